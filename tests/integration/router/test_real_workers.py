"""The router with real worker processes of the oracle model: the answer, what it moved, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from router.app import Router
from runtime.config import Config
from tests.integration.pd.conftest import ORACLE
from tests.integration.pd.workers import WorkerProcess, baseline, eventually
from tests.integration.router.scripted import until
from tests.integration.router.sites import config


@dataclass(slots=True)
class Real:
    router: Router
    all: list[WorkerProcess]
    http: aiohttp.ClientSession

    @property
    def workers(self) -> dict[str, WorkerProcess]:
        """By role, the last one of each."""
        return {worker.role: worker for worker in self.all}

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, "return_ledger": True}
        async with self.http.post("/v1/completions", json=body | fields) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer


@asynccontextmanager
async def real(
    *roles: str,
    step_s: float = 0.0,
    lease_s: float = 60.0,
    faults: str = "",
    settings: Config | None = None,
    pool_tokens: int = 0,
) -> AsyncIterator[Real]:
    """Workers of these roles behind one router. The lease is long: what frees pages here is never the lease. faults:
    further ones of all of them."""
    async with AsyncExitStack() as stack:
        router = await Router.start(settings or config())
        stack.push_async_callback(router.close)
        flags = {**ORACLE, "registry": router.grpc, "lease_s": lease_s}
        if pool_tokens:
            flags["kv_pool_tokens"] = pool_tokens
        armed = [f"engine.step=delay:{step_s}"] * bool(step_s) + [faults] * bool(faults)
        env = {"PDSERVE_FAULTS": ",".join(armed)} if armed else {}
        workers = [WorkerProcess(role, flags, env) for role in roles]
        for worker in workers:
            stack.push_async_callback(worker.stop)
        await asyncio.gather(*(worker.start() for worker in workers))
        await until(lambda: sum(state.usable for state in router.fleet.states()) == len(roles), 10)
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{router.http}"))
        yield Real(router, workers, http)


async def test_pair_and_aggregated_answers_are_the_same_tokens() -> None:
    prompts = [[(7 * i + length) % 250 for i in range(length)] for length in (1, 15, 16, 17, 255, 257, 1500)]
    async with real("both") as made:
        alone = [await made.complete(prompt=prompt) for prompt in prompts]
        sampled_alone = await made.complete(prompt=prompts[3], temperature=1, seed=5, n=3)
    async with real("prefill", "decode") as made:
        paired = [await made.complete(prompt=prompt) for prompt in prompts]
        sampled = await made.complete(prompt=prompts[3], temperature=1, seed=5, n=3, cache_salt="cold")
        await baseline(*made.workers.values())

    for prompt, one, two in zip(prompts, alone, paired, strict=True):
        assert one["choices"][0]["token_ids"] == two["choices"][0]["token_ids"], len(prompt)
        assert len(two["choices"][0]["token_ids"]) == 24
    assert [c["token_ids"] for c in sampled["choices"]] == [c["token_ids"] for c in sampled_alone["choices"]]
    ledger = paired[-1]["ledger"]
    assert ledger["transfer_pages"] == 94  # ceil(1500 / 16); nothing of the prompt was there
    assert ledger["transport"] == "nixl"
    assert ledger["prefill_pid"] != ledger["decode_pid"]
    assert alone[0]["ledger"]["transfer_bytes"] == 0


async def test_a_prompt_that_no_pool_can_ever_hold_is_refused_at_once_and_is_the_clients_fault() -> None:
    async with real("prefill", "decode", pool_tokens=512) as made:
        body = {"prompt": [7] * 600, "max_tokens": 4}
        async with made.http.post("/v1/completions", json=body, timeout=aiohttp.ClientTimeout(5)) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["param"]) == (400, "prompt"), answer
        assert answer["error"]["code"] == "exceeds_capacity"
        assert (await made.complete(prompt=[7] * 300, max_tokens=4))["usage"]["completion_tokens"] == 4


async def test_usage_tells_the_prefix_hit_of_prefill() -> None:
    """Public report T128 (vllm-project/vllm#47136; llm-d/llm-d-router#1012)."""
    async with real("prefill", "decode") as made:
        cold = await made.complete(prompt=[i % 250 for i in range(367)])
        warm = await made.complete(prompt=[i % 250 for i in range(367)])
        foreign = await made.complete(prompt=[i % 250 for i in range(367)], cache_salt="other")

    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm, foreign)]
    assert cached == [0, 352, 0]
    assert cold["choices"][0]["token_ids"] == warm["choices"][0]["token_ids"]


