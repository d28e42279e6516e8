"""`bench serve` against a router with simulated workers: its figures are what the router counted, and whatever dies,
every request is accounted for and nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import yaml

from bench.sim.profile import find
from router.app import Router
from runtime.config import Config
from tests.integration.router.scripted import until

ANY = "127.0.0.1:0"
START_S = 60.0
COMPLETED = 'pdserve_requests_total{outcome="completed",reason=""}'
ENDLESS = ("--output=100", "--concurrency=8", "--requests=100000", "--loaders=2")

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Site:
    """A router here, its workers in a process for each role."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.workers: dict[str, asyncio.subprocess.Process] = {}
        self._before: dict[str, float] = {}

    @property
    def http(self) -> list[str]:
        return ["--url", f"http://{self.router.http}"]

    @property
    def grpc(self) -> list[str]:
        return ["--grpc", self.router.grpc]

    def counted(self) -> dict[str, float]:
        """What the router has counted since the last call."""
        now = self._counts()
        since = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        return since

    def _counts(self) -> dict[str, float]:
        text = self.router.metrics.render().decode()
        return {name: float(value) for name, value in re.findall(r"^(pdserve_\S+) (\S+)$", text, re.MULTILINE)}

    async def answer(self, more: int) -> None:
        """Until so many more requests are answered."""
        before = self._counts().get(COMPLETED, 0.0)
        await until(lambda: self._counts().get(COMPLETED, 0.0) >= before + more)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Site]:
    content = yaml.safe_load(find("sim-h100-8b").read_text())
    content["noise"] = {"lognormal_sigma": 0, "stall_probability": 0, "stall_factor": 1, "clock_drift_ppm": 0}
    (folder / "quiet.yaml").write_text(yaml.safe_dump(content))
    shared = {"model": "oracle", "log_level": "error", "drain_timeout_s": 1.0, "registry_ttl_s": 1.0}
    timers = {"first_token_timeout_s": 3.0, "inter_token_timeout_s": 3.0}
    router = await Router.start(
        Config.load({**shared, **timers, "policy": "predicted", "http_listen": ANY, "grpc_listen": ANY})
    )
    made = Site(router)
    try:
        for role in ("prefill", "decode"):
            own = Config.load({**shared, "sim": str(folder / "quiet.yaml"), "role": role, "sim_count": 2})
            own = own.model_copy(update={"registry": router.grpc})
            made.workers[role] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pdserve", "worker", env=dict(os.environ) | own.child_environment()
            )
        await until(lambda: sum(worker.usable for worker in router.fleet.workers()) == 4, START_S)
        yield made
    finally:
        for process in made.workers.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await router.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """For tests that leave its workers alone."""
    async with running(tmp_path_factory.mktemp("site")) as made:
        yield made


