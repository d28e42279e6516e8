"""Which pages hold the KV of which prefix. Torch-free; shares the pool's lock.

Pages enter when their content is confirmed, never before, and by page key only. Presence is prefix-closed: a key is
here only if the key it hangs on is, so a look-up may test links first. Eviction takes tails first, least recently used
first. Every change is journalled with a sequence number; a reader that fell behind takes a snapshot.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from engine.pages import PagePool
from kvtransfer.hashing import LINK_PAGES


@dataclass(frozen=True, slots=True)
class CacheChange:
    """keys in chain order when stored, tail first when removed. state_length > 0: not pages but the state after so many
    tokens came, went or changed its tier; keys has the one it hangs on. tier: where it is now, if still stored."""

    sequence: int
    stored: bool
    keys: tuple[bytes, ...]
    state_length: int = 0
    tier: str = "device"


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Every key here as of `sequence`; a key comes after the one it hangs on. states: (key, length) of each, on the
    device. lower, lower_states: (tier, keys) and (tier, states) of those that are only below the device."""

    sequence: int
    keys: tuple[bytes, ...]
    states: tuple[tuple[bytes, int], ...] = ()
    lower: tuple[tuple[str, tuple[bytes, ...]], ...] = ()
    lower_states: tuple[tuple[str, tuple[tuple[bytes, int], ...]], ...] = ()


STATE_TIERS = ("device", "host", "disk")


def _highest(tiers: Counter[str]) -> str:
    return next((tier for tier in STATE_TIERS if tiers[tier]), "")


