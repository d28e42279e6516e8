"""Timers that tell a worker that is silent from a router that did not listen.

The failure that shapes it: this process stands still for a while (stopped, starved, or its machine was). When it runs
again its timers ring first, before anything the workers have answered meanwhile is read: every request in flight is
given up at once, and every worker is blamed for it. So a bell that rings late has not been heard; it rings once more
after what waits could be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LATE_S = 0.5
"""A bell this late: it was this process that did not run."""

GRACE_S = 1.0


class Bell:
    """Calls `ring` once after `delay` seconds, or a little later when this process stood still meanwhile."""

    __slots__ = ("_due", "_handle", "_loop", "_ring")

    def __init__(self, loop: asyncio.AbstractEventLoop, delay: float, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._due: float | None = loop.time() + delay
        self._handle = loop.call_later(delay, self._rung)

    def cancel(self) -> None:
        """Idempotent."""
        self._handle.cancel()

    def _rung(self) -> None:
        late = self._due is not None and self._loop.time() - self._due > LATE_S
        self._due = None
        if late:
            self._handle = self._loop.call_later(GRACE_S, self._ring)
        else:
            self._ring()
