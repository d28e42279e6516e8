"""One task, one claim in the store that routers share, given back at the end."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Mapping
from contextlib import suppress

import structlog

from runtime.errors import RegistryUnavailable
from runtime.registry.pools import Claim, Wish
from runtime.registry.store import Store

GOODBYE_S = 1.0

_log = structlog.get_logger("pdserve.router.claims")


class Claimant(abc.ABC):
    """Takes turns for as long as it lives. Owner calls start() and close()."""

    def __init__(self, store: Store, pool: str, holder: str, ttl_s: float) -> None:
        self._store = store
        self._pool = pool
        self._holder = holder
        self._ttl_s = ttl_s
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    @abc.abstractmethod
    async def turn(self) -> None:
        """Claim, if need be. A store that is away, or a fault, ends no more than this turn."""

    @abc.abstractmethod
    async def pause(self) -> None:
        """Until the next turn."""

    async def claim(self, wishes: Mapping[str, Wish]) -> Claim:
        """What is held from now on, in place of what was. Raises RegistryUnavailable."""
        return await self._store.claim(self._pool, self._holder, wishes, self._ttl_s)

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name=f"claims-{self._pool}")

    async def close(self) -> None:
        """Gives it back, if the store is there."""
        self._stopping = True  # cancelling alone is not enough: the Redis client has been seen to swallow it
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        with suppress(RegistryUnavailable, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._store.claim(self._pool, self._holder, {}, 0.0)

    async def _run(self) -> None:
        while not self._stopping:
            try:
                await self.turn()
            except RegistryUnavailable:
                pass  # what was last known holds
            except Exception as exc:  # noqa: BLE001  supervises: the others go on hearing of this router
                _log.error("claim_failed", pool=self._pool, exc_info=exc)
            await self.pause()
