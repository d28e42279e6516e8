"""The disk tier's books: its pages and states, what goes down to it and what comes up again. Engine thread only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.pages import SlotPool
from engine.prefix_cache import PrefixCache
from engine.retention import Retained
from engine.successors import Successors
from engine.tiers.cost import Costs
from engine.tiers.disk import Disk
from engine.tiers.disk_states import DiskStates
from engine.tiers.index import Entry, TierIndex
from engine.tiers.journal import Found
from engine.tiers.notes import Hints, Lines, Notebook
from engine.tiers.policy import Order
from engine.tiers.pool import Mover
from engine.tiers.spill import Spill
from engine.tiers.staging import Staging
from engine.tiers.states import HostStates, TierState
from engine.tiers.stats import Counts, TierReport
from engine.tiers.work import Job, Lane, Urgency

MOST_TURNS = 1000
"""Of reads that follow each other within one poll()."""


@dataclass(frozen=True, slots=True)
class Upper:
    """What lies above the disk."""

    host: TierIndex
    states: HostStates
    cache: PrefixCache
    retained: Retained
    successors: Successors


class DiskTier:
    """lane: of the disk's own. queue_pages: on their way to the disk at most, and as many bytes of states. has: whether
    a page is in any tier. gone: told keys that have left the disk (tail first). now, wall: clocks, in seconds."""

    def __init__(
        self,
        disk: Disk,
        upper: Upper,
        lane: Lane,
        mover: Mover,
        costs: Costs,
        counts: Counts,
        queue_pages: int,
        order: Order,
        has: Callable[[bytes], bool],
        gone: Callable[[Sequence[bytes]], None],
        now: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        host, host_states, cache, retained = upper.host, upper.states, upper.cache, upper.retained
        self.index = TierIndex(disk.count + 1, order, self._left, host.pool.lock, retained.rank)
        self.slots = SlotPool(disk.states + 1 if disk.states else 0, host.pool.lock)
        self.states = DiskStates(self.slots, self.index, cache, order, retained.rank, self._state_left)
        self.lane = lane
        self.jobs = 0
        self._disk, self._upper = disk, upper
        self._costs, self._counts, self._gone = costs, counts, gone
        hints = Hints(retained, self.index.__contains__, now, wall)
        self._notes = Notebook(hints, Lines(upper.successors, self.states, now))
        page_bytes = mover.item_bytes(True)
        self.staging = Staging(
            disk,
            self.index,
            self.states,
            host,
            host_states,
            counts,
            page_bytes,
            submit=lambda run, done: self._submit(Urgency.LOAD, run, done),
            has=has,
            came=self._came,
            moved=lambda nbytes, seconds: self._moved("up", nbytes, seconds),
        )
        self._spill = Spill(
            disk,
            self.index,
            self.states,
            host,
            host_states,
            self._notes,
            counts,
            page_bytes,
            queue_pages,
            submit=lambda run, done: self._submit(Urgency.STORE, run, done),
            has=has,
            published=self._published,
            moved=lambda nbytes, seconds: self._moved("down", nbytes, seconds),
        )
        self._restore(disk.found)
        retained.serve(self._ranked, self.index.used_again)
        retained.serve(lambda _key, _rank: None, self.states.used_again)

    def _restore(self, found: Found) -> None:
        """What an earlier process of this worker has left."""
        self._notes.restore(found)
        if not found.puts:  # and so no state
            return
        pages, slots = self.index.pool.allocate(self._disk.count), self.slots.allocate(self._disk.states)
        assert pages is not None
        assert slots is not None
        for put in found.puts.values():
            self.index.add(Entry(put.key, put.slot, put.parent, put.depth, put.sums))
        for state in found.states.values():
            sums = state.slot_sums, state.page_sums
            self.states.restore(TierState(state.key, state.length, state.tail, state.slot, 0, *sums, state.saving))
        self.index.pool.release(pages[::-1])  # places are taken in order: the lowest is, roughly, the longest unused
        self.slots.release(slots[::-1])

    # --- down and up ----------------------------------------------------------------------------------------------

    def spill(self, entries: Sequence[Entry]) -> None:
        """Copy pages that have come to the host on to the disk, as the queue takes them."""
        self._spill.pages(entries)

    def spill_state(self, state: TierState) -> None:
        """Copy a state that has come to the host on to the disk, as the queue takes it."""
        self._spill.state(state)

    def forget(self, seq: int) -> None:
        self.staging.forget(seq)

    def poll(self) -> None:
        """Conclude what has ended."""
        self._spill.note()
        self._conclude()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        for _ in range(MOST_TURNS):
            over = self.lane.take()
            if not over:
                return
            for job in over:
                self.jobs -= 1
                job.done(job.result, job.error, job.seconds)

    def _published(self, key: bytes) -> None:
        if key not in self._upper.cache and key not in self._upper.host:
            self._upper.cache.record_lower([key], "disk")

    def _came(self, keys: Sequence[bytes]) -> None:
        """These have come to the host."""
        lower = [key for key in keys if key not in self._upper.cache]
        if lower:
            self._upper.cache.record_lower(lower, "host")

    def _left(self, keys: Sequence[bytes]) -> None:
        self._spill.left(keys)
        self._notes.hints.forget(keys)
        self._gone(keys)

    def _state_left(self, name: bytes) -> None:
        self._spill.left([name])
        self._notes.lines.forget([name])

    def _ranked(self, key: bytes, rank: int) -> None:
        self.index.ranked(key, rank)
        self._notes.hints.changed(key)

    def _submit(self, urgency: Urgency, run: Callable[[], object], done: Callable[..., None]) -> None:
        self.jobs += 1
        self.lane.submit(Job(urgency, run, done))

    def _moved(self, direction: str, nbytes: int, seconds: float) -> None:
        self._costs.copied("disk", direction, nbytes, seconds)
        self._counts.moved("disk", direction, nbytes, seconds)

    # --- for reports, tests and shutdown ----------------------------------------------------------------------------

    def report(self) -> TierReport:
        """From any thread."""
        return TierReport.of("disk", self.index.pool, len(self.index), self._counts, self.slots, len(self.states))

    def close(self) -> None:
        """Write down what is still to be said, and end."""
        self.poll()
        self._spill.end()
        self.staging.end()
        self.lane.close()
        self._conclude()
        drops, hints = self._spill.rest()
        if drops or hints:
            with contextlib.suppress(OSError):  # no room: they are lost
                self._disk.note(drops, hints)
        self._disk.close()

    def check(self, has: Callable[[bytes], bool]) -> None:
        """Raises AssertionError."""
        self.index.check()
        self.slots.check()
        self.states.check(has)

    def check_empty(self) -> None:
        """Raises AssertionError."""
        self._spill.check_empty()
        self.staging.check_empty()
        assert self.index.pool.referenced == 0, "disk pages are still held"
        assert self.slots.referenced == 0, "disk slots are still held"
