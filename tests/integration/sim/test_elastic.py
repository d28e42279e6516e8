"""`pdserve up --sim --elastic`: the roles follow what clients ask for, and no request fails by it."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from deploy.fleet import Fleet
from deploy.pressure import ROLES
from runtime.config import Config

FLAGS = ["--sim=sim-h100-8b", "--prefill=2", "--decode=2", "--model=oracle", "--http-listen=127.0.0.1:0", "--elastic"]
QUICK = ["--elastic-dwell-s=1", "--elastic-cooldown-s=1", "--ttft-goal-s=5", "--tpot-goal-s=0.008"]


@pytest.fixture
def cluster() -> Iterator[tuple[str, str]]:
    """The HTTP and the gRPC address."""
    command = [sys.executable, "-m", "pdserve", "up", *FLAGS, *QUICK]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found: dict[str, str] = {}
    for line in process.stdout:
        if match := re.match(r"(HTTP|gRPC)\s+(\S+)", line):
            found[match[1]] = match[2]
        if "Ctrl-C ends it" in line:
            break
    try:
        yield found["HTTP"], found["gRPC"]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@asynccontextmanager
async def asking(http: str, clients: int, prompt: int, answer: int, statuses: Counter[int]) -> AsyncIterator[None]:
    over = asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        while not over.is_set():
            body: dict[str, Any] = {"prompt": f"{number:06d}" + "x" * (prompt - 6), "max_tokens": answer}
            async with session.post(f"{http}/completions", json=body) as reply:
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
async def test_from_prompts_to_answers_and_home_again(cluster: tuple[str, str]) -> None:
    """A pool that is cold gives a worker away, or lends one (`both`) where the rest would get hot by that: which of the
    two is a matter of the machine's speed here, and of unit tests. The needy pool has gained one either way."""
    http, grpc = cluster
    statuses: Counter[int] = Counter()
    async with Fleet(grpc, Config()) as fleet:
        async with asking(http, 80, 8000, 1, statuses):
            await until(fleet, lambda roles: serving("prefill", roles) >= 3)
        async with asking(http, 40, 64, 300, statuses):
            await until(fleet, lambda roles: serving("decode", roles) >= 3)
        await until(fleet, lambda roles: roles == {"prefill": 2, "decode": 2})
    assert set(statuses) == {200}
