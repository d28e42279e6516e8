"""Agent, embedded registry and feed together, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from protos.v1 import registry_pb2, registry_pb2_grpc
from runtime import rpc
from runtime.clock import FakeClock, SystemClock
from runtime.config import Config
from runtime.errors import InvalidRequest, RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry import open_store
from runtime.registry.agent import RegistryAgent
from runtime.registry.feed import Feed
from runtime.registry.memory import MemoryStore
from runtime.registry.service import RegistryService
from runtime.registry.store import Snapshot, Store, WorkerRecord
from tests.unit.runtime.servers import RedisServer, until, until_async

TTL_S = 0.6


def record(epoch: int = 1, **fields: object) -> WorkerRecord:
    return WorkerRecord(worker_id="w", epoch=epoch, address="127.0.0.1:9", **fields)  # type: ignore[arg-type]


def worker_config(registry: str) -> Config:
    return Config.load({"registry": registry, "registry_ttl_s": TTL_S})


@asynccontextmanager
async def registry(store: Store, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    config = Config()
    server = rpc.server(config)
    RegistryService(store, Config(registry_ttl_s=TTL_S)).add_to(server)
    address = rpc.bind(server, listen, config)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


class Seen:
    """A feed's callbacks, written down."""

    def __init__(self, store: Store, clock: FakeClock | SystemClock, metrics: Metrics | None = None) -> None:
        self.log: list[str] = []
        self.feed = Feed(
            store,
            TTL_S,
            clock,
            added=lambda new: self.log.append(f"added {new.worker_id}/{new.epoch}"),
            changed=lambda old, new: self.log.append(f"changed {old.ready} to {new.ready}"),
            removed=lambda old: self.log.append(f"removed {old.worker_id}/{old.epoch}"),
            metrics=metrics,
        )


async def knows(store: Store, **fields: object) -> bool:
    found = (await store.snapshot()).records.get("w")
    return found is not None and all(getattr(found, name) == value for name, value in fields.items())


async def test_an_agent_registers_updates_renews_and_says_goodbye() -> None:
    store = MemoryStore(SystemClock())
    async with registry(store) as address:
        agent = RegistryAgent(worker_config(address), record())
        agent.start()
        async with asyncio.timeout(5):
            await agent.registered.wait()
        agent.update(record(ready=True))
        await until_async(lambda: knows(store, ready=True))
        await asyncio.sleep(2 * TTL_S)  # longer than an unrenewed registration lives
        assert await knows(store, ready=True)
        await agent.stop()
        assert not await knows(store)


async def test_an_agent_waits_for_a_registry_that_comes_later_and_returns_after_its_restart() -> None:
    first = MemoryStore(SystemClock())
    async with registry(first) as address:
        pass
    metrics = Metrics()
    agent = RegistryAgent(worker_config(address), record(), metrics)
    agent.start()
    await until(lambda: metrics.value("pdserve_registry_losses_total") >= 2)
    assert not agent.registered.is_set()
    for _ in range(2):  # two lives of the router, on the same port
        store = MemoryStore(SystemClock())
        async with registry(store, address):
            await until_async(lambda store=store: knows(store, epoch=1))  # type: ignore[misc]
        await until(lambda: not agent.registered.is_set())
    await agent.stop()


async def test_stopping_an_agent_whose_registry_is_away_does_not_wait() -> None:
    agent = RegistryAgent(worker_config("127.0.0.1:1"), record())
    agent.start()
    async with asyncio.timeout(3):
        await agent.stop()
        await agent.stop()


async def test_a_record_that_no_registry_takes_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest):
        RegistryAgent(worker_config("127.0.0.1:1"), WorkerRecord(worker_id="w"))


async def test_a_lost_stream_leaves_the_worker_one_ttl_to_come_back() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with registry(store) as address:
        channel = rpc.channel(address, Config())
        call: Any = registry_pb2_grpc.RegistryStub(channel).Register()  # type: ignore[call-arg]
        await call.write(record())
        ack = await call.read()
        assert (ack.ttl_ms, ack.renew_every_ms) == (600, 200)
        await channel.close(None)
        clock.advance(TTL_S - 0.01)
        assert await knows(store)
        clock.advance(0.01)
        assert not await knows(store)


async def test_a_frozen_worker_whose_stream_stays_open_expires() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    async with registry(store) as address:
        channel = rpc.channel(address, Config())
        call: Any = registry_pb2_grpc.RegistryStub(channel).Register()  # type: ignore[call-arg]
        await call.write(record())
        await call.read()
        clock.advance(TTL_S)
        assert not await knows(store)
        await call.write(record())
        await call.read()
        assert await knows(store)
        await channel.close(None)


async def test_a_stream_of_an_older_epoch_is_refused() -> None:
    store = MemoryStore(SystemClock())
    await store.put(record(epoch=9), 60)
    async with registry(store) as address:
        channel = rpc.channel(address, Config())
        call: Any = registry_pb2_grpc.RegistryStub(channel).Register()  # type: ignore[call-arg]
        await call.write(record(epoch=8))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert rpc.from_rpc_error(caught.value).reason == "superseded"
        await channel.close(None)


async def test_list_answers_what_the_store_holds() -> None:
    store = MemoryStore(SystemClock())
    await store.put(record(), 60)
    async with registry(store) as address:
        channel = rpc.channel(address, Config())
        reply = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest())
        assert list(reply.workers) == [record()]
        await channel.close(None)


