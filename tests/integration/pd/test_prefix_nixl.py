"""Cached prefixes between worker processes, over NIXL: from the device, from host memory, from a source that dies."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from protos.v1 import common_pb2
from tests.integration.pd.conftest import ORACLE
from tests.integration.pd.router_client import Answer, Router, request
from tests.integration.pd.workers import PATIENT, WorkerProcess, baseline

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

HOST = {"host_pool_tokens": 16384, "kv_pool_tokens": 1024}


def source(worker: WorkerProcess, tokens: int, budget_ms: int = 20_000) -> common_pb2.PrefixSource:
    return common_pb2.PrefixSource(
        worker_id="source", epoch=worker.epoch, address=worker.address, tokens=tokens, budget_ms=budget_ms
    )


def prompt(length: int, seed: int, vocabulary: int = 90) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(4, vocabulary, length)]


class Fleet:
    """Worker processes of one model, and a router to any pair of them."""

    def __init__(self, flags: dict[str, Any], **env: str) -> None:
        self._flags, self._env = flags, env
        self._stack = AsyncExitStack()
        self.routers: dict[tuple[int, int], Router] = {}

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for router in self.routers.values():
            await router.close()
        await self._stack.aclose()

    async def start(
        self, *workers: tuple[str, dict[str, Any]], env: dict[str, str] | None = None
    ) -> list[WorkerProcess]:
        made = [WorkerProcess(role, {**self._flags, **flags}, {**self._env, **(env or {})}) for role, flags in workers]
        for worker in made:
            self._stack.push_async_callback(worker.stop)
        await asyncio.gather(*(worker.start() for worker in made))
        return made

    async def answer(self, p: WorkerProcess, d: WorkerProcess, tokens: list[int], **options: Any) -> Answer:
        key = (p.pid, d.pid)
        if key not in self.routers:
            self.routers[key] = await Router(p, d).open()
        return await self.routers[key].disaggregated(request(tokens, **options))


@pytest.fixture
async def oracle() -> AsyncIterator[Fleet]:
    async with Fleet({**ORACLE, **PATIENT, "transport": "nixl"}) as fleet:
        yield fleet


async def offers(worker: WorkerProcess) -> dict[str, float]:
    name = 'pdserve_worker_prefix_offers_total{tier="'
    return {key.removeprefix(name).removesuffix('"}'): v for key, v in (await worker.scrape()).items() if name in key}


async def test_a_prefix_comes_from_the_device_and_from_host_memory_of_another_worker(oracle: Fleet) -> None:
    p, q, d, cold = await oracle.start(("prefill", HOST), ("prefill", {}), ("decode", {}), ("prefill", {}))
    tokens = prompt(600, 1)
    expected = (await oracle.answer(cold, d, tokens)).tokens
    await oracle.answer(p, d, tokens)
    first = await oracle.answer(q, d, [*tokens[:-8], *prompt(8, 2)], prefix_source=source(p, 592))
    assert first.prefill is not None
    assert (first.prefill.fetched_tokens, first.prefill.transport) == (592, "nixl")
    other = prompt(600, 3)
    await oracle.answer(p, d, other)
    for seed in range(4, 8):
        await oracle.answer(p, d, prompt(900, seed))
    low = await oracle.answer(q, d, other, prefix_source=source(p, 592))
    assert low.prefill is not None
    assert low.prefill.fetched_tokens == 592
    assert await offers(p) == {"device": 1.0, "host": 1.0}
    assert low.tokens == (await oracle.answer(cold, d, other)).tokens
    assert (await oracle.answer(q, d, tokens)).tokens == expected
    await baseline(p, q, d, seconds=5)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_that_dies_or_freezes_in_mid_fetch_costs_its_time_only(
    oracle: Fleet, end: signal.Signals
) -> None:
    (p,) = await oracle.start(("prefill", {}), env={"PDSERVE_FAULTS": "kv.event=delay:1"})
    q, d, cold = await oracle.start(("prefill", {}), ("decode", {}), ("prefill", {}))
    tokens = prompt(600, 1)
    expected = (await oracle.answer(cold, d, tokens)).tokens
    router = await Router(p, q).open()
    await router.p.send(submit=(work := request(tokens)))
    while (await router.p.next(work.ref)).WhichOneof("event") != "done":
        pass
    asked = asyncio.create_task(oracle.answer(q, d, tokens, prefix_source=source(p, 592, budget_ms=1500)))
    await asyncio.sleep(0.3)  # somewhere in the source's first, delayed word
    p.signal(end)
    began = time.monotonic()
    answer = await asked
    assert time.monotonic() - began < 5
    assert answer.tokens == expected
    assert answer.prefill is not None
    assert answer.prefill.fetched_tokens == 0
    await baseline(q, d, seconds=5)
    if end == signal.SIGSTOP:
        p.signal(signal.SIGKILL)
    await p.wait()
    await router.d.close()


async def test_a_hybrid_models_turn_comes_back_from_decode_to_a_cold_worker_from_device_and_host() -> None:
    """State and partial page of the turn's end, over NIXL: computed is only what follows it."""
    flags = {**ORACLE, "transport": "nixl", "model": "tiny-kimi", "kv_pool_tokens": 8192}
    async with Fleet(flags | PATIENT, PDSERVE_DETERMINISTIC="true") as fleet:
        low = {"host_pool_tokens": 16384, "kv_pool_tokens": 1024, "state_slots": 6}
        p, q, d = await fleet.start(("prefill", {}), ("prefill", {}), ("decode", low))
        tokens = prompt(200, 1, 500)
        first = await fleet.answer(p, d, tokens, max_tokens=21)
        turn = [*tokens, *first.tokens[0], *prompt(30, 2, 500)]
        from_device = await fleet.answer(q, p, turn, prefix_source=source(d, 220))
        assert from_device.prefill is not None
        assert from_device.prefill.cached_tokens == from_device.prefill.fetched_tokens == 220
        for seed in range(3, 6):
            await fleet.answer(p, d, prompt(900, seed, 500), max_tokens=2)
        other = [*tokens, *first.tokens[0], *prompt(30, 20, 500)]
        from_host = await fleet.answer(p, q, other, prefix_source=source(d, 220))
        assert await offers(d) == {"device": 1.0, "host": 1.0}
        assert from_host.prefill is not None
        assert from_host.prefill.cached_tokens == 220
        assert from_host.tokens == (await fleet.answer(q, p, other)).tokens
        (cold,) = await fleet.start(("both", {}))
        assert from_device.tokens == (await fleet.answer(cold, p, turn)).tokens
        await baseline(p, q, d, seconds=5)
