"""Workers that die and freeze under load: simulated ones, with the real protocol, in processes that can be killed.

The router and the workers that stay well run in this process; the one of each role that does not has a process of its
own. Tokens of simulated workers are a function of position and seed, so an answer that went on elsewhere is seen to be
the one it would have been.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
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

TOKENS = 40
START_S = 60.0
ANY = "127.0.0.1:0"


class Site:
    """2 prefill and 2 decode workers here, one more of each in a process: victims["prefill"], victims["decode"]."""

    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.client = client
        self.victims: dict[str, asyncio.subprocess.Process] = {}

    async def ask(self, number: int) -> list[int]:
        """The answer's tokens. Asserts that it is whole."""
        body = {
            "model": "oracle",
            "prompt": f"{number} green bottles hanging on the wall, " * (1 + number % 7),
            "max_tokens": TOKENS,
            "seed": number,
            "temperature": 1.0,
            "stream": False,
            "return_token_ids": True,
        }
        async with self.client.post("/v1/completions", json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        assert len(tokens) == TOKENS
        return tokens

    def running(self, role: str) -> int:
        worker = self.router.fleet.worker(f"victim-{role}")
        return worker.inflight_requests if worker is not None else 0

    def usable(self) -> int:
        return sum(worker.usable for worker in self.router.fleet.workers())


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Without noise, and slow enough to be hit in the middle."""
    content = yaml.safe_load(find("sim-h100-8b").read_text())
    content["noise"] = {"lognormal_sigma": 0, "stall_probability": 0, "stall_factor": 1, "clock_drift_ppm": 0}
    content["decode"]["fixed_s"] = 0.02
    content["prefill"]["fixed_s"] = 0.05
    file = tmp_path / "slow.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


@pytest.fixture
def silence_s() -> float:
    """After which a worker is given up. Longer than a machine stands still: a kill is heard of without it."""
    return 60.0


@pytest.fixture
async def site(profile: str, silence_s: float, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("runtime.logs.setup", lambda *args, **kwargs: None)
    timers = {"first_token_timeout_s": silence_s, "inter_token_timeout_s": silence_s, "registry_ttl_s": 1.0}
    shared = {"model": "oracle", "log_level": "error", "drain_timeout_s": 1.0, "registry_ttl_s": 1.0}
    router = await Router.start(
        Config.load({**shared, **timers, "policy": "predicted", "http_listen": ANY, "grpc_listen": ANY})
    )
    stopping, here = asyncio.Event(), []
    async with aiohttp.ClientSession(f"http://{router.http}") as client:
        made = Site(router, client)
        try:
            for role in ("prefill", "decode"):
                own = Config.load({**shared, "sim": profile, "role": role, "registry": router.grpc})
                victim = own.model_copy(update={"worker_id": f"victim-{role}"})
                made.victims[role] = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "pdserve", "worker", env=dict(os.environ) | victim.child_environment()
                )
                here.append(asyncio.create_task(sim.serve(own.model_copy(update={"sim_count": 2}), stopping)))
            await until(lambda: made.usable() == 6, START_S)
            yield made
        finally:
            for process in made.victims.values():
                if process.returncode is None:
                    process.send_signal(signal.SIGCONT)
                    process.kill()
                await process.wait()
            stopping.set()
            await asyncio.gather(*here)
            await router.close()


async def under_load(site: Site, role: str, sent: signal.Signals) -> list[list[int]]:
    """40 requests, and the signal to the victim when some of them run there. Every answer is whole."""
    calls = [asyncio.create_task(site.ask(number)) for number in range(40)]
    await until(lambda: site.running(role) >= 2, 20)
    site.victims[role].send_signal(sent)
    return await asyncio.gather(*calls)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_killed_under_load_costs_no_request_and_changes_no_answer(site: Site, role: str) -> None:
    answers = await under_load(site, role, signal.SIGKILL)
    await until(lambda: site.usable() == 5, 10)
    for number in (0, 13, 39):
        assert answers[number] == await site.ask(number)
    await until(lambda: len(site.router.planner.ledger) == 0)
    site.router.planner.ledger.check()


@pytest.mark.slow
@pytest.mark.parametrize("silence_s", [3.0])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_freezes_under_load_costs_no_request_and_is_used_again(site: Site, role: str) -> None:
    answers = await under_load(site, role, signal.SIGSTOP)
    await until(lambda: site.usable() == 5, 20)
    for number in (0, 13, 39):
        assert answers[number] == await site.ask(number)
    site.victims[role].send_signal(signal.SIGCONT)
    await until(lambda: site.usable() == 6, 20)
    await until(lambda: len(site.router.planner.ledger) == 0)
    site.router.planner.ledger.check()
    worker = site.router.fleet.worker(f"victim-{role}")
    assert worker is not None
    served = worker.served
    while worker.served == served:
        await asyncio.gather(*(site.ask(number) for number in range(12)))
