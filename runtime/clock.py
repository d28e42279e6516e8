"""Time as a value that is passed in: durations and leases on a monotonic clock, timestamps on a wall clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """monotonic() for every duration, deadline and lease; wall() only for what a person or another system reads."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks, in seconds: the calls themselves, since a request at the router asks thirty times."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class FakeClock:
    """Stands still until told: advance() moves both clocks, step_wall() only the wall (an NTP correction)."""

    def __init__(self, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Raises ValueError for a negative step: a monotonic clock never goes back."""
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self._monotonic += seconds
        self._wall += seconds

    def step_wall(self, seconds: float) -> None:
        self._wall += seconds
