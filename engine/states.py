"""Which state slots hold the recurrent state of which prefix. Torch-free; shares the pools' lock with the page cache.

A state is worth something only together with the KV pages below it, so it hangs on the page key at floor16(length) and
goes when that key goes. Off the page grid (the end of a turn) it also keeps the partial page and its up to 15 tokens,
all of which must match. States are immutable: a hit copies slot and partial page; they enter when the write is done.

| slot                      | owner                                                               |
|---------------------------|---------------------------------------------------------------------|
| mutable                   | one sequence, from admission to its end                             |
| being written             | a step in flight, for a checkpoint inside one of its rows           |
| in here, count 0          | the cache; evicted when slots run out                               |
| in here, count > 0        | the cache, and whoever copies or reads it (hits, leases)            |

When slots run out a spent state goes (see engine.successors), else the one with the lowest score, pages untouched:
recency in [0, 1] plus the prefill it saves over the next shallower state, per byte, in [0, 1]. So a state between two
others goes before either.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.pages import PagePool, SlotPool
from engine.prefix_cache import PrefixCache
from engine.runner_api import ModelSpec
from engine.successors import Successors
from kvtransfer.types import PAGE_TOKENS

SAVING_WEIGHT = 1.0


@dataclass(slots=True, eq=False)
class State:
    """The state after `length` tokens: those below `key`, then `tail`. page: the partial page, 0 = on the grid.
    used: look-ups when it was last hit or made, so that states one prompt leaves are of one age.
    below: the next shallower state of the same prefix. whole: the slot's records begin there (engine.plan.Copy)."""

    key: bytes
    length: int
    tail: tuple[int, ...]
    slot: int
    page: int
    used: int
    whole: int
    below: State | None = None
    name: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.name = state_id(self.key, self.tail)

    @property
    def start(self) -> int:
        """A hit here need not run the tokens from here on to `length`: one on the state below would."""
        return self.below.length if self.below else 0


@dataclass(frozen=True, slots=True)
class Match:
    """pages: of the longest known prefix on the device; below: how many more follow on the host; `known` tokens of
    both. state: the deepest one inside the device's, if any. lower: length of one on the host that is used instead."""

    pages: list[int]
    state: State | None
    below: int = 0
    lower: int = 0

    @property
    def known(self) -> int:
        return (len(self.pages) + self.below) * PAGE_TOKENS

    @property
    def resumed(self) -> int:
        return self.lower or (self.state.length if self.state else 0)


def state_id(key: bytes, tail: Sequence[int]) -> bytes:
    """One name for a state on any tier."""
    data = key + struct.pack(f"<{len(tail)}I", *tail)
    return hashlib.blake2b(data, digest_size=32, person=b"pdserve-state").digest()


