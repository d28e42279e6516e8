"""Several routers over one Redis: one door, one set of limits, one knowledge of caches; Redis may go at any time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from protos.v1 import common_pb2
from router.app import Router
from router.shared.index import _Log
from runtime.config import Config
from tests.integration.router.scripted import Leg, ScriptedWorker, decode_answers, until
from tests.integration.router.sites import config, serving
from tests.integration.router.test_policies import STORED, CachingWorker
from tests.unit.runtime.servers import RedisServer

FULL = common_pb2.ErrorDetail(reason="saturated", retryable=True)
KEY = {"Authorization": "Bearer one"}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.resume()
    server.kill()


def settings(redis: RedisServer, **changes: Any) -> Config:
    """A time to live that a loaded machine keeps, too."""
    return config(**({"registry": redis.url, "cache_salt_secret": "shared", "registry_ttl_s": 10.0} | changes))


def limited(folder: Path, limits: str) -> str:
    file = folder / "keys.yaml"
    file.write_text(f"{hashlib.sha256(b'one').hexdigest()}: {{tenant: a, {limits}}}\n")
    return str(file)


class Doors:
    """Some routers with the same workers, and a client that goes from one to the next."""

    def __init__(self, stack: AsyncExitStack, workers: tuple[ScriptedWorker, ...]) -> None:
        self._stack = stack
        self.workers = workers
        self.routers: list[Router] = []
        self._clients: list[aiohttp.ClientSession] = []
        self._turn = 0

    async def open(self, settings: Config, *, wait: bool = True) -> Router:
        router = await Router.start(settings)
        self._stack.push_async_callback(router.close)
        self.routers.append(router)
        session = aiohttp.ClientSession(f"http://{router.http}", timeout=aiohttp.ClientTimeout(30))
        client = await self._stack.enter_async_context(session)
        if wait:
            await self.seen(router)
        self._clients.append(client)
        return router

    async def seen(self, router: Router) -> None:
        await until(lambda: sum(state.usable for state in router.fleet.states()) == len(self.workers))

    async def ask(self, at: int | None = None, **fields: Any) -> int:
        """The status of one request."""
        self._turn += 1
        client = self._clients[self._turn % len(self._clients) if at is None else at]
        body = {"prompt": f"call {self._turn}", "max_tokens": 4} | fields
        async with client.post("/v1/completions", json=body, headers=KEY) as response:
            await response.read()
            return response.status

    async def under_load(self, stop: asyncio.Event, streams: int = 8) -> list[int]:
        """Statuses of requests sent one after the other on each of so many connections, until told to stop."""

        async def one() -> list[int]:
            statuses = []
            while not stop.is_set():
                statuses.append(await self.ask())
                await asyncio.sleep(0.005)
            return statuses

        return [status for statuses in await asyncio.gather(*(one() for _ in range(streams))) for status in statuses]


@asynccontextmanager
async def doors(routers: int, settings: Config, *workers: ScriptedWorker) -> AsyncIterator[Doors]:
    async with AsyncExitStack() as stack:
        made = Doors(stack, workers)
        for number in range(routers):
            router = await made.open(settings, wait=False)
            if number == 0:
                for worker in workers:
                    await stack.enter_async_context(serving(worker, router))
        for router in made.routers:
            await made.seen(router)
        yield made


def pair() -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker("prefill"), ScriptedWorker("decode")


# --- caches


async def written(router: Router, worker_id: str) -> _Log:
    """This router's log of a worker's cache, once it stands in Redis."""
    shared = router.sharing.index
    assert shared is not None
    await until(lambda: worker_id in shared._logs and shared._logs[worker_id].base > 0)
    return shared._logs[worker_id]


async def test_a_new_router_knows_the_caches_at_once_and_asks_workers_only_for_what_came_after(
    redis: RedisServer,
) -> None:
    workers = CachingWorker("prefill", "p0"), CachingWorker("decode", "d0")
    workers[0].snapshot, workers[0].at = [bytes([n]) * 32 for n in range(200)], 7
    known = settings(redis, policy="predicted")
    async with doors(1, known, *workers) as made:
        old = made.routers[0]
        await until(lambda: all(old.planner.index.synced(worker.id) for worker in workers))
        log = await written(old, "p0")
        workers[0].says(STORED, [b"new " * 8], sequence=8)
        await until(lambda: log.size > log.base > 0)

        new = await made.open(known)
        await until(lambda: new.planner.index.position("p0") == (workers[0].epoch, 8))
        assert len(new.planner.index) == len(old.planner.index) == 201
        await until(lambda: len(workers[0].asked) == 2)
        assert workers[0].asked == [(0, 0), (workers[0].epoch, 8)]


async def test_what_stands_in_redis_is_not_trusted(redis: RedisServer) -> None:
    workers = CachingWorker("prefill", "p0"), CachingWorker("decode", "d0")
    workers[0].snapshot = [b"k" * 32]
    known = settings(redis, policy="predicted")
    async with doors(1, known, *workers) as made, Redis.from_url(redis.url) as raw:
        await written(made.routers[0], "p0")
        stop = asyncio.Event()
        load = asyncio.create_task(made.under_load(stop))
        for poison in (b"\x80\x04\x95" + b"\xff" * 1000, b"", b"[1, 2]", b"9" * 40):
            for name in await raw.keys():
                if await raw.type(name) == b"string":
                    await raw.set(name, poison)
            for worker in workers:
                assert worker.agent is not None
                worker.agent.update(worker.record())  # renewed, as it is three times in its time to live
            new = await made.open(known)
            await until(lambda new=new: new.planner.index.synced("p0"))  # type: ignore[misc]
            assert new.planner.index.export("p0").events[0].keys == [b"k" * 32]  # type: ignore[union-attr]
        stop.set()
        assert set(await load) == {200}


# --- limits of tenants


class Gated(ScriptedWorker):
    """Decodes when told to."""

    def __init__(self) -> None:
        super().__init__("decode")
        self.gate = asyncio.Event()
        self.decode = self._waits

    async def _waits(self, leg: Leg) -> None:
        await self.gate.wait()
        await decode_answers(leg)


async def test_a_tenants_prompts_in_flight_are_limited_over_all_routers(redis: RedisServer, tmp_path: Path) -> None:
    gated = Gated()
    shared = settings(redis, api_keys_file=limited(tmp_path, "max_inflight: 6"), registry_token="t")
    async with doors(3, shared, ScriptedWorker("prefill"), gated) as made:
        await until(lambda: all(router.sharing.quotas.routers == 3 for router in made.routers))  # type: ignore[union-attr]
        calls = [asyncio.create_task(made.ask()) for _ in range(24)]
        await until(lambda: sum(call.done() for call in calls) == 18)
        assert {call.result() for call in calls if call.done()} == {429}
        assert sum(router.front.permits.inflight for router in made.routers) == 6

        gated.gate.set()
        assert sorted(await asyncio.gather(*calls)) == [200] * 6 + [429] * 18
        assert await asyncio.gather(*(made.ask(at=0) for _ in range(6))) == [200] * 6, "one router may use all of it"


async def test_a_tenants_tokens_are_counted_over_all_routers(redis: RedisServer, tmp_path: Path) -> None:
    shared = settings(
        redis, api_keys_file=limited(tmp_path, "tokens_per_s: 0.001, burst_tokens: 100"), registry_token="t"
    )
    async with doors(2, shared, *pair()) as made:
        statuses = []
        for number in range(20):  # of some ten tokens each
            statuses.append(await made.ask(at=number % 2, prompt="hello"))
            spent = [router.sharing.quotas for router in made.routers]
            for quotas in spent:
                assert quotas is not None
                await quotas._count()  # as it does ten times a second
        assert 8 <= statuses.count(200) <= 14
        assert statuses.count(200) + statuses.count(429) == 20
        assert statuses[-2:] == [429, 429], "at either router"


# --- Redis goes


async def test_a_redis_that_comes_and_goes_costs_no_request_at_any_router(redis: RedisServer, tmp_path: Path) -> None:
    shared = settings(
        redis, policy="predicted", api_keys_file=limited(tmp_path, "max_inflight: 100"), registry_token="t"
    )
    workers = CachingWorker("prefill", "p0"), CachingWorker("decode", "d0")
    async with doors(2, shared, *workers) as made:
        stop = asyncio.Event()
        load = asyncio.create_task(made.under_load(stop))
        for _ in range(3):
            redis.kill()
            await until(lambda: all(not router._feed.available for router in made.routers))
            redis.start()  # empty
            await until(lambda: all(router._feed.available for router in made.routers))
        assert all({s.worker_id for s in r.fleet.states() if s.usable} == {"p0", "d0"} for r in made.routers)
        await until(lambda: all(worker.agent is not None and worker.agent.registered.is_set() for worker in workers))
        new = await made.open(shared)
        stop.set()
        statuses = await load
        assert set(statuses) == {200}
        assert len(statuses) > 50
        assert await made.ask(at=made.routers.index(new)) == 200


@pytest.mark.slow
async def test_a_redis_that_stands_still_for_five_seconds_costs_no_request(redis: RedisServer, tmp_path: Path) -> None:
    keys = limited(tmp_path, "max_inflight: 100")
    shared = settings(redis, policy="predicted", api_keys_file=keys, registry_token="t", registry_ttl_s=3.0)
    async with doors(2, shared, CachingWorker("prefill", "p0"), CachingWorker("decode", "d0")) as made:
        stop = asyncio.Event()
        load = asyncio.create_task(made.under_load(stop))
        await asyncio.sleep(0.5)
        redis.pause()
        await asyncio.sleep(5)
        redis.resume()
        await until(lambda: all(router._feed.available for router in made.routers), 10)
        await asyncio.sleep(2 * shared.registry_ttl_s)
        stop.set()
        assert set(await load) == {200}
        assert all(sum(s.usable for s in router.fleet.states()) == 2 for router in made.routers)


# --- capacity


class Small(ScriptedWorker):
    """Takes so many requests at once and refuses more, as a worker whose pages are used up."""

    def __init__(self, role: str, worker_id: str, room: int) -> None:
        super().__init__(role, worker_id)
        self.room = room
        self.most = 0
        self.refusals = 0

    async def reserve(self, request: common_pb2.ReserveRequest) -> common_pb2.ReserveReply:
        self.refuse = FULL if self.held() >= self.room else None
        self.refusals += self.refuse is not None
        reply = await super().reserve(request)
        self.most = max(self.most, self.held())
        return reply


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_routers_that_choose_the_same_workers_at_once_overbook_none_and_fail_nobody(
    redis: RedisServer, policy: str
) -> None:
    decodes = [Small("decode", f"d{i}", 4) for i in range(3)]
    workers = [ScriptedWorker("prefill", "p0"), ScriptedWorker("prefill", "p1"), *decodes]
    for worker in workers:
        worker.load = common_pb2.Load(pages_free=10_000, pages_total=10_000)
    async with doors(3, settings(redis, policy=policy), *workers) as made:
        statuses = await asyncio.gather(*(made.ask(max_tokens=8) for _ in range(90)))
        assert statuses == [200] * 90
        assert max(worker.most for worker in decodes) <= 4
        assert min(len(worker.submitted) for worker in decodes) >= 15, "none is left out"
        await until(lambda: all(worker.held() == 0 for worker in decodes))