@dataclass(slots=True)
class _Node:
    page: int
    parent: bytes | None
    depth: int  # pages from the root, this one included
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
        self.nowhere: Callable[[Sequence[bytes]], None] = lambda _: None  # told keys that are in no tier any more
        self._key_gone: Callable[[bytes], None] = lambda _: None
        self._page_wanted: Callable[[int], bool] = lambda _: False
        self._dropped: Callable[[Sequence[bytes], Sequence[int]], dict[bytes, str]] = lambda _, __: {}
        self._below: Callable[[], dict[str, list[bytes]]] = dict
        self._states: dict[tuple[bytes, int], Counter[str]] = {}
        pool.set_evictor(self._evict)

    @property
    def enabled(self) -> bool:
        return self._enabled

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def depth(self, key: bytes) -> int:
        """Pages up to this key."""
        return self._nodes[key].depth

    def parent(self, key: bytes) -> bytes | None:
        return self._nodes[key].parent

    def following(self, key: bytes) -> Collection[bytes]:
        """Keys here that hang on this one, which may be elsewhere."""
        node = self._nodes.get(key)
        return node.children.keys() if node is not None else ()

    def set_dependents(self, key_gone: Callable[[bytes], None], page_wanted: Callable[[int], bool]) -> None:
        """Whoever hangs states on keys. key_gone: this key is being forgotten. page_wanted: give up this page, which
        has no key, if it is yours. Both are called under the pool's lock."""
        self._key_gone, self._page_wanted = key_gone, page_wanted

    def set_lower(
        self,
        dropped: Callable[[Sequence[bytes], Sequence[int]], dict[bytes, str]],
        below: Callable[[], dict[str, list[bytes]]],
    ) -> None:
        """The tiers below. dropped: told keys (tail first) and pages that have been forgotten here, it names the tier
        of those that are still somewhere; under the pool's lock. below: keys by tier, parents first."""
        self._dropped, self._below = dropped, below

    def record_lower(self, keys: Sequence[bytes], tier: str) -> None:
        """Journal that keys which are not here are in `tier` now; "" = nowhere any more."""
        with self._pool.lock:
            self._record(bool(tier), keys, tier=tier or "device")

    def ranked(self, key: bytes, rank: int) -> None:
        """See engine.retention."""
        node = self._nodes.get(key)
        if node is not None:
            self._pool.rank(node.page, rank)

    def used_again(self, keys: Sequence[bytes]) -> None:
        """See engine.retention."""
        with self._pool.lock:
            self._pool.used_again([self._nodes[key].page for key in keys if key in self._nodes])

    def key_of(self, page: int) -> bytes | None:
        return self._key_of.get(page)

    def leaving(self, page: int) -> list[bytes]:
        """Keys that are forgotten when this idle page is evicted next."""
        return self._behind(self._tail(self._key_of[page])) if page in self._key_of else []

    def evict(self, page: int) -> None:
        """Give up this idle page, or the tail that hangs on it."""
        with self._pool.lock:
            self._evict(page)

    def oldest(self, count: int) -> list[tuple[int, bytes, bytes | None]]:
        """(page, key, parent) of the idle pages that would be evicted first, of at most `count` looked at."""
        with self._pool.lock:
            named = [(page, self._key_of.get(page)) for page in self._pool.oldest(count)]
            return [(page, key, self._nodes[key].parent) for page, key in named if key is not None]

    def record_state(self, key: bytes, length: int, ready: bool, tier: str = "device") -> None:
        """Count a state that came to a tier or left it, and journal what that changes for a reader: where the highest
        one of this key and length is, for several may differ in their last tokens only. The caller holds the lock."""
        tiers = self._states.setdefault((key, length), Counter())
        before = _highest(tiers)
        tiers[tier] += 1 if ready else -1
        after = _highest(tiers)
        if not after:
            del self._states[key, length]
            self._record(False, [key], length, before)
        elif after != before:
            self._record(True, [key], length, after)

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
            below = {tier: tuple(k for k in keys if k not in self._nodes) for tier, keys in self._below().items()}
            lower = tuple((tier, keys) for tier, keys in below.items() if keys)
            states: dict[str, list[tuple[bytes, int]]] = {}
            for state, tiers in self._states.items():
                states.setdefault(_highest(tiers), []).append(state)
            here = tuple(states.pop("device", ()))
            return CacheSnapshot(
                self._sequence, tuple(self._nodes), here, lower, tuple((t, tuple(s)) for t, s in states.items())
            )

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
                assert node.depth == (self._nodes[node.parent].depth if node.parent else 0) + 1

    # --- inside -------------------------------------------------------------------------------------------------

    def _record(self, stored: bool, keys: Sequence[bytes], state_length: int = 0, tier: str = "device") -> None:
        if not stored and not state_length:
            self.nowhere(keys)
        self._sequence += 1
        self._journal.append(CacheChange(self._sequence, stored, tuple(keys), state_length, tier))
        if self._on_change is not None:
            self._on_change()

    def _add(self, key: bytes, page: int, parent: bytes | None) -> None:
        assert page not in self._key_of, "a page has one content"
        depth = self._nodes[parent].depth + 1 if parent is not None else 1
        self._nodes[key] = _Node(page, parent, depth, {})
        self._key_of[page] = key
        if parent is not None:
            self._nodes[parent].children[key] = None
        self._pool.keep(page)

    def _evict(self, oldest: int) -> None:
        """Drop the tail that hangs on the oldest cached page (usually that page itself)."""
        if oldest not in self._key_of:
            given_up = self._page_wanted(oldest)
            assert given_up, "a cached page without a name"
            return
        self._drop(self._tail(self._key_of[oldest]))

    def _tail(self, key: bytes) -> bytes:
        """The end of the idle chain that hangs on `key`."""
        while True:
            idle = (c for c in self._nodes[key].children if self._pool.refs(self._nodes[c].page) == 0)
            child = next(idle, None)
            if child is None:
                return key
            key = child

    def _behind(self, key: bytes) -> list[bytes]:
        """`key` and what hangs on it, the tails first."""
        order = [key]
        for known in order:
            order.extend(self._nodes[known].children)
        order.reverse()
        return order

    def _drop(self, key: bytes) -> None:
        """Forget `key` and what hangs on it. Pages that are still held lose their name, not their content."""
        order = self._behind(key)
        parent = self._nodes[key].parent
        if parent is not None:
            del self._nodes[parent].children[key]
        pages = []
        for known in order:
            self._key_gone(known)
            node = self._nodes.pop(known)
            del self._key_of[node.page]
            self._pool.unkeep(node.page)
            pages.append(node.page)
        below = self._dropped(order, pages)
        gone = [known for known in order if known not in below]
        if gone:
            self._record(False, gone)
        for tier in set(below.values()):
            self._record(True, [known for known in reversed(order) if below.get(known) == tier], tier=tier)
