"""The contract of a registry store, on the memory store and on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from protos.v1 import common_pb2
from runtime.clock import FakeClock
from runtime.errors import InvalidRequest
from runtime.metrics import Metrics
from runtime.registry.memory import MemoryStore
from runtime.registry.pools import Share, Wish
from runtime.registry.redis import RedisStore
from runtime.registry.store import MAX_LOG_BYTES, MAX_READ_BYTES, MAX_RECORD_BYTES, Store, WorkerRecord


@dataclass
class Under:
    """A store under test; pass_ttl() lets more than ttl_s seconds go by on the store's own clock."""

    store: Store
    clock: FakeClock | None
    ttl_s: float

    async def pass_ttl(self) -> None:
        if self.clock is not None:
            self.clock.advance(self.ttl_s)
            return
        await asyncio.sleep(2 * self.ttl_s)  # Redis has its own clock, and looks at it with every command


@pytest.fixture(params=["memory", "redis"])
async def under(request: pytest.FixtureRequest) -> AsyncIterator[Under]:
    if request.param == "memory":
        clock = FakeClock()
        yield Under(MemoryStore(clock), clock, 1.0)
    else:
        store = RedisStore(request.getfixturevalue("redis_url"), Metrics())
        yield Under(store, None, 0.1)
        await store.close()


def record(worker_id: str = "w", epoch: int = 1, **fields: object) -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, epoch=epoch, address="127.0.0.1:1", **fields)  # type: ignore[arg-type]


async def test_what_was_put_is_listed(under: Under) -> None:
    await under.store.put(record("a", ready=True), 10)
    await under.store.put(record("b", epoch=2**63 + 5), 10)
    records = (await under.store.snapshot()).records
    assert records == {"a": record("a", ready=True), "b": record("b", epoch=2**63 + 5)}


async def test_a_record_that_is_not_renewed_expires_and_one_that_is_stays(under: Under) -> None:
    await under.store.put(record("stays"), 100)
    await under.store.put(record("goes"), under.ttl_s)
    await under.pass_ttl()
    assert set((await under.store.snapshot()).records) == {"stays"}


async def test_a_worker_that_expired_may_come_back(under: Under) -> None:
    await under.store.put(record(), under.ttl_s)
    await under.pass_ttl()
    assert not (await under.store.snapshot()).records
    await under.store.put(record(), 10)
    assert set((await under.store.snapshot()).records) == {"w"}


async def test_a_later_put_replaces_the_record(under: Under) -> None:
    await under.store.put(record(), 10)
    await under.store.put(record(draining=True), 10)
    assert (await under.store.snapshot()).records["w"].draining


async def test_the_snapshot_does_not_change_when_the_caller_changes_its_record(under: Under) -> None:
    mine = record()
    await under.store.put(mine, 10)
    mine.ready = True
    assert not (await under.store.snapshot()).records["w"].ready


async def test_an_older_epoch_never_overwrites_a_newer_one(under: Under) -> None:
    await under.store.put(record(epoch=5), 10)
    with pytest.raises(InvalidRequest) as caught:
        await under.store.put(record(epoch=4), 10)
    assert caught.value.reason == "superseded"
    assert (await under.store.snapshot()).records["w"].epoch == 5


async def test_a_newer_epoch_takes_over(under: Under) -> None:
    await under.store.put(record(epoch=5), 10)
    await under.store.put(record(epoch=6), 10)
    assert (await under.store.snapshot()).records["w"].epoch == 6


