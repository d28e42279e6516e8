"""Virtual time: a heap of what happens next. Equal times happen in the order they were put in."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]


class Agenda:
    """A clock (runtime.clock.Clock) that jumps from event to event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: float, action: Action, *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time, self.now), self._count, action, arguments))

    def run(self, until: float = float("inf")) -> None:
        """Everything up to `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, arguments = heapq.heappop(heap)
            self.done += 1
            action(*arguments)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now
