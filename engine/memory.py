"""What sequences own of the pools: taken at admission all or nothing, grown page by page, given back in one place.

Torch-free. Only the engine thread calls this; counts held by leases and landings come and go on other threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.pages import PageHold, PagePool, SlotPool, hold_both, pages_for
from engine.plan import Copy, Row
from engine.prefix_cache import PrefixCache
from engine.reservations import Ledger
from engine.retention import Retained
from engine.sequence import Phase, Sequence, usable_hit
from engine.states import Match, State, StateCache, checkpoint_lengths, state_id
from engine.tiers.index import Entry
from engine.tiers.loads import Loaded
from engine.tiers.states import TierState
from engine.tiers.tiers import Tiers
from kvtransfer.types import PAGE_TOKENS, Below


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Which states a model with state leaves in the cache, beside the one where the same prompt would land again.
    interval: one every so many tokens of a prompt, 0 = none. junctions: where a path known from another request ends.
    ends: the exact one at the end of a turn."""

    interval: int = 0
    junctions: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class _Claim:
    """What admission takes for a sequence: hit pages to share, a state to copy, and how much is fresh. below, lower:
    what follows the hit on the host, and the state there. kept: one slot more, for the device to have that state."""

    match: Match
    hit: list[int]
    fresh: int
    slots: int
    below: list[Entry]
    lower: TierState | None = None
    kept: bool = False

    @property
    def start(self) -> int:
        """Tokens that need not be run, as things are on the device."""
        if self.lower is not None:
            return 0
        return self.match.resumed if self.match.state else len(self.hit) * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Left:
    """What a sequence leaves to whoever goes on with it: the memory of `computed` tokens, under one hold. below: which
    of it is the host tier's."""

    computed: int
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    hold: PageHold
    below: Below | None = None


