"""The tiers of one engine: pages down before they are dropped, up again on a hit, and running requests swapped.

Engine thread only; copies run on a lane (work.py) and are concluded in poll(). Ownership while a copy is under way:

| copy     | device page                                | host page                                              |
|----------|--------------------------------------------|--------------------------------------------------------|
| store    | held here; afterwards next to be evicted   | allocated here; published when the copy is done        |
| load     | the request's, and held here               | held here, so that it is not evicted while it is read  |
| swap out | held here; free when the copy is done      | the swapped request's                                  |
| swap in  | the request's, and held here               | given back when the copy is done                       |

A failed copy is a miss: what was not loaded is computed. With no room, or too much under way, nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.pages import PageHold, PagePool, SlotPool, hold_both
from engine.prefix_cache import PrefixCache
from engine.tiers.cost import Costs
from engine.tiers.disk import Disk
from engine.tiers.index import Entry, TierIndex
from engine.tiers.policy import Order, Sightings
from engine.tiers.pool import Mover, Pair, Sums
from engine.tiers.spill import DiskTier
from engine.tiers.stats import Counts, Moved, TierReport
from engine.tiers.stores import Stores
from engine.tiers.work import Job, Lane, Urgency
from kvtransfer.types import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Options:
    """queue_pages: pages on their way down at most. cap_pages etc.: see policy.Sightings. poison: device pages whose
    content has gone down are overwritten when they are given up (a test's proof that bytes came back up)."""

    pages: int
    slots: int = 0
    order: Order = "lru"
    queue_pages: int = 64
    swap: bool = True
    poison: bool = False


@dataclass(slots=True, eq=False)
class Swapped:
    """A request that was running. computed: tokens in its pages and state. saved: its bytes are on the host."""

    computed: int
    pages: list[int]
    slot: int
    page_sums: list[Sums]
    slot_sums: list[Sums]
    saved: bool = False


@dataclass(slots=True, eq=False)
class Loading:
    """base: tokens on the device already; source: what comes up; target: device pages; hold: on those."""

    seq: int
    base: int
    pairs: list[Pair]
    sums: list[Sums]
    keys: list[bytes]
    slots: list[Pair]
    hold: PageHold
    swapped: Swapped | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """seq has `computed` tokens in its pages now."""

    seq: int
    computed: int


class Tiers:
    """lane runs the copies. costs.prefill is measured by the engine. now: monotonic seconds."""

    def __init__(
        self,
        options: Options,
        sightings: Sightings,
        pages: PagePool,
        slots: SlotPool,
        cache: PrefixCache,
        mover: Mover,
        lane: Lane,
        now: Callable[[], float],
    ) -> None:
        self.options = options
        self.sightings = sightings
        self.costs = Costs()
        self.counts = Counts()
        self.host = TierIndex(options.pages, options.order, self._left_host, pages.lock)
        self.host_slots = SlotPool(options.slots)
        self._pages, self._slots, self._cache = pages, slots, cache
        self._mover, self._lane = mover, lane
        self._page_bytes, self._slot_bytes = mover.item_bytes(True), mover.item_bytes(False)
        self._swapped: dict[int, Swapped] = {}
        self._loading: dict[int, Loading] = {}
        self._loaded: list[Loaded] = []
        self._jobs = 0
        self._stores = Stores(
            pages,
            cache,
            self.host,
            sightings,
            mover,
            self.counts,
            options.queue_pages,
            submit=lambda run, done: self._submit(Urgency.STORE, run, done),
            published=self._publish,
            now=now,
        )
        self.disk: DiskTier | None = None
        cache.set_lower(self._dropped, self._below)

    def add_disk(self, disk: Disk, lane: Lane, queue_pages: int) -> None:
        """Put a disk tier below the host's. Once, before anything runs."""
        parts = (self.host, self._cache, lane, self.costs, self.counts)
        self.disk = DiskTier(disk, *parts, self._page_bytes, queue_pages, self.options.order, self._left_disk)

    # --- every turn -----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Conclude the copies that have ended."""
        for job in self._lane.take():
            self._jobs -= 1
            job.done(job.result, job.error, job.seconds)
        if self.disk is not None:
            self.disk.poll()

    def take_loaded(self) -> list[Loaded]:
        """Requests whose load is over, since the last call."""
        loaded, self._loaded = self._loaded, []
        return loaded

    @property
    def idle(self) -> bool:
        """No copy is under way."""
        return self._jobs == 0 and (self.disk is None or self.disk.jobs == 0)

    def store(self) -> None:
        """Start copies of idle device pages that would be evicted soon and are wanted below."""
        self._stores.ahead()

    def make_room(self, count: int, keep: Collection[int], wanted: Sequence[Entry]) -> bool:
        """See Stores.make_room. wanted: host entries that must not be pushed out by this."""
        if count <= 0 or self.options.pages == 0:
            return True
        with self.host.pool.hold([entry.page for entry in wanted]):
            return self._stores.make_room(count, keep, self.poll)

    def _publish(self, batch: list[Entry], seconds: float) -> None:
        """Parents come first, so that nothing enters whose parent is nowhere (it was dropped meanwhile)."""
        self._copied("down", len(batch) * self._page_bytes, seconds)
        for entry in batch:
            known = entry.parent is None or entry.parent in self._cache or bool(self._tier(entry.parent))
            on_device = entry.key in self._cache
            if known and self.host.add(entry):
                self.counts.stored += 1
                if not on_device:
                    self._cache.record_lower([entry.key], "host")
        if self.disk is not None:
            self.disk.spill([entry for entry in batch if entry.key in self.host])

    # --- prefix hits ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], held: int) -> list[Entry]:
        """What follows the first `held` of `keys` on the host, when fetching it is faster than computing it."""
        found = self.host.match(keys, held) if self.options.pages else []
        tokens = len(found) * PAGE_TOKENS
        if found and not self.costs.fetch_pays("host", len(found) * self._page_bytes, tokens):
            self.counts.declined += 1
            return []
        return found

    def staging(self, seq: int, keys: Sequence[bytes], held: int) -> bool:
        """Whether a waiting request had better wait for pages that are on their way from the disk to the host. held:
        of `keys`, how many are on the device."""
        if self.disk is None:
            return False
        above = held + len(self.host.match(keys, held))
        if self.disk.stage(seq, keys, above):
            self.disk.poll()
        return self.disk.stage(seq, keys, above)

    def load(self, seq: int, base: int, entries: Sequence[Entry], targets: Sequence[int]) -> None:
        """Bring `entries` up into the device pages `targets`, which the request owns. base: tokens before them."""
        assert seq not in self._loading
        self.host.pool.share([entry.page for entry in entries])
        pairs = [(target, entry.page) for target, entry in zip(targets, entries, strict=True)]
        hold = self._pages.hold([target for target, _ in pairs])
        loading = Loading(seq, base, pairs, [e.sums for e in entries], [e.key for e in entries], [], hold)
        self._start_load(loading)

    def busy(self, seq: int) -> bool:
        """A load of this request is under way."""
        return seq in self._loading

    def _start_load(self, loading: Loading) -> None:
        self._loading[loading.seq] = loading

        def run() -> tuple[int, int]:
            slot_sums = loading.swapped.slot_sums if loading.swapped else []
            slots = self._mover.load(False, loading.slots, slot_sums) if loading.slots else 0
            return self._mover.load(True, loading.pairs, loading.sums), slots

        def done(good: tuple[int, int] | None, error: Exception | None, seconds: float) -> None:
            if error is not None:
                self.counts.failed += 1
            elif good != (len(loading.pairs), len(loading.slots)):
                self.counts.corrupt += 1
                if good is not None and loading.keys:
                    self.host.drop(loading.keys[good[0]])
            self._concluded(loading, good or (0, 0), seconds)

        self._submit(Urgency.LOAD, run, done)

    def _concluded(self, loading: Loading, good: tuple[int, int], seconds: float) -> None:
        pages, slots = good
        self._copied("up", pages * self._page_bytes + slots * self._slot_bytes, seconds)
        if loading.swapped is None:
            self.host.pool.release([host for _, host in loading.pairs])
            self.counts.hit_pages += pages
        else:
            self._give_back(loading.swapped)
        loading.hold.release()
        if self._loading.get(loading.seq) is loading:
            del self._loading[loading.seq]
            self._loaded.append(Loaded(loading.seq, self._computed(loading, pages, slots)))

    @staticmethod
    def _computed(loading: Loading, pages: int, slots: int) -> int:
        if loading.swapped is None:
            return loading.base + pages * PAGE_TOKENS
        whole = pages == len(loading.pairs) and slots == len(loading.slots)
        return loading.swapped.computed if whole else 0

    # --- swapping running requests ------------------------------------------------------------------------------------

    def swap_out(self, seq: int, computed: int, pages: Sequence[int], slot: int) -> bool:
        """Copy a running request's pages and slot down; the caller gives back its own counts right after. False: no
        room, or computing again costs less. Then nothing changes."""
        if not self.options.swap or not self.options.pages or not computed:
            return False
        nbytes = len(pages) * self._page_bytes + (self._slot_bytes if slot else 0)
        if not self.costs.swap_pays(nbytes, computed):
            self.counts.declined += 1
            return False
        targets = self.host.pool.allocate(len(pages))
        slots = self.host_slots.allocate(1 if slot else 0)
        if targets is None or slots is None:
            self.host.pool.release(targets or [])
            self.host_slots.release(slots or [])
            self.counts.dropped += 1
            return False
        swapped = Swapped(computed, targets, slots[0] if slots else 0, [], [])
        self._swapped[seq] = swapped
        self.counts.swapped_out += 1
        self._save(swapped, list(pages), slot, nbytes)
        return True

    def _save(self, swapped: Swapped, pages: list[int], slot: int, nbytes: int) -> None:
        hold = hold_both(self._pages, pages, self._slots, [slot] if slot else [])
        pairs = list(zip(pages, swapped.pages, strict=True))
        slots = [(slot, swapped.slot)] if slot else []

        def run() -> tuple[list[Sums], list[Sums]]:
            return self._mover.save(True, pairs), self._mover.save(False, slots) if slots else []

        def done(sums: tuple[list[Sums], list[Sums]], error: Exception | None, seconds: float) -> None:
            if error is None:
                swapped.page_sums, swapped.slot_sums = sums
                self._copied("down", nbytes, seconds)
                swapped.saved = True
            else:
                self.counts.failed += 1
            current = next((seq for seq, known in self._swapped.items() if known is swapped), None)
            if current is None or error is not None:
                self._swapped.pop(current, None) if current is not None else None
                self._give_back(swapped)
            if self.options.poison:
                self._poison_unshared(pages, slot)
            hold.release()

        self._submit(Urgency.SWAP, run, done)

    def swapped(self, seq: int) -> Swapped | None:
        return self._swapped.get(seq)

    @property
    def holds_pages(self) -> bool:
        """Device pages will come free when the copies down that are under way are done."""
        return self._stores.under_way or any(not swapped.saved for swapped in self._swapped.values())

    def swap_in(self, seq: int, targets: Sequence[int], slot: int) -> None:
        """Bring a swapped request back into its new pages and slot."""
        swapped = self._swapped.pop(seq)
        assert swapped.saved, "its copy is still under way"
        pairs = list(zip(targets, swapped.pages, strict=True))
        slots = [(slot, swapped.slot)] if swapped.slot else []
        hold = hold_both(self._pages, list(targets), self._slots, [slot] if slots else [])
        self.counts.swapped_in += 1
        self._start_load(Loading(seq, 0, pairs, swapped.page_sums, [], slots, hold, swapped))

    def forget(self, seq: int) -> None:
        """The request has given up its memory: what is on its way lands nowhere, what is kept for it is dropped."""
        self._loading.pop(seq, None)
        if self.disk is not None:
            self.disk.forget(seq)
        swapped = self._swapped.pop(seq, None)
        if swapped is not None and swapped.saved:
            self._give_back(swapped)

    def _give_back(self, swapped: Swapped) -> None:
        self.host.pool.release(swapped.pages)
        if swapped.slot:
            self.host_slots.release([swapped.slot])

    # --- the device cache ---------------------------------------------------------------------------------------------

    def _dropped(self, keys: Sequence[bytes], pages: Sequence[int]) -> dict[bytes, str]:
        """The device cache forgets these (tail first): those that are still here. What hung on the others goes too."""
        kept = {}
        self._stores.forget(keys)
        for key, page in zip(keys, pages, strict=True):
            tier = self._tier(key)
            if tier:
                kept[key] = tier
                if self.options.poison and self._pages.refs(page) == 0:
                    self._mover.poison(True, [page])
            else:
                self.counts.lost += 1
                self._orphan(key)
        return kept

    def _left_host(self, keys: Sequence[bytes]) -> None:
        gone = [key for key in keys if key not in self._cache]
        lower = [key for key in gone if self._tier(key)]
        lost = [key for key in gone if not self._tier(key)]
        if lower:
            self._cache.record_lower(lower[::-1], "disk")
        self._lost(lost)

    def _left_disk(self, keys: Sequence[bytes]) -> None:
        self._lost([key for key in keys if key not in self._cache and not self._tier(key)])

    def _lost(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._cache.record_lower(keys, "")
        for key in keys:
            self._orphan(key)

    def _orphan(self, key: bytes) -> None:
        """This key is nowhere any more: nor may be what hangs on it."""
        self.host.drop(key)
        if self.disk is not None:
            self.disk.index.drop(key)

    def _tier(self, key: bytes) -> str:
        """The highest tier below the device that has this key, "" = none."""
        if key in self.host:
            return "host"
        return "disk" if self.disk is not None and key in self.disk.index else ""

    def _below(self) -> dict[str, list[bytes]]:
        lower = {"host": self.host.keys()}
        if self.disk is not None:
            lower["disk"] = [key for key in self.disk.index.keys() if key not in self.host]  # noqa: SIM118
        return lower

    def _poison_unshared(self, pages: Sequence[int], slot: int) -> None:
        """Of a swapped request: what nobody else holds and no cache keeps."""
        self._mover.poison(True, [p for p in pages if self._pages.refs(p) == 1 and not self._pages.kept(p)])
        if slot and self._slots.refs(slot) == 1 and not self._slots.kept(slot):
            self._mover.poison(False, [slot])

    # --- inside ---------------------------------------------------------------------------------------------------

    def _submit(
        self, urgency: Urgency, run: Callable[[], Any], done: Callable[[Any, Exception | None, float], None]
    ) -> None:
        self._jobs += 1
        self._lane.submit(Job(urgency, run, done))

    def _copied(self, direction: str, nbytes: int, seconds: float) -> None:
        self.costs.copied("host", direction, nbytes, seconds)
        self.counts.moved("host", direction, nbytes, seconds)

    @property
    def swapped_now(self) -> int:
        return len(self._swapped)

    def reports(self) -> list[TierReport]:
        """One for each tier, from any thread."""
        found = [("host", self.host, self.counts.hit_pages)]
        if self.disk is not None:
            found.append(("disk", self.disk.index, self.counts.disk_pages))
        return [self._report(*one) for one in found]

    def _report(self, tier: str, index: TierIndex, hits: int) -> TierReport:
        down = self.counts.moves.get((tier, "down"), Moved())
        up = self.counts.moves.get((tier, "up"), Moved())
        counts = self.counts
        return TierReport(
            tier=tier,
            pages_total=index.pool.total,
            pages_published=len(index),
            pages_held=index.pool.referenced,
            hit_pages=hits,
            bytes_down=down.nbytes,
            bytes_up=up.nbytes,
            seconds_down=down.seconds,
            seconds_up=up.seconds,
            swapped_out=counts.swapped_out if tier == "host" else 0,
            swapped_in=counts.swapped_in if tier == "host" else 0,
            faults=counts.failed + counts.corrupt,
        )

    def close(self) -> None:
        """Wait for what is under way and conclude it. Idempotent."""
        self._lane.close()
        self.poll()
        if self.disk is not None:
            self.disk.close()

    def check_empty(self) -> None:
        """Assert that only published pages are left. Raises AssertionError."""
        self.host.check()
        self.host_slots.check()
        assert not self._swapped, "swapped requests are left"
        assert not self._loading, "loads are left"
        self._stores.check_empty()
        assert self.host.pool.referenced == 0, "host pages are still held"
        assert self.host_slots.referenced == 0, "host slots are still held"
        if self.disk is not None:
            self.disk.check_empty()
