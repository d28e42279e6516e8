"""Which worker holds which prefix: page keys -> workers and tiers, and where a recurrent state can be resumed.

Advisory: it is fed by what workers say of their caches, a little late. A wrong entry costs time, never correctness, so
nothing here is locked, confirmed or waited for. What it must not do is grow or lie for ever: memory is bounded by
`max_units` (second-chance eviction; as many checkpoints, the oldest go), a worker's entries live no longer than its
epoch, and a gap in the sequence numbers asks for a snapshot.

One integer per key holds a bit per worker, so a look-up walks the prompt once for all of them: links first, then the
at most 16 keys of each link at which some worker's prefix ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.hashing import LINK_TOKENS
from router.policy.bits import bits_of, note, place
from router.policy.keys import Keys

_TOUCHED = 1
"""Bit 0 of an entry: looked up since eviction last passed it. Worker bits begin at bit 1."""

MAX_SEQUENCE = 1 << 62
"""Numbers are counted on from, and must stay such as a message can hold."""


class Kind(Enum):
    STORED = 1
    REMOVED = 2
    TIER_CHANGED = 3
    CHECKPOINT_READY = 4
    CHECKPOINT_REMOVED = 5


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """keys in chain order. tier: "device", "host" or "disk", also of a checkpoint. state_length: of a checkpoint, in
    tokens; its one key is that of the last full page at or before it."""

    kind: Kind
    keys: Sequence[bytes]
    tier: str = "device"
    state_length: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Event i has sequence first_sequence + i; a snapshot's batches all carry the sequence it was taken at."""

    epoch: int
    first_sequence: int
    events: Sequence[CacheEvent]
    snapshot: bool = False
    snapshot_end: bool = False


@dataclass(frozen=True, slots=True)
class Export:
    """What is known of one worker as of `sequence` of `epoch`: events that would make it known elsewhere."""

    epoch: int
    sequence: int
    events: Sequence[CacheEvent]


@dataclass(frozen=True, slots=True)
class Hit:
    """Prefix lengths in tokens. kv: in any tier; device: without a load; host: without a read from disk.
    resume: where prefill may start: kv, or for models with state the last ready checkpoint at or before it. state: the
    tier of that checkpoint, "" = the device's, or none."""

    kv: int
    device: int
    host: int
    resume: int
    state: str = ""


NO_HIT = Hit(0, 0, 0, 0)


@dataclass(slots=True)
class _Source:
    """What is known of one worker's feed. `synced`: no gap since a snapshot or since sequence 0 of its epoch."""

    bit: int
    epoch: int = 0
    sequence: int = 0
    synced: bool = False
    in_snapshot: bool = False
    keys: set[bytes] = field(default_factory=set)
    checkpoints: set[tuple[bytes, int]] = field(default_factory=set)


