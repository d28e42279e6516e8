"""The NIXL transport by itself: two agents in one process, real UCX."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from kvtransfer.mapping import Moves
from kvtransfer.nixl import NixlTransport
from kvtransfer.transport import Agent, Incarnation
from kvtransfer.types import Region
from runtime.errors import TransferFailed

SIZE = 1 << 20


class End:
    """A transport and one registered buffer."""

    def __init__(self, worker_id: str, epoch: int = 1, fill: int = 0) -> None:
        self.incarnation = Incarnation(worker_id, 0, epoch)
        self.transport = NixlTransport(self.incarnation, quarantine_s=60.0)
        self.memory = np.full(SIZE, fill, np.uint8)
        self.base = self.memory.ctypes.data

    async def start(self) -> End:
        self.agent = await self.transport.start([Region(1, "kv", self.base, SIZE, 4096, 0, 1)])
        return self

    def moves(self, source: End, size: int = SIZE, offset: int = 0) -> Moves:
        row = [[self.base + offset, size, 0]]
        return Moves(np.array(row, np.uint64), np.array([[source.base + offset, size, 0]], np.uint64))


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    ends: list[End] = []

    async def one(*arguments: Any, **options: Any) -> End:
        ends.append(await End(*arguments, **options).start())
        return ends[-1]

    yield one
    for end in ends:
        await end.transport.close()


def soon() -> float:
    return time.monotonic() + 60


async def test_bytes_arrive_and_are_counted_as_nixl_counts_them(start: Start) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    await reader.transport.connect(source.incarnation, source.agent)
    flight = reader.transport.read(source.agent.name, reader.moves(source), soon())
    stats = await flight.result
    await flight.quiet
    assert (reader.memory == 7).all()
    assert (stats.nbytes, stats.descriptors) == (SIZE, 1)
    assert 0 < stats.seconds < 60
    assert not flight.quarantined


async def test_connecting_twice_is_the_same_as_once(start: Start) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    for _ in range(2):
        await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.read(source.agent.name, reader.moves(source), soon()).result


@pytest.mark.parametrize("works", [True, False])
async def test_a_call_whose_caller_went_away_leaves_the_thread_alive(start: Start, *, works: bool) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    busy = threading.Event()
    reader.transport._owner.submit(lambda: busy.wait(10))
    agent = source.agent if works else Agent(source.agent.name, b"nonsense")
    connecting = asyncio.create_task(reader.transport.connect(source.incarnation, agent))
    await asyncio.sleep(0)  # the command waits for the thread
    connecting.cancel()
    await asyncio.wait([connecting])
    busy.set()
    async with asyncio.timeout(60):
        await reader.transport.connect(source.incarnation, source.agent)
        await reader.transport.read(source.agent.name, reader.moves(source), soon()).result
    assert reader.transport.unhealthy() == ""


async def test_a_newer_incarnation_replaces_the_older_one_which_is_not_taken_back(start: Start) -> None:
    reader, old, new = await start("d"), await start("p", 1, 1), await start("p", 2, 2)
    await reader.transport.connect(old.incarnation, old.agent)
    await reader.transport.connect(new.incarnation, new.agent)
    await reader.transport.read(new.agent.name, reader.moves(new), soon()).result
    assert (reader.memory == 2).all()
    with pytest.raises(TransferFailed, match="no such peer"):
        await reader.transport.read(old.agent.name, reader.moves(old), soon()).result
    with pytest.raises(TransferFailed, match="newer incarnation"):
        await reader.transport.connect(old.incarnation, old.agent)


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"\0" * 500])
async def test_metadata_that_is_none_is_refused_and_others_go_on(start: Start, metadata: bytes) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    with pytest.raises(TransferFailed):
        await reader.transport.connect(Incarnation("q", 0, 1), Agent("q/0/1", metadata))
    await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.read(source.agent.name, reader.moves(source), soon()).result


async def test_metadata_of_another_agent_than_its_name_says_is_refused(start: Start) -> None:
    reader, source = await start("d"), await start("p")
    with pytest.raises(TransferFailed, match="another agent"):
        await reader.transport.connect(Incarnation("q", 0, 1), Agent("q/0/1", source.agent.metadata))


async def test_a_range_outside_the_sources_memory_fails_alone(start: Start) -> None:
    reader, source, other = await start("d"), await start("p", fill=7), await start("q", fill=9)
    for end in (source, other):
        await reader.transport.connect(end.incarnation, end.agent)
    bad = reader.moves(source)
    bad.remote[0, 0] += SIZE
    flights = [
        reader.transport.read(source.agent.name, bad, soon()),
        reader.transport.read(other.agent.name, reader.moves(other), soon()),
        reader.transport.read(source.agent.name, reader.moves(source, 64), soon()),
    ]
    results = await asyncio.gather(*(f.result for f in flights), return_exceptions=True)
    assert isinstance(results[0], TransferFailed)
    assert [r.nbytes for r in results[1:] if not isinstance(r, BaseException)] == [SIZE, 64]
    assert reader.memory[0] == 7
    assert reader.memory[-1] == 9


async def test_of_reads_that_waited_together_each_ends_as_it_would_have_alone(start: Start) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.read(
        source.agent.name, reader.moves(source, 64, 1024), soon()
    ).result  # wired: no wait below
    held = threading.Event()
    reader.transport._owner.submit(held.wait)
    tables = [reader.moves(source, 64, offset) for offset in (0, 64, 128, 192)]
    tables[1].remote[0, 0] += SIZE
    flights = [reader.transport.read(source.agent.name, table, soon()) for table in tables]
    flights[2].result.cancel()
    await asyncio.sleep(0)
    held.set()
    results = await asyncio.gather(*(f.result for f in flights), return_exceptions=True)
    assert [r.nbytes for r in (results[0], results[3]) if not isinstance(r, BaseException)] == [64, 64]
    assert isinstance(results[1], TransferFailed)
    assert isinstance(results[2], asyncio.CancelledError)
    for flight in flights:
        await flight.quiet
    assert [int(x) for x in reader.memory[:256:64]] == [7, 0, 0, 7]


async def test_a_disconnected_peer_is_not_read_from_until_it_is_connected_again(start: Start) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.disconnect(source.agent.name)
    flight = reader.transport.read(source.agent.name, reader.moves(source), soon())
    with pytest.raises(TransferFailed):
        await flight.result
    await flight.quiet
    await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.read(source.agent.name, reader.moves(source), soon()).result


async def test_a_read_abandoned_before_it_was_posted_is_not_posted(start: Start) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    await reader.transport.connect(source.incarnation, source.agent)
    held = threading.Event()
    reader.transport._owner.submit(held.wait)
    flight = reader.transport.read(source.agent.name, reader.moves(source), soon())
    flight.result.cancel()
    await asyncio.sleep(0)
    assert flight.quarantined
    held.set()
    await flight.quiet
    assert not reader.memory.any()
    assert reader.transport.quarantined() == 0


async def test_a_quarantine_older_than_its_bound_is_unhealthy_until_it_ends(start: Start) -> None:
    reader, source = await start("d"), await start("p", fill=7)
    await reader.transport.connect(source.incarnation, source.agent)
    held = threading.Event()
    reader.transport._owner.submit(held.wait)
    flight = reader.transport.read(source.agent.name, reader.moves(source), soon())
    flight.result.cancel()
    await asyncio.sleep(0)
    assert reader.transport.unhealthy() == ""
    flight.over_at -= 61
    assert "1 reads in quarantine" in reader.transport.unhealthy()
    held.set()
    await flight.quiet
    await asyncio.sleep(0)
    assert reader.transport.unhealthy() == ""


async def test_closing_joins_the_thread_and_later_reads_fail() -> None:
    reader, source = await End("d").start(), await End("p").start()
    await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.close()
    await source.transport.close()
    assert not reader.transport._owner.thread.is_alive()
    with pytest.raises(TransferFailed, match="closed"):
        await reader.transport.read(source.agent.name, reader.moves(source), soon()).result
    with pytest.raises(TransferFailed, match="closed"):
        await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.close()


async def test_a_transport_that_was_never_started_closes() -> None:
    await NixlTransport(Incarnation("d", 0, 1)).close()


async def test_a_dead_thread_is_unhealthy_and_its_reads_fail(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    reader, source = await start("d"), await start("p")
    await reader.transport.connect(source.incarnation, source.agent)
    threading.excepthook, hook = (lambda _: None), threading.excepthook
    try:
        reader.transport._owner.submit(_bug)
        reader.transport._owner.thread.join(5)
    finally:
        threading.excepthook = hook
    assert "died" in reader.transport.unhealthy()
    with pytest.raises(TransferFailed):
        await reader.transport.read(source.agent.name, reader.moves(source), soon()).result


def _bug() -> None:
    raise AssertionError("a bug on the transport's thread")


async def busy_share() -> float:
    """Cores this process keeps busy."""
    began = time.process_time(), time.monotonic()
    await asyncio.sleep(0.3)
    return (time.process_time() - began[0]) / (time.monotonic() - began[1])


async def test_an_idle_transport_costs_next_to_nothing(start: Start) -> None:
    before = await busy_share()  # threads that other tests' libraries keep
    reader, source = await start("d"), await start("p")
    await reader.transport.connect(source.incarnation, source.agent)
    await reader.transport.read(source.agent.name, reader.moves(source), soon()).result
    shares: list[float] = []
    while len(shares) < 10 and min(shares, default=1.0) > before + 0.1:  # a busy machine makes every wake-up dearer
        shares.append(await busy_share())
    assert min(shares) < before + 0.1  # two agents: 5 % of a core each
