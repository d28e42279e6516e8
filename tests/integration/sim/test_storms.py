"""Everything stands still for a while, or one after the other does; then all of it is used again and nobody is refused.

What stood still here is what a machine with far too much to do, or one that was paused, does to its processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
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
START_S = 60.0
TOKENS = 20
TTL_S = 1.0
SHARED = {"model": "oracle", "log_level": "error", "drain_timeout_s": 1.0, "registry_ttl_s": TTL_S}


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Without noise; a token takes two hundredths of a second."""
    content = yaml.safe_load(find("sim-h100-8b").read_text())
    content["noise"] = {"lognormal_sigma": 0, "stall_probability": 0, "stall_factor": 1, "clock_drift_ppm": 0}
    content["decode"]["fixed_s"] = 0.02
    file = tmp_path / "slow.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


class Site:
    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.client = client

    async def ask(self, number: int) -> tuple[int, str]:
        """(status, code of the error)"""
        body = {"model": "oracle", "prompt": f"{number} green bottles, " * 9, "max_tokens": TOKENS, "seed": number}
        async with self.client.post("/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            return response.status, answer.get("error", {}).get("code", "")

    def usable(self) -> int:
        return sum(worker.usable for worker in self.router.fleet.workers())

    async def quiet(self) -> None:
        """Nothing is booked, charged or reserved any more."""
        workers = self.router.fleet.workers()
        await until(lambda: len(self.router.planner.ledger) == 0, 20)
        await until(lambda: not any(worker.inflight_requests for worker in workers), 20)
        await until(lambda: not any(w.load.running + w.load.leases + w.load.pages_reserved for w in workers), 20)
        self.router.planner.ledger.check()


@asynccontextmanager
async def site(policy: str, **timers: float) -> AsyncIterator[Site]:
    router = await Router.start(
        Config.load({**SHARED, **timers, "policy": policy, "http_listen": ANY, "grpc_listen": ANY})
    )
    try:
        async with aiohttp.ClientSession(f"http://{router.http}") as client:
            yield Site(router, client)
    finally:
        await router.close()


@pytest.mark.parametrize("policy", ["predicted", pytest.param("least_load", marks=pytest.mark.slow)])
async def test_after_a_machine_stood_still_nobody_is_blamed_or_thought_to_be_gone(
    policy: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Router and workers share an event loop, and nothing runs on it for longer than every timer."""
    monkeypatch.setattr("runtime.logs.setup", lambda *args, **kwargs: None)
    async with site(policy, first_token_timeout_s=1.0, inter_token_timeout_s=1.0) as made:
        stopping, serving = asyncio.Event(), []
        try:
            for role in ("prefill", "decode"):
                own = Config.load({**SHARED, "sim": profile, "role": role, "registry": made.router.grpc})
                serving.append(asyncio.create_task(sim.serve(own.model_copy(update={"sim_count": 2}), stopping)))
            await until(lambda: made.usable() == 4, START_S)
            calls = [asyncio.create_task(made.ask(number)) for number in range(8)]
            workers = made.router.fleet.workers()
            await until(lambda: sum(worker.inflight_requests for worker in workers) >= 8, 20)

            time.sleep(1.5 * TTL_S)  # noqa: ASYNC251  that is the point

            calls += [asyncio.create_task(made.ask(number)) for number in range(8, 12)]
            assert set(await asyncio.gather(*calls)) == {(200, "")}
            assert made.router.fleet.workers() == workers
            assert made.router.dispatcher.booking.breakers.quiet
            assert made.router.metrics.value("pdserve_router_retries_total") == 0
            await made.quiet()
        finally:
            stopping.set()
            await asyncio.gather(*serving)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["predicted", "least_load"])
async def test_after_a_storm_of_stops_every_worker_is_used_again_and_nobody_is_refused(
    policy: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.logs.setup", lambda *args, **kwargs: None)
    draw, victims = random.Random(7), []
    async with site(policy, first_token_timeout_s=5.0, inter_token_timeout_s=5.0) as made:
        try:
            for role in ("prefill", "prefill", "decode", "decode"):
                own = Config.load({**SHARED, "sim": profile, "role": role, "registry": made.router.grpc})
                environment = dict(os.environ) | own.child_environment()
                victims.append(
                    await asyncio.create_subprocess_exec(sys.executable, "-m", "pdserve", "worker", env=environment)
                )
            await until(lambda: made.usable() == 4, START_S)
            calls = []
            for turn in range(60):
                calls += [asyncio.create_task(made.ask(8 * turn + number)) for number in range(4)]
                for victim in victims:
                    sent = signal.SIGSTOP if draw.random() < 0.05 else signal.SIGCONT if draw.random() < 0.2 else None
                    if sent is not None:
                        victim.send_signal(sent)
                await asyncio.sleep(0.2)
            for victim in victims:
                victim.send_signal(signal.SIGCONT)
            await asyncio.gather(*calls)  # each has its end, well or not
            await until(lambda: made.usable() == 4, 30)
            await made.quiet()

            served = {worker.id: worker.served for worker in made.router.fleet.workers()}
            async with asyncio.timeout(60):
                while any(worker.served == served[worker.id] for worker in made.router.fleet.workers()):
                    answers = await asyncio.gather(*(made.ask(1000 + number) for number in range(4)))
                    assert set(answers) == {(200, "")}
            await made.quiet()
            assert [victim.returncode for victim in victims] == [None] * 4
        finally:
            for victim in victims:
                if victim.returncode is None:
                    victim.send_signal(signal.SIGCONT)
                    victim.kill()
                await victim.wait()
