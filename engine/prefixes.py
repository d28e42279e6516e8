"""Cached prefixes between workers, on the engine's side: what is here is found and held for another worker, what comes
from one is given room, and published when it has been verified. Torch-free.

Who owns the pages of a prefix that comes:

    staged        the staging, and beside it the destination's hold, which is the puller's until no read can land
    published     the prefix cache: pages by key, the state at its length. The request that wanted them hits them
    dropped       nobody

What another worker is given is pinned only as far as nobody here is waiting for the room; what comes takes no room from
anybody who was promised it. Both are asked of the engine thread between two steps; the answer is a future.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from engine.memory import Memory
from engine.pages import PageHold, pages_for
from engine.plan import Copy
from engine.sequence import usable_hit
from engine.states import State
from engine.tiers.index import Entry
from kvtransfer.types import PAGE_TOKENS, Below, Destination, LegKey, Prefix, Wanted

T = TypeVar("T")
Post = Callable[[Callable[[], None]], bool]
"""Run something on the engine thread, between two steps. False: the engine has ended, it never will."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Room for tokens [0, destination.token_count) of a prompt. hold: ours, until publish() or drop()."""

    wanted: Wanted
    destination: Destination
    hold: PageHold


@dataclass(slots=True, eq=False)
class _Asked:
    """Somebody who waits until others' pages have gone down to make room. until: monotonic seconds."""

    wanted: Wanted
    token_count: int
    key: LegKey
    until: float
    answer: Future[Staged | None]