async def test_the_farewell_of_an_older_epoch_removes_nothing(under: Under) -> None:
    await under.store.put(record(epoch=5), 10)
    assert not await under.store.remove("w", 4)
    assert await under.store.remove("w", 5)
    assert not await under.store.remove("w", 5)
    assert not (await under.store.snapshot()).records


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (WorkerRecord(epoch=1, address="x"), "worker_id"),
        (WorkerRecord(worker_id="w" * 513, epoch=1, address="x"), "worker_id"),
        (WorkerRecord(worker_id="w", address="x"), "epoch"),
        (WorkerRecord(worker_id="w", epoch=1), "address"),
        (WorkerRecord(worker_id="w", epoch=1, address="x", progress="y" * MAX_RECORD_BYTES), "record"),
    ],
)
async def test_a_malformed_record_is_refused(under: Under, bad: WorkerRecord, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await under.store.put(bad, 10)
    assert caught.value.field == field
    assert not (await under.store.snapshot()).records


@pytest.mark.parametrize("change", ["new", "changed", "removed"])
async def test_a_change_wakes_a_waiting_watcher(under: Under, change: str) -> None:
    if change != "new":
        await under.store.put(record(), 100)
    cursor = (await under.store.snapshot()).cursor
    waiting = asyncio.create_task(under.store.wait(cursor, 60))
    if change == "removed":
        await under.store.remove("w", 1)
    else:
        await under.store.put(record(ready=True), 100)
    async with asyncio.timeout(5):
        await waiting


async def test_a_change_between_listing_and_waiting_is_not_missed(under: Under) -> None:
    cursor = (await under.store.snapshot()).cursor
    await under.store.put(record(), 100)
    async with asyncio.timeout(5):
        await under.store.wait(cursor, 60)


async def test_a_renewal_with_another_load_wakes_nobody(under: Under) -> None:
    await under.store.put(record(), 100)
    cursor = (await under.store.snapshot()).cursor
    await under.store.put(record(load=common_pb2.Load(running=3)), 100)
    snapshot = await under.store.snapshot()
    assert snapshot.cursor == cursor
    assert snapshot.records["w"].load.running == 3
    await under.store.wait(cursor, 0.01)  # returns by its timeout


# --- logs


async def test_a_log_is_what_was_written_and_then_appended(under: Under) -> None:
    await under.store.write_log("l", [b"1", b"\x00\xff", b"3"] * 20, 10)
    assert await under.store.append_logs({"l": b"4", "other": b"5"}, 10) == {"l": 81, "other": 1}
    assert await under.store.read_log("l", 0) == b"1\x00\xff3" * 20 + b"4"
    assert await under.store.read_log("l", 79) == b"34"
    assert await under.store.read_log("l", 81) == await under.store.read_log("none", 0) == b""
    assert await under.store.read_log("other", 0) == b"5"


async def test_a_log_that_is_written_again_is_replaced(under: Under) -> None:
    await under.store.write_log("l", [b"old" * 1000], 10)
    await under.store.write_log("l", [b"new"], 10)
    assert await under.store.read_log("l", 0) == b"new"


async def test_a_read_and_a_log_have_limits(under: Under) -> None:
    await under.store.write_log("l", [b"x" * (MAX_READ_BYTES + 1)], 10)
    assert len(await under.store.read_log("l", 0)) == MAX_READ_BYTES
    assert await under.store.read_log("l", MAX_READ_BYTES) == b"x"
    with pytest.raises(InvalidRequest):
        await under.store.write_log("l", [b"x" * MAX_LOG_BYTES, b"x"], 10)


async def test_a_log_is_forgotten_after_its_time(under: Under) -> None:
    await under.store.write_log("written", [b"1"], under.ttl_s)
    await under.store.append_logs({"appended": b"1"}, under.ttl_s)
    await under.pass_ttl()
    assert await under.store.read_log("written", 0) == await under.store.read_log("appended", 0) == b""


# --- shares of limits


def wish(want: int, limit: int = 10) -> dict[str, Wish]:
    return {"t": Wish(want, limit)}


async def test_shares_never_exceed_the_limit_and_say_who_is_short(under: Under) -> None:
    first = await under.store.claim("p", "a", wish(7), 10)
    assert (first.shares, first.holders) == ({"t": Share(7)}, 1)
    second = await under.store.claim("p", "b", wish(5), 10)
    assert (second.shares, second.holders) == ({"t": Share(3, others=7)}, 2)
    assert (await under.store.claim("p", "a", wish(4), 10)).shares == {"t": Share(4, others=3, short=2)}
    assert (await under.store.claim("p", "b", wish(5), 10)).shares == {"t": Share(5, others=4)}


async def test_a_slot_that_is_not_named_is_given_back(under: Under) -> None:
    await under.store.claim("p", "a", wish(10), 10)
    assert (await under.store.claim("p", "b", wish(1), 10)).shares["t"].held == 0
    await under.store.claim("p", "a", {}, 10)
    claim = await under.store.claim("p", "b", wish(10), 10)
    assert (claim.shares["t"].held, claim.holders) == (10, 2)


async def test_the_share_of_a_holder_that_died_is_free_after_its_time(under: Under) -> None:
    await under.store.claim("p", "dead", wish(10), under.ttl_s)
    await under.pass_ttl()
    assert (await under.store.claim("p", "b", wish(10), 10)).shares["t"] == Share(10)


async def test_a_holder_that_leaves_counts_no_more(under: Under) -> None:
    await under.store.claim("p", "a", wish(10), 10)
    await under.store.claim("p", "a", {}, 0)
    claim = await under.store.claim("p", "b", wish(10), 10)
    assert (claim.shares["t"].held, claim.holders) == (10, 1)


async def test_claims_at_once_do_not_lose_each_other(under: Under) -> None:
    claims = await asyncio.gather(*(under.store.claim("p", f"h{i}", wish(1, 3), 10) for i in range(4)))
    assert sorted(claim.shares["t"].held for claim in claims) == [0, 1, 1, 1]


# --- counters


async def test_counters_count_and_are_forgotten_after_their_time(under: Under) -> None:
    assert await under.store.add({"c": 1, "d": 7}, 10) == {"c": 1, "d": 7}
    assert await under.store.add({"c": 5}, 10) == {"c": 6}
    assert await under.store.add({"c": -2}, under.ttl_s) == {"c": 4}
    await under.pass_ttl()
    assert await under.store.add({"c": 1, "d": 1}, 10) == {"c": 1, "d": 8}


async def test_two_workers_registering_at_once_are_both_kept(under: Under) -> None:
    await asyncio.gather(*(under.store.put(record(f"w{i}"), 10) for i in range(20)))
    assert len((await under.store.snapshot()).records) == 20
