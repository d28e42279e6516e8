"""Who waits for whom, live: tenants, long and short prompts, priorities, over simulated workers and real sockets.

Orders and shares are compared, never seconds: the machine may be slow, and everything is slow with it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from bench.sim.profile import find
from pdserve import sim
from router.app import Router
from runtime.config import Config
from tests.integration.router.scripted import until

ANY = "127.0.0.1:0"
LONG, SHORT = 6000, 200
TENANTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "modest": {},
    "iron": {"weight": 1.0},
    "gold": {"weight": 3.0},
    "first": {"priority": -1},
    "last": {"priority": 1},
}


class Site:
    """One prefill and one decode worker. ended: names of requests, as their answers came."""

    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.client = client
        self.ended: list[str] = []

    async def ask(self, tenant: str, number: int, tokens: int) -> None:
        body = {"model": "oracle", "prompt": f"{tenant}{number:04d} ".ljust(tokens, "x"), "max_tokens": 2}
        async with self.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {tenant}"}) as got:
            assert got.status == 200, await got.text()
            await got.read()
        self.ended.append(f"{tenant}{number}")

    def crowd(self, tenant: str, count: int, tokens: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.ask(tenant, number, tokens)) for number in range(count)]

    @property
    def waiting(self) -> int:
        return len(self.router.front.dispatcher.booking.line)

    async def warm(self) -> None:
        """The router has seen what prompts take here."""
        for number in range(3):
            await self.ask("greedy", 9000 + number, LONG)
        self.ended.clear()


@asynccontextmanager
async def site(folder: Path, policy: str, **changes: Any) -> AsyncIterator[Site]:
    content = yaml.safe_load(find("sim-h100-8b").read_text())
    content["noise"] = {"lognormal_sigma": 0, "stall_probability": 0, "stall_factor": 1, "clock_drift_ppm": 0}
    content["prefill"].update(per_token_s=2e-5, chunk_tokens=1024)
    profile, keys = folder / "quiet.yaml", folder / "keys.yaml"
    profile.write_text(yaml.safe_dump(content))
    named = {hashlib.sha256(name.encode()).hexdigest(): {"tenant": name, **own} for name, own in TENANTS.items()}
    keys.write_text(yaml.safe_dump(named))
    shared = {"model": "oracle", "log_level": "error", "drain_timeout_s": 1.0, "registry_token": "t"}
    own = {"policy": policy, "line_hold_s": 0.05, "http_listen": ANY, "grpc_listen": ANY, "api_keys_file": str(keys)}
    router = await Router.start(Config.load({**shared, **own, **changes}))
    stopping = asyncio.Event()
    workers = [
        asyncio.create_task(
            sim.serve(Config.load({**shared, "sim": str(profile), "role": role, "registry": router.grpc}), stopping)
        )
        for role in ("prefill", "decode")
    ]
    try:
        async with aiohttp.ClientSession(f"http://{router.http}", connector=aiohttp.TCPConnector(limit=0)) as client:
            await until(lambda: sum(worker.usable for worker in router.fleet.workers()) == 2)
            made = Site(router, client)
            await made.warm()
            yield made
    finally:
        stopping.set()
        await asyncio.gather(*workers)
        await router.close()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.logs.setup", lambda *args, **kwargs: None)


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_a_greedy_tenants_crowd_costs_another_tenant_a_few_of_its_prompts_not_all(
    tmp_path: Path, policy: str
) -> None:
    async with site(tmp_path, policy) as made:
        crowd = made.crowd("greedy", 14, LONG)
        await until(lambda: made.waiting >= 6)
        for number in range(3):
            before = len(made.ended)
            placed = len(crowd) - sum(task.done() for task in crowd) - made.waiting
            await made.ask("modest", number, SHORT)
            passed = [name for name in made.ended[before:] if name.startswith("greedy")]
            assert len(passed) <= placed + 1, "who was at the workers already, and one in the time of an answer's way"
        await asyncio.gather(*crowd)
        assert made.ended.index("modest2") < 14, "the crowd was still there"


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_short_prompts_do_not_wait_for_a_stream_of_long_ones_and_the_long_ones_end(
    tmp_path: Path, policy: str
) -> None:
    async with site(tmp_path, policy, ttft_goal_s_per_1k=20.0) as made:
        longs = made.crowd("modest", 8, LONG)
        await until(lambda: made.waiting >= 5)
        await asyncio.gather(*(made.ask("modest", 100 + number, SHORT) for number in range(4)))
        assert sum(len(name) == len("modest0") for name in made.ended) <= 5, "long ones are left"
        await asyncio.gather(*longs)
        assert len(made.ended) == 12


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_who_has_priority_goes_first_and_the_others_go_too(tmp_path: Path, policy: str) -> None:
    async with site(tmp_path, policy) as made:
        low = made.crowd("last", 8, LONG)
        await until(lambda: made.waiting >= 5)
        placed = len(low) - made.waiting
        high = made.crowd("first", 6, LONG)
        await asyncio.gather(*low, *high)
        latest = max(place for place, name in enumerate(made.ended) if name.startswith("first"))
        sooner = [name for name in made.ended[:latest] if name.startswith("last")]
        assert len(sooner) <= placed, "nobody passed them but who was at the workers already"
        assert len(made.ended) == 14


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_weights_of_one_and_three_are_shares_of_one_and_three(tmp_path: Path, policy: str) -> None:
    async with site(tmp_path, policy) as made:
        crowd = made.crowd("iron", 60, LONG) + made.crowd("gold", 60, LONG)
        await until(lambda: made.waiting >= 100)
        await asyncio.gather(*crowd)
        first = made.ended[8:68]
        gold = sum(name.startswith("gold") for name in first)
        assert 43 <= gold <= 47, "3 to 1, a fifth more or less, to the next whole request"
