"""Two processes, real NIXL over UCX, real gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.mapping import Moves
from kvtransfer.types import Destination, Pulled
from runtime.config import Config
from runtime.errors import ChecksumMismatch, KvLost, LayoutMismatch, TicketInvalid, TransferFailed
from tests.integration.transfer.conftest import Source, Sources
from tests.integration.transfer.worker import BIG_PAGES, KV, STATE, CountingHold, Worker, layout, stop

TOKENS = 100
PAGES = list(range(3, 10))  # 7 pages hold 100 tokens
MINE = [20, 21, 22, 5, 6, 30, 40]


def hold_of(dest: Destination) -> CountingHold:
    assert isinstance(dest.hold, CountingHold)
    return dest.hold


async def computed(source: Source, request: str = "r", salt: int = 7) -> bytes:
    """A hand-off whose prompt is computed already."""
    await source.ask("fill", salt=salt, items=PAGES)
    await source.ask("fill", salt=salt, items=[1], paged=False)
    ticket = await source.open(request, PAGES, TOKENS)
    await source.ask("final", request=request, tokens=TOKENS)
    return ticket


async def pull(reader: Worker, source: Source, ticket: bytes, dest: Destination, seconds: float = 60.0) -> Pulled:
    return await reader.puller.pull(ticket, source.address, dest, time.monotonic() + seconds, 1)


async def test_pages_and_slots_arrive_equal_and_are_confirmed(reader: Worker, sources: Sources) -> None:
    source = await sources.start()
    ticket = await computed(source)
    dest = reader.destination(MINE, TOKENS)

    pulled = await pull(reader, source, ticket, dest)

    assert reader.wrong(7, PAGES, MINE) == []
    assert reader.wrong(7, [1], [1], paged=False) == []
    assert pulled.state_length == TOKENS
    assert [f.token for f in pulled.first] == [42]
    assert pulled.bytes_read == 7 * KV.item_bytes + STATE.item_bytes
    assert pulled.pages_read == 7
    assert hold_of(dest).releases == 1
    assert (await source.wait_for("r", "released"))["releases"] == 1
    assert await source.quit() == 0


async def test_ranges_announced_by_the_other_process_are_read_as_they_come(reader: Worker, sources: Sources) -> None:
    source = await sources.start()
    await source.ask("fill", salt=7, items=PAGES)
    ticket = await source.open("r", PAGES, TOKENS, ready=32)
    dest = reader.destination(MINE, TOKENS)
    running = asyncio.create_task(pull(reader, source, ticket, dest))
    await until(lambda: not reader.wrong(7, PAGES[:2], MINE[:2]))
    assert not reader.pools[0]["kv"].array[MINE[2:]].any()
    await source.ask("ready", request="r", start=32, end=96)
    await until(lambda: not reader.wrong(7, PAGES[:6], MINE[:6]))
    await source.ask("fill", salt=7, items=[1], paged=False)
    await source.ask("final", request="r", tokens=TOKENS)
    await running
    assert reader.wrong(7, PAGES, MINE) == []
    assert reader.wrong(7, [1], [1], paged=False) == []


@dataclass
class Held:
    """The reader's reads wait between their announcement and their post. arrived: one of them is over."""

    announced: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def held(reader: Worker, monkeypatch: pytest.MonkeyPatch) -> Held:
    held, arrive = Held(), reader.puller._arrive

    async def later(*arguments: Any) -> None:
        held.announced.set()
        await held.go.wait()
        await arrive(*arguments)
        held.arrived.set()

    monkeypatch.setattr(reader.puller, "_arrive", later)
    return held


async def test_a_page_changed_at_the_source_after_it_was_announced_is_detected(
    reader: Worker, sources: Sources, held: Held
) -> None:
    source = await sources.start()
    await source.ask("fill", salt=7, items=PAGES)
    ticket = await source.open("r", PAGES, TOKENS, ready=TOKENS)
    running = asyncio.create_task(pull(reader, source, ticket, reader.destination(MINE, TOKENS)))
    await held.announced.wait()
    await source.ask("corrupt", page=PAGES[2], byte=99)
    held.go.set()
    with pytest.raises(ChecksumMismatch):
        await running


