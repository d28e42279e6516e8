"""The page a decode takes when none is free: one that costs no state. Engine thread only.

Mostly the longest unused page, or one of the next, carries no state, or is below with all that stands on it. If not, it
goes down first, its states with it, and the decode waits for that, by no more than WAIT_S, while others run.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.pages import PagePool
from engine.prefix_cache import PrefixCache
from engine.states import StateCache
from engine.tiers.presence import Presence
from engine.tiers.state_stores import StateStores
from engine.tiers.stores import Stores

WAIT_S = 0.25
"""A decode, or an admission, waits so long for pages and states to go down before they are dropped."""

PAGES_TRIED = 8


class Growth:
    """poll: concludes copies that have ended. now: monotonic seconds."""

    def __init__(
        self,
        pages: PagePool,
        cache: PrefixCache,
        states: StateCache,
        stores: Stores,
        state_stores: StateStores,
        where: Presence,
        poll: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._pages, self._cache, self._states = pages, cache, states
        self._stores, self._state_stores, self._where = stores, state_stores, where
        self._poll, self._now = poll, now
        self._since: float | None = None  # since when a decode waits

    def ready(self) -> bool:
        """Whether a decode may take a page now. False: copies of what would be lost are under way."""
        if self._pages.free or self._spare():
            self._since = None
            return True
        if not self._under_way:
            self._copy_next()
        self._since = self._now() if self._since is None else self._since
        self._poll()
        if self._spare() or not self._under_way or self._now() - self._since >= WAIT_S:
            self._since = None
            return True
        return False

    @property
    def _under_way(self) -> bool:
        return self._stores.under_way or self._state_stores.under_way

    def _copy_next(self) -> None:
        """Start copies of what goes with the page that is evicted next: not the oldest, but the end of what hangs on
        it."""
        with self._pages.lock:
            for page in self._pages.oldest(1):
                keys = self._cache.leaving(page)[::-1]
                self._stores.copy([(self._page(key), key, self._cache.parent(key)) for key in keys])
                self._state_stores.copy(self._states.leaving(page))

    def _page(self, key: bytes) -> int:
        chain, parent = [key], self._cache.parent(key)
        while parent is not None:
            chain.append(parent)
            parent = self._cache.parent(parent)
        return self._cache.match(chain[::-1])[-1]

    def _spare(self) -> bool:
        """Give up the first page that costs no state, of those that are worth no more than the first. Whether there is
        one."""
        with self._pages.lock:
            oldest = self._pages.oldest(PAGES_TRIED)
            for page in oldest:
                if self._rank(page) > self._rank(oldest[0]):
                    return False
                if self._costs_nothing(page):
                    self._cache.evict(page)
                    return True
        return False

    def _rank(self, page: int) -> int:
        key = self._cache.key_of(page)
        return self._states.rank(key) if key is not None else 0

    def _costs_nothing(self, page: int) -> bool:
        """Every state that would go is below, pages included, or wanted by nobody."""
        if not all(map(self._state_stores.safe, self._states.leaving(page))):
            return False
        return not any(self._where.stranded(key) for key in self._cache.leaving(page))
