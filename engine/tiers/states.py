"""Recurrent states below the device: all layers of one boundary in one slot, all or nothing, with the partial page and
its tokens where the boundary is off the page grid. Torch-free; engine thread only.

As on the device (engine.states) a state hangs on the key of the last full page below it, and goes when that key is in
no tier any more. A slot here is in one state: free; referenced (being written, being read, or a swapped request's); or
cached. When slots run out a spent state goes (see engine.successors), else the one with the lowest score: by `lru` the
longest unused, by `flops` recency plus the prefill it saves per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.pages import PageHold, SlotPool, hold_both
from engine.prefix_cache import PrefixCache
from engine.states import SAVING_WEIGHT, fits, state_id
from engine.tiers.index import TierIndex
from engine.tiers.policy import Order
from engine.tiers.pool import Sums


@dataclass(slots=True, eq=False)
class TierState:
    """As engine.states.State. slot: of this tier. page: on the host; on the disk, where a slot has room for it, 0.
    saving: FLOPs per byte, as weighed when it came down."""

    key: bytes
    length: int
    tail: tuple[int, ...]
    slot: int
    page: int
    slot_sums: Sums
    page_sums: Sums
    saving: float
    used: int = 0
    name: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.name = state_id(self.key, self.tail)


class TierStates:
    """One tier's. rank: see engine.retention. spent: of a state's name, see engine.successors."""

    def __init__(
        self,
        tier: str,
        slots: SlotPool,
        cache: PrefixCache,
        order: Order,
        rank: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        self.slots = slots
        self._tier, self._cache, self._order = tier, cache, order
        self._by_key: dict[bytes, list[TierState]] = {}
        self._used = self._count = 0
        self._rank = rank
        self.spent: Callable[[bytes], bool] = lambda _: False
        slots.set_evictor(lambda _: self._evict(self._victim()))

    def __len__(self) -> int:
        """From any thread."""
        return self._count

    def on(self, key: bytes) -> bool:
        """Whether any state hangs on this key."""
        return key in self._by_key

    def get(self, key: bytes, tail: tuple[int, ...]) -> TierState | None:
        return next((state for state in self._by_key.get(key, ()) if state.tail == tail), None)

    def has(self, key: bytes, tail: tuple[int, ...]) -> bool:
        return self.get(key, tail) is not None

    def named(self, key: bytes, name: bytes) -> bool:
        return any(state.name == name for state in self._by_key.get(key, ()))

    def match(self, keys: Sequence[bytes], tokens: Sequence[int], above: int) -> list[TierState]:
        """States of prefixes of `tokens` that are longer than `above` tokens, the longest first. keys: of the pages
        that are in some tier a state can be used with. Takes no count."""
        found: list[TierState] = []
        for key in reversed(keys):
            here = [s for s in self._by_key.get(key, ()) if s.length > above and fits(s.length, s.tail, tokens)]
            found += sorted(here, key=lambda s: s.length, reverse=True)
        return found

    def use(self, state: TierState) -> PageHold:
        """It is hit: counts on what it lies in, so that it stays while it is read."""
        self.used(state)
        return self.held(state)

    def used(self, state: TierState) -> None:
        """It is hit, by who has counts on it."""
        self._used += 1
        state.used = self._used

    def held(self, state: TierState) -> PageHold:
        """Counts on what it lies in."""
        return self.slots.hold([state.slot])

    def used_again(self, keys: Sequence[bytes]) -> None:
        """See engine.retention."""
        for key in keys:
            for state in self._by_key.get(key, ()):
                state.used = self._used

    def add(self, state: TierState) -> bool:
        """Publish a state whose bytes are there; the caller holds counts on what it lies in. False: it is known."""
        if self.has(state.key, state.tail):
            return False
        state.used = self._used
        self._by_key.setdefault(state.key, []).append(state)
        self._count += 1
        self.slots.keep(state.slot)
        with self.slots.lock:
            self._cache.record_state(state.key, state.length, ready=True, tier=self._tier)
        return True

    def restore(self, state: TierState) -> None:
        """As add(), of what an earlier process left, the longest unused first."""
        self._used += 1
        self.add(state)

    def drop(self, state: TierState) -> bool:
        """Forget one; False: it is not known. What is held loses its name only."""
        found = self._by_key.get(state.key, [])
        if state not in found:
            return False
        found.remove(state)
        self._count -= 1
        if not found:
            del self._by_key[state.key]
        self.slots.unkeep(state.slot)
        with self.slots.lock:
            self._cache.record_state(state.key, state.length, ready=False, tier=self._tier)
        return True

    def key_gone(self, key: bytes) -> None:
        """The page under this key is nowhere any more."""
        for state in list(self._by_key.get(key, ())):
            self.drop(state)

    def check(self, in_some_tier: Callable[[bytes], bool]) -> None:
        """Raises AssertionError."""
        states = self._all()
        assert len({state.slot for state in states}) == len(states), f"two states in one slot of the {self._tier}"
        for state in states:
            assert in_some_tier(state.key), "a state without its pages"
            assert self.slots.kept(state.slot), "a state whose slot is not kept"
            assert state.slot_sums, "published before it was written"
            assert bool(state.tail) == bool(state.page_sums), "a partial page goes with a tail"
        assert len(states) == self._count

    # --- inside -------------------------------------------------------------------------------------------------

    def _all(self) -> list[TierState]:
        return [state for found in self._by_key.values() for state in found]

    def _evict(self, state: TierState) -> None:
        self.drop(state)

    def _victim(self) -> TierState:
        idle = [s for s in self._all() if self.slots.refs(s.slot) == 0]
        assert idle, "cached slots without a state"
        idle = [s for s in idle if self.spent(s.name)] or idle
        lowest = min(self._rank(s.key) for s in idle)
        idle = [s for s in idle if self._rank(s.key) == lowest]
        oldest, newest = min(s.used for s in idle), max(s.used for s in idle)
        best = max(s.saving for s in idle) or 1.0

        def score(state: TierState) -> float:
            recency = (state.used - oldest) / max(newest - oldest, 1)
            return recency + (SAVING_WEIGHT * state.saving / best if self._order == "flops" else 0.0)

        return min(idle, key=score)


class HostStates(TierStates):
    """slots: host slots, shared with swapped requests. host: for partial pages."""

    def __init__(
        self,
        slots: SlotPool,
        host: TierIndex,
        cache: PrefixCache,
        order: Order,
        rank: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        super().__init__("host", slots, cache, order, rank)
        self._pages = host.pool
        self._by_page: dict[int, TierState] = {}
        host.set_dependents(self._page_wanted)

    def held(self, state: TierState) -> PageHold:
        return hold_both(self._pages, [state.page] if state.page else [], self.slots, [state.slot])

    def add(self, state: TierState) -> bool:
        added = super().add(state)
        if added and state.page:
            self._by_page[state.page] = state
            self._pages.keep(state.page)
        return added

    def drop(self, state: TierState) -> bool:
        known = super().drop(state)
        if known and state.page:
            del self._by_page[state.page]
            self._pages.unkeep(state.page)
        return known

    def check(self, in_some_tier: Callable[[bytes], bool]) -> None:
        super().check(in_some_tier)
        partial = [state for state in self._all() if state.tail]
        assert all(self._by_page.get(state.page) is state for state in partial), "a partial page is somebody else's"
        assert len(self._by_page) == len(partial)

    def _page_wanted(self, page: int) -> bool:
        """The host pool wants a page: drop the state whose partial page it is. False: it is nobody's."""
        state = self._by_page.get(page)
        return state is not None and self.drop(state)
