"""Router processes over one Redis: what one that is killed leaves behind, and what the others go on with."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from deploy.ports import free_ports
from runtime.config import Config
from tests.integration.router.scripted import ScriptedWorker, until
from tests.integration.router.sites import config, serving
from tests.integration.router.test_several_routers import Gated
from tests.unit.runtime.servers import RedisServer

pytestmark = pytest.mark.slow


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


def settings(redis: RedisServer, folder: Path, **changes: object) -> Config:
    keys = folder / "keys.yaml"
    lines = [f"{hashlib.sha256(b'limited').hexdigest()}: {{tenant: a, max_inflight: 4}}"]
    lines += [f"{hashlib.sha256(b'free').hexdigest()}: {{tenant: b}}"]
    keys.write_text("\n".join(lines))
    shared = {"registry": redis.url, "cache_salt_secret": "one", "api_keys_file": str(keys), "registry_token": "t"}
    return config(**(shared | changes))


@dataclass
class Process:
    """`pdserve router`, and a client of it."""

    child: subprocess.Popen[bytes]
    http: aiohttp.ClientSession

    async def ask(self, key: str = "free", **fields: object) -> int:
        body = {"prompt": "hello", "max_tokens": 4} | fields
        async with self.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            await answer.read()
            return answer.status

    async def ready(self) -> bool:
        try:
            async with self.http.get("/health/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def process(settings: Config, log: Path, http: str = "") -> AsyncIterator[Process]:
    """http: where several processes listen; empty = a port of its own."""
    http = http or f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    own = settings.child_environment(http_listen=http)
    with log.open("ab") as output:
        command = [sys.executable, "-m", "pdserve", "router"]
        child = subprocess.Popen(command, env=os.environ | own, stderr=output)  # noqa: ASYNC220  returns at once
    try:
        async with aiohttp.ClientSession(f"http://{http}") as session:
            yield Process(child, session)
    finally:
        child.kill()
        child.wait()


async def ready(*routers: Process) -> None:
    async with asyncio.timeout(60):
        for router in routers:
            while not await router.ready():  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)


async def test_a_killed_router_takes_its_share_and_its_streams_with_it_and_nothing_else(
    redis: RedisServer, tmp_path: Path
) -> None:
    shared = settings(redis, tmp_path, policy="predicted")
    gated = Gated()
    home = SimpleNamespace(config=shared, grpc="")
    async with AsyncExitStack() as stack:
        for worker in (ScriptedWorker("prefill"), gated):
            await stack.enter_async_context(serving(worker, home))  # type: ignore[arg-type]
        routers = [await stack.enter_async_context(process(shared, tmp_path / f"router{n}.log")) for n in range(2)]
        await ready(*routers)
        one, two = routers

        lost = [asyncio.create_task(one.ask("limited")) for _ in range(3)]
        await until(lambda: len(gated.submitted) == 3, 30)
        held = asyncio.create_task(two.ask("limited"))
        await until(lambda: len(gated.submitted) == 4, 30)
        assert await two.ask("limited") == 429

        one.child.send_signal(signal.SIGKILL)
        ended = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(end, aiohttp.ClientError) for end in ended)

        free = [asyncio.create_task(again(two)) for _ in range(3)]  # the dead router's share, three seconds later
        await until(lambda: len(gated.submitted) == 7, 30)
        assert await two.ask("limited") == 429
        gated.gate.set()
        assert await held == 200
        assert await asyncio.gather(*free) == [200] * 3
        assert [await two.ask(prompt=f"call {number}") for number in range(20)] == [200] * 20


async def test_processes_on_one_port_are_one_door_and_one_that_leaves_or_comes_costs_no_request(
    redis: RedisServer, tmp_path: Path
) -> None:
    http, grpc_port = (f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2))
    shared = settings(
        redis, tmp_path, routers=2, http_listen=http, grpc_listen=grpc_port, policy="predicted", registry_ttl_s=10.0
    )
    workers = ScriptedWorker("prefill"), ScriptedWorker("decode")
    home = SimpleNamespace(config=shared, grpc="")
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(serving(worker, home))  # type: ignore[arg-type]
        logs = [tmp_path / f"router{n}.log" for n in range(3)]
        first, _ = [await stack.enter_async_context(process(shared, log, http)) for log in logs[:2]]
        await said(lambda: all("listening" in log.read_text() for log in logs[:2]))

        stop = asyncio.Event()
        load = asyncio.create_task(new_connections(http, stop))
        await said(lambda: all(served(log) > 20 for log in logs[:2]))

        first.child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.child.wait, 30) == 0
        before = served(logs[1])
        await said(lambda: served(logs[1]) > before + 20)
        await stack.enter_async_context(process(shared, logs[2], http))
        await said(lambda: served(logs[2]) > 20)

        stop.set()
        assert set(await load) == {200}
        assert len({hello.router_id for hello in workers[0].hellos}) == 3, "every process has streams of its own"


async def said(condition: Callable[[], bool]) -> None:
    """Wait for what logs say, without reading them all the time: the workers live here, too."""
    async with asyncio.timeout(90):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def served(log: Path) -> int:
    return log.read_text().count('"outcome":"completed"')


async def new_connections(http: str, stop: asyncio.Event) -> list[int]:
    """Statuses of requests, each on a connection of its own, several at a time."""
    statuses: list[int] = []
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(f"http://{http}", connector=connector) as session:
        router = Process(None, session)  # type: ignore[arg-type]

        async def one() -> None:
            while not stop.is_set():
                statuses.append(await router.ask())

        await asyncio.gather(*(one() for _ in range(4)))
    return statuses


async def again(router: Process) -> int:
    """Until it is no longer refused for the tenant's limit."""
    async with asyncio.timeout(30):
        while (status := await router.ask("limited")) == 429:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.1)
    return status
