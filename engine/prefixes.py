"""Cached prefixes between workers, on the engine's side: what is here is found and held for another worker, what comes
from one is given room, and published when it has been verified. Torch-free.

Who owns the pages of a prefix that comes:

    staged        the staging, and beside it the destination's hold, which is the puller's until no read can land
    published     the prefix cache: pages by key, the state at its length. The request that wanted them hits them
    dropped       nobody

What another worker is given is pinned only as far as nobody here is waiting for the room; what comes takes no room from
anybody who was promised it. Both are answered at once, under the pools' lock, where that is enough: nothing can be
evicted between finding and holding, and a step of the model may last longer than a fetch. Where records have to be
folded, or others' pages evicted, the engine thread answers between two steps. So the answer is a future.

A fault in one of these is its asker's, who computes instead: it ends neither the step nor the engine of everybody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from engine.memory import Memory
from engine.pages import PageHold, hold_both, pages_for
from engine.plan import Copy
from engine.promotions import DISK_SHARE, Promotion, Promotions
from engine.sequence import usable_hit
from engine.states import State
from engine.tiers.index import Entry
from engine.tiers.pool import Sums
from engine.tiers.states import TierState
from kvtransfer.types import PAGE_TOKENS, Below, Destination, LegKey, Prefix, Wanted

_log = logging.getLogger(__name__)

T = TypeVar("T")
Post = Callable[[Callable[[], None]], bool]
"""Run something on the engine thread, between two steps. False: the engine has ended, it never will."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Room for tokens [0, destination.token_count) of a prompt. hold: ours, until publish() or drop()."""

    wanted: Wanted
    destination: Destination
    hold: PageHold


