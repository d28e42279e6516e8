"""A registry that takes over an address knows at once who was registered there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from runtime import rpc
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.registry.agent import RegistryAgent
from runtime.registry.heir import Heir
from runtime.registry.memory import MemoryStore
from runtime.registry.service import RegistryService
from runtime.registry.store import WorkerRecord
from tests.unit.runtime.certificates import Authority
from tests.unit.runtime.servers import until_async

TTL_S = 0.6
CONFIG = Config(registry_ttl_s=TTL_S, registry_token="t", reuse_port=True)


def record(worker: str, epoch: int = 1, **fields: object) -> WorkerRecord:
    return WorkerRecord(worker_id=worker, epoch=epoch, address="127.0.0.1:9", **fields)  # type: ignore[arg-type]


@dataclass
class Home:
    store: MemoryStore
    service: RegistryService
    server: grpc.aio.Server
    address: str

    async def workers(self) -> set[str]:
        return set((await self.store.snapshot()).records)


@asynccontextmanager
async def home(store: MemoryStore, listen: str = "127.0.0.1:0", config: Config = CONFIG) -> AsyncIterator[Home]:
    server = rpc.server(config, shares_port=True)
    service = RegistryService(store, config)
    service.add_to(server)
    made = Home(store, service, server, rpc.bind(server, listen, config))
    await server.start()
    try:
        yield made
    finally:
        await server.stop(0)


async def test_where_nobody_was_nothing_is_inherited() -> None:
    store = MemoryStore(SystemClock())
    heir = Heir(store, CONFIG, "127.0.0.1:1")
    assert not await heir.start()
    await heir.stop()
    assert (await store.snapshot()).records == {}


@pytest.mark.parametrize("secure", [False, True])
async def test_workers_are_known_before_the_new_one_listens_and_come_over_when_the_old_one_leaves(
    secure: bool, tmp_path: Path
) -> None:
    tls = {**Authority.create(tmp_path / "ca").issue("router.pdserve"), "tls_roles": True} if secure else {}
    mine = CONFIG.model_copy(update=tls)
    async with home(MemoryStore(SystemClock()), config=mine) as old:
        config = mine.model_copy(update={"registry": old.address})
        agents = [RegistryAgent(config, record(name, ready=True)) for name in ("a", "b")]
        for agent in agents:
            agent.start()
            await agent.registered.wait()
        store = MemoryStore(SystemClock())
        heir = Heir(store, mine, old.address)
        assert await heir.start()
        assert set((await store.snapshot()).records) == {"a", "b"}
        async with home(store, old.address, mine) as new:
            await asyncio.sleep(4 * TTL_S)  # longer than what nobody renews
            assert await new.workers() == {"a", "b"}

            old.service.leave()
            leaving = asyncio.create_task(old.server.stop(5 * TTL_S))
            agents[0].update(record("a", ready=False))

            async def has_come_over() -> bool:
                return not (await store.snapshot()).records["a"].ready

            await until_async(has_come_over)
            await asyncio.sleep(4 * TTL_S)
            assert await new.workers() == {"a", "b"}, "they renew here"
            await agents[1].stop()
            assert await new.workers() == {"a"}, "and what the old one knew is over"
            await asyncio.sleep(2 * TTL_S)
            assert await new.workers() == {"a"}
            await agents[0].stop()
            await heir.stop()
            await leaving


async def test_a_worker_that_speaks_for_itself_is_not_overruled_by_what_is_inherited() -> None:
    async with home(MemoryStore(SystemClock())) as old:
        await old.store.put(record("a", ready=True), 60)
        store = MemoryStore(SystemClock())
        heir = Heir(store, CONFIG, old.address)
        await heir.start()
        await store.put(record("a", ready=False), 60)
        await asyncio.sleep(TTL_S)
        assert not (await store.snapshot()).records["a"].ready
        await heir.stop()


async def test_who_has_inherited_does_not_inherit_from_itself() -> None:
    """A channel finds another process, or ourselves, at the address when the first one has gone."""
    async with home(MemoryStore(SystemClock())) as old:
        await old.store.put(record("a"), 60)
        store = MemoryStore(SystemClock())
        heir = Heir(store, CONFIG, old.address)
        await heir.start()
        await old.server.stop(0)
        async with home(store, old.address) as new:
            await asyncio.sleep(4 * TTL_S)
            assert await new.workers() == set(), "nobody has renewed it"
        await heir.stop()


async def test_without_the_token_nothing_is_inherited() -> None:
    guarded = CONFIG.model_copy(update={"api_keys_file": "keys.yaml"})
    async with home(MemoryStore(SystemClock()), config=guarded) as old:
        await old.store.put(record("a"), 60)
        heir = Heir(MemoryStore(SystemClock()), CONFIG.model_copy(update={"registry_token": "other"}), old.address)
        assert not await heir.start()
        await heir.stop()
