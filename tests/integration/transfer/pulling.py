"""A prompt that is there to be read, and a reader who reads it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvtransfer.inprocess import InProcessTransport
from kvtransfer.source import State
from kvtransfer.types import Destination, Pulled
from tests.integration.transfer.worker import CountingHold, Worker

TOKENS = 100
PAGES = list(range(3, 10))
MINE = [20, 21, 22, 5, 6, 30, 40]


def computed(source: Worker, request: str = "r", salt: int = 7) -> bytes:
    source.fill(salt, PAGES)
    source.fill(salt, [1], paged=False)
    ticket = source.open(request, PAGES, TOKENS)
    source.final(request, TOKENS)
    return ticket


async def pull(
    reader: Worker, source: Worker, ticket: bytes, dest: Destination, seconds: float = 60.0, fence: int = 1
) -> Pulled:
    return await reader.puller.pull(ticket, source.address, dest, time.monotonic() + seconds, fence)


def hold_of(dest: Destination) -> CountingHold:
    assert isinstance(dest.hold, CountingHold)
    return dest.hold


def wire(reader: Worker) -> InProcessTransport:
    transport = reader.ranks[0].transport
    assert isinstance(transport, InProcessTransport)
    return transport


def untouched(reader: Worker) -> bool:
    return not any(pool.array.any() for pools in reader.pools for pool in pools.values())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  several objects, no common event
            await asyncio.sleep(0.005)


async def ended(source: Worker, state: State, request: str = "r") -> None:
    await until(lambda: source.store.state(source.key(request)) is state)