@dataclass(frozen=True, slots=True)
class _Here:
    """tokens: of the prompt. pages: on the device, the partial one of `state` last; low: what follows on the host;
    state or lower: where the tokens end, there or here."""

    tokens: int
    pages: list[int]
    low: list[Entry]
    state: State | None = None
    lower: TierState | None = None


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
        self._promotions = Promotions(memory, now, self._offer)

    # --- any thread -----------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        return self._memory.has_state

    def held(self, wanted: Wanted) -> int:
        """Tokens of a prompt that need not be computed here, as far as can be seen without the engine thread."""
        with self._memory.pages.lock:
            return self._here(wanted).tokens

    def offer(self, wanted: Wanted, within_s: float = 0.0) -> Future[Prefix | None]:
        """The longest run of pages here (and the state at its end), with a hold; None: nothing beyond
        wanted.first_token, or no page can be spared. within_s: that long the asker can wait for all of it; 0 = the disk
        is not read for it."""
        with self._memory.pages.lock:
            here = self._here(wanted)
            if within_s > 0 and self._more_on_disk(wanted, here):
                return self._promoted(wanted, here, within_s)
            if here.state is None or not self._has_records(here.state):
                return _answered(self._given(wanted, here))
        return self._ask(lambda: self._offer(wanted))

    def stage(self, wanted: Wanted, token_count: int, key: LegKey, until: float) -> Future[Staged | None]:
        """Room for the prompt's first `token_count` tokens, for the request `key` that is not submitted yet. None:
        until then there was none without taking what others were promised."""
        memory, asked = self._memory, _Asked(wanted, token_count, key, until, Future())
        answer = asked.answer
        with memory.pages.lock:
            shared, fresh = self._split(asked)
            if not memory.cache.enabled or not self._fits(shared, fresh, key):
                return _answered(None)
            if fresh <= memory.pages.free and (memory.slots.free or not memory.has_state):
                return _answered(self._taken(asked))
        if not self._post(lambda: self._asked.append(asked)):
            answer.set_result(None)
        return answer

    def publish(self, staged: Staged) -> None:
        """What was staged has arrived and is verified: whoever is submitted after this hits it."""
        if not self._post(lambda: self._published(staged)):
            staged.hold.release()

    def drop(self, staged: Staged) -> None:
        """It did not arrive whole. A read that may still land keeps its pages by the destination's own hold."""
        staged.hold.release()

    # --- the engine thread ----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Before each step: answer who waits for room, or for what is on the disk."""
        self._promotions.turn()
        if not self._asked:
            return
        asked, self._asked = self._asked, []
        for one in asked:
            if self._now() >= one.until:
                _give(one.answer, None)
            elif not self._staged(one):
                self._asked.append(one)

    def close(self) -> None:
        """Nobody will be answered any more."""
        self._promotions.close()
        asked, self._asked = self._asked, []
        for one in asked:
            _give(one.answer, None)

    # --- what is here ---------------------------------------------------------------------------------------------

    def _offer(self, wanted: Wanted) -> Prefix | None:
        with self._memory.pages.lock:
            here = self._here(wanted)
            if here.state is not None and self._has_records(here.state):
                self._settle(here.state)
            return self._given(wanted, here)

    def _given(self, wanted: Wanted, here: _Here) -> Prefix | None:
        if here.tokens <= wanted.first_token or wanted.state != self.has_state:
            return None
        if not self._may_pin(here.pages, here.state.slot if here.state is not None else 0):
            return None
        return self._held(here)

    def _here(self, wanted: Wanted) -> _Here:
        """What of a prompt is on the device and, behind that, on the host. With a state: up to the longest one."""
        memory, keys = self._memory, self._keys(wanted)
        tiers = memory.tiers
        if memory.states is None:
            pages = memory.cache.match(keys)
            low = tiers.host.match(keys, len(pages)) if tiers is not None else []
            return _Here((len(pages) + len(low)) * PAGE_TOKENS, pages, low)
        match = memory.states.match(keys, wanted.tokens)
        count = len(match.pages)
        low = tiers.host.match(keys, count) if tiers is not None else []
        lower = tiers.states.match(keys[: count + len(low)], wanted.tokens, match.resumed) if tiers is not None else []
        if lower:
            full = lower[0].length // PAGE_TOKENS
            return _Here(lower[0].length, match.pages[:full], low[: max(full - count, 0)], lower=lower[0])
        partial = [match.state.page] if match.state is not None and match.state.page else []
        return _Here(match.resumed, match.pages[: match.resumed // PAGE_TOKENS] + partial, [], match.state)

    def _more_on_disk(self, wanted: Wanted, here: _Here) -> bool:
        """Whether a longer prefix could be offered after something has come up from there."""
        tiers, keys, tokens = self._memory.tiers, self._keys(wanted), here.tokens
        if tiers is None or tiers.disk is None or wanted.state != self.has_state:
            return False
        if not wanted.state:
            first = tokens // PAGE_TOKENS
            return first < len(keys) and keys[first] in tiers.disk.index
        return any(below.match(keys, wanted.tokens, tokens) for below in (tiers.disk.states, tiers.states))

    def _promoted(self, wanted: Wanted, here: _Here, within_s: float) -> Future[Prefix | None]:
        answer: Future[Prefix | None] = Future()
        until = self._now() + DISK_SHARE * within_s
        asked = Promotion(wanted, self._keys(wanted), here.tokens, until, answer)
        if not self._post(lambda: self._promotions.begin(asked)):
            answer.set_result(None)
        return answer

    def _may_pin(self, pages: list[int], slot: int) -> bool:
        """Idle cached pages that are held for a peer are room that nobody here can have."""
        memory = self._memory
        free = memory.ledger.free()
        idle = sum(memory.pages.refs(page) == 0 for page in pages)
        return idle <= free.pages and not (slot and memory.slots.refs(slot) == 0 and not free.slots)

    def _has_records(self, state: State) -> bool:
        return state.whole < state.length and self._memory.settle is not None

    def _settle(self, state: State) -> None:
        """A slot that holds records is folded: it will be read as it is."""
        assert self._memory.settle is not None
        self._memory.settle(Copy(False, state.slot, state.slot, state.length, state.whole))
        state.whole = state.length

    def _held(self, here: _Here) -> Prefix:
        memory, lower = self._memory, here.lower
        slots = [here.state.slot] if here.state is not None else []
        hold = hold_both(memory.pages, here.pages, memory.slots, slots)
        if memory.tiers is None or not (here.low or lower):
            return Prefix(tuple(here.pages), tuple(slots), here.tokens, hold)
        low = [entry.page for entry in here.low]
        hold = PageHold.joined(hold, memory.tiers.host.pool.hold(low))
        sums = [entry.sums for entry in here.low]
        slot_sums: tuple[Sums, ...] = ()
        if lower is not None:
            hold = PageHold.joined(hold, memory.tiers.states.use(lower))
            slots, slot_sums = [lower.slot], (lower.slot_sums,)
            if lower.page:
                low.append(lower.page)
                sums.append(lower.page_sums)
        below = Below(len(here.pages), tuple(sums), slot_sums)
        return Prefix((*here.pages, *low), tuple(slots), here.tokens, hold, below)

    # --- what comes -----------------------------------------------------------------------------------------------

    def _staged(self, asked: _Asked) -> bool:
        """Whether it is answered."""
        try:
            return self._stage(asked)
        except Exception as fault:  # noqa: BLE001 - supervises the answer: who asked gets the fault
            if not asked.answer.done() and asked.answer.set_running_or_notify_cancel():
                asked.answer.set_exception(fault)
            else:
                _log.exception("room that nobody waits for any more could not be given back")
            return True

    def _stage(self, asked: _Asked) -> bool:
        if asked.answer.cancelled():
            return True
        memory = self._memory
        with memory.pages.lock:
            shared, fresh = self._split(asked)
            if not self._fits(shared, fresh, asked.key):
                _give(asked.answer, None)
                return True
            if memory.tiers is not None:
                slots = int(memory.has_state) - memory.slots.free
                if not memory.tiers.make_room(fresh - memory.pages.free, shared, [], slots):
                    return False
            staged = self._taken(asked)
        if not _give(asked.answer, staged) and staged is not None:
            staged.destination.hold.release()
            staged.hold.release()
        return True

    def _split(self, asked: _Asked) -> tuple[list[int], int]:
        """Pages that are here, and how many more it takes. One at least comes: it brings the state, or the end."""
        count = asked.token_count
        shared = self._memory.cache.match(self._keys(asked.wanted))[: (count - 1) // PAGE_TOKENS]
        return shared, pages_for(count) - len(shared)

    def _fits(self, shared: list[int], fresh: int, key: LegKey) -> bool:
        """Whether there is room that is nobody's, or the request's own. A state needs a slot beside the request's: it
        is copied from."""
        memory = self._memory
        free, own = memory.ledger.free(), memory.ledger.promised(key)
        idle = sum(memory.pages.refs(page) == 0 for page in shared)
        slots = 1 + max(own.slots, 1) if memory.has_state else 0
        return fresh + idle <= free.pages + own.pages and slots <= free.slots + own.slots

    def _taken(self, asked: _Asked) -> Staged | None:
        """Copies may have begun and ended meanwhile, so what is here is looked up anew."""
        memory, count = self._memory, asked.token_count
        shared, fresh = self._split(asked)
        memory.pages.share(shared)
        new = memory.pages.allocate(fresh)
        slots = memory.slots.allocate(1 if memory.has_state else 0)
        if new is None or slots is None:
            memory.pages.release(shared + (new or []))
            memory.slots.release(slots or [])
            return None
        pages = shared + new
        ours = PageHold(((memory.pages, tuple(pages)), (memory.slots, tuple(slots))))
        theirs = hold_both(memory.pages, pages, memory.slots, slots)
        held = len(shared) * PAGE_TOKENS
        return Staged(asked.wanted, Destination(tuple(pages), tuple(slots), count, held, theirs), ours)

    def _published(self, staged: Staged) -> None:
        try:
            self._publish(staged)
        except Exception:  # noqa: BLE001 - supervises the cache's gain: without it the request computes its prompt
            _log.exception("a prefix that has come could not be cached")
        finally:
            staged.hold.release()

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

    # --- inside ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _keys(wanted: Wanted) -> tuple[bytes, ...]:
        """Of the pages a prompt may resume after: one token is left to run."""
        return wanted.page_keys[: usable_hit(len(wanted.tokens))]

    def _ask(self, work: Callable[[], T | None]) -> Future[T | None]:
        answer: Future[T | None] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work())
            except Exception as fault:  # noqa: BLE001 - supervises the answer: who asked gets the fault
                answer.set_exception(fault)

        if not self._post(run):
            answer.set_result(None)
        return answer


def _answered(value: T | None) -> Future[T | None]:
    answer: Future[T | None] = Future()
    answer.set_result(value)
    return answer


def _give(answer: Future[T | None], value: T | None) -> bool:
    """False: nobody waits for it any more."""
    if not answer.set_running_or_notify_cancel():
        return False
    answer.set_result(value)
    return True
