"""What another worker asks for and is on this one's disk comes up to the host first, and is offered from there.

Engine thread only. The asker says how long it can wait for all of it: half of that is for the disk, the rest for the
way to it. What does not fit is not read, and what is late is not waited for: then what is above the disk is offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine.memory import Memory
from engine.tiers.tiers import Tiers
from kvtransfer.types import Prefix, Wanted

DISK_SHARE = 0.5
"""Of an asker's time."""


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """resumed: tokens of the prompt that can be offered without it. until: monotonic seconds."""

    wanted: Wanted
    keys: Sequence[bytes]
    resumed: int
    until: float
    answer: Future[Prefix | None]


class Promotions:
    """offer: what is above the disk now, with a hold."""

    def __init__(self, memory: Memory, now: Callable[[], float], offer: Callable[[Wanted], Prefix | None]) -> None:
        self._memory, self._now, self._offer = memory, now, offer
        self._numbers = itertools.count(1)
        self._under_way: dict[int, Promotion] = {}

    def begin(self, asked: Promotion) -> None:
        """Start to read; or answer at once, when there is nothing that would be read in time."""
        tiers = self._memory.tiers
        if tiers is None or tiers.disk is None or not asked.answer.set_running_or_notify_cancel():
            return
        number = -next(self._numbers)  # beside the numbers of sequences
        self._under_way[number] = asked
        try:
            self._read(tiers, number, asked)
        except Exception as fault:  # noqa: BLE001 - supervises the answer: who asked gets the fault
            self._forget(number)
            asked.answer.set_exception(fault)
        self.turn()

    def turn(self) -> None:
        """Answer those for whom everything has come, or who cannot wait any longer."""
        tiers = self._memory.tiers
        if not self._under_way or tiers is None:
            return
        tiers.poll()
        for number, asked in list(self._under_way.items()):
            if tiers.staging(number) and self._now() < asked.until:
                continue
            self._forget(number)
            try:
                asked.answer.set_result(self._offer(asked.wanted))
            except Exception as fault:  # noqa: BLE001 - as above
                asked.answer.set_exception(fault)

    def close(self) -> None:
        """Nobody will be answered any more."""
        for number, asked in list(self._under_way.items()):
            self._forget(number)
            asked.answer.set_result(None)

    def _read(self, tiers: Tiers, number: int, asked: Promotion) -> None:
        memory, left = self._memory, asked.until - self._now()

        def in_time(nbytes: int) -> bool:
            return left > 0 and (tiers.costs.copy_s("disk", "up", nbytes) or 0.0) <= left

        with memory.pages.lock:
            held = len(memory.cache.match(asked.keys))
            resumed = asked.resumed if memory.has_state else None
            tiers.stage(number, asked.keys, held, asked.wanted.tokens, resumed, in_time)

    def _forget(self, number: int) -> None:
        del self._under_way[number]
        assert self._memory.tiers is not None
        self._memory.tiers.forget(number)