async def test_a_feed_tells_of_coming_changing_restarting_and_going() -> None:
    """Public report T168 (vllm-project/production-stack#1091)."""
    clock = FakeClock()
    store = MemoryStore(clock)
    seen = Seen(store, clock)
    await store.put(record(), TTL_S)
    await seen.feed.turn()
    await store.put(record(ready=True), TTL_S)
    await seen.feed.turn()
    await store.put(record(epoch=2), TTL_S)
    await seen.feed.turn()
    clock.advance(TTL_S)
    await seen.feed.turn()
    assert seen.log == ["added w/1", "changed False to True", "removed w/1", "added w/2", "removed w/2"]


async def test_a_feed_in_motion_sees_a_change_without_waiting_for_its_turn() -> None:
    store = MemoryStore(SystemClock())
    seen = Seen(store, SystemClock())
    seen.feed._ttl_s = 3600.0  # no turn comes by itself
    seen.feed.start()
    await seen.feed.synced.wait()
    await store.put(record(), 60)
    await until(lambda: seen.log == ["added w/1"])
    await store.remove("w", 1)
    await until(lambda: seen.log == ["added w/1", "removed w/1"])
    await seen.feed.stop()


async def test_while_redis_is_away_the_view_stays_and_nobody_is_lost_when_it_comes_back_empty(
    own_redis: RedisServer,
) -> None:
    """Public report T147 (kvcache-ai/Mooncake#2246)."""
    config = worker_config(own_redis.url)
    metrics = Metrics()
    store = open_store(config, metrics)
    seen = Seen(store, SystemClock(), metrics)
    seen.feed.start()
    agent = RegistryAgent(config, record(), metrics)
    agent.start()
    await until(lambda: seen.log == ["added w/1"])

    own_redis.kill()
    await until(lambda: not seen.feed.available and not agent.registered.is_set())
    assert list(seen.feed.workers) == ["w"]
    assert metrics.value("pdserve_registry_outages_total") == 1

    own_redis.start()  # empty
    await until(lambda: seen.feed.available and agent.registered.is_set())
    await asyncio.sleep(2 * TTL_S)  # beyond the grace
    assert seen.log == ["added w/1"]
    await agent.stop()
    await until(lambda: seen.log == ["added w/1", "removed w/1"])
    await seen.feed.stop()
    await store.close()


async def test_a_worker_lost_during_an_outage_is_removed_one_ttl_after_it() -> None:
    class Flaky(MemoryStore):
        away = False

        async def snapshot(self) -> Snapshot:
            if self.away:
                raise RegistryUnavailable("away")
            return await super().snapshot()

    clock = FakeClock()
    store = Flaky(clock)
    seen = Seen(store, clock)
    await store.put(record(), TTL_S)
    await seen.feed.turn()
    store.away = True
    clock.advance(100)
    await seen.feed.turn()
    store.away = False
    await seen.feed.turn()
    assert seen.log == ["added w/1"]
    clock.advance(TTL_S)
    await seen.feed.turn()
    assert seen.log == ["added w/1", "removed w/1"]


async def test_a_worker_whose_record_somebody_spoiled_stays_one_ttl() -> None:
    class Spoiled(MemoryStore):
        spoiled = False

        async def snapshot(self) -> Snapshot:
            known = await super().snapshot()
            return replace(known, records={}, unreadable=frozenset(known.records)) if self.spoiled else known

    clock = FakeClock()
    store = Spoiled(clock)
    seen = Seen(store, clock)
    await store.put(record(), 100)
    await seen.feed.turn()
    store.spoiled = True
    await seen.feed.turn()
    store.spoiled = False  # it was renewed
    await seen.feed.turn()
    clock.advance(2 * TTL_S)
    store.spoiled = True
    await seen.feed.turn()
    assert seen.log == ["added w/1"]
    clock.advance(TTL_S)
    await seen.feed.turn()
    assert seen.log == ["added w/1", "removed w/1"]


async def test_a_router_that_stood_still_declares_nobody_gone_before_they_could_renew() -> None:
    class Waits(MemoryStore):
        """Every wait takes as long as the test says."""

        def __init__(self) -> None:
            super().__init__(clock)
            self.taken: asyncio.Queue[float] = asyncio.Queue()

        async def wait(self, cursor: str, timeout_s: float) -> None:
            clock.advance(await self.taken.get())
            self.taken.task_done()

    clock = FakeClock()
    store = Waits()
    seen = Seen(store, clock)
    await store.put(record(), TTL_S)
    seen.feed.start()
    store.taken.put_nowait(10 * TTL_S)
    for _ in range(4):
        store.taken.put_nowait(TTL_S / 4)
    await until(lambda: not store.taken.qsize())
    assert seen.log == ["added w/1"]
    store.taken.put_nowait(TTL_S / 4)
    await until(lambda: seen.log == ["added w/1", "removed w/1"])  # it has not renewed: a TTL later it goes
    await seen.feed.stop()


async def test_a_fault_over_one_worker_hides_no_other() -> None:
    store, seen = MemoryStore(SystemClock()), list[str]()

    def added(new: WorkerRecord) -> None:
        if new.worker_id == "odd":
            raise ZeroDivisionError
        seen.append(new.worker_id)

    feed = Feed(store, TTL_S, SystemClock(), added=added, changed=lambda old, new: None, removed=lambda old: None)
    await store.put(WorkerRecord(worker_id="odd", epoch=1, address="127.0.0.1:9"), 60.0)
    feed.start()
    await store.put(record(), 60.0)
    await until(lambda: seen == ["w"])
    await store.put(WorkerRecord(worker_id="late", epoch=1, address="127.0.0.1:9"), 60.0)
    await until(lambda: seen == ["w", "late"])
    await feed.stop()
