"""A prompt whose pages lie with a busy worker goes to an idle one, which is told whom to fetch them from."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from router.policy.ledger import Demand
from router.policy.view import Placement
from tests.integration.router.scripted import until
from tests.integration.router.sites import Site, config, site
from tests.integration.router.test_policies import PROMPT, STORED, CachingWorker, fleet, idle, keys_of, used

LONG = PROMPT * 5  # computing it takes longer than fetching it, as a router guesses before it knows
PAGES = len(LONG) // 16


def able(workers: list[CachingWorker], feature: bool = True) -> list[CachingWorker]:
    for worker in workers:
        if feature:
            worker.described.features.append("prefix_source")
    return workers


async def known_at(made: Site, owner: CachingWorker) -> None:
    """`owner` says that it has the whole of LONG."""
    status, _ = await made.complete(prompt="teach me the salt, please", max_tokens=2)
    assert status == 200
    index = made.router.planner.index
    await until(lambda: all(index.synced(worker.id) for worker in made.workers))
    owner.says(STORED, keys_of(made, LONG), sequence=2)
    await until(lambda: index.position(owner.id)[1] >= 2)


def busy(made: Site, *names: str) -> None:
    """Prompts of ten seconds are booked there; on decode workers beside others' decoding, which they would disturb."""
    planner = made.router.planner
    for number, name in enumerate(names):
        demand = Demand(10, prefill_tokens=100_000, prefill_s=10.0)
        planner.ledger.charge((f"others-{number}", 1), {name: demand}, asyncio.get_running_loop().time())


@pytest.mark.parametrize("owner", ["p0", "d0"])
async def test_an_idle_worker_is_told_whom_to_fetch_a_prefix_from(owner: str) -> None:
    workers = able(fleet(prefills=2, decodes=1))
    source = next(worker for worker in workers if worker.id == owner)
    async with site(*workers, settings=config(policy="predicted")) as made:
        await known_at(made, source)
        busy(made, "p0", "d0")
        assert await used(made, LONG) == "p1"
        told = workers[1].submitted[-1].work.prefix_source
        assert (told.worker_id, told.epoch, told.address) == (owner, source.epoch, source.address)
        assert told.tokens == min(PAGES * 16, len(LONG) - 1)
        assert told.budget_ms > 0
        assert not workers[2].submitted[-1].work.HasField("prefix_source"), "who reads the hand-off needs no prefix"
        assert made.metric("pdserve_router_prefix_fetches_total", outcome="missed") == 1, (
            "the scripted one fetches nothing"
        )
        for number in range(2):
            made.router.planner.ledger.release_all(f"others-{number}", (1,), 0.0)
        await until(lambda: idle(made))


@pytest.mark.parametrize(("feature", "fetches"), [(False, 4), (True, 0)])
async def test_nobody_is_told_to_fetch_who_cannot_or_shall_not(feature: bool, fetches: int) -> None:
    workers = able(fleet(prefills=2, decodes=1), feature)
    async with site(*workers, settings=config(policy="predicted", prefix_fetches=fetches)) as made:
        await known_at(made, workers[0])
        busy(made, "p0", "d0")
        await used(made, LONG)
        assert not any(leg.work.HasField("prefix_source") for worker in workers for leg in worker.submitted)


async def test_a_prompt_whose_scores_are_wanted_is_run_whole() -> None:
    workers = able(fleet(prefills=2, decodes=1))
    async with site(*workers, settings=config(policy="predicted")) as made:
        await known_at(made, workers[0])
        busy(made, "p0", "d0")
        await made.post("/v1/completions", {"prompt": LONG, "max_tokens": 1, "echo": True, "logprobs": 1})
        assert not any(leg.work.HasField("prefix_source") for worker in workers for leg in worker.submitted)


async def test_an_absurd_budget_is_an_hour_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that a worker has made up may make a prediction of any size."""
    workers = able(fleet(prefills=2, decodes=1))
    async with site(*workers, settings=config(policy="predicted")) as made:
        await known_at(made, workers[0])
        busy(made, "p0", "d0")
        choose = made.router.planner._policy.choose

        def endless(*asked: Any) -> Any:
            placed = choose(*asked)
            assert isinstance(placed, Placement)
            assert placed.fetch is not None
            return replace(placed, fetch=replace(placed.fetch, budget_s=math.inf))

        monkeypatch.setattr(made.router.planner._policy, "choose", endless)
        assert await used(made, LONG) == "p1"
        assert workers[1].submitted[-1].work.prefix_source.budget_ms == 3_600_000
        for name in ("others-0", "others-1"):
            made.router.planner.ledger.release_all(name, (1,), 0.0)
