"""The bounded first-in-first-out line of requests that wait for capacity."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runtime.errors import Saturated

RETRY_AFTER_MS = 1000


class Line:
    """place() is entered by the head of the line alone; whoever leaves, for any reason, lets the next one in."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Raises Saturated(reason="queue_full")."""
        if len(self._waiting) >= self._limit:
            raise Saturated(
                "too many requests wait already",
                reason="queue_full",
                limit=f"{self._limit} requests",
                retry_after_ms=RETRY_AFTER_MS,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._call_next()
        try:
            await turn
            yield
        finally:
            self._waiting.remove(turn)
            self._call_next()

    def _call_next(self) -> None:
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)