async def test_a_client_that_leaves_frees_both_sides_within_a_second() -> None:
    async with real("prefill", "decode", step_s=0.02) as made:
        body = {"prompt": "x" * 700, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        for read in (0, 5):
            response = await made.http.post("/v1/completions", json=body) if read else None
            if response is None:
                call = asyncio.create_task(made.http.post("/v1/completions", json=body))
                await until(lambda: any(state.prefill_load for state in made.router.fleet.states()))
                call.cancel()
            else:
                for _ in range(read):
                    await response.content.readuntil(b"\n\n")
                response.close()
            await baseline(*made.workers.values())


async def test_a_killed_decode_worker_ends_the_stream_within_a_second_and_prefill_is_clean() -> None:
    async with real("prefill", "decode", step_s=0.02) as made:
        body = {"prompt": "x" * 100, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with made.http.post("/v1/completions", json=body) as response:
            for _ in range(5):
                await response.content.readuntil(b"\n\n")
            killed = time.perf_counter()
            await made.workers["decode"].kill()
            rest = (await response.content.read()).decode()
            took = time.perf_counter() - killed

        events = [line for line in rest.splitlines() if line.startswith("data: ")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert took < 1
        await baseline(made.workers["prefill"])


async def test_a_killed_prefill_worker_ends_the_request_within_a_second_and_decode_is_clean() -> None:
    async with real("prefill", "decode", step_s=0.3) as made:
        body = {"prompt": "x" * 2000, "max_tokens": 20}
        call = asyncio.create_task(made.http.post("/v1/completions", json=body))
        await until(lambda: any(state.prefill_load for state in made.router.fleet.states()))
        await asyncio.sleep(0.3)  # inside the second chunk
        killed = time.perf_counter()
        await made.workers["prefill"].kill()
        response = await call
        took = time.perf_counter() - killed

        assert response.status == 503
        assert took < 1
        await baseline(made.workers["decode"])


GENERATED = "pdserve_worker_generated_tokens_total"


async def speaks(worker: WorkerProcess) -> bool:
    """It has said a token."""
    return any(value for name, value in (await worker.scrape()).items() if name.startswith(GENERATED))


async def test_killing_a_prefill_and_a_decode_worker_under_load_changes_no_answer() -> None:
    """kill -9 of real processes; greedy, seeded and several choices; every answer is the undisturbed one."""
    wishes = [
        {"prompt": [(7 * i + j) % 250 for j in range(40 + 90 * (i % 5))], "max_tokens": 40 + i, "n": 1 + (i % 4 == 3)}
        | ({"temperature": 1.0, "seed": i} if i % 2 else {})
        for i in range(16)
    ]

    def tokens(answer: dict[str, Any]) -> list[list[int]]:
        return [choice["token_ids"] for choice in answer["choices"]]

    async with real("both") as made:
        alone = [tokens(await made.complete(**wish)) for wish in wishes]
    async with real("prefill", "prefill", "decode", "decode", step_s=0.03) as made:
        calls = [asyncio.create_task(made.complete(**wish)) for wish in wishes]
        await until(lambda: made.router.metrics.value("pdserve_requests_inflight", {}) == len(wishes))
        await until(lambda: sum(state.decode_load for state in made.router.fleet.states()) >= len(wishes))
        await eventually(lambda: speaks(made.all[2]), 30)  # some have begun, some have not
        await asyncio.gather(made.all[0].kill(), made.all[2].kill())

        answers = [tokens(answer) for answer in await asyncio.gather(*calls)]
        retried = made.router.metrics.value("pdserve_router_retries_total", {"kind": "continue"})
        await baseline(made.all[1], made.all[3], seconds=20)

    assert answers == alone
    assert retried > 0
