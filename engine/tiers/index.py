"""Which pages lie in a tier (host or disk), under which page key. Torch-free; changed by the engine thread only.

A page of the tier is in one state, as on the device: free; referenced (being written, being read, or the copy of a
swapped request); or cached, that is published and idle. A key enters when its bytes are there, never before.

Over all tiers presence is prefix-closed: the parent of a key here is in some tier. So eviction
takes tails first, and a key that goes for good takes what hangs on it along.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.pages import PagePool
from engine.tiers.policy import Order, first_to_go, flops_per_byte
from engine.tiers.pool import Sums
from kvtransfer.types import PAGE_TOKENS

CANDIDATES = 16
"""Longest unused pages the FLOPs order chooses among."""


@dataclass(slots=True)
class Entry:
    """depth: pages before it in its sequence."""

    key: bytes
    page: int
    parent: bytes | None
    depth: int
    sums: Sums


class TierIndex:
    """pages: the null one included. gone: told keys that have left (tail first). lock: of the device pool,
    so that a snapshot of both is of one moment. rank: of a key that comes (see engine.retention)."""

    def __init__(
        self,
        pages: int,
        order: Order = "lru",
        gone: Callable[[Sequence[bytes]], None] = lambda _: None,
        lock: threading.RLock | None = None,
        rank: Callable[[bytes], int] = lambda _: 0,
    ) -> None:
        self.pool = PagePool(pages, lock)
        self._order = order
        self._gone = gone
        self._rank = rank
        self._entries: dict[bytes, Entry] = {}
        self._by_page: dict[int, Entry] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._page_wanted: Callable[[int], bool] = lambda _: False
        self.pool.set_evictor(self._evict)

    def set_dependents(self, page_wanted: Callable[[int], bool]) -> None:
        """Whoever keeps pages here that have no key. page_wanted: give up this one, if it is yours."""
        self._page_wanted = page_wanted

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def keys(self) -> list[bytes]:
        """From any thread."""
        with self.pool.lock:
            return list(self._entries)

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def following(self, key: bytes) -> Collection[bytes]:
        """Keys here that hang on this one, which may be elsewhere."""
        return self._children.get(key, {}).keys()

    def match(self, keys: Sequence[bytes], first: int) -> list[Entry]:
        """Entries of keys[first:] up to the first that is not here. Takes no count."""
        found: list[Entry] = []
        for key in keys[first:]:
            entry = self._entries.get(key)
            if entry is None:
                break
            found.append(entry)
        return found

    def add(self, entry: Entry) -> bool:
        """Publish a page whose bytes are there; the caller holds a count on it. False: the key is known already."""
        if entry.key in self._entries:
            return False
        assert entry.page not in self._by_page, "a page has one content"
        with self.pool.lock:
            self._entries[entry.key] = self._by_page[entry.page] = entry
        if entry.parent is not None:
            self._children.setdefault(entry.parent, {})[entry.key] = None
        self.pool.keep(entry.page)
        self.pool.rank(entry.page, self._rank(entry.key))
        return True

    def ranked(self, key: bytes, rank: int) -> None:
        """See engine.retention."""
        entry = self._entries.get(key)
        if entry is not None:
            self.pool.rank(entry.page, rank)

    def used_again(self, keys: Sequence[bytes]) -> None:
        """See engine.retention."""
        self.pool.used_again([self._entries[key].page for key in keys if key in self._entries])

    def drop(self, key: bytes) -> None:
        """Forget `key`, if it is here, and all that hangs on it here. Pages that are held lose their name only."""
        order = [key]
        for known in order:
            order.extend(self._children.get(known, ()))
        lost = [k for k in reversed(order) if k in self._entries]
        for known in lost:
            self._remove(self._entries[known])
        if lost:
            self._gone(lost)

    def oldest(self, count: int) -> list[Entry]:
        """The idle entries that would be evicted first, of at most `count` pages looked at."""
        found = map(self._by_page.get, self.pool.oldest(count))
        return [entry for entry in found if entry is not None]

    def serving(self, key: bytes, used: Callable[[bytes], bool]) -> list[bytes]:
        """`key`, what hangs on it and what it hangs on, as far as nothing else does, the deepest first; nothing where
        a key at or behind it is `used`."""
        behind = [key]
        for known in behind:
            behind.extend(self._children.get(known, ()))
        if any(used(known) for known in behind):
            return []
        before = []
        entry = self._entries.get(key)
        while entry is not None and entry.parent is not None:
            above = entry.parent
            if used(above) or len(self._children.get(above, ())) > 1:
                break
            before.append(above)
            entry = self._entries.get(above)
        return [known for known in (*reversed(behind), *before) if known in self._entries]

    def leave_first(self, keys: Sequence[bytes]) -> None:
        """Those of them that are idle are evicted next, in this order."""
        self.pool.used_least([self._entries[key].page for key in keys])

    def check(self) -> None:
        """Raises AssertionError."""
        self.pool.check()
        assert len(self._by_page) == len(self._entries), "two keys on one page"
        for key, entry in self._entries.items():
            assert entry.key == key
            assert self._by_page[entry.page] is entry
            assert entry.parent is None or key in self._children[entry.parent]
        assert all(child in self._entries for found in self._children.values() for child in found)

    # --- inside -------------------------------------------------------------------------------------------------

    def _remove(self, entry: Entry) -> None:
        with self.pool.lock:
            del self._entries[entry.key]
        del self._by_page[entry.page]
        if entry.parent is not None:
            siblings = self._children[entry.parent]
            del siblings[entry.key]
            if not siblings:
                del self._children[entry.parent]
        self.pool.unkeep(entry.page)

    def _evict(self, oldest: int) -> None:
        if oldest not in self._by_page:
            given_up = self._page_wanted(oldest)
            assert given_up, "a cached page without a name"
            return
        self.drop(self._victim(oldest).key)

    def _victim(self, oldest: int) -> Entry:
        if self._order == "lru":
            return self._tail(self._by_page[oldest])
        lowest = self._rank(self._by_page[oldest].key)
        equals = [entry for entry in self.oldest(CANDIDATES) if self._rank(entry.key) == lowest]
        tails = list({id(t): t for t in map(self._tail, equals)}.values())
        worth = [flops_per_byte(t.depth * PAGE_TOKENS, PAGE_TOKENS, 1) for t in tails]
        return tails[first_to_go(worth)]

    def _tail(self, entry: Entry) -> Entry:
        """The end of the idle chain that hangs on `entry`."""
        while True:
            below = (self._entries[key] for key in self._children.get(entry.key, ()))
            idle = next((child for child in below if self.pool.refs(child.page) == 0), None)
            if idle is None:
                return entry
            entry = idle
