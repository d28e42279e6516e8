"""The elastic controller over a live fleet: roles follow what clients do, and no request fails by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from deploy.controller import Controller
from deploy.elastic import Move
from deploy.elastic_state import Nothing
from runtime import faults
from runtime.config import Config
from runtime.errors import InvalidRequest
from tests.integration.cluster.local_fleet import LocalFleet, local_fleet
from tests.integration.router.scripted import until

QUICK: dict[str, Any] = {"elastic": True, "elastic_dwell_s": 0.3, "elastic_cooldown_s": 0.2, "drain_timeout_s": 5.0}


@asynccontextmanager
async def controlled(made: LocalFleet, **settings: Any) -> AsyncIterator[Controller]:
    """A controller that looks ten times a second."""
    config = Config(**{**QUICK, **settings}, max_batch=made.router.config.max_batch)
    controller = Controller(config, made.router.grpc, made.router.http, period_s=0.1)
    stopping = asyncio.Event()
    running = asyncio.create_task(controller.run(stopping))
    try:
        yield controller
    finally:
        stopping.set()
        await running


def count(made: LocalFleet, role: str) -> int:
    return list(made.roles().values()).count(role)


async def test_a_burst_of_prompts_turns_a_decode_worker_into_one_more_for_prompts() -> None:
    with faults.armed("engine.step=delay:0.02"):
        async with (
            local_fleet("prefill", "decode", "decode") as made,
            controlled(made, prefill=1, decode=2),
            made.under_load(12, 2000, 1),
        ):
            await until(lambda: count(made, "prefill") == 2 and count(made, "decode") == 1, 30)
        assert made.failed == []
        assert made.answered > 0


@pytest.mark.slow
async def test_the_fleet_follows_from_prompts_to_answers_and_back_to_what_was_configured() -> None:
    with faults.armed("engine.step=delay:0.02"):
        async with local_fleet("prefill", "prefill", "decode", "decode", max_batch=8) as made:
            async with controlled(made, prefill=2, decode=2):
                async with made.under_load(24, 2000, 1):
                    await until(lambda: count(made, "prefill") == 3, 30)
                async with made.under_load(24, 20, 100):
                    await until(lambda: count(made, "decode") == 3, 40)
                await until(lambda: (count(made, "prefill"), count(made, "decode")) == (2, 2), 40)
            assert made.failed == []


async def test_a_controller_that_ends_puts_back_the_worker_it_drains() -> None:
    async with local_fleet("prefill", "decode") as made:
        controller = Controller(Config(**QUICK), made.router.grpc, made.router.http)
        assert isinstance(await controller.turn(made.fleet), Nothing)
        (worker, _) = await made.fleet.workers()
        controller.elastic.move = Move(worker.worker_id, worker.epoch, "decode", "prefill", 0.0)
        await made.fleet.drain(worker.address, True)
        await until(lambda: count(made, "decode") == 0)
        stopping = asyncio.Event()
        stopping.set()
        await controller.run(stopping)
        await until(lambda: count(made, "decode") == 1)


async def test_a_router_that_is_away_only_makes_it_wait() -> None:
    async with local_fleet("prefill", "decode") as made:
        stopping = asyncio.Event()
        controller = Controller(Config(**QUICK), "127.0.0.1:1", "127.0.0.1:1", period_s=0.01)
        running = asyncio.create_task(controller.run(stopping))
        async with controlled(made):
            pass
        assert not running.done()
        stopping.set()
        await running


def test_without_a_ray_cluster_nobody_can_be_asked_for_more() -> None:
    with pytest.raises(InvalidRequest):
        Controller(Config(elastic=True, prefill_max=3), "127.0.0.1:1", "")