async def test_thirty_two_hand_offs_at_once_arrive_whole(reader: Worker, sources: Sources) -> None:
    source = await sources.start()
    tickets = []
    for i in range(32):
        page = 2 * i + 1
        await source.ask("fill", salt=100 + i, items=[page])
        tickets.append((await source.open(f"r{i}", [page], 16), page, 100 + i))
    await source.ask("fill", salt=5, items=[1], paged=False)
    for i in range(32):
        await source.ask("final", request=f"r{i}", tokens=16)
    mine = list(range(1, 33))
    pulled = await asyncio.gather(
        *(
            pull(reader, source, ticket, reader.destination([to], 16, slots=[to]))
            for (ticket, _, _), to in zip(tickets, mine, strict=True)
        )
    )
    for (_, page, salt), to in zip(tickets, mine, strict=True):
        assert reader.wrong(salt, [page], [to]) == []
        assert reader.wrong(5, [1], [to], paged=False) == []
    assert {p.bytes_read for p in pulled} == {KV.item_bytes + STATE.item_bytes}
    for i in range(32):
        await source.wait_for(f"r{i}", "released")
    assert (await source.ask("counts"))["pages"] == 0


# --- refusals -----------------------------------------------------------------------------------------------------


async def test_another_layout_is_refused_before_a_byte_moves(reader: Worker, sources: Sources) -> None:
    source = await sources.start(layout={"model": "another"})
    ticket = await computed(source)
    dest = reader.destination(MINE, TOKENS)
    with pytest.raises(LayoutMismatch, match="model_fingerprint differs"):
        await pull(reader, source, ticket, dest)
    assert not reader.pools[0]["kv"].array.any()
    assert hold_of(dest).releases == 1


async def test_a_ticket_that_was_used_is_refused(reader: Worker, sources: Sources) -> None:
    source = await sources.start()
    ticket = await computed(source)
    await pull(reader, source, ticket, reader.destination(MINE, TOKENS))
    await source.wait_for("r", "released")
    with pytest.raises(TicketInvalid, match="released"):
        await pull(reader, source, ticket, reader.destination(MINE, TOKENS))


# --- death and restart --------------------------------------------------------------------------------------------


async def test_a_source_killed_while_it_computes_is_noticed_by_its_stream_and_not_by_a_clock(
    reader: Worker, sources: Sources, held: Held
) -> None:
    """The lease outlives the pull, so nothing else could end it as lost."""
    source = await sources.start(config={"lease_s": 600.0})
    await source.ask("fill", salt=7, items=PAGES)
    ticket = await source.open("r", PAGES, TOKENS, ready=32)
    dest = reader.destination(MINE, TOKENS)
    held.go.set()
    running = asyncio.create_task(pull(reader, source, ticket, dest))
    await held.arrived.wait()
    source.process.kill()
    with pytest.raises(KvLost, match="the source of the pages is lost"):
        await running
    assert hold_of(dest).releases == 1


async def test_a_source_killed_between_announcement_and_read_fails_that_read_only(
    reader: Worker, sources: Sources, held: Held
) -> None:
    source, other = await sources.start("p"), await sources.start("q")
    held.go.set()
    ticket, good = await computed(source), await computed(other, salt=9)
    await pull(reader, source, await computed(source, "warm"), reader.destination(MINE, TOKENS))
    dest = reader.destination(MINE, TOKENS)
    held.go.clear()
    held.announced.clear()
    running = asyncio.create_task(pull(reader, source, ticket, dest))
    await held.announced.wait()
    source.process.kill()
    await source.process.wait()
    held.go.set()
    with pytest.raises(KvLost):
        await running
    await until(lambda: hold_of(dest).releases == 1)
    await pull(reader, other, good, reader.destination(MINE, TOKENS))
    assert reader.wrong(9, PAGES, MINE) == []


async def test_a_source_restarted_at_its_address_serves_in_its_new_epoch(reader: Worker, sources: Sources) -> None:
    first = await sources.start(epoch=1)
    stale = await computed(first, "stale")
    await pull(reader, first, await computed(first, "r"), reader.destination(MINE, TOKENS))
    first.process.kill()
    await first.process.wait()
    second = await sources.start(epoch=2, listen=first.address)

    with pytest.raises(TicketInvalid):
        await pull(reader, second, stale, reader.destination(MINE, TOKENS))
    await pull(reader, second, await computed(second, salt=9), reader.destination(MINE, TOKENS))

    assert reader.wrong(9, PAGES, MINE) == []


