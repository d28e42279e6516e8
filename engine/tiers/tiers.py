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
from typing import Any

from engine.pages import PageHold, PagePool, SlotPool, hold_both
from engine.prefix_cache import PrefixCache
from engine.retention import Retained
from engine.states import State, StateCache
from engine.successors import Successors
from engine.tiers.cost import Costs
from engine.tiers.disk import Disk
from engine.tiers.disk_tier import DiskTier, Upper
from engine.tiers.growth import WAIT_S, Growth
from engine.tiers.hits import Hits, InTime
from engine.tiers.index import Entry, TierIndex
from engine.tiers.loads import Loaded, Loading, Loads
from engine.tiers.policy import Options, Sightings
from engine.tiers.pool import Mover
from engine.tiers.presence import Presence
from engine.tiers.state_stores import StateStores
from engine.tiers.states import HostStates, TierState
from engine.tiers.stats import Counts, TierReport
from engine.tiers.stores import Stores
from engine.tiers.swaps import Swapped, Swaps
from engine.tiers.work import Job, Lane, Urgency


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
        self.host = TierIndex(
            options.pages, options.order, lambda keys: self._where.left_host(keys), pages.lock, retained.rank
        )
        self.host_slots = SlotPool(options.slots, pages.lock)
        self.states = HostStates(self.host_slots, self.host, cache, options.order, retained.rank)
        self._retained = retained
        self._pages, self._slots, self._cache = pages, slots, cache
        self._mover, self._lane, self._now = mover, lane, now
        self._page_bytes, self._slot_bytes = mover.item_bytes(True), mover.item_bytes(False)
        self._jobs = 0
        self._closed = False
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
        self.hits = Hits(self.host, self.states, self.costs, self.counts, self._page_bytes, self._slot_bytes)
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
        self._where = Presence(cache, self.host, self.states)
        cache.set_lower(self._device_dropped, self._where.below)
        if states is not None:
            states.successors.ways = self._where.ways
            self.states.spent = states.successors.spent
        self._successors = states.successors if states is not None else Successors()
        self._growth = self._make_growth(states) if states is not None else None
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

    def _make_growth(self, states: StateCache) -> Growth:
        assert self.state_stores is not None
        stores = self._stores, self.state_stores
        return Growth(self._pages, self._cache, states, *stores, self._where, poll=self.poll, now=self._now)

    def add_disk(self, disk: Disk, lane: Lane, queue_pages: int, wall: Callable[[], float]) -> None:
        """Put a disk tier below the host's. Once, before anything runs. wall: seconds of the wall clock."""
        self.disk = DiskTier(
            disk,
            Upper(self.host, self.states, self._cache, self._retained, self._successors),
            lane,
            self._mover,
            self.costs,
            self.counts,
            queue_pages,
            self.options.order,
            has=self.has,
            gone=self._where.left_disk,
            now=self._now,
            wall=wall,
        )
        self._where.disk = below = self.disk
        below.states.spent = self.states.spent
        if self.state_stores is not None:
            self.state_stores.lower = lambda state: below.states.has(state.key, state.tail)

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
        state: State | TierState | None = None,
    ) -> bool:
        """Whether so many idle pages (none of `keep`) and slots may be evicted: their bytes are below, or not wanted
        there. If not, copies are started, and this is asked again when they are done. Who has waited long enough drops
        them. wanted, state: what is hit, which must not be pushed out by this."""
        if pages <= 0 and slots <= 0:
            return True
        lower = state if isinstance(state, TierState) else None
        held = [entry.page for entry in wanted] + ([lower.page] if lower and lower.page else [])
        with hold_both(self.host.pool, held, self.host_slots, [lower.slot] if lower else []):
            left = self._stores.make_room(pages, keep) if pages > 0 else False
            if self.state_stores is not None:
                going = [p for p in self._pages.oldest(pages + len(keep)) if p not in keep] if pages > 0 else []
                left |= self.state_stores.make_room(slots, going, state if isinstance(state, State) else None)
            self.poll()
        return self._waited(left or self._storing)

    def spare_slots(self, need: int, soon: int) -> bool:
        """See StateStores.spare."""
        assert self.state_stores is not None
        if self.state_stores.spare(need, soon):
            return True
        self.poll()
        return self.state_stores.spare(need, soon)

    def spare_page(self) -> bool:
        """See Growth.ready."""
        return self._growth is None or self._growth.ready()

    def give_up_slot(self) -> None:
        """See StateStores.give_up."""
        if self.state_stores is not None:
            self.state_stores.give_up()

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

    def _publish_state(self, state: TierState, seconds: float) -> None:
        """Unless its pages have gone meanwhile."""
        self._copied("down", self._slot_bytes + (self._page_bytes if state.page else 0), seconds)
        if self.has(state.key) and self.states.add(state):
            self.counts.stored_states += 1
            if self.disk is not None:
                self.disk.spill_state(state)

    # --- prefix hits ------------------------------------------------------------------------------------------------

    def staging(self, seq: int) -> bool | None:
        """Whether a waiting request had better wait for what is on its way from the disk to the host; None: stage() has
        not decided that yet."""
        return self.disk.staging.known(seq) if self.disk is not None else False

    def stage(
        self,
        seq: int,
        keys: Sequence[bytes],
        held: int,
        tokens: Sequence[int],
        resumed: int | None,
        in_time: InTime | None = None,
    ) -> None:
        """Bring up from the disk what the prompt `tokens` had better wait for. held: of `keys`, how many are on the
        device. resumed: tokens its state there has; None: it needs none. in_time: see Hits."""
        disk = self.disk
        assert disk is not None
        if resumed is None:
            found: tuple[list[Entry], TierState | None] = self.hits.pages_on_disk(disk, keys, held, in_time), None
        else:
            found = self.hits.state_on_disk(disk, keys, tokens, held, resumed, in_time)
        if found[0] or found[1]:
            disk.staging.start(seq, *found)
            disk.poll()
        else:
            disk.staging.decline(seq)

    def load(self, seq: int, base: int, entries: Sequence[Entry], targets: Sequence[int]) -> None:
        """Bring `entries` up into the device pages `targets`, which the request owns. base: tokens before them."""
        pairs = [(target, entry.page) for target, entry in zip(targets, entries, strict=True)]
        hold = PageHold.joined(self._pages.hold(targets), self.host.pool.hold([entry.page for entry in entries]))

        def spoilt(good: int, _: int) -> None:
            self.host.drop(entries[good].key)

        self._loads.start(Loading(seq, pairs, [e.sums for e in entries], hold, base=base, spoilt=spoilt))

    def load_state(
        self, seq: int, entries: Sequence[Entry], state: TierState, targets: Sequence[int], slot: int, kept: int
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

    def has(self, key: bytes) -> bool:
        """Whether the page under this key is in some tier."""
        return self._where.has(key)

    def _device_dropped(self, keys: Sequence[bytes], pages: Sequence[int]) -> dict[bytes, str]:
        """The device cache forgets these (tail first): the tiers of those that are still here."""
        self._stores.forget(keys)
        kept = self._where.dropped(keys)
        self.counts.lost += len(keys) - len(kept)
        if self.options.poison:
            gone = zip(keys, pages, strict=True)
            self._mover.poison(True, [page for key, page in gone if key in kept and self._pages.refs(page) == 0])
        return kept

    def _state_dropped(self, state: State) -> None:
        """It has left the device. Poisoned is what nobody holds and the host has."""
        assert self.state_stores is not None
        self.counts.lost_states += self.state_stores.forget(state)
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
        states = self.host_slots, len(self.states)
        host = TierReport.of("host", self.host.pool, len(self.host), self.counts, *states)
        return [host, self.disk.report()] if self.disk is not None else [host]

    def close(self) -> None:
        """Wait for what is under way and conclude it. Idempotent."""
        if self._closed:
            return
        self._closed = True
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
            self.disk.check(self.has)

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
