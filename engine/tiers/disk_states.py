"""States on disk, each with its partial page in one place of the file; and which pages none of them needs.

A page that no state stands on is of little use to a model with states, and a state without its pages of none: a state
goes with its page key (see TierStates), and the pages that only served one that was evicted are the next to go.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.pages import SlotPool
from engine.prefix_cache import PrefixCache
from engine.tiers.index import TierIndex
from engine.tiers.policy import Order
from engine.tiers.states import TierState, TierStates


class DiskStates(TierStates):
    """pages: the tier's. left: told the names of states that are here no more."""

    def __init__(
        self,
        slots: SlotPool,
        pages: TierIndex,
        cache: PrefixCache,
        order: Order,
        rank: Callable[[bytes], int],
        left: Callable[[bytes], None],
    ) -> None:
        super().__init__("disk", slots, cache, order, rank)
        self._pages, self._left = pages, left

    def drop(self, state: TierState) -> bool:
        known = super().drop(state)
        if known:
            self._left(state.name)
        return known

    def _evict(self, state: TierState) -> None:
        self.drop(state)
        self._pages.leave_first(self._pages.serving(state.key, self.on))