async def start(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.serve", *words, "--json",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process, code: int = 0) -> dict[str, Any]:
    """The one JSON object it printed, and nothing else."""
    async with asyncio.timeout(90):
        out, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (code, "")
    found: dict[str, Any] = json.loads(out)
    counts = found["requests"]
    assert counts["sum"] == sum(count for state, count in counts.items() if state != "sum")
    return found


async def run(*words: str) -> dict[str, Any]:
    return await ended(await start(*words))


async def loaders_of(process: asyncio.subprocess.Process, count: int) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    await until(lambda: len(parent.children()) == count)
    return parent.children()


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_the_figures_are_what_the_router_counted(site: Site, way: str) -> None:
    site.counted()
    load = "--dataset shared-prefix --groups 3 --prefix 1024 --input 20:200 --output 2:30 --rate 30 --requests 80"
    found = await run(*getattr(site, way), *load.split(), "--loaders=2")
    counted = site.counted()
    assert found["requests"]["completed"] == 80
    assert counted[COMPLETED] == 80
    cached = counted['pdserve_prompt_tokens_total{source="cached"}']
    prompt = cached + counted['pdserve_prompt_tokens_total{source="computed"}']
    assert found["prompt_tokens"] == prompt
    assert found["output_tokens"] == counted["pdserve_completion_tokens_total"]
    assert found["cached_tokens"] == cached
    assert found["hit_rate"] == pytest.approx(cached / prompt)
    assert found["hit_rate"] > 0.6, "three prefixes, eighty prompts"
    assert (found["short_answers"], found["prompts_of_other_length"]) == (0, 0)
    ttft = counted["pdserve_ttft_seconds_sum"] / counted["pdserve_ttft_seconds_count"]
    assert ttft <= found["ttft_s"]["mean"] + 1e-3, "the client sees what the router does, and the way"
    assert found["ttft_s"]["mean"] - ttft < 0.5
    prefill = counted['pdserve_stage_seconds_sum{stage="prefill"}'] / 80
    assert found["parts_s"]["prefill"]["mean"] == pytest.approx(prefill, rel=1e-3)
    assert sum(one["requests"] for one in found["load"]["loaders"]) == 80
    assert found["config"]["objective"] == {"ttft_s": 2.0, "ttft_s_per_8k": 1.0, "tpot_s": 0.05}


async def test_every_kind_of_work_is_answered_with_the_lengths_asked_for(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{n} bottles of beer", "output_tokens": 5}) + "\n" for n in range(9))
    )
    for words, requests in (
        (["--dataset=conversations", "--turns=3", "--input=40:80", "--output=10", "--requests=20"], 20),
        (["--dataset=trace", "--longest=6000", "--requests=15", "--rate=inf", "--warmup=3"], 15),
        ([f"--prompts={file}", "--chat", "--ignore-eos", "--concurrency=3"], 9),
    ):
        site.counted()
        found = await run(*site.http, *words)
        counted = site.counted()
        warm = found["config"]["warmup"]
        assert found["requests"]["completed"] == requests
        assert counted[COMPLETED] == requests + warm
        assert (found["short_answers"], found["prompts_of_other_length"]) == (0, 0)
        if "conversations" in words[0]:
            assert found["cached_tokens"] > 0, "what was said before is cached"


async def test_ctrl_c_reports_what_is_done_and_leaves_nothing(site: Site) -> None:
    process = await start(*site.http, *ENDLESS)
    loaders = await loaders_of(process, 2)
    await site.answer(30)
    process.send_signal(signal.SIGINT)
    found = await ended(process)
    assert found["stopped"] is True
    assert found["requests"]["completed"] > 10
    assert found["requests"]["cut_short"] == 8, "those under way"
    assert found["requests"]["refused"] + found["requests"]["failed"] == 0
    assert not any(loader.is_running() for loader in loaders)
    await until(lambda: all(worker.inflight_requests == 0 for worker in site.router.fleet.workers()), 20)


async def test_a_command_that_is_killed_leaves_no_load_generator(site: Site) -> None:
    process = await start(*site.http, *ENDLESS)
    loaders = await loaders_of(process, 2)
    await site.answer(4)
    process.kill()
    await process.communicate()
    await until(lambda: not any(loader.is_running() for loader in loaders), 20)


@pytest.mark.slow
async def test_a_load_generator_that_is_killed_costs_its_share_and_is_told(site: Site) -> None:
    process = await start(*site.http, "--output=50", "--concurrency=8", "--duration=4", "--loaders=2")
    loaders = await loaders_of(process, 2)
    await site.answer(30)
    loaders[0].kill()
    found = await ended(process, 1)
    assert found["load"]["lost"] == 1
    (reason,) = found["reasons"]["failed"]
    assert reason == "load_generator_lost"
    assert found["requests"]["failed"] <= 4 + 4, "under way, and what it had no time to tell"
    other = next(one for one in found["load"]["loaders"] if not one["lost"])
    assert other["requests"] > 30


async def test_what_a_fleet_that_dies_leaves_unanswered_is_counted(tmp_path: Path) -> None:
    """Answers break off, and whatever comes afterwards finds nobody."""
    async with running(tmp_path) as site:
        process = await start(*site.grpc, "--input=50", "--output=60", "--rate=60", "--requests=300", "--timeout=20")
        await site.answer(5)
        for worker in site.workers.values():
            worker.kill()
        found = await ended(process)
    counts, reasons = found["requests"], found["reasons"]
    assert (counts["sum"], counts["cut_short"]) == (300, 0)
    assert counts["refused"] + counts["failed"] > 50
    assert sum(reasons["refused"].values()) == counts["refused"]
    assert sum(reasons["failed"].values()) == counts["failed"]
    assert all(reason for reason in (*reasons["refused"], *reasons["failed"]))
    assert found["goodput"] <= counts["completed"] / 300