class PrefixIndex:
    """max_units: keys remembered over all workers. stateful: a hit needs a checkpoint (hybrid models)."""

    def __init__(self, max_units: int = 2_000_000, *, stateful: bool = False, expect_s: float = 30.0) -> None:
        self.stateful = stateful
        self._max = max_units
        self._expect_s = expect_s
        self._units: dict[bytes, int] = {}
        self._lower: dict[bytes, tuple[int, int]] = {}  # (host bits, disk bits); without an entry all are on device
        self._checkpoints: dict[bytes, dict[int, int]] = {}
        self._states = 0  # lengths in _checkpoints
        self._lower_states: dict[tuple[bytes, int], tuple[int, int]] = {}  # as _lower
        self._expected: dict[bytes, int] = {}
        self._expiries: deque[tuple[float, int, Sequence[bytes]]] = deque()
        self._order: deque[bytes] = deque()
        self._sources: dict[str, _Source] = {}
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        return len(self._units)

    # --- workers ------------------------------------------------------------------------------------------------

    def bit(self, worker_id: str) -> int:
        """The worker's place in a look-up's answer; a stranger is added."""
        return self._source(worker_id).bit

    def forget(self, worker_id: str) -> None:
        """The worker is gone for good."""
        source = self._sources.pop(worker_id, None)
        if source is not None:
            self._clear(source)
            self._drop_expected(source.bit)
            self._free_bits.append(source.bit)

    def synced(self, worker_id: str) -> bool:
        source = self._sources.get(worker_id)
        return source is not None and source.synced

    def position(self, worker_id: str) -> tuple[int, int]:
        """(epoch, sequence) to ask the worker's feed to go on from; sequence 0 asks for a snapshot."""
        source = self._source(worker_id)
        return source.epoch, source.sequence if source.synced else 0

    def export(self, worker_id: str) -> Export | None:
        """None while the worker's feed is not followed without a gap."""
        source = self._sources.get(worker_id)
        if source is None or not source.synced:
            return None
        keys, events = list(source.keys), []
        if keys:
            events.append(CacheEvent(Kind.STORED, keys))
        for tier, at in (("host", 0), ("disk", 1)) if self._lower else ():
            lower = [key for key in keys if self._lower.get(key, (0, 0))[at] >> source.bit & 1]
            if lower:
                events.append(CacheEvent(Kind.TIER_CHANGED, lower, tier))
        for key, length in source.checkpoints:
            events.append(CacheEvent(Kind.CHECKPOINT_READY, (key,), self._state_tier(key, length, source.bit), length))
        return Export(source.epoch, source.sequence, events)

    # --- the feed -----------------------------------------------------------------------------------------------

    def apply(self, worker_id: str, batch: Batch) -> bool:
        """False: something is missing between what is known and this batch; it was not taken, ask for a snapshot."""
        source = self._source(worker_id)
        if batch.epoch < source.epoch or batch.first_sequence > MAX_SEQUENCE:
            return True  # of a life that is over, or no number a worker can have counted to
        if batch.epoch > source.epoch:
            self._clear(source)
            source.epoch, source.sequence, source.synced, source.in_snapshot = batch.epoch, 0, True, False
        if batch.snapshot:
            self._snapshot(source, batch)
            return True
        skip = source.sequence + 1 - batch.first_sequence
        if not source.synced or skip < 0:
            source.synced = False
            return False
        for event in batch.events[skip:]:
            self._take(source, event)
        source.sequence = max(source.sequence, batch.first_sequence + len(batch.events) - 1)
        return True

    def expect(self, worker_id: str, keys: Sequence[bytes], now: float) -> None:
        """A prompt was sent there: its links will be there soon. Believed for a while, unless an event says so."""
        bit = 1 << self._source(worker_id).bit
        for key in keys:
            self._expected[key] = self._expected.get(key, 0) | bit
        self._expiries.append((now + self._expect_s, bit, keys))
        self._expire(now)

    # --- look-up ------------------------------------------------------------------------------------------------

    def match(self, keys: Keys, *, expected: bool = False) -> dict[int, Hit]:
        """Bit of worker -> its hit; workers without any are left out. expected: count what is on its way, too."""
        units = self._walk(keys, self._any_expected if expected and self._expected else self._any)
        if not units:
            return {}
        lower = bool(self._lower)
        device = self._walk(keys, self._on_device) if lower else units
        host = self._walk(keys, self._above_disk) if lower else units
        size, resumes = keys.unit_tokens, self._resumes(keys, units)
        return {
            bit: Hit(
                count * size,
                min(device.get(bit, 0), count) * size,
                min(host.get(bit, 0), count) * size,
                *(resumes.get(bit, (0, "")) if self.stateful else (count * size, "")),
            )
            for bit, count in units.items()
        }

    def _any(self, key: bytes) -> int:
        bits = self._units.get(key, 0)
        if bits and not bits & _TOUCHED:
            self._units[key] = bits | _TOUCHED
        return bits

    def _any_expected(self, key: bytes) -> int:
        return self._any(key) | self._expected.get(key, 0)

    def _on_device(self, key: bytes) -> int:
        host, disk = self._lower.get(key, (0, 0))
        return self._units.get(key, 0) & ~(host | disk)

    def _above_disk(self, key: bytes) -> int:
        return self._units.get(key, 0) & ~self._lower.get(key, (0, 0))[1]

    def _walk(self, keys: Keys, look: Callable[[bytes], int]) -> dict[int, int]:
        """Units of the longest prefix of every worker, by bit."""
        here = self._all_bits()
        ends: list[tuple[int, int]] = []
        index = 0
        for link in keys.links():
            left = here & look(link)
            if left != here:
                ends.append((here & ~left, index))
                here = left
                if not here:
                    break
            index += 1
        if here:
            ends.append((here, index))
        found: dict[int, int] = {}
        for bits, link_index in ends:
            self._walk_link(keys, link_index, bits, look, found)
        return found

    def _walk_link(self, keys: Keys, link: int, here: int, look: Callable[[bytes], int], found: dict[int, int]) -> None:
        count = link * (LINK_TOKENS // keys.unit_tokens)
        for key in keys.units(link):
            left = here & look(key)
            if left != here:
                note(here & ~left, count, found)
                here = left
                if not here:
                    return
            count += 1
        note(here, count, found)

    def _resumes(self, keys: Keys, units: dict[int, int]) -> dict[int, tuple[int, str]]:
        """The last checkpoint at or before each worker's KV, and its tier. Looked for at links and beside the ends of
        prefixes."""
        if not self.stateful or not self._checkpoints:
            return {}
        per_link = LINK_TOKENS // keys.unit_tokens
        places = [link for link in keys.links() if link in self._checkpoints]
        for link in {count // per_link for count in units.values()}:
            places += [key for key in keys.units(link) if key in self._checkpoints]
        found = sorted(
            ((length, bits, key) for key in set(places) for length, bits in self._checkpoints[key].items()),
            reverse=True,
        )
        resumes: dict[int, tuple[int, str]] = {}
        for bit, count in units.items():
            most = min((count + 1) * keys.unit_tokens - 1, keys.tokens)
            last = next(((length, key) for length, bits, key in found if length <= most and bits >> bit & 1), None)
            if last is not None:
                tier = self._state_tier(last[1], last[0], bit)
                resumes[bit] = (last[0], tier if tier != "device" else "")
        return resumes

    def _state_tier(self, key: bytes, length: int, bit: int) -> str:
        host, disk = self._lower_states.get((key, length), (0, 0))
        if host >> bit & 1:
            return "host"
        return "disk" if disk >> bit & 1 else "device"

    # --- inside -------------------------------------------------------------------------------------------------

    def _source(self, worker_id: str) -> _Source:
        source = self._sources.get(worker_id)
        if source is None:
            bit = self._free_bits.pop() if self._free_bits else len(self._sources) + 1
            source = self._sources[worker_id] = _Source(bit)
        return source

    def _all_bits(self) -> int:
        return ((1 << (len(self._sources) + len(self._free_bits) + 1)) - 1) & ~_TOUCHED

    def _snapshot(self, source: _Source, batch: Batch) -> None:
        if not source.in_snapshot:
            self._clear(source)
        source.in_snapshot = not batch.snapshot_end
        for event in batch.events:
            self._take(source, event)
        source.sequence = batch.first_sequence
        source.synced = batch.snapshot_end

    def _take(self, source: _Source, event: CacheEvent) -> None:
        match event.kind:
            case Kind.STORED:
                self._store(source, event.keys)
                if event.tier != "device":
                    self._retier(source, event.keys, event.tier)
            case Kind.TIER_CHANGED:
                self._store(source, event.keys)
                self._retier(source, event.keys, event.tier)
            case Kind.REMOVED:
                for key in event.keys:
                    if key in source.keys:
                        source.keys.discard(key)
                        self._unset(key, source.bit)
            case Kind.CHECKPOINT_READY:
                for key in event.keys:
                    self._store_checkpoint(source, key, event.state_length, event.tier)
            case Kind.CHECKPOINT_REMOVED:
                for key in event.keys:
                    self._drop_checkpoint(source, key, event.state_length)

    def _store(self, source: _Source, keys: Sequence[bytes]) -> None:
        bit, units = 1 << source.bit, self._units
        for key in keys:
            known = units.get(key)
            if known is None:
                self._order.append(key)
                units[key] = bit
            else:
                units[key] = known | bit
            source.keys.add(key)
        if self._lower:
            self._retier(source, keys, "device")
        while len(units) > self._max:
            self._evict()

    def _retier(self, source: _Source, keys: Sequence[bytes], tier: str) -> None:
        for key in keys:
            place(self._lower, key, source.bit, tier)

    def _unset(self, key: bytes, bit: int) -> None:
        left = self._units.get(key, 0) & ~(1 << bit)
        if left & ~_TOUCHED:
            self._units[key] = left
            lower = self._lower.get(key)
            if lower is not None:
                self._lower[key] = (lower[0] & ~(1 << bit), lower[1] & ~(1 << bit))
        else:
            self._units.pop(key, None)
            self._lower.pop(key, None)
            if len(self._order) > 2 * len(self._units) + 1024:
                self._order = deque(self._units)

    def _evict(self) -> None:
        """Second chance: what was looked up since the last pass goes to the end of the line once."""
        while True:
            key = self._order.popleft()
            bits = self._units.get(key)
            if bits is None:
                continue
            if bits & _TOUCHED:
                self._units[key] = bits & ~_TOUCHED
                self._order.append(key)
                continue
            del self._units[key]
            self._lower.pop(key, None)
            self._forget_states(key)
            holders = set(bits_of(bits & ~_TOUCHED))
            for source in self._sources.values():
                if source.bit in holders:
                    source.keys.discard(key)
            return

    def _store_checkpoint(self, source: _Source, key: bytes, length: int, tier: str) -> None:
        lengths = self._checkpoints.setdefault(key, {})
        self._states += length not in lengths
        lengths[length] = lengths.get(length, 0) | 1 << source.bit
        source.checkpoints.add((key, length))
        if self._lower_states or tier != "device":
            place(self._lower_states, (key, length), source.bit, tier)
        while self._states > self._max:
            self._forget_states(next(iter(self._checkpoints)))

    def _forget_states(self, key: bytes) -> None:
        for source in self._sources.values():
            for length in [at for at in self._checkpoints.get(key, ()) if (key, at) in source.checkpoints]:
                self._drop_checkpoint(source, key, length)

    def _drop_checkpoint(self, source: _Source, key: bytes, length: int) -> None:
        source.checkpoints.discard((key, length))
        place(self._lower_states, (key, length), source.bit, "device")
        lengths = self._checkpoints.get(key)
        if lengths is None or length not in lengths:
            return
        lengths[length] &= ~(1 << source.bit)
        if not lengths[length]:
            del lengths[length]
            self._states -= 1
        if not lengths:
            del self._checkpoints[key]

    def _clear(self, source: _Source) -> None:
        for key in source.keys:
            self._unset(key, source.bit)
        source.keys = set()
        for key, length in list(source.checkpoints):
            self._drop_checkpoint(source, key, length)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            _, bit, keys = self._expiries.popleft()
            self._forget_expected(bit, keys)

    def _drop_expected(self, bit: int) -> None:
        for entry in [entry for entry in self._expiries if entry[1] == 1 << bit]:
            self._expiries.remove(entry)
            self._forget_expected(entry[1], entry[2])

    def _forget_expected(self, bit: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            left = self._expected.get(key, 0) & ~bit
            if left:
                self._expected[key] = left
            else:
                self._expected.pop(key, None)

    def check(self) -> None:
        """Assert that every entry is somebody's, and the bound. Raises AssertionError."""
        assert len(self._units) <= self._max
        by_bit = {source.bit: source for source in self._sources.values()}
        assert len(by_bit) == len(self._sources), "two workers share a bit"
        held = {(key, source.bit) for source in self._sources.values() for key in source.keys}
        listed = {(key, bit) for key, bits in self._units.items() for bit in bits_of(bits & ~_TOUCHED)}
        assert held == listed, "an entry without its worker, or a worker without its entry"
        for key, (host, disk) in self._lower.items():
            assert not (host | disk) & ~self._units.get(key, 0), "a tier of nobody"
            assert not host & disk, "one copy in two tiers"
        told = ((key, at, bits) for key, lengths in self._checkpoints.items() for at, bits in lengths.items())
        saved = {(key, at, bit) for key, at, bits in told for bit in bits_of(bits)}
        assert saved == {(*state, source.bit) for source in self._sources.values() for state in source.checkpoints}
        assert self._states == len({(key, at) for key, at, _ in saved}) <= self._max
        for (key, length), (host, disk) in self._lower_states.items():
            assert not (host | disk) & ~self._checkpoints.get(key, {}).get(length, 0), "a tier of no state"
            assert not host & disk, "one state in two tiers"
        assert set(self._units) <= set(self._order), "an entry that can never be evicted"