async def test_a_reader_that_restarts_pulls_from_the_same_source(sources: Sources) -> None:
    source = await sources.start()
    for epoch in (1, 2):
        reader = await Worker("d", epoch, layout(), Config(), transport="nixl").start()
        await pull(reader, source, await computed(source, f"r{epoch}", salt=epoch), reader.destination(MINE, TOKENS))
        assert reader.wrong(epoch, PAGES, MINE) == []
        await reader.close()
    assert await source.quit() == 0


async def test_a_hundred_failed_reads_leave_the_peer_usable(reader: Worker, sources: Sources) -> None:
    """Public report T112 (ai-dynamo/nixl#149)."""
    source = await sources.start()
    await reader.puller.connect(source.address)
    transport, region = reader.ranks[0].transport, reader.pools[0]["kv"].region
    bogus = np.array([[1 << 40, 64, 0]], np.uint64)
    local = np.array([[region.base, 64, 0]], np.uint64)
    for _ in range(100):
        flight = transport.read("p/0/1", Moves(local, bogus), time.monotonic() + 5)
        with pytest.raises(TransferFailed):
            await flight.result
        await flight.quiet
    await pull(reader, source, await computed(source), reader.destination(MINE, TOKENS))
    assert reader.wrong(7, PAGES, MINE) == []


# --- quarantine over the network path -----------------------------------------------------------------------------


async def test_a_frozen_sources_read_stays_in_quarantine_until_its_bytes_have_landed(sources: Sources) -> None:
    """Over TCP, a read from a stopped process neither ends nor fails, half of it may have landed; the abandoned
    destination is kept until it is over, then the same source serves again."""
    async with reading_over_tcp(sources) as (process, source):
        await process.ask("begin", address=source.address, pid=source.process.pid)
        assert (await process.ask("landed"))["pages"] == 0, "it was stopped before"
        await send_some(source, process)
        assert 0 < (await process.ask("landed"))["pages"] < len(BIG_PAGES)

        assert await process.ask("give_up") == {"released": 0, "quarantined": True}
        source.process.send_signal(signal.SIGCONT)
        assert await process.ask("pull_again", address=source.address) == {"released": True, "wrong": []}


async def test_a_reader_that_exits_with_a_read_in_quarantine_exits_cleanly(sources: Sources) -> None:
    """Of the source nothing is asked: UCX 1.23 may abort a process that thaws after its reader has left."""
    async with reading_over_tcp(sources) as (process, source):
        await process.ask("begin", address=source.address, pid=source.process.pid)
        await process.ask("give_up")
        assert await process.quit() == 0


async def send_some(source: Source, reader: Source) -> None:
    """Let a stopped source send no more than sockets hold: while it runs, its reader stands still, and it is stopped
    when something has come. A source that was not asked yet is given another turn when its reader has had one."""
    waiting = 0
    async with asyncio.timeout(60):
        while not waiting:
            stop(reader.process.pid)
            source.process.send_signal(signal.SIGCONT)
            for _ in range(100):
                if waiting := unread(reader.process.pid):
                    break
                await asyncio.sleep(0.005)
            stop(source.process.pid)
            reader.process.send_signal(signal.SIGCONT)
        while not (await reader.ask("landed"))["pages"]:  # noqa: ASYNC110  bytes land without an event
            await asyncio.sleep(0.005)


def unread(pid: int) -> int:
    """Bytes that wait in a process's sockets, of those that hold more than words of a protocol."""
    table = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    waiting = {f"socket:[{row[9]}]": int(row[4].partition(":")[2], 16) for row in table}
    mine = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return sum(size for socket in mine if (size := waiting.get(socket, 0)) > 65536)


@asynccontextmanager
async def reading_over_tcp(sources: Sources) -> AsyncIterator[tuple[Source, Source]]:
    """A reader process and a source process that may only use TCP, with pages that take a while."""
    tcp = {"UCX_TLS": "tcp"}
    config = {"transfer_timeout_s": 60.0, "lease_s": 60.0}
    big = {"big": True}
    source = await sources.start("p", env=tcp, layout=big, config=config, items=24)
    process = await sources.start("d", env=tcp, layout=big, config=config, items=24)
    await source.ask("fill", salt=7, items=BIG_PAGES)
    for request in ("a", "b", "c"):
        ticket = await source.open(request, BIG_PAGES, 16 * len(BIG_PAGES))
        await source.ask("final", request=request, tokens=16 * len(BIG_PAGES), slots=[])
        await process.ask("ticket", ticket=ticket.hex())
    yield process, source


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  bytes land without an event
            await asyncio.sleep(0.005)
