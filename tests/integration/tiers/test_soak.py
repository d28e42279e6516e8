"""Real workers on small pools with every tier, aborts and kill -9: nothing fails, each answer is as undisturbed."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.app import Router
from tests.integration.pd.conftest import ORACLE
from tests.integration.pd.workers import WorkerProcess, baseline
from tests.integration.router.scripted import until
from tests.integration.router.sites import config
from tests.integration.router.test_real_workers import Real

PAGE = {"oracle": 2048, "tiny-kimi": 16384}
TTL_S = 30.0
"""A killed worker is found by its streams; one that is merely slow is not to be given up for dead."""

SLOW = "tier.load=delay:0.005,tier.store=delay:0.005,disk.read=delay:0.005"


def wish(number: int) -> dict[str, Any]:
    """One of forty beginnings, most of them of several pages, and what is new in this request."""
    chance = random.Random(number)
    start = chance.randrange(40)
    prompt = [(7 * i + start) % 250 for i in range(64 + 16 * (start % 9))] + [chance.randrange(250) for _ in range(9)]
    more: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 3 == 0 else {}
    return {"prompt": prompt, "max_tokens": 4 + number % 20} | more


async def answer(made: Real, number: int) -> list[int]:
    tokens: list[int] = (await made.complete(**wish(number)))["choices"][0]["token_ids"]
    return tokens


async def abort(made: Real, number: int, after: float) -> None:
    call = asyncio.create_task(answer(made, number))
    await asyncio.sleep(after)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


class Fleet:
    """Two workers behind a router, which a kill ends and another start brings back."""

    def __init__(self, stack: AsyncExitStack, router: Router, model: str, pool: int, folder: Path) -> None:
        self._stack = stack
        self.router = router
        low = {"host_pool_tokens": 2 * pool, "disk_pool_bytes": 8 * pool * PAGE[model] // 16}
        tiers = {**low, "disk_pool_dir": folder, "headroom_tokens": 8} if pool < 16384 else {}
        told = {"registry": router.grpc, "registry_ttl_s": TTL_S}
        self.flags = {**ORACLE, **tiers, **told, "model": model, "kv_pool_tokens": pool}
        self.workers: list[WorkerProcess] = []

    async def start(self) -> WorkerProcess:
        env = {"PDSERVE_FAULTS": SLOW, "PDSERVE_HOST_POISON": "true"}
        worker = WorkerProcess("both", self.flags, env)
        self._stack.push_async_callback(worker.stop)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def usable(self, count: int) -> None:
        await until(lambda: sum(state.usable for state in self.router.fleet.states()) == count, 60)


async def answers(model: str, pool: int, count: int, folder: Path, kills: int = 0) -> list[list[int]]:
    async with AsyncExitStack() as stack:
        router = await Router.start(config(model=model, registry_ttl_s=TTL_S))
        stack.push_async_callback(router.close)
        fleet = Fleet(stack, router, model, pool, folder)
        await asyncio.gather(fleet.start(), fleet.start())
        await fleet.usable(2)
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{router.http}"))
        made = Real(router, fleet.workers, http)
        room = asyncio.Semaphore(8)

        async def one(number: int) -> list[int]:
            async with room:
                if kills and number % 5 == 0:
                    await abort(made, 1000 + number, 0.02 * (number % 4))
                return await answer(made, number)

        down = 0
        calls = [asyncio.create_task(one(number)) for number in range(count)]
        for kill in range(kills):
            await until(lambda done=kill + 1: sum(c.done() for c in calls) > done * count // (kills + 1), 300)  # type: ignore[misc]
            worker = fleet.workers.pop(0)
            down += sum(tier.bytes_down for tier in (await worker.load()).tiers)
            await worker.kill()
            await fleet.start()
            await fleet.usable(2)
        said = await asyncio.gather(*calls)
        await baseline(*fleet.workers)
        assert down > 0 or not kills, "nothing went down"
        return said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["oracle", "tiny-kimi"])
async def test_workers_that_run_short_and_die_lose_nothing(model: str, tmp_path: Path) -> None:
    """Forty beginnings are 380 pages; a worker has room for 64."""
    right = await answers(model, 16384, 250, tmp_path / "a")
    found = await answers(model, 1024, 250, tmp_path / "b", kills=2)
    assert found == right
