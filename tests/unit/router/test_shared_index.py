"""What one router leaves of workers' caches for the next: the log's bytes, its writer, its reader."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.v1 import worker_pb2
from router.admission.line import Line
from router.policy.index import Batch, CacheEvent, Export, Kind, PrefixIndex
from router.shared.cache_wire import KEYS_PER_BATCH, batch_of, snapshot_of
from router.shared.index import GROWTH_BYTES, KEEP_S, WRITER_TTL_S, SharedIndex
from router.shared.index_log import Frames, Unreadable
from router.shared.quotas import Quotas
from runtime.clock import FakeClock
from runtime.errors import RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry.memory import MemoryStore

SECRET = b"s" * 32
GENERATION = b"g" * 8
GROUP = "v1 page=16"
STORED = worker_pb2.CacheEvent.KIND_STORED
REMOVED = worker_pb2.CacheEvent.KIND_REMOVED


def frames(secret: bytes = SECRET, namespace: tuple[str, ...] = ("model", "1"), worker: str = "w") -> Frames:
    return Frames(secret, namespace, worker)


def log(*messages: bytes, of: Frames | None = None, generation: bytes = GENERATION) -> bytes:
    made = of or frames()
    return b"".join(made.seal(generation, number, message) for number, message in enumerate(messages))


# --- the bytes


def test_messages_come_back_as_they_were() -> None:
    assert list(frames().messages(log(b"one", b"", b"x" * 5000))) == [b"one", b"", b"x" * 5000]
    assert list(frames().messages(b"")) == []


@pytest.mark.parametrize(
    "other",
    [frames(secret=b"t" * 32), frames(namespace=("model", "2")), frames(worker="v"), frames(namespace=("mode", "l1"))],
)
def test_a_log_of_another_deployment_model_layout_or_worker_is_unreadable_and_elsewhere(other: Frames) -> None:
    with pytest.raises(Unreadable):
        list(frames().messages(log(b"one", of=other)))
    assert other.name != frames().name


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_wrong_byte_anywhere_is_noticed(place: int, flip: int) -> None:
    good = log(b"one", b"two", b"three")
    place %= len(good)
    bad = good[:place] + bytes([good[place] ^ flip]) + good[place + 1 :]
    with pytest.raises(Unreadable):
        list(frames().messages(bad))


def test_a_missing_repeated_or_foreign_frame_is_noticed() -> None:
    one, two = (frames().seal(GENERATION, number, b"m") for number in (0, 1))
    other = frames().seal(b"h" * 8, 1, b"m")
    assert len(list(frames().messages(one + two))) == 2
    for bad in (two, one + one, one + other, one + two[:-1], one + two[:3], b"\xff" * 40, b"\x00" * 40):
        with pytest.raises(Unreadable):
            list(frames().messages(bad))


# --- what the index exports


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


@pytest.mark.parametrize("count", [0, 1, KEYS_PER_BATCH, 2 * KEYS_PER_BATCH + 1])
def test_a_snapshot_of_an_export_makes_the_same_index(count: int) -> None:
    one = PrefixIndex(stateful=True)
    events = [
        CacheEvent(Kind.STORED, keys(*range(count))),
        CacheEvent(Kind.TIER_CHANGED, keys(*range(count // 2)), "host"),
        CacheEvent(Kind.TIER_CHANGED, keys(*range(count // 4)), "disk"),
        CacheEvent(Kind.CHECKPOINT_READY, keys(count), state_length=77),
    ]
    one.apply("w", Batch(5, 1, events))
    export = one.export("w")
    assert export is not None

    other = PrefixIndex(stateful=True)
    other.bit("someone else")
    for wire in snapshot_of(export):
        assert sum(len(event.page_keys) for event in wire.events) <= KEYS_PER_BATCH
        assert other.apply("w", batch_of(wire))

    other.check()
    assert other.position("w") == (5, 4)
    again = other.export("w")
    assert again is not None
    assert content(again) == content(export)


def content(export: Export) -> set[tuple[object, ...]]:
    return {(e.kind, key, e.tier, e.state_length) for e in export.events for key in e.keys}


def test_nothing_is_exported_of_a_feed_with_a_gap() -> None:
    index = PrefixIndex()
    index.apply("w", Batch(1, 1, [CacheEvent(Kind.STORED, keys(1))]))
    assert not index.apply("w", Batch(1, 9, []))
    assert index.export("w") is None
    assert index.export("nobody") is None


# --- writer and reader


class Flaky(MemoryStore):
    """A Redis that can be away."""

    away = False

    async def read_log(self, log: str, start: int) -> bytes:
        self._check()
        return await super().read_log(log, start)

    async def append_logs(self, items: Mapping[str, bytes], ttl_s: float) -> Mapping[str, int]:
        self._check()
        return await super().append_logs(items, ttl_s)

    def _check(self) -> None:
        if self.away:
            raise RegistryUnavailable("away")


@dataclass
class Side:
    """A router's index with its share in the logs."""

    store: MemoryStore
    clock: FakeClock
    name: str = "one"
    index: PrefixIndex = field(default_factory=PrefixIndex)
    metrics: Metrics = field(default_factory=Metrics)
    sequence: int = 0

    def __post_init__(self) -> None:
        self.shared = SharedIndex(self.store, self.index, ("model", "1"), SECRET, self.name, self.clock, self.metrics)

    def hears(self, *numbers: int, kind: int = STORED, worker: str = "w", **fields: object) -> None:
        self.sequence += 1
        event = worker_pb2.CacheEvent(kind=worker_pb2.CacheEvent.Kind.ValueType(kind), page_keys=keys(*numbers))
        wire = worker_pb2.CacheEventBatch(first_sequence=self.sequence, events=[event], epoch=1, **fields)  # type: ignore[arg-type]
        assert self.index.apply(worker, batch_of(wire))
        self.shared.heard(worker, GROUP, wire)

    def known(self, worker: str = "w") -> set[bytes]:
        export = self.index.export(worker)
        return {one for event in export.events for one in event.keys} if export is not None else set()

    async def flush(self) -> None:
        await self.shared.flush()

    async def load(self, worker: str = "w", epoch: int = 1, group: str = GROUP) -> str:
        before = self.outcomes()
        await self.shared.load(worker, group, epoch)
        return next(name for name, count in self.outcomes().items() if count > before[name])

    def outcomes(self) -> dict[str, float]:
        names = ("taken", "none", "stale", "unreadable", "unavailable", "skipped")
        return {name: self.metrics.value("pdserve_router_index_logs_total", {"outcome": name}) for name in names}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Flaky:
    return Flaky(clock)


