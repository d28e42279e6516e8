"""What only a Redis can do: answer garbage, be full, stand still, be gone, come back empty."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from redis.asyncio import Connection, Redis

import runtime.registry.redis as module
from runtime.errors import InvalidRequest, RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry.pools import MAX_POOL_BYTES, Wish
from runtime.registry.redis import COMMANDS, RedisStore
from runtime.registry.store import MAX_RECORD_BYTES, WorkerRecord
from tests.unit.runtime.servers import RedisServer, until_async

GOOD = WorkerRecord(worker_id="good", epoch=1, address="127.0.0.1:1")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def store(redis_url: str, metrics: Metrics) -> AsyncIterator[RedisStore]:
    store = RedisStore(redis_url, metrics)
    yield store
    await store.close()


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        yield client


def ignored(metrics: Metrics, cause: str) -> float:
    return metrics.value("pdserve_registry_ignored_records_total", {"cause": cause})


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (b"\xff" * 40, "malformed"),
        (b"\x80\x04\x95\x10", "malformed"),  # a pickle's first bytes
        (WorkerRecord(worker_id="bad").SerializeToString(), "malformed"),
        (b"x" * (MAX_RECORD_BYTES + 1), "oversized"),
        (b"x" * (8 << 20), "oversized"),
    ],
)
async def test_garbage_is_ignored_counted_and_can_be_replaced(
    store: RedisStore, raw: Redis, metrics: Metrics, value: bytes, cause: str
) -> None:
    await store.put(GOOD, 10)
    await raw.set("{pdserve}:worker:bad", value)
    await raw.zadd("{pdserve}:workers", {"bad": 0})
    assert set((await store.snapshot()).records) == {"good"}
    assert ignored(metrics, cause) == 1
    await store.put(WorkerRecord(worker_id="bad", epoch=1, address="a:1"), 10)
    assert set((await store.snapshot()).records) == {"good", "bad"}


@pytest.mark.parametrize(
    "value",
    [
        b"\x80\x04\x95\x10",
        b"[]",
        b"{" * 200_000,
        b'{"a": 1}',
        b'{"a": [1e99, {}]}',
        b'{"a": [1, {"t": [0, -1]}]}',
        b'{"a": [1, {"t": [' + b"9" * 5000 + b", 1]}]}",
        b'{"a": [true, {}]}',
        b" " * (MAX_POOL_BYTES + 1),
    ],
)
async def test_a_poisoned_pool_is_counted_and_begins_anew(
    store: RedisStore, raw: Redis, metrics: Metrics, value: bytes
) -> None:
    await raw.set("{pdserve}:pool:p", value)
    assert (await store.claim("p", "h", {"t": Wish(3, 5)}, 10)).shares["t"].held == 3
    assert ignored(metrics, "pool") == 1
    assert (await store.claim("p", "other", {"t": Wish(3, 5)}, 10)).shares["t"].held == 2


async def test_a_claim_that_never_ends_is_not_believed(store: RedisStore, raw: Redis) -> None:
    await raw.set("{pdserve}:pool:p", b'{"for ever": [9000000000000000, {"t": [5, 5]}]}')
    assert (await store.claim("p", "h", {"t": Wish(3, 5)}, 10)).shares["t"].held == 3


@pytest.mark.parametrize("value", [b"many", str(2**63 - 1).encode()])
async def test_a_counter_that_is_no_number_begins_anew_and_the_others_count(
    store: RedisStore, raw: Redis, metrics: Metrics, value: bytes
) -> None:
    await raw.set("{pdserve}:count:c", value)
    assert await store.add({"c": 1, "d": 2}, 10) == {"d": 2}
    assert ignored(metrics, "counter") == 1
    assert await store.add({"c": 1, "d": 2}, 10) == {"c": 1, "d": 4}


async def test_a_log_that_is_no_text_is_an_outage(store: RedisStore, raw: Redis) -> None:
    await raw.rpush("{pdserve}:log:l", b"x")
    for call in (store.read_log("l", 0), store.append_logs({"l": b"1"}, 1)):
        with pytest.raises(RegistryUnavailable):
            await call


async def test_with_a_token_only_records_made_with_it_count(
    store: RedisStore, raw: Redis, redis_url: str, metrics: Metrics
) -> None:
    guarded, other = RedisStore(redis_url, metrics, "token"), RedisStore(redis_url, metrics, "tokem")
    await guarded.put(GOOD, 10)
    await store.put(WorkerRecord(worker_id="stray", epoch=1, address="a:1"), 10)
    await other.put(WorkerRecord(worker_id="other", epoch=1, address="a:1"), 10)
    moved = await raw.get("{pdserve}:worker:good")
    assert moved is not None
    await raw.set("{pdserve}:worker:moved", moved)
    await raw.zadd("{pdserve}:workers", {"moved": 0})
    found = await guarded.snapshot()
    assert set(found.records) == {"good"}
    assert found.unreadable == {"stray", "other", "moved"}
    assert "good" not in (await store.snapshot()).records
    await guarded.put(WorkerRecord(worker_id="stray", epoch=1, address="a:1"), 10)
    assert await guarded.remove("good", 1)
    assert set((await guarded.snapshot()).records) == {"stray"}
    await guarded.close()
    await other.close()


async def test_an_incarnation_that_is_no_text_is_just_another_one(store: RedisStore, raw: Redis) -> None:
    await store.put(GOOD, 10)
    before = (await store.snapshot()).incarnation
    await raw.set("{pdserve}:incarnation", b"\x80\x04\x95" + b"\xff" * 1000)
    poisoned = await store.snapshot()
    assert set(poisoned.records) == {"good"}
    assert poisoned.incarnation != before
    assert len(poisoned.incarnation) <= 32


async def test_a_record_under_another_workers_key_is_ignored(store: RedisStore, raw: Redis) -> None:
    await raw.set("{pdserve}:worker:w", GOOD.SerializeToString())
    await raw.zadd("{pdserve}:workers", {"w": 0})
    assert not (await store.snapshot()).records


async def test_a_key_of_another_type_is_an_outage_not_a_crash(store: RedisStore, raw: Redis) -> None:
    await raw.set("{pdserve}:workers", "not a set")
    with pytest.raises(RegistryUnavailable):
        await store.snapshot()


async def test_the_id_of_an_expired_worker_leaves_the_index(store: RedisStore, raw: Redis) -> None:
    await raw.zadd("{pdserve}:workers", {"long gone": 0})
    await store.snapshot()
    assert await raw.zcard("{pdserve}:workers") == 0


async def test_a_full_server_is_an_outage(store: RedisStore, raw: Redis) -> None:
    """Public report T162 (LMCache/LMCache#779)."""
    await store.add({"c": 1}, 10)
    before = (await raw.config_get("maxmemory"))["maxmemory"] or "0"
    await raw.config_set("maxmemory", 1)
    try:
        for call in (store.put(GOOD, 10), store.add({"c": 1}, 10), store.claim("p", "h", {}, 10)):
            with pytest.raises(RegistryUnavailable):
                await call
    finally:
        await raw.config_set("maxmemory", before)
    await store.put(GOOD, 10)
    assert await store.add({"c": 1}, 10) == {"c": 2}, "what was counted before is still there"


async def test_a_server_that_wants_a_password_is_an_outage(own_redis: RedisServer, metrics: Metrics) -> None:
    """Public report T162 (LMCache/LMCache#779): the error after OOM was one of authentication."""
    store, wrong = RedisStore(own_redis.url, metrics), RedisStore(own_redis.url.replace("//", "//:wrong@"), metrics)
    async with Redis.from_url(own_redis.url) as admin:
        await store.put(GOOD, 10)
        await admin.config_set("requirepass", "right")
        await store.close()
        for refused in (RedisStore(own_redis.url, metrics), wrong):
            with pytest.raises(RegistryUnavailable) as error:
                await refused.put(GOOD, 10)
            assert "wrong" not in str(error.value)
            await refused.close()
        await admin.config_set("requirepass", "")


async def test_a_standing_server_costs_its_timeout_once(
    own_redis: RedisServer, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public report T075 (BerriAI/litellm#35273)."""
    store = RedisStore(own_redis.url, metrics)
    await store.put(GOOD, 60)
    own_redis.pause()
    asked, send = [], Connection.send_packed_command

    async def counted(self: Connection, *arguments: Any, **options: Any) -> None:
        asked.append(self)
        await send(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "send_packed_command", counted)
        async with asyncio.timeout(60):
            with pytest.raises(RegistryUnavailable) as error:
                await store.snapshot()
    assert isinstance(error.value.__cause__, redis.TimeoutError)
    assert len(asked) == 1, "whoever calls has pauses of its own between attempts"
    own_redis.resume()

    async def back() -> bool:
        try:
            return set((await store.snapshot()).records) == {"good"}
        except RegistryUnavailable:
            return False

    await until_async(back)
    await store.close()


async def test_an_absent_server_is_an_outage_at_once(metrics: Metrics) -> None:
    store = RedisStore("redis://127.0.0.1:1", metrics)
    for call in (
        store.snapshot(),
        store.put(GOOD, 1),
        store.wait("0", 1),
        store.add({"c": 1}, 1),
        store.read_log("l", 0),
    ):
        with pytest.raises(RegistryUnavailable):
            await call
    await store.close()


async def test_an_invalid_record_is_told_from_an_outage_when_the_server_is_away(metrics: Metrics) -> None:
    store = RedisStore("redis://127.0.0.1:1", metrics)
    with pytest.raises(InvalidRequest):
        await store.put(WorkerRecord(), 1)
    await store.close()


async def test_only_the_listed_commands_are_used(redis_url: str, metrics: Metrics) -> None:
    """An operator gives the store's user exactly COMMANDS on keys of ours; everything works under that."""
    password = "p"
    with redis.Redis.from_url(redis_url) as admin:
        admin.acl_setuser(
            "pdserve", enabled=True, passwords=[f"+{password}"], keys=["{pdserve}:*"],
            commands=[f"+{command.lower()}" for command in COMMANDS], reset=True,
        )  # fmt: skip
    store = RedisStore(redis_url.replace("redis://", f"redis://pdserve:{password}@"), metrics)
    try:
        await store.put(GOOD, 10)
        await store.put(WorkerRecord(worker_id="brief", epoch=1, address="a:1"), 0.001)
        await store.wait((await store.snapshot()).cursor, 0.02)
        assert set((await store.snapshot()).records) == {"good"}
        await store.write_log("l", [b"1"], 1)
        assert await store.append_logs({"l": b"2"}, 1) == {"l": 2}
        assert await store.read_log("l", 0) == b"12"
        assert (await store.claim("p", "h", {"t": Wish(1, 1)}, 1)).holders == 1
        assert await store.add({"c": 1}, 1) == {"c": 1}
        assert await store.remove("good", 1)
    finally:
        await store.close()
        with redis.Redis.from_url(redis_url) as admin:
            admin.acl_deluser("pdserve")


def test_nothing_is_scripted_or_pickled() -> None:
    source = inspect.getsource(module)
    assert "eval(" not in source
    assert "register_script" not in source
    assert "import pickle" not in source