class StateCache:
    """model: its sizes and the work of a prefill, for the score."""

    def __init__(self, cache: PrefixCache, pages: PagePool, slots: SlotPool, model: ModelSpec) -> None:
        self._cache = cache
        self._pages = pages
        self._slots = slots
        self._model = model
        self._by_key: dict[bytes, list[State]] = {}
        self._by_page: dict[int, State] = {}
        self._looked_up = 0
        self.version = 0  # grows with every state that comes, goes or is hit
        self.rank: Callable[[bytes], int] = lambda _: 0
        self.successors = Successors(lambda key: len(cache.following(key)))
        self.dropped: Callable[[State], None] = lambda _: None
        slots.set_evictor(lambda _: self._drop(self._victim()))
        cache.set_dependents(self._key_gone, self._page_wanted)

    def __len__(self) -> int:
        return sum(len(found) for found in self._by_key.values())

    def slots(self) -> set[int]:
        """Slots that hold a cached state."""
        return {state.slot for state in self._all()}

    def match(self, keys: Sequence[bytes], tokens: Sequence[int]) -> Match:
        """keys: of the full pages of tokens[:-1]. The state holds at most len(tokens) - 1 tokens: one is left to run.
        Takes no count: call under the lock together with share()."""
        with self._pages.lock:
            pages = self._cache.match(keys)
            self._looked_up += 1
            for depth in range(len(pages), 0, -1):
                found = [s for s in self._by_key.get(keys[depth - 1], ()) if fits(s.length, s.tail, tokens)]
                if found:
                    best = max(found, key=lambda s: s.length)
                    best.used = self._looked_up
                    self.version += 1
                    return Match(pages, best)
            return Match(pages, None)

    def has(self, key: bytes, tail: tuple[int, ...]) -> bool:
        return any(state.tail == tail for state in self._by_key.get(key, ()))

    def of(self, keys: Sequence[bytes], tokens: Sequence[int]) -> list[State]:
        """States of prefixes of `tokens`. keys: of its full pages. Nobody is said to have hit them."""
        return [s for key in keys for s in self._by_key.get(key, ()) if fits(s.length, s.tail, tokens)]

    def publish(
        self, keys: Sequence[bytes], length: int, tail: Sequence[int], slot: int, page: int, whole: int
    ) -> bool:
        """Make the state after `length` tokens known; keys: of the full pages below it. The caller holds counts on
        slot and page, whose content is final. False: it is known already, or the pages it hangs on are not."""
        assert length == len(keys) * PAGE_TOKENS + len(tail), "a state of another length"
        assert len(tail) < PAGE_TOKENS
        assert bool(tail) == bool(page), "a partial page goes with a tail"
        with self._pages.lock:
            if not keys or keys[-1] not in self._cache:
                return False
            if self.has(keys[-1], tuple(tail)):
                return False
            assert slot not in self.slots(), "a slot has one content"
            state = State(keys[-1], length, tuple(tail), slot, page, self._looked_up, whole)
            state.below = self._next_below(state)
            for other in self._all():
                if other.below is state.below and other.length > length and self._descends(other, state):
                    other.below = state
            self._by_key.setdefault(state.key, []).append(state)
            self.version += 1
            self._slots.keep(slot)
            if page:
                self._by_page[page] = state
                self._pages.keep(page)
            self._cache.record_state(state.key, length, ready=True)
            return True

    def victims(self, count: int) -> list[State]:
        """The idle states that would be evicted first, in that order."""
        with self._pages.lock:
            return self._by_score()[:count]

    def going(self, pages: Iterable[int]) -> list[State]:
        """The states that go when these idle pages are evicted, the first of them first: what hangs on a page goes
        before it. (Of what hangs on one of them and is not itself among those before it, all that may go.)"""
        found: list[State] = []
        seen: set[bytes] = set()
        for page in pages:
            key, partial = self._cache.key_of(page), self._by_page.get(page)
            if partial is not None:
                found.append(partial)
            elif key is not None and key not in seen:
                for known in self._behind(key, seen):
                    found += self._by_key.get(known, ())
        return found

    def _behind(self, key: bytes, seen: set[bytes]) -> list[bytes]:
        """`key` and what hangs on it, tails first, without what has been `seen`; now it has."""
        order = [key]
        for known in order:
            seen.add(known)
            order.extend(child for child in self._cache.following(known) if child not in seen)
        order.reverse()
        return order

    def leaving(self, page: int) -> list[State]:
        """The states that go when this idle page is evicted next, and what hangs on it with it."""
        partial = self._by_page.get(page)
        if partial is not None:
            return [partial]
        return [state for key in self._cache.leaving(page) for state in self._by_key.get(key, ())]

    def give_up_page(self, page: int) -> None:
        """Evict this idle page next, before older ones."""
        self._cache.evict(page)

    def give_up(self, state: State) -> None:
        """Forget an idle state: its slot is free."""
        with self._pages.lock:
            self._drop(state)

    def used_again(self, keys: Sequence[bytes]) -> None:
        """See engine.retention."""
        for key in keys:
            for state in self._by_key.get(key, ()):
                state.used = self._looked_up

    def saving(self, state: State) -> float:
        """FLOPs of prefill saved per byte."""
        size = self._model.slot_memory + (self._model.page_bytes if state.page else 0)
        return self._model.flops(state.start, state.length) / size

    def entries(self) -> list[tuple[bytes, int]]:
        """(page key, length) of every state."""
        with self._pages.lock:
            return [(s.key, s.length) for s in self._all()]

    def check(self) -> None:
        """Assert that states agree with the page cache and with both pools. Raises AssertionError."""
        with self._pages.lock:
            assert len(self.slots()) == len(self), "two states in one slot"
            for state in self._all():
                assert state.key in self._cache, "a state without its pages"
                depth = self._cache.depth(state.key)
                assert state.length == depth * PAGE_TOKENS + len(state.tail), "a state at another depth"
                assert self._slots.kept(state.slot), "a state whose slot is not kept"
                assert not state.page or (self._pages.kept(state.page) and self._by_page[state.page] is state)
                assert state.below is self._next_below(state), "another state lies between"
            assert all(s.page for s in self._by_page.values())

    # --- inside -------------------------------------------------------------------------------------------------

    def _all(self) -> list[State]:
        return [state for found in self._by_key.values() for state in found]

    def _next_below(self, state: State) -> State | None:
        """The deepest state that is shorter, on the way from `state` to the root. A tail leads nowhere: only states on
        the grid lie below another."""
        key: bytes | None = state.key if state.tail else self._cache.parent(state.key)
        while key is not None:
            on_grid = next((s for s in self._by_key.get(key, ()) if not s.tail), None)
            if on_grid is not None:
                return on_grid
            key = self._cache.parent(key)
        return None

    def _descends(self, deeper: State, state: State) -> bool:
        key: bytes | None = deeper.key
        while key is not None and key != state.key:
            key = self._cache.parent(key)
        return key is not None and not state.tail

    def _victim(self) -> State:
        idle = self._by_score()
        assert idle, "cached slots without a state"
        return idle[0]

    def _by_score(self) -> list[State]:
        """Idle states, the first to go first: what is spent, then by rank (see engine.retention), then by score."""
        idle = [s for s in self._all() if self._slots.refs(s.slot) == 0]
        if not idle:
            return []
        oldest, newest = min(s.used for s in idle), max(s.used for s in idle)
        best = max(self.saving(s) for s in idle)

        def score(state: State) -> tuple[bool, int, float]:
            recency = (state.used - oldest) / max(newest - oldest, 1)
            kept = not self.successors.spent(state.name)
            return kept, self.rank(state.key), recency + SAVING_WEIGHT * self.saving(state) / best

        return sorted(idle, key=score)

    def _drop(self, state: State) -> None:
        """Forget one state. A slot or page that is still held loses its name, not its content."""
        found = self._by_key[state.key]
        found.remove(state)
        if not found:
            del self._by_key[state.key]
        for other in self._all():
            if other.below is state:
                other.below = state.below
        self._slots.unkeep(state.slot)
        if state.page:
            del self._by_page[state.page]
            self._pages.unkeep(state.page)
        self._cache.record_state(state.key, state.length, ready=False)
        self.version += 1
        self.dropped(state)

    def _key_gone(self, key: bytes) -> None:
        for state in list(self._by_key.get(key, ())):
            self._drop(state)

    def _page_wanted(self, page: int) -> bool:
        """The page pool wants a page: drop the state whose partial page it is. False: it is nobody's."""
        state = self._by_page.get(page)
        if state is not None:
            self._drop(state)
        return state is not None


def fits(length: int, tail: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether a state of `length` tokens that ends in `tail` can be resumed by `tokens`, all full pages being known."""
    return length < len(tokens) and tuple(tokens[length - len(tail) : length]) == tuple(tail)


JUNCTION_TOKENS = 64
"""A state at a junction must save at least so many tokens over its neighbours on either side."""


def checkpoint_lengths(match: Match, tokens: int, interval: int, junctions: bool) -> tuple[int, ...]:
    """At which lengths the prefill of a prompt exports its state: rising multiples of the page past what was resumed.

    At floor16(tokens - 1), where the same prompt lands when it comes again; where a known path ends, for its second
    sighting has shown that it is shared (not when that would save little); every `interval` tokens (0 = not).
    """
    last = (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    wanted = {last}
    if junctions and min(match.known - match.resumed, last - match.known) >= JUNCTION_TOKENS:
        wanted.add(match.known)
    if interval:
        wanted.update(range(interval, last, interval))
    return tuple(sorted(length for length in wanted if length > match.resumed))
