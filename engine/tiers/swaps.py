"""Running requests that had to give up their memory: their bytes wait on the host. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.pages import PageHold, PagePool, SlotPool, hold_both
from engine.tiers.cost import Costs
from engine.tiers.index import TierIndex
from engine.tiers.loads import Loading
from engine.tiers.pool import Mover, Sums
from engine.tiers.stats import Counts


@dataclass(slots=True, eq=False)
class Swapped:
    """A request that was running. computed: tokens in its pages and state. saved: its bytes are on the host."""

    computed: int
    pages: list[int]
    slot: int
    page_sums: list[Sums] = field(default_factory=list)
    slot_sums: list[Sums] = field(default_factory=list)
    saved: bool = False


_Bytes = tuple[list[Sums], list[Sums]]
Submit = Callable[[Callable[[], _Bytes], Callable[[_Bytes, Exception | None, float], None]], None]
"""(what to run on the tier's thread, what to do with its result, error and seconds)"""


class Swaps:
    """host, host_slots: where they go. copied: told bytes and seconds. poison: overwrite what nobody has any more."""

    def __init__(
        self,
        device: tuple[PagePool, SlotPool],
        host: TierIndex,
        host_slots: SlotPool,
        mover: Mover,
        costs: Costs,
        counts: Counts,
        submit: Submit,
        copied: Callable[[int, float], None],
        poison: bool,
    ) -> None:
        self._pages, self._slots = device
        self._host, self._host_slots = host, host_slots
        self._mover, self._costs, self._counts = mover, costs, counts
        self._submit, self._copied, self._poison = submit, copied, poison
        self._swapped: dict[int, Swapped] = {}

    def __len__(self) -> int:
        return len(self._swapped)

    def get(self, seq: int) -> Swapped | None:
        return self._swapped.get(seq)

    @property
    def under_way(self) -> bool:
        return any(not swapped.saved for swapped in self._swapped.values())

    def out(self, seq: int, computed: int, pages: Sequence[int], slot: int) -> bool:
        """Copy a running request's pages and slot down; the caller gives back its own counts right after. False: no
        room, or computing again costs less. Then nothing changes."""
        nbytes = len(pages) * self._mover.item_bytes(True) + (self._mover.item_bytes(False) if slot else 0)
        if not self._costs.swap_pays(nbytes, computed):
            self._counts.declined += 1
            return False
        targets = self._host.pool.allocate(len(pages))
        slots = self._host_slots.allocate(1 if slot else 0)
        if targets is None or slots is None:
            self._host.pool.release(targets or [])
            self._host_slots.release(slots or [])
            self._counts.dropped += 1
            return False
        swapped = Swapped(computed, targets, slots[0] if slots else 0)
        self._swapped[seq] = swapped
        self._counts.swapped_out += 1
        self._save(swapped, list(pages), slot, nbytes)
        return True

    def _save(self, swapped: Swapped, pages: list[int], slot: int, nbytes: int) -> None:
        hold = hold_both(self._pages, pages, self._slots, [slot] if slot else [])
        pairs = list(zip(pages, swapped.pages, strict=True))
        slots = [(slot, swapped.slot)] if slot else []

        def run() -> _Bytes:
            return self._mover.save(True, pairs), self._mover.save(False, slots) if slots else []

        def done(sums: _Bytes, error: Exception | None, seconds: float) -> None:
            if error is None:
                swapped.page_sums, swapped.slot_sums = sums
                self._copied(nbytes, seconds)
                swapped.saved = True
            else:
                self._counts.failed += 1
            current = next((seq for seq, known in self._swapped.items() if known is swapped), None)
            if current is None or error is not None:
                self._swapped.pop(current, None) if current is not None else None
                self._owned(swapped).release()
            if self._poison:
                self._poison_unshared(pages, slot)
            hold.release()

        self._submit(run, done)

    def back(self, seq: int, targets: Sequence[int], slot: int) -> Loading:
        """What brings a swapped request into its new pages and slot. It is on the host no more when that is done."""
        swapped = self._swapped.pop(seq)
        assert swapped.saved, "its copy is still under way"
        slots = [(slot, swapped.slot)] if swapped.slot else []
        device = hold_both(self._pages, list(targets), self._slots, [slot] if slots else [])
        self._counts.swapped_in += 1
        pairs = list(zip(targets, swapped.pages, strict=True))
        return Loading(
            seq,
            pairs,
            swapped.page_sums,
            PageHold.joined(device, self._owned(swapped)),
            whole=swapped.computed,
            slots=slots,
            slot_sums=swapped.slot_sums,
            hit=False,
        )

    def hand_over(self, seq: int) -> tuple[Swapped, PageHold]:
        """A swapped request goes on elsewhere, from these bytes: what the host keeps of it is the hold's now."""
        swapped = self._swapped.pop(seq)
        assert swapped.saved, "its copy is still under way"
        return swapped, self._owned(swapped)

    def forget(self, seq: int) -> None:
        """What is kept for this request is dropped, when its copy is done."""
        swapped = self._swapped.pop(seq, None)
        if swapped is not None and swapped.saved:
            self._owned(swapped).release()

    def _owned(self, swapped: Swapped) -> PageHold:
        """Its counts on the host, as a value."""
        slots = (swapped.slot,) if swapped.slot else ()
        return PageHold(((self._host.pool, tuple(swapped.pages)), (self._host_slots, slots)))

    def _poison_unshared(self, pages: Sequence[int], slot: int) -> None:
        """What nobody else holds and no cache keeps."""
        self._mover.poison(True, [p for p in pages if self._pages.refs(p) == 1 and not self._pages.kept(p)])
        if slot and self._slots.refs(slot) == 1 and not self._slots.kept(slot):
            self._mover.poison(False, [slot])