@dataclass(slots=True)
class Memory:
    """states: of a model whose sequences own one slot each, else None. tiers: memory below this, if there is any.
    settle: makes a copy at once, between steps, where slots hold records: what is swapped out must be whole."""

    pages: PagePool
    slots: SlotPool
    cache: PrefixCache
    ledger: Ledger
    headroom_tokens: int
    states: StateCache | None = None
    checkpoints: Checkpoints = Checkpoints()
    tiers: Tiers | None = None
    settle: Callable[[Copy], None] | None = None
    retained: Retained = field(default_factory=Retained)

    def __post_init__(self) -> None:
        self.cache.nowhere = self.retained.forget
        self.retained.serve(self.cache.ranked, self.cache.used_again)
        if self.states is not None:
            self.states.rank = self.retained.rank
            self.retained.serve(lambda _key, _rank: None, self.states.used_again)

    @property
    def has_state(self) -> bool:
        return self.states is not None

    def admit(self, seq: Sequence, use_cache: bool) -> int | None:
        """Give a waiting sequence everything it needs to run to its headroom; None and nothing changes if that is not
        there now. Returns how many tokens came from the cache; they count as computed.

        Bookings of requests not yet here are respected, other waiting requests are not (they are served in order).
        """
        swapped = self.tiers.swapped(seq.id) if self.tiers else None
        if swapped is not None and not swapped.saved:
            return None
        with self.pages.lock:
            claim = self._claimed(seq, use_cache and swapped is None)
            if claim is not None and self.tiers is not None:
                pages, slots = claim.fresh - self.pages.free, claim.slots - self.slots.free
                state = claim.lower or claim.match.state
                if not self.tiers.make_room(pages, claim.hit, claim.below, slots, state):
                    return None
                # Copies have begun and ended in there: pages are held, others are known to be damaged.
                claim = self._claimed(seq, use_cache and swapped is None)
            if claim is None:
                return None
            self.pages.share(claim.hit)
            if claim.match.state is not None:
                self._resume(seq, claim.match.state)
            new = self.pages.allocate(claim.fresh)
            new_slots = self.slots.allocate(claim.slots)
        assert new is not None
        assert new_slots is not None
        self._give(seq, claim, new, new_slots)
        if swapped is None:
            self._came_by(seq, claim.lower or claim.match.state)
        if self.tiers and swapped is not None:
            self.tiers.swap_in(seq.id, seq.pages[: len(swapped.pages)], seq.slot)
        elif self.tiers and claim.lower is not None:
            targets = seq.pages[len(claim.hit) :][: len(claim.below) + bool(claim.lower.page)]
            kept = new_slots[-1] if claim.kept else 0
            self.tiers.load_state(seq.id, claim.below, claim.lower, targets, seq.slot, kept)
        elif self.tiers and claim.below:
            self.tiers.load(seq.id, claim.start, claim.below, seq.pages[len(claim.hit) :][: len(claim.below)])
        if self.tiers and not seq.lost:
            self._sighted(seq, claim)
        self._retain(seq, len(claim.hit))
        return claim.start

    def _came_by(self, seq: Sequence, state: State | TierState | None) -> None:
        seq.came_by = state.name if state is not None else None
        if state is not None and self.states is not None:
            self.states.successors.resumed(state.name, state.key, seq.request.spec.key.request_id)

    def _retain(self, seq: Sequence, pages: int) -> None:
        """Its request uses the first `pages` of its pages, which were there before it, and its whole session."""
        hint = seq.request.spec.retention
        seq.kept_until = self.retained.until(hint)
        self._touch(seq, seq.hasher.page_keys(seq.tokens)[:pages], pages)
        self.retained.used(hint.session)

    def _touch(self, seq: Sequence, keys: list[bytes], fresh: int) -> None:
        """Of `keys` what is on the device; keys[fresh:] are this request's own making."""
        hint = seq.request.spec.retention
        if not hint.plain or len(self.retained):
            self.retained.touch(keys[: len(self.cache.match(keys))], hint, fresh, seq.kept_until)

    def _sighted(self, seq: Sequence, claim: _Claim) -> None:
        assert self.tiers is not None
        prompt = seq.request.spec.prompt_len
        self.tiers.sightings.asked(seq.hasher.page_keys(seq.tokens)[: prompt // PAGE_TOKENS])
        state = claim.lower or claim.match.state
        if state is not None:
            self.tiers.sightings.state(state.name, state.length, prompt)

    def staging(self, seq: Sequence, use_cache: bool) -> bool:
        """What this waiting sequence can use is on its way from the disk to the host."""
        tiers = self.tiers
        if tiers is None or tiers.disk is None or not use_cache or tiers.swapped(seq.id) is not None:
            return False
        if tiers.staging(seq.id) is None:
            keys = seq.hasher.page_keys(seq.tokens)[: usable_hit(len(seq.tokens))]
            match = self._match(seq)
            # Pages without a state above them are run again: only those below one are worth it.
            stateful = self.states is not None and not seq.request.remote
            tiers.stage(seq.id, keys, len(match.pages), seq.tokens, match.resumed if stateful else None)
        return bool(tiers.staging(seq.id))

    def loading(self, seq: Sequence) -> bool:
        """Its pages are on their way up: it owns all it needs, and cannot run before loaded()."""
        return self.tiers is not None and self.tiers.busy(seq.id)

    def loaded(self, seq: Sequence, loaded: Loaded) -> None:
        """As many of its tokens are in its pages (and state) now."""
        assert loaded.computed is not None
        seq.computed = seq.whole = loaded.computed
        self.publish(seq, loaded.computed // PAGE_TOKENS)
        if loaded.kept:
            assert self.states is not None
            self.states.publish(seq.full_keys(), seq.computed, (), loaded.kept, 0, seq.computed)
            self.slots.release([loaded.kept])

    def _claimed(self, seq: Sequence, use_cache: bool) -> _Claim | None:
        """What to take, if it is there. A state to copy from is one slot and maybe one page more: with nothing left to
        wait for, do without."""
        claim = self._claim(seq, use_cache)
        if self._fits(claim):
            return claim
        if claim.match.state is None or self.slots.referenced:
            return None
        claim = self._claim(seq, use_cache=False)
        return claim if self._fits(claim) else None

    def _claim(self, seq: Sequence, use_cache: bool) -> _Claim:
        own = seq.own_pages(self.headroom_tokens)
        forked = own - len(seq.tokens) // PAGE_TOKENS
        match = self._match(seq) if use_cache else Match([], None)
        if self.states is not None and not seq.request.remote:
            return self._claim_state(seq, match, own, forked, use_cache)
        # One that arrives whole needs no state here.
        fresh = own - len(match.pages) + (seq.rows - 1) * forked
        below = self._below(seq, len(match.pages)) if use_cache else []
        return _Claim(match, match.pages, fresh, seq.rows if self.states is not None else 0, below)

    def _claim_state(self, seq: Sequence, match: Match, own: int, forked: int, use_cache: bool) -> _Claim:
        """With a state, pages past it are run again, so they are not taken."""
        below: list[Entry] = []
        lower, kept = None, False
        if use_cache and self.tiers is not None:
            keys = seq.hasher.page_keys(seq.tokens)[: usable_hit(len(seq.tokens))]
            below, lower = self.tiers.hits.state(keys, seq.tokens, len(match.pages), match.resumed)
            match = Match(match.pages, None if lower else match.state, len(below), lower.length if lower else 0)
        hit = match.pages[: match.resumed // PAGE_TOKENS]
        below = below[: lower.length // PAGE_TOKENS - len(hit)] if lower else []
        if lower is not None and not lower.tail:
            kept = self.slots.available - self.ledger.booked.slots > seq.rows
        fresh = own - len(hit) + (seq.rows - 1) * forked
        return _Claim(match, hit, fresh, seq.rows + kept, below, lower, kept)

    def _below(self, seq: Sequence, held: int) -> list[Entry]:
        if self.tiers is None:
            return []
        return self.tiers.hits.pages(seq.hasher.page_keys(seq.tokens)[: usable_hit(len(seq.tokens))], held)

    def _match(self, seq: Sequence) -> Match:
        keys = seq.hasher.page_keys(seq.tokens)[: usable_hit(len(seq.tokens))]
        if self.states is None or seq.request.remote:
            return Match(self.cache.match(keys), None)
        return self.states.match(keys, seq.tokens)

    def _fits(self, claim: _Claim) -> bool:
        """What is shared leaves the pool's available pages just as what is allocated does."""
        state, booked = claim.match.state, self.ledger.booked
        taken = claim.hit + ([state.page] if state and state.page else [])
        idle = sum(self.pages.refs(page) == 0 for page in taken)
        idle_slots = int(state is not None and self.slots.refs(state.slot) == 0)
        pages = claim.fresh + idle <= self.pages.available - booked.pages
        return pages and claim.slots + idle_slots <= self.slots.available - booked.slots

    def _resume(self, seq: Sequence, state: State) -> None:
        """Hold what the next step copies; the targets are known when the sequence has its own slot and pages."""
        self.slots.share([state.slot])
        if state.page:
            self.pages.share([state.page])

    def _give(self, seq: Sequence, claim: _Claim, new: list[int], slots: list[int]) -> None:
        own = seq.own_pages(self.headroom_tokens) - len(claim.hit)
        forked = len(claim.hit) + own - len(seq.tokens) // PAGE_TOKENS
        seq.pages = claim.hit + new[:own]
        seq.spare = [new[own + i * forked : own + (i + 1) * forked] for i in range(seq.rows - 1)]
        seq.published = len(claim.hit)
        seq.computed = seq.whole = claim.start
        seq.checkpoints = ()
        if self.states is None:
            return
        seq.slot, *seq.spare_slots = slots[: seq.rows]
        state = claim.match.state
        if state is not None:
            assert state.length == seq.computed, "a state of another length"
            seq.pending.append((self.slots, Copy(False, state.slot, seq.slot, state.length, state.whole)))
            if state.page:
                seq.pending.append((self.pages, Copy(True, state.page, seq.pages[len(claim.hit)])))
        if not seq.request.remote and self.cache.enabled:
            seq.checkpoints = checkpoint_lengths(
                claim.match, len(seq.tokens), self.checkpoints.interval, self.checkpoints.junctions
            )

    def grow(self, seq: Sequence) -> bool:
        """One page more if the next token needs it; False when there is none."""
        if pages_for(len(seq.tokens)) <= len(seq.pages):
            return True
        more = self.pages.allocate(1) if self.tiers is None or self.tiers.spare_page() else None
        if more is None:
            return False
        seq.pages += more
        return True

    def publish(self, seq: Sequence, loaded: int = 0) -> None:
        """Make the full pages of the confirmed state known to the cache. loaded: pages that were not made here."""
        if seq.computed // PAGE_TOKENS > seq.published:
            keys = seq.full_keys()
            self.cache.publish(keys, seq.pages, seq.published)
            self._touch(seq, keys, max(seq.published, loaded))
            if self.tiers is not None:
                self.tiers.sightings.written(keys, seq.published, seq.request.spec.prompt_len)
            seq.published = len(keys)

    def publish_checkpoints(self, seq: Sequence, row: Row) -> None:
        """The row's step is done, so its checkpoints are written."""
        for length, slot in row.checkpoints:
            assert self.states is not None
            keys = seq.hasher.page_keys(seq.tokens)[: length // PAGE_TOKENS]
            self.states.publish(keys, length, (), slot, 0, length)
            self._left_state(seq, keys[-1], length, (), junction=seq.checkpoints[-1:] != (length,))
        self.drop_checkpoints(row)

    def drop_checkpoints(self, row: Row) -> None:
        """Give back the step's count on them; what was published stays in the cache."""
        self.slots.release([slot for _, slot in row.checkpoints])

    def keep_end(self, seq: Sequence) -> None:
        """A sequence that is complete leaves its state where it stands: nobody writes slot and partial page again."""
        if self.states is None or not self.cache.enabled or not self.checkpoints.ends or not seq.slot:
            return
        assert len(seq.tokens) - seq.computed in (0, 1), "the state holds all known tokens but the newest"
        keys, border = seq.full_keys(), seq.computed // PAGE_TOKENS * PAGE_TOKENS
        tail = seq.tokens[border : seq.computed]
        page = seq.pages[len(keys)] if tail else 0
        self.states.publish(keys, seq.computed, tail, seq.slot, page, seq.whole)
        if keys:
            if seq.came_by is None:  # it came whole: another worker went on from what is known here, too
                self._came_by(seq, self._under(keys, seq.tokens[: seq.computed]))
            self._left_state(seq, keys[-1], seq.computed, tuple(tail))

    def _under(self, keys: list[bytes], tokens: list[int]) -> State | TierState | None:
        assert self.states is not None
        found: list[State | TierState] = [*self.states.of(keys, tokens)]
        if self.tiers is not None:
            found += self.tiers.states.match(keys, tokens, 0)
        return max(found, key=lambda s: s.length, default=None)

    def _left_state(
        self, seq: Sequence, key: bytes, length: int, tail: tuple[int, ...], *, junction: bool = False
    ) -> None:
        assert self.states is not None
        if not self.states.has(key, tail):
            return
        name, spec = state_id(key, tail), seq.request.spec
        self.states.successors.left(name, key, spec.key.request_id, seq.came_by, junction=junction)
        seq.came_by = name
        if self.tiers is not None:
            self.tiers.sightings.state(name, length, spec.prompt_len)

    def fork(self, lead: Sequence, choice: int, seq_id: int) -> Sequence:
        """A further choice after the prompt: full pages shared, the last partial page and the slot copied by the next
        step (the copy holds the source until then)."""
        shared = lead.computed // PAGE_TOKENS
        own = lead.spare.pop()
        self.pages.share(lead.pages[:shared])
        other = Sequence(
            id=seq_id,
            request=lead.request,
            choice=choice,
            fanout=1,
            tokens=list(lead.tokens),
            hasher=lead.hasher.fork(),
            phase=Phase.RUNNING,
            computed=lead.computed,
            whole=lead.computed,
            published=lead.published,
            came_by=lead.came_by,
            pages=lead.pages[:shared] + own,
        )
        if lead.computed % PAGE_TOKENS:
            self._copy(other, self.pages, Copy(True, lead.pages[shared], own[0]))
        if self.has_state:
            other.slot = lead.spare_slots.pop()
            self._copy(other, self.slots, Copy(False, lead.slot, other.slot, lead.computed, lead.whole))
        return other

    @staticmethod
    def _copy(seq: Sequence, pool: PagePool, copy: Copy) -> None:
        pool.share([copy.source])
        seq.pending.append((pool, copy))

    def hold(self, seq: Sequence) -> PageHold:
        """A further count on the pages of the known tokens, and on the slot."""
        return hold_both(self.pages, self.known_pages(seq), self.slots, self.known_slots(seq))

    @staticmethod
    def known_pages(seq: Sequence) -> tuple[int, ...]:
        return tuple(seq.pages[: pages_for(len(seq.tokens))])

    @staticmethod
    def known_slots(seq: Sequence) -> tuple[int, ...]:
        return (seq.slot,) if seq.slot else ()

    def drop_spares(self, seq: Sequence) -> None:
        """Give back what was kept for choices that will not fork (any more)."""
        for pages in seq.spare:
            self.pages.release(pages)
        self.slots.release(seq.spare_slots)
        seq.spare, seq.spare_slots = [], []

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's memory. Its bytes are kept below where that beats computing them again."""
        seq.lost = max(seq.lost, seq.computed)
        if self.tiers is not None and not seq.pending:
            self._make_whole(seq)
            self.tiers.swap_out(seq.id, seq.computed, seq.pages[: pages_for(seq.computed)], seq.slot)
        self._give_up(seq)

    def _make_whole(self, seq: Sequence) -> None:
        """Nothing of its state is left to records."""
        if seq.whole < seq.computed and self.settle is not None:
            self.settle(Copy(False, seq.slot, seq.slot, seq.computed, seq.whole))
            seq.whole = seq.computed

    def kept_below(self, seq: Sequence) -> bool:
        """It was swapped out, and all but its newest token is on the host. (One that was swapped while its tokens were
        computed, or computed again, has less there.)"""
        swapped = self.tiers.swapped(seq.id) if self.tiers is not None else None
        return swapped is not None and swapped.saved and swapped.computed == len(seq.tokens) - 1

    def moving_below(self, seq: Sequence) -> bool:
        """It was swapped out, and all of it is on the host or on its way there."""
        return self.tiers is not None and self.tiers.swapped(seq.id) is not None

    def depart(self, seq: Sequence) -> Left:
        """A sequence that goes on elsewhere gives back everything of its own; a hold of its own keeps what was
        computed, on the device or, if it was swapped out, on the host."""
        if seq.phase is Phase.WAITING:
            assert self.tiers is not None
            swapped, hold = self.tiers.hand_over(seq.id)
            sums = Below(0, tuple(swapped.page_sums), tuple(swapped.slot_sums))
            return Left(swapped.computed, tuple(swapped.pages), (swapped.slot,) if swapped.slot else (), hold, sums)
        self._make_whole(seq)
        pages, slots = tuple(seq.pages[: pages_for(seq.computed)]), self.known_slots(seq)
        left = Left(seq.computed, pages, slots, hold_both(self.pages, pages, self.slots, slots))
        self.keep_end(seq)
        self.release(seq)
        return left

    def release(self, seq: Sequence) -> None:
        """Give back every count of a sequence. Counts of leases and landings live on."""
        if self.tiers is not None:
            self.tiers.forget(seq.id)
        if seq.published and not seq.request.spec.retention.plain:
            self._retain(seq, seq.published)
        self._give_up(seq)

    def _give_up(self, seq: Sequence) -> None:
        self.drop_spares(seq)
        for pool, copy in seq.pending:
            pool.release([copy.source])
        self.pages.release(seq.pages)
        if seq.slot:
            self.slots.release([seq.slot])
        seq.pending, seq.pages, seq.slot, seq.held_up = [], [], 0, -1.0
        seq.computed = seq.whole = seq.published = 0
