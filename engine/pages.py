"""Counted pages and slots. Torch-free, thread-safe behind one short lock.

A page is in exactly one state, and free + cached + referenced == total at every moment (page 0 is null, in no state):

| state      | owner                                   | leaves it by                                        |
|------------|-----------------------------------------|-----------------------------------------------------|
| free       | the pool                                | allocate()                                          |
| referenced | whoever holds counts: sequences, leases, | the last release(): to cached if kept, else to free |
|            | landings (also after a cancel: quarantine) |                                                  |
| cached     | the prefix cache (kept, no count)       | share() on a hit, or eviction when pages run out     |

Slots are counted the same way; the cache that keeps some is engine.states.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine.idle import IdleOrder
from kvtransfer.types import PAGE_TOKENS


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """`count` pages, page 0 included, which is never handed out.

    `lock` is re-entrant and shared with the prefix cache and the ledger, so that a check and the allocation it allows
    are one action. Nothing is called outside under it but the evictor and the free-listener, which must be short.
    """

    def __init__(self, count: int, lock: threading.RLock | None = None) -> None:
        """lock: of another pool, to be shared with it."""
        self.lock = lock or threading.RLock()
        self._total = max(count, 1) - 1
        self._refs = [0]  # of pages that were handed out once; those behind them are free, and cost nothing
        self._again: deque[int] = deque()  # free after use
        self._cached = IdleOrder()
        self._kept: set[int] = set()
        self._evict: Callable[[int], None] | None = None
        self._on_free: Callable[[], None] | None = None

    # --- counts -------------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Pages that can be handed out."""
        return self._total

    @property
    def free(self) -> int:
        with self.lock:
            return self._total + 1 - len(self._refs) + len(self._again)

    @property
    def cached(self) -> int:
        """Pages nobody holds, kept for their content; they are evicted when needed."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages allocate() could hand out now."""
        with self.lock:
            return self.free + len(self._cached)

    @property
    def referenced(self) -> int:
        with self.lock:
            return self._total - self.free - len(self._cached)

    def oldest(self, count: int) -> list[int]:
        """At most `count` idle cached pages, in the order in which they would be evicted."""
        with self.lock:
            return list(itertools.islice(self._cached, count))

    def refs(self, page: int) -> int:
        return self._refs[page] if page < len(self._refs) else 0

    def kept(self, page: int) -> bool:
        return page in self._kept

    def check(self) -> None:
        """Assert the invariant, from the counts themselves. Raises AssertionError."""
        with self.lock:
            free, cached = {*self._again, *range(len(self._refs), self._total + 1)}, set(self._cached)
            assert len(cached) == len(self._cached), "an idle page is counted twice"
            referenced = {page for page, count in enumerate(self._refs) if count > 0}
            assert len(free) == self.free, "a page is free twice"
            assert len(free | cached | referenced) == self.total, "a page is in no state"
            assert len(free) + len(cached) + len(referenced) == self.total, "a page is in two states"
            assert 0 not in free | cached | referenced, "page 0 was handed out"
            assert min(self._refs) >= 0, "a count below zero"
            assert cached <= self._kept, "a cached page nobody keeps"
            assert not self._kept & free, "a kept page is free"

    # --- counts up and down -------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one count each, or None and nothing changes. Evicts cached pages where free run out."""
        with self.lock:
            first, again = len(self._refs), self._again
            fresh = min(count, self._total + 1 - first)
            if count > fresh + len(again) + len(self._cached):
                return None
            while len(again) < count - fresh:
                assert self._evict is not None, "cached pages without a cache"
                self._evict(next(iter(self._cached)))
            pages = [again.popleft() for _ in range(count - fresh)]
            for page in pages:
                self._refs[page] = 1
            if fresh:
                self._refs.extend([1] * fresh)
                pages = [*range(first, first + fresh), *pages]
            return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more count on each page; they must be referenced or cached."""
        with self.lock:
            for page in pages:
                if self._refs[page] == 0:
                    self._cached.remove(page)
                self._refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One count less on each. The tail goes first, so that it is evicted before what it hangs on."""
        if not pages:
            return
        freed = False
        with self.lock:
            for page in reversed(pages):
                assert self._refs[page] > 0, "released more often than held"
                self._refs[page] -= 1
                if self._refs[page] == 0:
                    freed = True
                    if page in self._kept:
                        self._cached.add(page)
                    else:
                        self._again.append(page)
        if freed and self._on_free is not None:
            self._on_free()

    def release_oldest(self, pages: Sequence[int]) -> None:
        """As release(); pages that become idle will be the first to be evicted, the first of them first."""
        self.release(pages)
        self.used_least(pages)

    def hold(self, pages: Sequence[int]) -> PageHold:
        """A further count on each page, as a value."""
        self.share(pages)
        return PageHold(((self, tuple(pages)),))

    # --- for the prefix cache and the loop ------------------------------------------------------------------------

    def keep(self, page: int) -> None:
        """A referenced page's content is wanted beyond its last count."""
        with self.lock:
            assert self._refs[page] > 0
            self._kept.add(page)

    def unkeep(self, page: int) -> None:
        """The content is not wanted any more; a page without counts becomes free."""
        with self.lock:
            self._kept.discard(page)
            if self._refs[page] == 0:
                self._cached.remove(page)
                self._again.append(page)
            self._cached.forget(page)

    def rank(self, page: int, rank: int) -> None:
        """From now on this kept page is evicted before those of higher ranks, idle or later."""
        with self.lock:
            if page in self._kept:
                self._cached.rank(page, rank)

    def used_again(self, pages: Iterable[int]) -> None:
        """Idle ones of these are as if they had just been released, one after the other."""
        with self.lock:
            for page in pages:
                if page in self._cached:
                    self._cached.to_back(page)

    def used_least(self, pages: Sequence[int]) -> None:
        """Idle ones of these are the first to be evicted of their rank, the first of them first."""
        with self.lock:
            for page in reversed(pages):
                if page in self._cached:
                    self._cached.to_front(page)

    def set_evictor(self, evict: Callable[[int], None]) -> None:
        """evict(oldest cached page) must unkeep at least one cached page. Called under the lock."""
        self._evict = evict

    def set_free_listener(self, on_free: Callable[[], None]) -> None:
        """Called, from any thread and outside the lock, when a page lost its last count."""
        self._on_free = on_free


class SlotPool(PagePool):
    """State slots: counted like pages. count may be 0 (a model without state)."""


class PageHold:
    """Counts on pages and slots with one owner. release() is idempotent and may come from any thread."""

    def __init__(self, parts: Sequence[tuple[PagePool, tuple[int, ...]]]) -> None:
        self._parts: tuple[tuple[PagePool, tuple[int, ...]], ...] = tuple(parts)
        self._lock = threading.Lock()

    @classmethod
    def joined(cls, *holds: PageHold) -> PageHold:
        """One hold that takes over what the others had."""
        parts: list[tuple[PagePool, tuple[int, ...]]] = []
        for hold in holds:
            with hold._lock:
                parts += hold._parts
                hold._parts = ()
        return cls(parts)

    @property
    def held(self) -> bool:
        return bool(self._parts)

    def release(self) -> None:
        with self._lock:
            parts, self._parts = self._parts, ()
        for pool, items in parts:
            pool.release(items)

    def __enter__(self) -> PageHold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold_both(pages: PagePool, page_ids: Sequence[int], slots: PagePool, slot_ids: Sequence[int]) -> PageHold:
    """One hold over pages and slots."""
    pages.share(page_ids)
    slots.share(slot_ids)
    return PageHold(((pages, tuple(page_ids)), (slots, tuple(slot_ids))))
