"""Copies that only make room give way to steps: they take a bounded share of memory's bandwidth while one runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """A bucket that fills at `bytes_per_s`, for one thread; 0 = no bound. busy: a step is running."""

    bytes_per_s: float
    busy: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _due: float = 0.0

    def spent(self, nbytes: int) -> None:
        """So many bytes have been copied: wait until that much was allowed, while steps run."""
        if not self.bytes_per_s or not self.busy():
            return
        now = self.clock()
        self._due = max(self._due, now) + nbytes / self.bytes_per_s
        self.sleep(self._due - now)
