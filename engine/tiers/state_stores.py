"""Which states go down to the host, and when: ahead of need while it is quiet, and before eviction. Engine thread only.

A state leaves the device when slots run out, when the page it hangs on goes, or its own partial page; all three are
foreseen. The source is held until the copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from engine.pages import PagePool, SlotPool
from engine.plan import Copy
from engine.states import State, StateCache
from engine.tiers.policy import Sightings
from engine.tiers.pool import Mover, Sums
from engine.tiers.states import HostStates, TierState
from engine.tiers.stats import Counts

LOOK_AHEAD = 8
"""States that would be evicted soonest and are kept ready to be dropped."""

_Bytes = tuple[list[Sums], list[Sums]]
Submit = Callable[[Callable[[], _Bytes], Callable[[_Bytes, Exception | None, float], None]], None]
"""(what to run on the tier's thread, what to do with its result, error and seconds)"""


class StateStores:
    """queue: states on their way down at most. published: told a state whose bytes are on the host and the seconds its
    copy took; it takes it in if it has a place. host_pages: for partial pages."""

    def __init__(
        self,
        device: tuple[PagePool, SlotPool],
        states: StateCache,
        host: HostStates,
        host_pages: PagePool,
        sightings: Sightings,
        mover: Mover,
        counts: Counts,
        queue: int,
        submit: Submit,
        published: Callable[[TierState, float], None],
    ) -> None:
        self._pages, self._slots = device
        self._states, self._host, self._host_pages = states, host, host_pages
        self._sightings, self._mover, self._counts = sightings, mover, counts
        self._queue, self._submit, self._published = queue, submit, published
        self.lower: Callable[[State], bool] = lambda _: False  # whether it is on a tier below the host
        self.settle: Callable[[Copy], None] | None = None  # makes a slot whole at once; None = no slot has records
        self._storing: set[bytes] = set()
        self._refused: set[bytes] = set()  # their store failed; tried again after one that did not
        self._ahead: set[bytes] = set()  # stored before anybody needed their room: not again, a small host would thrash
        self._tried: set[bytes] = set()  # started for the room that is being made
        self._looked_at = (-1, -1)  # the device's states when there was nothing to do ahead

    @property
    def under_way(self) -> bool:
        return bool(self._storing)

    def ahead(self) -> None:
        """Start a copy of a state that would be evicted soon, one at a time."""
        now = (self._states.version, self._slots.cached)
        if self._storing or self._looked_at == now:
            return
        if all(pool.free * 2 > pool.total for pool in (self._slots, self._pages)):
            return
        if not self._start(self._states.victims(LOOK_AHEAD), 1, self._ahead, in_no_hurry=True):
            self._looked_at = now

    def make_room(self, slots: int, pages: Collection[int], keep: State | None) -> bool:
        """Start copies of what goes when `slots` idle slots and the device pages `pages` are taken. Whether something
        was left for later."""
        going = self._states.victims(slots + (keep is not None)) if slots > 0 else []
        going += self._states.going(pages)
        wanted = [state for state in going if state is not keep]
        return self._start(wanted, self._queue, self._tried)

    def copy(self, going: Iterable[State]) -> None:
        """Start copies of these."""
        self._start(going, self._queue, self._tried)

    def made_room(self) -> None:
        self._tried.clear()

    def spare(self, need: int, soon: int) -> bool:
        """Whether `need` idle slots can be had without losing a state. Copies of what else would go are started, for
        `soon` slots more than that; False: they are under way."""
        idle = self._states.victims(self._slots.total)
        exposed = [state for state in idle if not self.safe(state)]
        safe = len(idle) - len(exposed)
        short = need + soon - safe - len(self._storing)
        if short > 0:
            self._start(exposed[:short], self._queue, self._ahead)
        return safe >= need or not self._storing

    def give_up(self) -> None:
        """Drop the first in line of the idle states that are below, or not wanted there; if there is none, none."""
        safe = next(filter(self.safe, self._states.victims(self._slots.total)), None)
        if safe is not None:
            self._states.give_up(safe)

    def forget(self, state: State) -> bool:
        """It has left the device. Whether it is lost: nobody has had a copy of it, and one was wanted."""
        name = state.name
        lost = not self.safe(state) and name not in self._ahead and name not in self._tried
        self._ahead.discard(name)
        return lost

    def safe(self, state: State) -> bool:
        """It is below, or not wanted there."""
        return not self._wanted(state) or self._host.has(state.key, state.tail) or self.lower(state)

    def _wanted(self, state: State) -> bool:
        return self._sightings.wanted(state.name) and not self._states.successors.spent(state.name)

    def _start(self, going: Iterable[State], limit: int, tried: set[bytes], *, in_no_hurry: bool = False) -> bool:
        """Whether some are on their way now, or were left."""
        for state in going:
            name = state.name
            known = name in self._storing or name in self._refused or name in tried
            if known or self._host.has(state.key, state.tail) or not self._wanted(state):
                continue
            if len(self._storing) >= limit:
                return True
            if not self._store(name, state, in_no_hurry):
                return bool(self._storing)
            tried.add(name)
        return bool(self._storing)

    def _store(self, name: bytes, state: State, in_no_hurry: bool) -> bool:
        """False: there is no room on the host."""
        if not self._whole(state):
            return True
        slots = self._host.slots.allocate(1)
        pages = self._host_pages.allocate(1 if state.page else 0)
        if slots is None or pages is None:
            self._host.slots.release(slots or [])
            self._host_pages.release(pages or [])
            self._counts.dropped += 1
            return False
        self._save(name, state, slots, pages, in_no_hurry)
        return True

    def _whole(self, state: State) -> bool:
        """Records do not move: a slot that has some is made whole, unless somebody reads it."""
        if state.whole == state.length or self.settle is None:
            return True
        if self._slots.refs(state.slot):
            return False
        self.settle(Copy(False, state.slot, state.slot, state.length, state.whole))
        state.whole = state.length
        return True

    def _save(self, name: bytes, state: State, slots: Sequence[int], pages: Sequence[int], in_no_hurry: bool) -> None:
        self._storing.add(name)
        partial = [state.page] if state.page else []
        self._pages.share(partial)
        hold = self._slots.hold([state.slot])
        saving = self._states.saving(state)
        source = state.slot

        def run() -> _Bytes:
            save, pairs = self._mover.save, list(zip(partial, pages, strict=True))
            found = save(True, pairs, in_no_hurry=in_no_hurry) if partial else []
            return save(False, [(source, slots[0])], in_no_hurry=in_no_hurry), found

        def done(sums: _Bytes, error: Exception | None, seconds: float) -> None:
            self._storing.discard(name)
            hold.release()
            self._pages.release_oldest(partial)
            if error is None:
                self._refused.clear()
                page = pages[0] if pages else 0
                (slot_sums,), page_sums = sums[0], sums[1][0] if page else ()
                made = TierState(state.key, state.length, state.tail, slots[0], page, slot_sums, page_sums, saving)
                self._published(made, seconds)
            else:
                self._counts.failed += 1
                self._refused.add(name)
            self._looked_at = (-1, -1)
            self._host.slots.release(slots)
            self._host_pages.release(pages)

        self._submit(run, done)

    def check_empty(self) -> None:
        """Raises AssertionError."""
        assert not self._storing, "stores of states are left"
