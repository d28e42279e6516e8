"""Recurrent states on the host: all layers of one boundary in one host slot, all or nothing, with the partial page and
its tokens where the boundary is off the page grid. Torch-free; engine thread only.

As on the device (engine.states) a state hangs on the key of the last full page below it, and goes when that key is in
no tier any more. A slot here is in one state: free; referenced (being written, being read, or a swapped request's); or
cached. When slots run out the state with the lowest score goes: by `lru` the longest unused, by `flops` recency plus
the prefill it saves per byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.pages import PageHold, SlotPool, hold_both
from engine.prefix_cache import PrefixCache
from engine.states import SAVING_WEIGHT, fits
from engine.tiers.index import TierIndex
from engine.tiers.policy import Order
from engine.tiers.pool import Sums


@dataclass(slots=True, eq=False)
class HostState:
    """As engine.states.State. slot, page: on the host. saving: FLOPs per byte, as weighed when it came down."""

    key: bytes
    length: int
    tail: tuple[int, ...]
    slot: int
    page: int
    slot_sums: Sums
    page_sums: Sums
    saving: float
    used: int = 0


class HostStates:
    """slots: host slots, shared with swapped requests. host: for partial pages. rank: see engine.retention."""

    def __init__(
        self,
        slots: SlotPool,
        host: TierIndex,
        cache: PrefixCache,
        order: Order,
        rank: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        self.slots = slots
        self._host, self._cache, self._order = host, cache, order
        self._by_key: dict[bytes, list[HostState]] = {}
        self._by_page: dict[int, HostState] = {}
        self._used = self._count = 0
        self._rank = rank
        slots.set_evictor(lambda _: self.drop(self._victim()))
        host.set_dependents(self._page_wanted)

    def __len__(self) -> int:
        """From any thread."""
        return self._count

    def has(self, key: bytes, tail: tuple[int, ...]) -> bool:
        return any(state.tail == tail for state in self._by_key.get(key, ()))

    def match(self, keys: Sequence[bytes], tokens: Sequence[int], above: int) -> list[HostState]:
        """States of prefixes of `tokens` that are longer than `above` tokens, the longest first. keys: of the pages
        that are in some tier a state can be used with. Takes no count."""
        found: list[HostState] = []
        for key in reversed(keys):
            here = [s for s in self._by_key.get(key, ()) if s.length > above and fits(s.length, s.tail, tokens)]
            found += sorted(here, key=lambda s: s.length, reverse=True)
        return found

    def use(self, state: HostState) -> PageHold:
        """It is hit: counts on its slot and page, so that they stay while they are read."""
        self._used += 1
        state.used = self._used
        return hold_both(self._host.pool, [state.page] if state.page else [], self.slots, [state.slot])

    def used_again(self, keys: Sequence[bytes]) -> None:
        """See engine.retention."""
        for key in keys:
            for state in self._by_key.get(key, ()):
                state.used = self._used

    def add(self, state: HostState) -> bool:
        """Publish a state whose bytes are there; the caller holds counts on slot and page. False: it is known."""
        if self.has(state.key, state.tail):
            return False
        state.used = self._used
        self._by_key.setdefault(state.key, []).append(state)
        self._count += 1
        self.slots.keep(state.slot)
        if state.page:
            self._by_page[state.page] = state
            self._host.pool.keep(state.page)
        with self.slots.lock:
            self._cache.record_state(state.key, state.length, ready=True, tier="host")
        return True

    def drop(self, state: HostState) -> None:
        """Forget one, if it is known. What is held loses its name only."""
        found = self._by_key.get(state.key, [])
        if state not in found:
            return
        found.remove(state)
        self._count -= 1
        if not found:
            del self._by_key[state.key]
        self.slots.unkeep(state.slot)
        if state.page:
            del self._by_page[state.page]
            self._host.pool.unkeep(state.page)
        with self.slots.lock:
            self._cache.record_state(state.key, state.length, ready=False, tier="host")

    def key_gone(self, key: bytes) -> None:
        """The page under this key is nowhere any more."""
        for state in list(self._by_key.get(key, ())):
            self.drop(state)

    def check(self, in_some_tier: Callable[[bytes], bool]) -> None:
        """Raises AssertionError."""
        states = [state for found in self._by_key.values() for state in found]
        assert len({state.slot for state in states}) == len(states), "two states in one host slot"
        for state in states:
            assert in_some_tier(state.key), "a state without its pages"
            assert self.slots.kept(state.slot), "a state whose slot is not kept"
            assert bool(state.tail) == bool(state.page), "a partial page goes with a tail"
            assert not state.page or self._by_page[state.page] is state
            assert state.slot_sums, "published before it was written"
            assert not state.page or state.page_sums, "published before it was written"
        assert len(states) == self._count
        assert len(self._by_page) == sum(bool(state.page) for state in states)

    # --- inside -------------------------------------------------------------------------------------------------

    def _victim(self) -> HostState:
        idle = [s for found in self._by_key.values() for s in found if self.slots.refs(s.slot) == 0]
        assert idle, "cached host slots without a state"
        lowest = min(self._rank(s.key) for s in idle)
        idle = [s for s in idle if self._rank(s.key) == lowest]
        oldest, newest = min(s.used for s in idle), max(s.used for s in idle)
        best = max(s.saving for s in idle) or 1.0

        def score(state: HostState) -> float:
            recency = (state.used - oldest) / max(newest - oldest, 1)
            return recency + (SAVING_WEIGHT * state.saving / best if self._order == "flops" else 0.0)

        return min(idle, key=score)

    def _page_wanted(self, page: int) -> bool:
        """The host pool wants a page: drop the state whose partial page it is. False: it is nobody's."""
        state = self._by_page.get(page)
        if state is not None:
            self.drop(state)
        return state is not None