@pytest.fixture
def one(store: Flaky, clock: FakeClock) -> Side:
    return Side(store, clock)


def another(one: Side, name: str = "two") -> Side:
    return Side(one.store, one.clock, name)


async def test_a_new_router_knows_what_the_old_one_does_and_goes_on_from_there(one: Side) -> None:
    one.hears(1, 2, 3)
    await one.flush()
    one.hears(4)
    one.hears(2, 3, kind=REMOVED)
    await one.flush()

    two = another(one)
    assert await two.load() == "taken"
    assert two.known() == one.known() == set(keys(1, 4))
    assert two.index.position("w") == (1, 3), "it asks the worker for what came after"


async def test_a_worker_that_says_nothing_more_is_kept_known(one: Side, clock: FakeClock) -> None:
    one.hears(1)
    await one.flush()
    for _ in range(8):
        clock.advance(KEEP_S / 2 - 1)
        await one.flush()  # takes the writer's share again, too
    two = another(one)
    assert await two.load() == "taken"
    assert two.index.position("w") == (1, 1)


async def test_one_router_writes_and_another_takes_over_when_it_is_gone(one: Side, clock: FakeClock) -> None:
    two = another(one)
    for side in (one, two):
        side.hears(1)
        await side.flush()
    assert (one.shared.writing, two.shared.writing) == (True, False)

    clock.advance(WRITER_TTL_S + 0.1)
    two.hears(2)
    await two.flush()
    assert two.shared.writing

    one.hears(2)
    await one.flush()
    assert not one.shared.writing
    assert await another(one, "three").load() == "taken"


async def test_a_writer_that_leaves_makes_room_at_once(one: Side) -> None:
    await one.flush()
    await one.shared.close()
    two = another(one)
    await two.flush()
    assert two.shared.writing


async def test_a_log_somebody_else_wrote_to_is_written_anew(one: Side) -> None:
    one.hears(1)
    await one.flush()
    name = next(iter(one.store._logs))
    await one.store.append_logs({name: b"poison"}, 10)
    assert await another(one).load() == "unreadable"

    one.hears(2)
    await one.flush()  # notices
    await one.flush()
    two = another(one, "three")
    assert await two.load() == "taken"
    assert two.known() == set(keys(1, 2))


