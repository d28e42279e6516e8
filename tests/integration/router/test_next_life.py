"""A worker's next process, at another port, is heard of before its record has gone: its cache is followed anew."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from protos.v1 import common_pb2
from tests.integration.router.honest import fleet, honest_prefill
from tests.integration.router.scripted import Leg, ScriptedWorker, until
from tests.integration.router.sites import config, serving, site
from tests.integration.router.test_policies import STORED, CachingWorker, idle


async def test_the_cache_of_a_workers_next_process_is_followed_and_the_last_ones_forgotten() -> None:
    first, second = CachingWorker("both", "b0"), CachingWorker("both", "b0")
    second.epoch = first.epoch + 1
    second.described.epoch = second.epoch
    first.snapshot, second.snapshot = [bytes(32)], [bytes([1]) * 32]
    async with site(first, settings=config(policy="predicted")) as made:
        index = made.router.planner.index
        await until(lambda: index.position("b0") == (first.epoch, 1) and len(index) == 1)
        async with serving(second, made.router):
            await until(lambda: second.asked != [])
            await until(lambda: index.position("b0")[0] == second.epoch)
            second.says(STORED, [bytes([2]) * 32], sequence=2)
            await until(lambda: index.position("b0") == (second.epoch, 2))
            assert len(index) == 2, "nothing of the process before"
            await until(lambda: sum(state.usable for state in made.router.fleet.states()) == 1)
            status, _ = await made.complete(prompt="still there?", max_tokens=2)
            assert status == 200
            assert idle(made)


async def test_a_fault_over_one_message_does_not_end_a_workers_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.planner.RETRY_S", 0.01)
    worker = CachingWorker("both", "b0")
    async with site(worker, settings=config(policy="predicted")) as made:
        index, faults = made.router.planner.index, [ZeroDivisionError()]
        await until(lambda: index.position("b0") == (worker.epoch, 1))
        apply = index.apply

        def once(*args: Any) -> bool:
            if faults:
                raise faults.pop()
            return apply(*args)

        monkeypatch.setattr(index, "apply", once)
        worker.says(STORED, [bytes([1]) * 32], sequence=2)
        await until(lambda: not faults and len(worker.asked) == 2)
        worker.says(STORED, [bytes([2]) * 32], sequence=2)
        await until(lambda: index.position("b0") == (worker.epoch, 2))


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_what_a_worker_failed_in_its_last_life_is_not_held_against_the_next_one(policy: str) -> None:
    async def fails(leg: Leg) -> None:
        leg.send(failed=common_pb2.ErrorDetail(reason="worker_lost", message="broken", retryable=True))

    workers, next_life = fleet(2, 1), ScriptedWorker("prefill", "p0")
    first, other, _ = workers
    first.prefill, next_life.prefill = fails, honest_prefill
    next_life.epoch = next_life.described.epoch = first.epoch + 1
    async with site(*workers, settings=config(policy=policy)) as made:
        breaker = made.router.dispatcher.booking.breakers.of("p0", "prefill")
        async with asyncio.timeout(10):
            while breaker.allows(time.monotonic()):
                assert (await made.complete())[0] == 200
        assert first.agent is not None
        assert other.agent is not None
        await first.agent.stop()
        async with serving(next_life, made.router):
            await other.agent.stop()
            fleet_of = made.router.fleet
            await until(lambda: {state.worker_id for state in fleet_of.states() if state.usable} == {"p0", "d0"})
            assert (await made.complete())[0] == 200
            assert made.metric("pdserve_router_degraded_choices_total") == 0
