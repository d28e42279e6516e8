from __future__ import annotations

import asyncio

from router.shared.claims import Claimant
from runtime.clock import SystemClock
from runtime.errors import RegistryUnavailable
from runtime.registry.memory import MemoryStore
from runtime.registry.pools import Wish


class Holding(Claimant):
    """Its turns end as the test says, then claim three of ten."""

    def __init__(self, store: MemoryStore, *faults: Exception) -> None:
        super().__init__(store, "pool", "me", 60.0)
        self._faults = list(faults)
        self.held = asyncio.Event()

    async def turn(self) -> None:
        if self._faults:
            raise self._faults.pop()
        if (await self.claim({"slot": Wish(3, 10)})).shares["slot"].held == 3:
            self.held.set()

    async def pause(self) -> None:
        await asyncio.sleep(0)


async def left(store: MemoryStore) -> int:
    """For somebody else."""
    return (await store.claim("pool", "other", {"slot": Wish(10, 10)}, 60.0)).shares["slot"].held


async def test_what_it_holds_is_its_own_until_it_closes_whatever_happens_in_a_turn() -> None:
    store = MemoryStore(SystemClock())
    holding = Holding(store, ZeroDivisionError(), RegistryUnavailable("away"))
    holding.start()
    async with asyncio.timeout(10):
        await holding.held.wait()
    assert await left(store) == 7
    await holding.close()
    assert await left(store) == 10


async def test_it_closes_without_having_begun() -> None:
    await Holding(MemoryStore(SystemClock())).close()
