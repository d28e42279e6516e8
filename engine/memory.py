"""What sequences own of the pools: taken at admission all or nothing, grown page by page, given back in one place.

Torch-free. Only the engine thread calls this; counts held by leases and landings come and go on other threads.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.pages import PageHold, PagePool, SlotPool, hold_both, pages_for
from engine.plan import Copy
from engine.prefix_cache import PrefixCache
from engine.reservations import Ledger
from engine.sequence import Phase, Sequence, usable_hit
from kvtransfer.types import PAGE_TOKENS


@dataclass(slots=True)
class Memory:
    """has_state: every sequence owns one slot."""

    pages: PagePool
    slots: SlotPool
    cache: PrefixCache
    ledger: Ledger
    headroom_tokens: int
    has_state: bool

    def admit(self, seq: Sequence, use_cache: bool) -> int | None:
        """Give a waiting sequence everything it needs to run to its headroom; None and nothing changes if that is not
        there now. Returns the pages found in the cache; they count as computed.

        Bookings of requests not yet here are respected, other waiting requests are not (they are served in order).
        """
        own = seq.own_pages(self.headroom_tokens)
        forked = own - len(seq.tokens) // PAGE_TOKENS
        keys = seq.hasher.page_keys(seq.tokens)[: usable_hit(len(seq.tokens))] if use_cache else []
        slot_count = seq.rows if self.has_state else 0
        with self.pages.lock:
            booked = self.ledger.booked
            hit = self.cache.match(keys)
            idle = sum(self.pages.refs(page) == 0 for page in hit)
            fresh = own - len(hit) + (seq.rows - 1) * forked
            if fresh + idle > self.pages.available - booked.pages:
                return None
            if slot_count > self.slots.available - booked.slots:
                return None
            self.pages.share(hit)
            new = self.pages.allocate(fresh)
            new_slots = self.slots.allocate(slot_count)
        assert new is not None
        assert new_slots is not None
        seq.pages = hit + new[: own - len(hit)]
        rest = new[own - len(hit) :]
        seq.spare = [rest[i * forked : (i + 1) * forked] for i in range(seq.rows - 1)]
        if self.has_state:
            seq.slot, *seq.spare_slots = new_slots
        seq.published = len(hit)
        seq.computed = len(hit) * PAGE_TOKENS
        return len(hit)

    def grow(self, seq: Sequence) -> bool:
        """One page more if the next token needs it; False when there is none."""
        if pages_for(len(seq.tokens)) <= len(seq.pages):
            return True
        more = self.pages.allocate(1)
        if more is None:
            return False
        seq.pages += more
        return True

    def publish(self, seq: Sequence) -> None:
        """Make the full pages of the confirmed state known to the cache."""
        if seq.computed // PAGE_TOKENS > seq.published:
            keys = seq.full_keys()
            self.cache.publish(keys, seq.pages, seq.published)
            seq.published = len(keys)

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
            published=lead.published,
            pages=lead.pages[:shared] + own,
        )
        if lead.computed % PAGE_TOKENS:
            self._copy(other, self.pages, Copy(True, lead.pages[shared], own[0]))
        if self.has_state:
            other.slot = lead.spare_slots.pop()
            self._copy(other, self.slots, Copy(False, lead.slot, other.slot))
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

    def release(self, seq: Sequence) -> None:
        """Give back every count of a sequence. Counts of leases and landings live on."""
        self.drop_spares(seq)
        for pool, copy in seq.pending:
            pool.release([copy.source])
        self.pages.release(seq.pages)
        if seq.slot:
            self.slots.release([seq.slot])
        seq.pending, seq.pages, seq.slot = [], [], 0
        seq.computed = seq.published = 0
