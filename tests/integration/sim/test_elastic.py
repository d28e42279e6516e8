"""`pdserve up --sim --elastic`: the roles follow what clients ask for, and no request fails by it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.fleet import Fleet
from deploy.pressure import ROLES
from runtime.config import Config
from tests.cluster_tools import ForegroundCluster
from tests.unit.runtime.servers import RedisServer

FLAGS = ["--sim=sim-h100-8b", "--prefill=2", "--decode=2", "--model=oracle", "--elastic"]
QUICK = ["--elastic-dwell-s=1", "--elastic-cooldown-s=1", "--ttft-goal-s=5", "--tpot-goal-s=0.008"]


@pytest.fixture(params=[1, 2])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ForegroundCluster]:
    """With one router, or with several that share a Redis."""
    redis = RedisServer(tmp_path)
    redis.start()
    shared = [f"--routers={request.param}", f"--registry={redis.url}"] if request.param > 1 else []
    running = ForegroundCluster(tmp_path, *FLAGS, *QUICK, *shared)
    try:
        yield running.until_ready()
    finally:
        running.stop()
        redis.kill()


@asynccontextmanager
async def asking(http: str, clients: int, prompt: int, answer: int, statuses: Counter[int]) -> AsyncIterator[None]:
    over = asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        while not over.is_set():
            body: dict[str, Any] = {"prompt": f"{number:06d}" + "x" * (prompt - 6), "max_tokens": answer}
            async with session.post(f"{http}/v1/completions", json=body) as reply:
                await reply.read()
                statuses[reply.status] += 1
            number += clients

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(session, number))
        try:
            yield
        finally:
            over.set()


async def until(fleet: Fleet, fits: Callable[[Counter[str]], bool]) -> None:
    """Those that take requests fit, by role; meanwhile neither pool is ever left without one."""
    async with asyncio.timeout(90):
        while True:
            usable = [one for one in await fleet.workers() if one.ready and not one.draining]
            roles: Counter[str] = Counter(ROLES[one.role] for one in usable)
            assert all(serving(pool, roles) for pool in ("prefill", "decode")), roles
            if fits(roles):
                return
            await asyncio.sleep(0.2)


def serving(pool: str, roles: Counter[str]) -> int:
    return roles[pool] + roles["both"]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_from_prompts_to_answers_and_home_again(cluster: ForegroundCluster) -> None:
    """A pool that is cold gives a worker away, or lends one (`both`) where the rest would get hot by that: which of the
    two is a matter of the machine's speed here, and of unit tests. The needy pool has gained one either way."""
    http = cluster.http
    statuses: Counter[int] = Counter()
    async with Fleet(cluster.record.grpc, Config()) as fleet:
        async with asking(http, 80, 8000, 1, statuses):
            await until(fleet, lambda roles: serving("prefill", roles) >= 3)
        async with asking(http, 40, 64, 300, statuses):
            await until(fleet, lambda roles: serving("decode", roles) >= 3)
        await until(fleet, lambda roles: roles == {"prefill": 2, "decode": 2})
    assert set(statuses) == {200}
