"""Workers that are all in disgrace are still better than nobody."""

from __future__ import annotations

from typing import Any

import pytest

from router.workers.breaker import Result, State
from tests.integration.router.scripted import ScriptedWorker
from tests.integration.router.sites import Site, config, site


def trip(made: Site, *worker_ids: str) -> None:
    """Open the breakers of these workers, as failures in a row do."""
    breakers, now = made.router.dispatcher.booking.breakers, made.router.clock.monotonic()
    for worker_id in worker_ids:
        for leg in ("prefill", "decode"):
            for number in range(20):
                breakers.heard(worker_id, leg, number, Result.BAD, now)
            assert breakers.of(worker_id, leg).state(now) is State.OPEN


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_with_every_breaker_open_requests_are_served_all_the_same_and_it_is_counted(policy: Any) -> None:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=config(policy=policy)) as made:
        trip(made, *(worker.id for worker in made.workers))
        assert (await made.complete())[0] == 200
        assert made.metric("pdserve_router_degraded_choices_total") >= 1


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_while_one_of_a_role_is_well_the_ones_in_disgrace_are_left_alone(policy: Any) -> None:
    workers = [ScriptedWorker("prefill"), ScriptedWorker("prefill", "prefill-2"), ScriptedWorker("decode")]
    async with site(*workers, settings=config(policy=policy)) as made:
        trip(made, workers[0].id)
        for _ in range(6):
            assert (await made.complete())[0] == 200
        assert workers[0].reserved == []
        assert made.metric("pdserve_router_degraded_choices_total") == 0
