"""Real workers, a real router: a worker with running streams is drained, and nobody notices."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from bench.sim.live import configured
from engine.models.oracle import OracleRunner
from pdserve.sim import nics
from protos.v1 import common_pb2, worker_pb2
from router.app import Router
from runtime.config import Config
from tests.integration.pd.conftest import ORACLE
from tests.integration.pd.inprocess import LocalWorker
from tests.integration.pd.inprocess import config as local_config
from tests.integration.pd.workers import WorkerProcess, baseline
from tests.integration.router.scripted import until
from tests.integration.router.sites import config
from tests.integration.router.test_real_workers import Real, real

STEP_S = 0.02
SLOW_STEP_S = 0.1
TOKENS = 300
"""Half a minute of slow decoding: a drain that waits for the streams shows."""


def body(number: int, **fields: Any) -> dict[str, Any]:
    prompt = [(7 * i + 13 * number) % 250 for i in range(40 + number)]
    fixed = {"ignore_eos": True, "return_token_ids": True, "max_tokens": TOKENS, "seed": number, "temperature": 0.9}
    return {"prompt": prompt, **fixed, **fields}


async def stream(made: Real, number: int, **fields: Any) -> dict[int, list[int]]:
    """The token ids a client got, by choice. Fails on an error event or without a finish."""
    said: dict[int, list[int]] = {}
    finishes: set[int] = set()
    async with made.http.post("/v1/completions", json=body(number, stream=True, **fields)) as response:
        assert response.status == 200
        async for line in response.content:
            text = line.decode().strip()
            if not text.startswith("data: ") or text == "data: [DONE]":
                continue
            for choice in json.loads(text.removeprefix("data: "))["choices"]:
                said.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
                if choice["finish_reason"]:
                    finishes.add(choice["index"])
    assert finishes == said.keys()
    return said


async def drain(worker: WorkerProcess, seconds: float) -> tuple[worker_pb2.DrainReply, float]:
    """Its answer, and how long it took."""
    started = time.monotonic()
    request = worker_pb2.DrainRequest(drain=True, timeout_ms=round(1000 * seconds))
    return await worker.admin.Drain(request, timeout=seconds + 10), time.monotonic() - started


def running(made: Real, worker: WorkerProcess) -> int:
    """Requests of this router at a worker."""
    known = next(w for w in made.router.fleet.workers() if w.record.address == worker.address)
    return known.inflight_requests


def moves(made: Real, outcome: str, reason: str = "drain") -> float:
    return made.router.metrics.value("pdserve_moves_total", {"reason": reason, "outcome": outcome})


@asynccontextmanager
async def within(router: Router, role: str, step_s: float = 0.0, **flags: Any) -> AsyncIterator[LocalWorker]:
    """A worker of the oracle model inside this process, of which every step takes so long."""
    settings = local_config("oracle", role=role, **reached(router)).model_copy(update=flags)
    async with started(settings) as worker:
        paced(worker, step_s)
        yield worker


def paced(worker: LocalWorker, step_s: float) -> None:
    runner = worker.parts.engine._runner
    assert isinstance(runner, OracleRunner)
    runner._step_s = step_s


@asynccontextmanager
async def started(settings: Config) -> AsyncIterator[LocalWorker]:
    worker = await LocalWorker(settings.role, settings).start()
    try:
        yield worker
    finally:
        await worker.stop()


def reached(router: Router) -> dict[str, Any]:
    return {"registry": router.grpc, "listen": "127.0.0.1:0", "drain_timeout_s": 1.0}


async def test_a_drained_decode_worker_is_empty_long_before_its_streams_end_and_no_token_differs() -> None:
    """A slow worker has all the streams when a quick one comes; the same requests, asked again there, never moved."""
    async with AsyncExitStack() as stack:
        router = await Router.start(config())
        stack.push_async_callback(router.close)
        prefill = await stack.enter_async_context(within(router, "prefill"))
        source = await stack.enter_async_context(within(router, "decode", SLOW_STEP_S))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{router.http}"))
        made = Real(router, [prefill, source], http)
        await until(lambda: sum(state.usable for state in router.fleet.states()) == 2, 20)
        calls = [asyncio.create_task(stream(made, number)) for number in range(5)]
        calls.append(asyncio.create_task(stream(made, 5, n=2)))
        await until(lambda: running(made, source) == 6, 20)
        target = await stack.enter_async_context(within(router, "decode"))
        await until(lambda: sum(state.usable for state in router.fleet.states()) == 3, 20)

        reply, seconds = await drain(source, 20)

        assert (reply.running, reply.leases) == (0, 0)
        assert seconds < TOKENS * SLOW_STEP_S / 2, "it did not wait for the streams"
        await baseline(source)
        moved = await asyncio.gather(*calls)
        assert moves(made, "moved") == 7
        assert router.metrics.value("pdserve_router_retries_total", {"kind": "continue"}) == 0
        assert moved == await asyncio.gather(*(stream(made, number) for number in range(5)), stream(made, 5, n=2))
        await baseline(prefill, source, target)


async def test_a_request_put_aside_for_want_of_memory_goes_on_at_a_worker_that_has_some() -> None:
    """Four requests in a pool that holds one of them to the end; the others' bytes wait on the host when a worker with
    room comes."""
    small = {"kv_pool_tokens": 16 * 14, "host_pool_tokens": 1024, "headroom_tokens": 1}
    async with AsyncExitStack() as stack:
        router = await Router.start(config(moves_pressure_s=0.1, headroom_tokens=1))
        stack.push_async_callback(router.close)
        prefill = await stack.enter_async_context(within(router, "prefill"))
        source = await stack.enter_async_context(within(router, "decode", SLOW_STEP_S, **small))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{router.http}"))
        made = Real(router, [prefill, source], http)
        await until(lambda: sum(state.usable for state in router.fleet.states()) == 2, 20)
        calls = [asyncio.create_task(stream(made, number, max_tokens=130)) for number in range(4)]
        tiers = source.parts.engine.tiers
        assert tiers is not None
        await until(lambda: tiers.swapped_now > 0, 30)
        target = await stack.enter_async_context(within(router, "decode"))

        await until(lambda: moves(made, "moved", "pressure") >= 1, 20)
        paced(source, 0.0)
        said = await asyncio.gather(*calls)

        assert said == await asyncio.gather(*(stream(made, number, max_tokens=130) for number in range(4)))
        await baseline(prefill, source, target)


async def test_simulated_workers_give_their_streams_away_too() -> None:
    profile = nics("sim-h100-8b").profile
    async with AsyncExitStack() as stack:
        router = await Router.start(config())
        stack.push_async_callback(router.close)
        workers = []
        for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
            flags = {"role": role, "sim": "sim-h100-8b", "worker_id": name, **reached(router)}
            settings = configured(local_config("oracle", **flags), profile)
            workers.append(await stack.enter_async_context(started(settings)))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{router.http}"))
        made = Real(router, list(workers), http)
        await until(lambda: sum(state.usable for state in router.fleet.states()) == 3, 20)
        calls = [asyncio.create_task(stream(made, number, max_tokens=120)) for number in range(4)]
        await until(lambda: all(running(made, worker) == 2 for worker in workers[1:]))

        reply, _ = await drain(workers[1], 20)

        assert (reply.running, reply.leases) == (0, 0)
        moved = await asyncio.gather(*calls)
        assert moves(made, "moved") == 2
        assert moved == await asyncio.gather(*(stream(made, number, max_tokens=120) for number in range(4)))
        await baseline(*workers)


@pytest.mark.slow
async def test_a_worker_that_changes_its_role_is_left_and_a_target_killed_afterwards_costs_no_stream() -> None:
    async with real("both") as made:
        right = [await stream(made, number) for number in range(3)]
    async with real("prefill", "decode", "both", step_s=STEP_S) as made:
        calls = [asyncio.create_task(stream(made, number)) for number in range(3)]
        source, other = made.workers["decode"], made.workers["both"]
        await until(lambda: running(made, source) >= 1)

        await source.admin.SetRole(worker_pb2.SetRoleRequest(role=common_pb2.ROLE_PREFILL), timeout=5)
        await until(lambda: moves(made, "moved", "role") >= 1)
        await until(lambda: running(made, source) == 0)
        await source.admin.SetRole(worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE), timeout=5)
        await until(lambda: all(state.usable for state in made.router.fleet.states()))
        await other.kill()

        assert await asyncio.gather(*calls) == right
        await baseline(source, made.workers["prefill"])


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["source", "target"])
async def test_a_worker_killed_while_the_bytes_move_costs_no_stream(victim: str) -> None:
    """The source's word on what may be read comes late, so that the kill falls into the transfer."""
    async with real("prefill", "decode", step_s=0.05, faults="kv.event=delay:1.5") as made:
        flags = {**ORACLE, "registry": made.router.grpc, "lease_s": 60.0}
        source, others = made.workers["decode"], [WorkerProcess("decode", flags) for _ in range(2)]
        calls = [asyncio.create_task(stream(made, number)) for number in range(3)]
        try:
            await until(lambda: running(made, source) == 3, 20)
            await asyncio.gather(*(worker.start() for worker in others))
            await until(lambda: sum(state.usable for state in made.router.fleet.states()) == 4, 20)
            draining = asyncio.create_task(drain(source, 20))
            under_way = made.router.dispatcher.moves._under_way
            await until(lambda: any(move._left for move in under_way), 20)
            going = next(move for move in under_way if move._left)
            assert going.onward.decode is not None
            address = going.onward.decode.worker.record.address
            target = next(worker for worker in others if worker.address == address)
            (left,) = [worker for worker in others if worker is not target]

            await (source if victim == "source" else target).kill()

            moved = await asyncio.gather(*calls)
            assert moved == [await stream(made, number) for number in range(3)]
            await asyncio.gather(draining, return_exceptions=True)
            alive = target if victim == "source" else source  # told in the background, else only after a lease, of 60 s
            await baseline(made.workers["prefill"], left, alive, seconds=10)
        finally:
            for worker in others:
                await worker.stop()