class Prefixes:
    """One engine's. post: see Post. now: monotonic seconds."""

    def __init__(self, memory: Memory, post: Post, now: Callable[[], float]) -> None:
        self._memory = memory
        self._post = post
        self._now = now
        self._asked: list[_Asked] = []

    # --- any thread -----------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        return self._memory.has_state

    def held(self, wanted: Wanted) -> int:
        """Tokens of a prompt that need not be computed here, as far as can be seen without the engine thread."""
        memory, keys = self._memory, self._keys(wanted)
        with memory.pages.lock:
            if memory.states is not None:
                return memory.states.match(keys, wanted.tokens).resumed
            count = len(memory.cache.match(keys))
            low = memory.tiers.host.match(keys, count) if memory.tiers is not None else []
            return (count + len(low)) * PAGE_TOKENS

    def offer(self, wanted: Wanted) -> Future[Prefix | None]:
        """The longest run of pages here (and the state at its end), with a hold; None: nothing beyond
        wanted.first_token, or no page can be spared."""
        return self._ask(lambda: self._offer(wanted))

    def stage(self, wanted: Wanted, token_count: int, key: LegKey, until: float) -> Future[Staged | None]:
        """Room for the prompt's first `token_count` tokens, for the request `key` that is not submitted yet. None:
        until then there was none without taking what others were promised."""
        answer: Future[Staged | None] = Future()
        asked = _Asked(wanted, token_count, key, until, answer)
        if not self._post(lambda: self._asked.append(asked)):
            answer.set_result(None)
        return answer

    def publish(self, staged: Staged) -> None:
        """What was staged has arrived and is verified: whoever is submitted after this hits it."""
        if not self._post(lambda: self._publish(staged)):
            staged.hold.release()

    def drop(self, staged: Staged) -> None:
        """It did not arrive whole. A read that may still land keeps its pages by the destination's own hold."""
        staged.hold.release()

    # --- the engine thread ----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Before each step: answer who waits for room."""
        if not self._asked:
            return
        asked, self._asked = self._asked, []
        for one in asked:
            if self._now() >= one.until:
                _give(one.answer, None)
            elif not self._stage(one):
                self._asked.append(one)

    def close(self) -> None:
        """Nobody will be answered any more."""
        asked, self._asked = self._asked, []
        for one in asked:
            _give(one.answer, None)

    # --- what is here ---------------------------------------------------------------------------------------------

    def _offer(self, wanted: Wanted) -> Prefix | None:
        with self._memory.pages.lock:
            return self._with_state(wanted) if self._memory.states is not None else self._pages_only(wanted)

    def _pages_only(self, wanted: Wanted) -> Prefix | None:
        memory, keys = self._memory, self._keys(wanted)
        pages = memory.cache.match(keys)
        low = memory.tiers.host.match(keys, len(pages)) if memory.tiers is not None else []
        count = (len(pages) + len(low)) * PAGE_TOKENS
        if wanted.state or count <= wanted.first_token or not self._may_pin(pages, 0):
            return None
        return self._promised(pages, low, (), count)

    def _with_state(self, wanted: Wanted) -> Prefix | None:
        memory = self._memory
        assert memory.states is not None
        match = memory.states.match(self._keys(wanted), wanted.tokens)
        state = match.state
        if state is None or not wanted.state or state.length <= wanted.first_token:
            return None
        pages = match.pages[: state.length // PAGE_TOKENS] + ([state.page] if state.page else [])
        if not self._may_pin(pages, state.slot):
            return None
        self._settle(state)
        return self._promised(pages, [], (state.slot,), state.length)

    def _may_pin(self, pages: list[int], slot: int) -> bool:
        """Idle cached pages that are held for a peer are room that nobody here can have."""
        memory = self._memory
        free = memory.ledger.free()
        idle = sum(memory.pages.refs(page) == 0 for page in pages)
        return idle <= free.pages and not (slot and memory.slots.refs(slot) == 0 and not free.slots)

    def _settle(self, state: State) -> None:
        """A slot that holds records is folded first: it is read as it is."""
        if state.whole < state.length and self._memory.settle is not None:
            self._memory.settle(Copy(False, state.slot, state.slot, state.length, state.whole))
            state.whole = state.length

    def _promised(self, pages: list[int], low: list[Entry], slots: tuple[int, ...], tokens: int) -> Prefix:
        memory = self._memory
        memory.pages.share(pages)
        memory.slots.share(slots)
        parts = [(memory.pages, tuple(pages)), (memory.slots, slots)]
        below = None
        if low:
            assert memory.tiers is not None
            memory.tiers.host.pool.share([entry.page for entry in low])
            parts.append((memory.tiers.host.pool, tuple(entry.page for entry in low)))
            below = Below(len(pages), tuple(entry.sums for entry in low))
        return Prefix((*pages, *(entry.page for entry in low)), slots, tokens, PageHold(parts), below)

    # --- what comes -----------------------------------------------------------------------------------------------

    def _stage(self, asked: _Asked) -> bool:
        """Whether it is answered."""
        if asked.answer.cancelled():
            return True
        memory, wanted, count = self._memory, asked.wanted, asked.token_count
        if not memory.cache.enabled:
            _give(asked.answer, None)
            return True
        with memory.pages.lock:
            shared = memory.cache.match(self._keys(wanted))[: (count - 1) // PAGE_TOKENS]
            fresh = pages_for(count) - len(shared)
            if not self._fits(shared, fresh, asked.key):
                _give(asked.answer, None)
                return True
            if memory.tiers is not None and not memory.tiers.make_room(fresh - memory.pages.free, shared, []):
                return False
            staged = self._taken(asked, fresh)
        if not _give(asked.answer, staged) and staged is not None:
            staged.destination.hold.release()
            staged.hold.release()
        return True

    def _fits(self, shared: list[int], fresh: int, key: LegKey) -> bool:
        """Whether there is room that is nobody's, or the request's own. A state needs a slot beside the request's: it
        is copied from."""
        memory = self._memory
        free, own = memory.ledger.free(), memory.ledger.promised(key)
        idle = sum(memory.pages.refs(page) == 0 for page in shared)
        slots = 1 + max(own.slots, 1) if memory.has_state else 0
        return fresh + idle <= free.pages + own.pages and slots <= free.slots + own.slots

    def _taken(self, asked: _Asked, fresh: int) -> Staged | None:
        """Copies have begun and ended meanwhile, so what is here is looked up anew."""
        memory, count = self._memory, asked.token_count
        shared = memory.cache.match(self._keys(asked.wanted))[: (count - 1) // PAGE_TOKENS]
        memory.pages.share(shared)
        new = memory.pages.allocate(pages_for(count) - len(shared))
        slots = memory.slots.allocate(1 if memory.has_state else 0)
        if new is None or slots is None:
            memory.pages.release(shared + (new or []))
            memory.slots.release(slots or [])
            return None
        pages = shared + new
        ours = PageHold(((memory.pages, tuple(pages)), (memory.slots, tuple(slots))))
        memory.pages.share(pages)
        memory.slots.share(slots)
        theirs = PageHold(((memory.pages, tuple(pages)), (memory.slots, tuple(slots))))
        held = len(shared) * PAGE_TOKENS
        return Staged(asked.wanted, Destination(tuple(pages), tuple(slots), count, held, theirs), ours)

    def _publish(self, staged: Staged) -> None:
        memory, wanted, landed = self._memory, staged.wanted, staged.destination
        full = landed.token_count // PAGE_TOKENS
        keys = wanted.page_keys[:full]
        with memory.pages.lock:
            memory.cache.publish(keys, landed.pages, landed.held // PAGE_TOKENS)
            if memory.states is not None:
                (slot,) = landed.slots
                tail = wanted.tokens[full * PAGE_TOKENS : landed.token_count]
                page = landed.pages[full] if tail else 0
                memory.states.publish(keys, landed.token_count, tail, slot, page, landed.token_count)
            if memory.tiers is not None:
                memory.tiers.sightings.written(keys, landed.held // PAGE_TOKENS, len(wanted.tokens))
        staged.hold.release()

    # --- inside ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _keys(wanted: Wanted) -> tuple[bytes, ...]:
        """Of the pages a prompt may resume after: one token is left to run."""
        return wanted.page_keys[: usable_hit(len(wanted.tokens))]

    def _ask(self, work: Callable[[], T | None]) -> Future[T | None]:
        answer: Future[T | None] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(work())

        if not self._post(run):
            answer.set_result(None)
        return answer


def _give(answer: Future[T | None], value: T | None) -> bool:
    """False: nobody waits for it any more."""
    if not answer.set_running_or_notify_cancel():
        return False
    answer.set_result(value)
    return True
