"""Two processes, real NIXL over UCX, real gRPC."""

from __future__ import annotations

import time

from kvtransfer.types import Destination, Pulled
from tests.integration.transfer.conftest import Source, Sources
from tests.integration.transfer.worker import KV, STATE, CountingHold, Worker

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


async def pull(reader: Worker, source: Source, ticket: bytes, dest: Destination, seconds: float = 20.0) -> Pulled:
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
