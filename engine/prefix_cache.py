"""Which pages hold the KV of which prefix. Torch-free; shares the pool's lock.

Pages enter when their content is confirmed, never before, and by page key only. Presence is prefix-closed: a key is
here only if the key it hangs on is, so a look-up may test links first. Eviction takes tails first, least recently used
first. Every change is journalled with a sequence number; a reader that fell behind takes a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.pages import PagePool
from kvtransfer.hashing import LINK_PAGES


@dataclass(frozen=True, slots=True)
class CacheChange:
    """keys in chain order when stored, tail first when removed."""

    sequence: int
    stored: bool
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Every key here as of `sequence`; a key comes after the one it hangs on."""

    sequence: int
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class _Node:
    page: int
    parent: bytes | None
    children: dict[bytes, None]


class PrefixCache:
    """journal_length: changes kept for readers; older ones need a snapshot."""

    def __init__(self, pool: PagePool, enabled: bool = True, journal_length: int = 4096) -> None:
        self._pool = pool
        self._enabled = enabled
        self._nodes: dict[bytes, _Node] = {}  # insertion order: parents before children
        self._key_of: dict[int, bytes] = {}
        self._journal: deque[CacheChange] = deque(maxlen=journal_length)
        self._sequence = 0
        self._on_change: Callable[[], None] | None = None
        pool.set_evictor(self._evict)

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Pages of the longest known prefix of `keys` (in chain order). Takes no count: call under the pool's lock
        together with share()."""
        with self._pool.lock:
            if not self._enabled:
                return []
            count = 0
            while count + LINK_PAGES <= len(keys) and keys[count + LINK_PAGES - 1] in self._nodes:
                count += LINK_PAGES
            while count < len(keys) and keys[count] in self._nodes:
                count += 1
            return [self._nodes[key].page for key in keys[:count]]

    def publish(self, keys: Sequence[bytes], pages: Sequence[int], first: int) -> None:
        """Make keys[first:] known, keys[i] being the content of pages[i]. The caller holds a count on the pages and
        their content is confirmed. A key that is known stays with its page; nothing is published whose parent is
        not here (it was evicted under its owner's feet)."""
        if not self._enabled or first >= len(keys):
            return
        with self._pool.lock:
            stored = []
            for index in range(first, len(keys)):
                key = keys[index]
                if key in self._nodes:
                    continue
                parent = keys[index - 1] if index else None
                if parent is not None and parent not in self._nodes:
                    break
                self._add(key, pages[index], parent)
                stored.append(key)
            if stored:
                self._record(True, stored)

    def clear(self) -> None:
        """Forget everything."""
        with self._pool.lock:
            for key in list(self._nodes):
                if key in self._nodes:
                    self._drop(key)

    # --- journal ------------------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Of the newest change; 0 = none yet."""
        return self._sequence

    def changes_after(self, sequence: int) -> list[CacheChange] | None:
        """Changes newer than `sequence`, oldest first; None when they are not all here any more, or it is from the
        future (another epoch): take a snapshot."""
        with self._pool.lock:
            missing = self._sequence - sequence
            if missing < 0 or missing > len(self._journal):
                return None
            return [change for change in self._journal if change.sequence > sequence]

    def snapshot(self) -> CacheSnapshot:
        with self._pool.lock:
            return CacheSnapshot(self._sequence, tuple(self._nodes))

    def set_change_listener(self, on_change: Callable[[], None]) -> None:
        """Called under the pool's lock after every change: only wake somebody up."""
        self._on_change = on_change

    def check(self) -> None:
        """Assert that presence is prefix-closed and agrees with the pool. Raises AssertionError."""
        with self._pool.lock:
            assert len(self._key_of) == len(self._nodes), "two keys on one page"
            for key, node in self._nodes.items():
                assert self._key_of[node.page] == key
                assert node.parent is None or key in self._nodes[node.parent].children, "a key without its parent"
                assert all(child in self._nodes for child in node.children)

    # --- inside -------------------------------------------------------------------------------------------------

    def _record(self, stored: bool, keys: Sequence[bytes]) -> None:
        self._sequence += 1
        self._journal.append(CacheChange(self._sequence, stored, tuple(keys)))
        if self._on_change is not None:
            self._on_change()

    def _add(self, key: bytes, page: int, parent: bytes | None) -> None:
        assert page not in self._key_of, "a page has one content"
        self._nodes[key] = _Node(page, parent, {})
        self._key_of[page] = key
        if parent is not None:
            self._nodes[parent].children[key] = None
        self._pool.keep(page)

    def _evict(self, oldest: int) -> None:
        """Drop the tail that hangs on the oldest cached page (usually that page itself)."""
        key = self._key_of[oldest]
        while True:
            idle = (c for c in self._nodes[key].children if self._pool.refs(self._nodes[c].page) == 0)
            child = next(idle, None)
            if child is None:
                break
            key = child
        self._drop(key)

    def _drop(self, key: bytes) -> None:
        """Forget `key` and what hangs on it. Pages that are still held lose their name, not their content."""
        order = [key]
        for known in order:
            order.extend(self._nodes[known].children)
        parent = self._nodes[key].parent
        if parent is not None:
            del self._nodes[parent].children[key]
        order.reverse()
        for known in order:
            node = self._nodes.pop(known)
            del self._key_of[node.page]
            self._pool.unkeep(node.page)
        self._record(False, order)
