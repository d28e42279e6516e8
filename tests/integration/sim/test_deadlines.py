"""Deadlines that cannot be met, live: they are refused at the door, and no worker computes for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from bench.sim.profile import find
from pdserve import AsyncClient, sim
from router.app import Router
from router.workers.deadlines import KNOWN
from runtime.config import Config
from runtime.errors import DeadlineExceeded
from tests.integration.router.scripted import until

ANY = "127.0.0.1:0"
TOKENS = 2000
LONG_S = 4.0
"""Of such a prompt here."""


@asynccontextmanager
async def site(folder: Path, policy: str) -> AsyncIterator[tuple[Router, AsyncClient]]:
    content = yaml.safe_load(find("sim-h100-8b").read_text())
    content["noise"] = {"lognormal_sigma": 0, "stall_probability": 0, "stall_factor": 1, "clock_drift_ppm": 0}
    content["heterogeneity"] = {"speed_sigma": 0}
    content["prefill"].update(fixed_s=0.005, per_token_s=LONG_S / TOKENS, chunk_tokens=256)
    profile = folder / "slow.yaml"
    profile.write_text(yaml.safe_dump(content))
    shared = {"model": "oracle", "log_level": "error", "drain_timeout_s": 1.0}
    router = await Router.start(Config.load({**shared, "policy": policy, "http_listen": ANY, "grpc_listen": ANY}))
    stopping = asyncio.Event()
    workers = [
        asyncio.create_task(
            sim.serve(Config.load({**shared, "sim": str(profile), "role": role, "registry": router.grpc}), stopping)
        )
        for role in ("prefill", "decode")
    ]
    try:
        await until(lambda: sum(worker.usable for worker in router.fleet.workers()) == 2, 30)
        async with AsyncClient(router.grpc) as client:
            for number in range(KNOWN + 2):
                await client.generate([number] * (20 + 180 * (number % 2)), max_tokens=1)
            yield router, client
    finally:
        stopping.set()
        await asyncio.gather(*workers)
        await router.close()


async def refused_at_once(client: AsyncClient, tokens: int, timeout_s: float) -> None:
    with pytest.raises(DeadlineExceeded) as refused:
        await client.generate([7] * tokens, max_tokens=2, timeout=timeout_s)
    assert refused.value.reason == "deadline_unmeetable"


@pytest.mark.parametrize("policy", ["predicted", "least_load"])
async def test_behind_work_that_takes_longer_than_its_deadline_a_request_is_refused_at_the_door(
    tmp_path: Path, policy: str
) -> None:
    async with site(tmp_path, policy) as (router, client):
        ahead = [asyncio.create_task(client.generate([9] * TOKENS, max_tokens=1)) for _ in range(4)]
        booked = router.front.dispatcher.booking.line
        await until(lambda: router.front.permits.inflight == 4, 10)
        await asyncio.sleep(0.3)  # the workers' reports say so, too
        sent = sum(worker.served for worker in router.fleet.workers())
        await refused_at_once(client, TOKENS, LONG_S / 4)
        assert sum(worker.served for worker in router.fleet.workers()) == sent
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
        await until(lambda: router.front.permits.inflight == 0, 10)
        assert len(booked) == 0
        assert (await client.generate([5] * 20, max_tokens=1, timeout=30)).usage.completion_tokens == 1


async def test_on_an_idle_fleet_a_prompt_that_takes_too_long_is_refused_and_one_in_a_cache_is_not(
    tmp_path: Path,
) -> None:
    async with site(tmp_path, "predicted") as (router, client):
        sent = sum(worker.served for worker in router.fleet.workers())
        await refused_at_once(client, TOKENS, LONG_S / 4)
        assert sum(worker.served for worker in router.fleet.workers()) == sent
        await client.generate([7] * TOKENS, max_tokens=2, timeout=60)
        await until(lambda: len(router.planner.index) > 0, 10)
        assert (await client.generate([7] * TOKENS, max_tokens=2, timeout=LONG_S / 4)).usage.cached_tokens > 0