async def test_a_log_that_was_lost_is_written_anew(one: Side) -> None:
    one.hears(1)
    await one.flush()
    one.store._logs.clear()
    one.hears(2)
    await one.flush()
    await one.flush()
    two = another(one)
    assert await two.load() == "taken"
    assert two.known() == set(keys(1, 2))


async def test_a_long_log_is_made_short_again(one: Side) -> None:
    one.hears(1)
    await one.flush()
    for _ in range(12):
        one.hears(*range(4000))
        await one.flush()
        one.hears(*range(4000), kind=REMOVED)
        await one.flush()
    (written,) = one.store._logs.values()
    assert len(written.data) < GROWTH_BYTES + 300_000
    two = another(one)
    await two.load()
    assert two.known() == one.known()


async def test_a_snapshot_from_the_worker_replaces_the_log(one: Side) -> None:
    one.hears(1, 2)
    await one.flush()
    one.sequence = 8
    one.hears(3, snapshot=True, snapshot_end=True)
    await one.flush()
    two = another(one)
    assert await two.load() == "taken"
    assert two.known() == set(keys(3))
    assert two.index.position("w") == (1, 9)


async def test_of_another_life_or_layout_of_the_worker_nothing_is_taken(one: Side) -> None:
    one.hears(1)
    await one.flush()
    assert await another(one).load(epoch=2) == "stale"
    assert await another(one).load(group="v1 page=32") == "none"
    assert await another(one).load(worker="v") == "none"


async def test_a_log_that_is_torn_by_a_new_writing_while_it_is_read_is_not_taken(one: Side, store: Flaky) -> None:
    one.hears(*range(40_000))  # more than one read
    await one.flush()
    read = store.read_log

    async def torn(log: str, start: int) -> bytes:
        part = await read(log, start)
        if not start:
            one.shared._forget_all()
            await one.flush()
        return part

    two = another(one)
    two.store.read_log = torn  # type: ignore[method-assign]
    assert await two.load() == "unreadable"
    assert two.known() == set()
    assert two.index.position("w")[1] == 0, "it asks the worker for a snapshot"


async def test_without_the_store_a_router_asks_the_workers_and_writes_everything_when_it_is_back(
    one: Side, store: Flaky, clock: FakeClock
) -> None:
    one.hears(1)
    await one.flush()
    store.away = True
    two = another(one)
    assert await two.load() == "unavailable"
    assert await two.load("v") == "skipped", "the next one is not waited for"
    one.hears(2)
    with pytest.raises(RegistryUnavailable):
        await one.flush()

    store.away = False
    clock.advance(3.0)
    one.shared._forget_all()  # as its task does
    await one.flush()
    assert await two.load() == "taken"
    assert two.known() == set(keys(1, 2))


async def test_what_is_heard_while_a_log_is_written_comes_after_it(one: Side) -> None:
    one.hears(*range(3 * KEYS_PER_BATCH))
    writing = asyncio.create_task(one.flush())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    one.hears(-1)
    await writing
    await one.flush()
    two = another(one)
    assert await two.load() == "taken"
    assert key(-1) in two.known()
    assert two.known() == one.known()


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 12), min_size=1, max_size=5)), max_size=12))
def test_a_reader_at_any_time_knows_what_the_writer_had_heard_at_the_last_flush(
    changes: Iterable[tuple[bool, list[int]]],
) -> None:
    async def play() -> None:
        clock = FakeClock()
        one = Side(Flaky(clock), clock)
        one.hears(99)
        await one.flush()
        for number, (stored, numbers) in enumerate(changes):
            one.hears(*numbers, kind=STORED if stored else REMOVED)
            await one.flush()
            two = another(one, f"reader {number}")
            assert await two.load() == "taken"
            assert two.known() == one.known()
            two.index.check()

    asyncio.run(play())


async def test_a_fault_of_one_turn_ends_neither_the_writer_nor_the_settling_of_limits(
    store: Flaky, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.shared.index.FLUSH_S", 0.001)
    monkeypatch.setattr("router.shared.quotas.IDLE_S", 0.021)
    turns, later = 0, asyncio.Event()

    async def faulty() -> None:
        nonlocal turns
        turns += 1
        if turns > 2:
            later.set()
        raise ZeroDivisionError

    one = Side(store, clock)
    quotas = Quotas(store, "one", [], Line(1, clock), clock, Metrics())
    for part, method in ((one.shared, "flush"), (quotas, "settle")):
        turns = 0
        later.clear()
        monkeypatch.setattr(part, method, faulty)
        part.start()
        await asyncio.wait_for(later.wait(), 5)
        await part.close()
