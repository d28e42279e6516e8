"""The tiers of one engine: pages and states down before they are dropped, up again on a hit, running requests swapped.

Engine thread only; copies run on a lane (work.py) and are concluded in poll(). Ownership while a copy is under way
(slots and the states in them as pages):

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
from dataclasses import replace
from typing import Any

from engine.pages import PageHold, PagePool, SlotPool, hold_both
from engine.prefix_cache import PrefixCache
from engine.retention import Retained
from engine.states import State, StateCache
from engine.tiers.cost import Costs
from engine.tiers.disk import Disk
from engine.tiers.index import Entry, TierIndex
from engine.tiers.loads import Loaded, Loading, Loads
from engine.tiers.policy import Options, Sightings
from engine.tiers.pool import Mover
from engine.tiers.spill import DiskTier
from engine.tiers.state_stores import StateStores
from engine.tiers.states import HostState, HostStates
from engine.tiers.stats import Counts, TierReport
from engine.tiers.stores import Stores
from engine.tiers.swaps import Swapped, Swaps
from engine.tiers.work import Job, Lane, Urgency
from kvtransfer.types import PAGE_TOKENS

WAIT_S = 0.25
"""An admission waits so long for pages and states to go down before they are dropped."""


class Tiers:
    """lane runs the copies. costs.prefill is measured by the engine. now: monotonic seconds. states: the device's, of a
    model that has any."""

    def __init__(
        self,
        options: Options,
        sightings: Sightings,
        pages: PagePool,
        slots: SlotPool,
        cache: PrefixCache,
        states: StateCache | None,
        retained: Retained,
        mover: Mover,
        lane: Lane,
        now: Callable[[], float],
    ) -> None:
        self.options = options
        self.sightings = sightings
        self.costs = Costs()
        self.counts = Counts()
        self.host = TierIndex(options.pages, options.order, self._left_host, pages.lock, retained.rank)
        self.host_slots = SlotPool(options.slots, pages.lock)
        self.states = HostStates(self.host_slots, self.host, cache, options.order, retained.rank)
        self._retained = retained
        self._pages, self._slots, self._cache = pages, slots, cache
        self._mover, self._lane, self._now = mover, lane, now
        self._page_bytes, self._slot_bytes = mover.item_bytes(True), mover.item_bytes(False)
        self._jobs = 0
        self._asked_at: float | None = None  # since when an admission waits for stores
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
        )
        self.state_stores = self._state_stores(states) if states is not None else None
        self._loads = Loads(
            mover,
            self.counts,
            submit=lambda run, done: self._submit(Urgency.LOAD, run, done),
            copied=lambda some, others, s: self._copied("up", some * self._page_bytes + others * self._slot_bytes, s),
            give_back=lambda slot: slots.release([slot]),
        )
        self._swaps = Swaps(
            (pages, slots),
            self.host,
            self.host_slots,
            mover,
            self.costs,
            self.counts,
            submit=lambda run, done: self._submit(Urgency.SWAP, run, done),
            copied=lambda nbytes, seconds: self._copied("down", nbytes, seconds),
            poison=options.poison,
        )
        self.disk: DiskTier | None = None
        cache.set_lower(self._dropped, self._below)
        retained.serve(self.host.ranked, self.host.used_again)
        retained.serve(lambda _key, _rank: None, self.states.used_again)

    def _state_stores(self, states: StateCache) -> StateStores:
        states.dropped = self._state_dropped
        return StateStores(
            (self._pages, self._slots),
            states,
            self.states,
            self.host.pool,
            self.sightings,
            self._mover,
            self.counts,
            queue=max(2, self.options.queue_pages * self._page_bytes // self._slot_bytes),
            submit=lambda run, done: self._submit(Urgency.STORE, run, done),
            published=self._publish_state,
        )

    def add_disk(self, disk: Disk, lane: Lane, queue_pages: int) -> None:
        """Put a disk tier below the host's. Once, before anything runs."""
        parts = (self.host, self._cache, lane, self.costs, self.counts)
        rank = self._retained.rank
        self.disk = DiskTier(disk, *parts, self._page_bytes, queue_pages, self.options.order, self._left_disk, rank)
        self._retained.serve(self.disk.index.ranked, self.disk.index.used_again)

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
        return self._loads.take()

    @property
    def idle(self) -> bool:
        """No copy is under way."""
        return self._jobs == 0 and (self.disk is None or self.disk.jobs == 0)

    # --- down -------------------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Start copies of what is idle on the device, would be evicted soon and is wanted below."""
        self._stores.ahead()
        if self.state_stores is not None:
            self.state_stores.ahead()

    def make_room(
        self,
        pages: int,
        keep: Collection[int],
        wanted: Sequence[Entry],
        slots: int = 0,
        state: State | HostState | None = None,
    ) -> bool:
        """Whether so many idle pages (none of `keep`) and slots may be evicted: their bytes are below, or not wanted
        there. If not, copies are started, and this is asked again when they are done. Who has waited long enough drops
        them. wanted, state: what is hit, which must not be pushed out by this."""
        if pages <= 0 and slots <= 0:
            return True
        lower = state if isinstance(state, HostState) else None
        held = [entry.page for entry in wanted] + ([lower.page] if lower and lower.page else [])
        with hold_both(self.host.pool, held, self.host_slots, [lower.slot] if lower else []):
            left = self._stores.make_room(pages, keep) if pages > 0 else False
            if self.state_stores is not None:
                going = [p for p in self._pages.oldest(pages + len(keep)) if p not in keep] if pages > 0 else []
                left |= self.state_stores.make_room(slots, going, state if isinstance(state, State) else None)
            self.poll()
        return self._waited(left or self._storing)

    def _waited(self, pending: bool) -> bool:
        now = self._now()
        if self._asked_at is None:
            self._asked_at = now
        if pending and now - self._asked_at < WAIT_S:
            return False
        self._asked_at = None
        self._stores.made_room()
        if self.state_stores is not None:
            self.state_stores.made_room()
        return True

    @property
    def _storing(self) -> bool:
        return self._stores.under_way or (self.state_stores is not None and self.state_stores.under_way)

    def _publish(self, batch: list[Entry], seconds: float) -> None:
        """Parents come first, so that nothing enters whose parent is nowhere (it was dropped meanwhile)."""
        self._copied("down", len(batch) * self._page_bytes, seconds)
        for entry in batch:
            known = entry.parent is None or self.has(entry.parent)
            on_device = entry.key in self._cache
            if known and self.host.add(entry):
                self.counts.stored += 1
                if not on_device:
                    self._cache.record_lower([entry.key], "host")
        if self.disk is not None:
            self.disk.spill([entry for entry in batch if entry.key in self.host])

    def _publish_state(self, state: HostState, seconds: float) -> None:
        """Unless its pages have gone meanwhile."""
        self._copied("down", self._slot_bytes + (self._page_bytes if state.page else 0), seconds)
        if self.has(state.key) and self.states.add(state):
            self.counts.stored_states += 1

    # --- prefix hits ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], held: int) -> list[Entry]:
        """What follows the first `held` of `keys` on the host, when fetching it is faster than computing it."""
        found = self.host.match(keys, held)
        tokens = len(found) * PAGE_TOKENS
        if found and not self.costs.fetch_pays("host", len(found) * self._page_bytes, tokens):
            self.counts.declined += 1
            return []
        return found

    def find_state(
        self, keys: Sequence[bytes], tokens: Sequence[int], held: int, resumed: int
    ) -> tuple[list[Entry], HostState | None]:
        """What follows the first `held` of `keys` on the host; and the longest state there that can be resumed with
        those pages, when fetching it and the pages below it is faster than running the tokens from `resumed` on."""
        entries = self.host.match(keys, held)
        candidates = self.states.match(keys[: held + len(entries)], tokens, resumed)
        for state in candidates:
            pages = max(state.length // PAGE_TOKENS - held, 0) + bool(state.page)
            nbytes = pages * self._page_bytes + self._slot_bytes
            if self.costs.fetch_pays("host", nbytes, state.length - resumed):
                return entries, state
        self.counts.declined += bool(candidates)
        return entries, None

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
        pairs = [(target, entry.page) for target, entry in zip(targets, entries, strict=True)]
        hold = PageHold.joined(self._pages.hold(targets), self.host.pool.hold([entry.page for entry in entries]))

        def spoilt(good: int, _: int) -> None:
            self.host.drop(entries[good].key)

        self._loads.start(Loading(seq, pairs, [e.sums for e in entries], hold, base=base, spoilt=spoilt))

    def load_state(
        self, seq: int, entries: Sequence[Entry], state: HostState, targets: Sequence[int], slot: int, kept: int
    ) -> None:
        """Bring `state` up into the request's `slot`, and the pages below it that are not on the device into `targets`
        (the partial one last). kept: another slot that gets the state, for the device's cache; its count is taken
        over."""
        sources = [entry.page for entry in entries] + ([state.page] if state.page else [])
        slots = [slot, kept] if kept else [slot]
        device = hold_both(self._pages, targets, self._slots, slots)
        host = PageHold.joined(self.states.use(state), self.host.pool.hold([entry.page for entry in entries]))

        def spoilt(pages: int, slots_good: int) -> None:
            if slots_good == len(slots) and pages < len(entries):
                self.host.drop(entries[pages].key)
            self.states.drop(state)

        self._loads.start(
            Loading(
                seq,
                list(zip(targets, sources, strict=True)),
                [e.sums for e in entries] + ([state.page_sums] if state.page else []),
                PageHold.joined(device, host),
                whole=state.length,
                slots=[(target, state.slot) for target in slots],
                slot_sums=[state.slot_sums] * len(slots),
                spoilt=spoilt,
                kept=kept,
            )
        )

    def busy(self, seq: int) -> bool:
        """A load of this request is under way."""
        return seq in self._loads.under_way

    # --- swapping running requests ------------------------------------------------------------------------------------

    def swap_out(self, seq: int, computed: int, pages: Sequence[int], slot: int) -> bool:
        """See Swaps.out. Nothing to do for what has computed nothing."""
        return bool(self.options.swap and computed and self._swaps.out(seq, computed, pages, slot))

    def swap_in(self, seq: int, targets: Sequence[int], slot: int) -> None:
        """Bring a swapped request back into its new pages and slot."""
        self._loads.start(self._swaps.back(seq, targets, slot))

    def swapped(self, seq: int) -> Swapped | None:
        return self._swaps.get(seq)

    def hand_over(self, seq: int) -> tuple[Swapped, PageHold]:
        """A swapped request goes on elsewhere: see Swaps.hand_over."""
        if self.disk is not None:
            self.disk.forget(seq)
        return self._swaps.hand_over(seq)

    @property
    def holds_pages(self) -> bool:
        """Device pages will come free when the copies down that are under way are done."""
        return self._storing or self._swaps.under_way

    def forget(self, seq: int) -> None:
        """The request has given up its memory: what is on its way lands nowhere, what is kept for it is dropped."""
        self._loads.forget(seq)
        if self.disk is not None:
            self.disk.forget(seq)
        self._swaps.forget(seq)

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
        self._lost([key for key in keys if not self.has(key)])

    def _lost(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._cache.record_lower(keys, "")
        for key in keys:
            self._orphan(key)

    def _orphan(self, key: bytes) -> None:
        """This key is nowhere any more: nor may be what hangs on it."""
        self.states.key_gone(key)
        self.host.drop(key)
        if self.disk is not None:
            self.disk.index.drop(key)

    def _tier(self, key: bytes) -> str:
        """The highest tier below the device that has this key, "" = none."""
        if key in self.host:
            return "host"
        return "disk" if self.disk is not None and key in self.disk.index else ""

    def has(self, key: bytes) -> bool:
        """Whether the page under this key is in some tier."""
        return key in self._cache or bool(self._tier(key))

    def _below(self) -> dict[str, list[bytes]]:
        lower = {"host": self.host.keys()}
        if self.disk is not None:
            lower["disk"] = [key for key in self.disk.index.keys() if key not in self.host]  # noqa: SIM118
        return lower

    def _state_dropped(self, state: State) -> None:
        """It has left the device. Poisoned is what nobody holds and the host has."""
        assert self.state_stores is not None
        self.state_stores.forget(state)
        if self.options.poison and self.states.has(state.key, state.tail):
            if self._slots.refs(state.slot) == 0:
                self._mover.poison(False, [state.slot])
            if state.page and self._pages.refs(state.page) == 0:
                self._mover.poison(True, [state.page])

    # --- inside -----------------------------------------------------------------------------------------------------

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
        return len(self._swaps)

    def reports(self) -> list[TierReport]:
        """One for each tier, from any thread."""
        host = TierReport.of("host", self.host.pool, len(self.host), self.counts)
        states = self.host_slots
        found = [replace(host, states_total=states.total, states_published=len(self.states))]
        if self.disk is not None:
            found.append(TierReport.of("disk", self.disk.index.pool, len(self.disk.index), self.counts))
        return found

    def close(self) -> None:
        """Wait for what is under way and conclude it. Idempotent."""
        self._lane.close()
        self.poll()
        self._mover.carrier.close()
        if self.disk is not None:
            self.disk.close()

    def check(self) -> None:
        """Assert what holds at any moment. Raises AssertionError."""
        self.host.check()
        self.host_slots.check()
        self.states.check(self.has)
        if self.disk is not None:
            self.disk.index.check()

    def check_empty(self) -> None:
        """Assert that only published pages and states are left. Raises AssertionError."""
        self.check()
        assert not self._swaps, "swapped requests are left"
        assert not self._loads.under_way, "loads are left"
        self._stores.check_empty()
        if self.state_stores is not None:
            self.state_stores.check_empty()
        assert self.host.pool.referenced == 0, "host pages are still held"
        assert self.host_slots.referenced == 0, "host slots are still held"
        if self.disk is not None:
            self.disk.check_empty()
