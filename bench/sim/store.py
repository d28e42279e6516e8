"""What one simulated worker remembers: KV on the device (the real pool and prefix cache), then in host memory, then on
disk, and the states a hybrid model can be resumed from. Says every change as the cache events a real worker would.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.profile import Profile
from engine.pages import PagePool
from engine.prefix_cache import PrefixCache
from router.policy.index import Batch, CacheEvent, Kind

_JOURNAL_TOKENS = 1 << 18
"""The journal holds what one allocation of the longest prompt can drop, unit by unit."""


@dataclass(frozen=True, slots=True)
class Found:
    """Of a prompt: units on device, units to promote from host and disk, and tokens prefill may skip."""

    pages: list[int]
    host: int
    disk: int
    resume: int
    state_from_host: bool = False


class Store:
    """unit: tokens per page of this pool. Sizes in units and slots."""

    def __init__(self, profile: Profile, unit: int, epoch: int) -> None:
        self.unit = unit
        self._profile = profile
        self.pool = PagePool(profile.pool.kv_tokens // unit + 1)
        self.cache = PrefixCache(self.pool, journal_length=_JOURNAL_TOKENS // unit)
        self._read = 0
        self._epoch = epoch
        self._sequence = 0
        self._events: list[CacheEvent] = []
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._disk: OrderedDict[bytes, None] = OrderedDict()
        self._host_units = profile.pool.host_kv_tokens // unit
        self._disk_units = profile.disk_tokens // unit
        self.stateful = profile.model.kind == "hybrid"
        self._states: OrderedDict[bytes, int] = OrderedDict()  # key -> state length, on device
        self._host_states: OrderedDict[bytes, int] = OrderedDict()
        self.slots_held = 0

    # --- look-up ------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], tokens: int) -> Found:
        """The longest prefix to resume from; at least one token is left to compute."""
        pages = self.cache.match(keys)
        at = len(pages)
        host = self._below(self._host, keys, at)
        disk = self._below(self._disk, keys, at + host)
        resume = min((at + host + disk) * self.unit, tokens - 1)
        if not self.stateful:
            return Found(pages, host, disk, resume)
        return self._with_state(keys, pages, host, disk, resume)

    def _with_state(self, keys: Sequence[bytes], pages: list[int], host: int, disk: int, most: int) -> Found:
        interval = self._profile.model.checkpoint_interval
        for length in range(most // interval * interval, 0, -interval):
            key = keys[length // self.unit - 1]
            if key in self._states or key in self._host_states:
                units = length // self.unit
                on_device = min(len(pages), units)
                from_host = min(host, units - on_device)
                from_disk = units - on_device - from_host
                self._touch(key)
                return Found(pages[:on_device], from_host, from_disk, length, key not in self._states)
        return Found([], 0, 0, 0)

    @staticmethod
    def _below(tier: OrderedDict[bytes, None], keys: Sequence[bytes], start: int) -> int:
        count = 0
        while start + count < len(keys) and keys[start + count] in tier:
            count += 1
        return count

    # --- pages --------------------------------------------------------------------------------------------------

    def allocate(self, shared: list[int], tokens: int) -> list[int] | None:
        """Pages for `tokens`, of which `shared` are there; None and nothing changes when there is no room."""
        self.pool.share(shared)
        more = self.pool.allocate(-(-tokens // self.unit) - len(shared))
        self._follow()
        if more is None:
            self.pool.release(shared)
            return None
        return shared + more

    def fits(self, tokens: int) -> bool:
        """Whether an empty pool would hold it."""
        return -(-tokens // self.unit) <= self.pool.total

    def publish(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        self.cache.publish(keys, pages, 0)
        self._follow()

    def adopt(self, keys: Sequence[bytes], units: int) -> bool:
        """The first `units` have come from elsewhere, with the state at their end. False: there is no room."""
        shared = self.cache.match(keys)[:units]
        pages = self.allocate(shared, units * self.unit)
        if pages is None:
            return False
        self.publish(keys[:units], pages)
        self.checkpoint(keys, units * self.unit - 1, units * self.unit)
        self.release(pages)
        return True

    def release(self, pages: Sequence[int]) -> None:
        self.pool.release(pages)

    # --- states -------------------------------------------------------------------------------------------------

    def take_slot(self) -> bool:
        """A slot for a running request; a checkpoint makes room when needed."""
        total = self._profile.pool.state_slots
        if not self.stateful:
            return True
        if self.slots_held >= total:
            return False
        self.slots_held += 1
        while self.slots_held + len(self._states) > total:
            self._demote()
        return True

    def give_slot(self) -> None:
        if self.stateful:
            self.slots_held -= 1
            assert self.slots_held >= 0

    def checkpoint(self, keys: Sequence[bytes], start: int, stop: int) -> None:
        """A prefill from `start` to `stop` leaves a state at every interval."""
        if not self.stateful:
            return
        interval = self._profile.model.checkpoint_interval
        for length in range((start // interval + 1) * interval, stop + 1, interval):
            if length // self.unit > len(keys):
                break
            key = keys[length // self.unit - 1]
            self._host_states.pop(key, None)
            if key not in self._states and self.slots_held < self._profile.pool.state_slots:
                self._states[key] = length
                self._events.append(CacheEvent(Kind.CHECKPOINT_READY, (key,), state_length=length))
                while self.slots_held + len(self._states) > self._profile.pool.state_slots:
                    self._demote()

    def _touch(self, key: bytes) -> None:
        for states in (self._states, self._host_states):
            if key in states:
                states.move_to_end(key)

    def _demote(self) -> None:
        key, length = self._states.popitem(last=False)
        self._host_states[key] = length
        if len(self._host_states) > self._profile.pool.host_state_slots:
            key, length = self._host_states.popitem(last=False)
            self._events.append(CacheEvent(Kind.CHECKPOINT_REMOVED, (key,), state_length=length))

    # --- tiers and events ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """What the device cache dropped goes to host memory, what that drops to disk."""
        if self.cache.sequence == self._read:
            return
        changes = self.cache.changes_after(self._read)
        assert changes is not None, "the journal is read after every change"
        self._read = self.cache.sequence
        dropped: list[bytes] = []
        for change in changes:
            if not change.stored:
                dropped += change.keys
                continue
            self._demote_keys(dropped)
            dropped = []
            for key in change.keys:
                self._host.pop(key, None)
                self._disk.pop(key, None)
            self._events.append(CacheEvent(Kind.STORED, change.keys))
        self._demote_keys(dropped)

    def _demote_keys(self, keys: Sequence[bytes]) -> None:
        if not keys:
            return
        for key in keys:
            self._host[key] = None
        self._events.append(CacheEvent(Kind.TIER_CHANGED, keys, tier="host"))
        down = [self._host.popitem(last=False)[0] for _ in range(max(len(self._host) - self._host_units, 0))]
        if not down:
            return
        for key in down:
            self._disk[key] = None
        self._events.append(CacheEvent(Kind.TIER_CHANGED, down, tier="disk"))
        gone = [self._disk.popitem(last=False)[0] for _ in range(max(len(self._disk) - self._disk_units, 0))]
        if gone:
            self._events.append(CacheEvent(Kind.REMOVED, gone))

    def events(self) -> Batch | None:
        """What changed since the last call, as the next batch of this worker's feed."""
        if not self._events:
            return None
        events, self._events = self._events, []
        first = self._sequence + 1
        self._sequence += len(events)
        return Batch(self._epoch, first, events)

    def check(self) -> None:
        """Assert that pools, tiers and slots add up. Raises AssertionError."""
        self.pool.check()
        self.cache.check()
        assert not self._host.keys() & self._disk.keys(), "a unit in two tiers"
        assert len(self._host) <= self._host_units
        assert len(self._disk) <= self._disk_units
        if self.stateful:
            assert self.slots_held + len(self._states) <= self._profile.pool.state_slots
            assert not self._states.keys() & self._host_states.keys()
