"""Slots for the states that prompts export inside a step: a cached state is copied down before its slot is taken.

A checkpoint has its place in the prompt, so it cannot be put off: the prompt is, by the time a copy takes and by no
more than WAIT_S, while the others of the step run. As the next chunk's checkpoints are known one step ahead, and what
is evicted next is mostly below already, that is rare.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.memory import Memory
from engine.plan import Row
from engine.sequence import Sequence
from engine.tiers.growth import WAIT_S


class Exports:
    """chunk_tokens: of one step, at most."""

    def __init__(self, memory: Memory, chunk_tokens: int) -> None:
        self._memory = memory
        self._chunk_tokens = chunk_tokens

    def ready(self, seq: Sequence, end: int, now: float) -> bool:
        """Whether the row up to `end` may run now: its checkpoints cost no state that is not below. If not, copies are
        under way."""
        memory = self._memory
        if not seq.checkpoints or memory.tiers is None:
            return True
        need, soon = self._count(seq, seq.computed, end), self._count(seq, end, end + self._chunk_tokens)
        spare = max(memory.slots.free - memory.ledger.booked.slots, 0)
        ready = need + soon <= spare or memory.tiers.spare_slots(max(need - spare, 0), soon - max(spare - need, 0))
        if not ready:
            seq.held_up = now if seq.held_up < 0 else seq.held_up
            ready = now - seq.held_up >= WAIT_S
        if ready:
            seq.held_up = -1.0
        return ready

    def slots(self, seq: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """(length, slot) of the checkpoints a row up to `end` exports: as many as there are slots to spare for."""
        memory = self._memory
        points = []
        for length in seq.checkpoints:
            if seq.computed < length <= end and memory.slots.available > memory.ledger.booked.slots:
                if not memory.slots.free and memory.tiers is not None:
                    memory.tiers.give_up_slot()
                found = memory.slots.allocate(1)
                if found is not None:
                    points.append((length, found[0]))
        return tuple(points)

    def drop(self, rows: Iterable[Row]) -> None:
        """These steps' rows export nothing after all."""
        for row in rows:
            self._memory.drop_checkpoints(row)

    @staticmethod
    def _count(seq: Sequence, start: int, end: int) -> int:
        return sum(start < length <= end for length in seq.checkpoints)
