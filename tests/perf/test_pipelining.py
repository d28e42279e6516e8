"""A hand-off is read while its prompt is computed: what is left after the last range is that range."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from runtime.config import Config
from tests.integration.transfer.worker import BIG, Worker, layout

pytestmark = pytest.mark.slow

RANGES = 16
"""Of one page of 4 MiB each."""
ROUNDS = 6


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    source, reader = [
        await Worker(name, 1, layout(big=True), Config(), items=RANGES + 1, transport="nixl").start() for name in "pd"
    ]
    source.fill(7, range(1, RANGES + 1))
    yield source, reader
    await reader.close()
    await source.close()


class Pull:
    """One hand-off of `pages` pages that is being watched, with nothing ready yet."""

    count = 0

    def __init__(self, source: Worker, reader: Worker, pages: int) -> None:
        Pull.count += 1
        self._source, self._reader, self._pages = source, reader, pages
        self._request = f"r{Pull.count}"
        self._tokens = pages * BIG.tokens

    async def begin(self) -> None:
        items = list(range(1, self._pages + 1))
        self._reader.pools[0][BIG.name].array[1:, :, -1] = 0
        ticket = self._source.open(self._request, items, self._tokens)
        dest = self._reader.destination(items, self._tokens, slots=())
        self._task = asyncio.create_task(
            self._reader.puller.pull(ticket, self._source.address, dest, time.monotonic() + 60, 1)
        )
        while not self._source.store._leases:  # noqa: ASYNC110  the watcher's arrival has no event
            await asyncio.sleep(0.001)

    async def compute(self, page: int) -> None:
        """Page `page` becomes ready; returns when it has landed at the reader, while the prompt is not computed yet."""
        self._source.store.range_ready(self._source.key(self._request), 0, page * BIG.tokens)
        theirs, mine = (w.pools[0][BIG.name].array[page] for w in (self._source, self._reader))
        while not np.array_equal(mine, theirs):  # noqa: ASYNC110  bytes land without an event
            await asyncio.sleep(0.001)

    async def finish(self) -> float:
        """The rest becomes ready. Seconds to the pull's end."""
        began = time.perf_counter()
        self._source.final(self._request, self._tokens, slots=())
        await self._task
        return time.perf_counter() - began


async def test_after_the_last_range_a_hand_off_takes_the_time_of_that_range_and_not_of_the_prompt(
    pair: tuple[Worker, Worker],
) -> None:
    """Each range is announced when the one before has landed, so a reader that waits for the end hangs here."""
    took: dict[str, list[float]] = {"whole": [], "one": [], "last": []}
    async with asyncio.timeout(60):
        for _ in range(ROUNDS):
            for name, pages, before in (("whole", RANGES, 0), ("one", 1, 0), ("last", RANGES, RANGES - 1)):
                pull = Pull(*pair, pages)
                await pull.begin()
                for page in range(1, before + 1):
                    await pull.compute(page)
                took[name].append(await pull.finish())
    best = {name: min(seconds) for name, seconds in took.items()}
    assert best["last"] <= 0.5 * best["whole"], best
    assert best["last"] <= 3 * best["one"], best
