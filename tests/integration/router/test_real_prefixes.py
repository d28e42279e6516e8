"""The whole way with real workers: a crowd that wants one worker's prefix is served by others that fetch it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.pd.workers import baseline
from tests.integration.router.sites import config
from tests.integration.router.test_real_workers import real

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DOCUMENT = [(7 * i + 3) % 250 for i in range(3000)]


def asked(number: int) -> list[int]:
    return DOCUMENT + [(number + i) % 250 for i in range(60)]


async def test_a_crowd_with_one_prefix_is_served_by_workers_that_fetch_it() -> None:
    """A step lasts 0.15 s, so computing the document takes several; the router has to see that on its own."""
    settings = config(policy="predicted", ttft_goal_s=30)
    async with real("prefill", "prefill", "decode", step_s=0.15, settings=settings) as made:
        first = await made.complete(prompt=DOCUMENT, max_tokens=8)
        fetched = 0.0
        answers: dict[int, dict[str, Any]] = {}
        for crowd in range(5):
            numbers = range(100 * crowd, 100 * crowd + 8)
            got = await asyncio.gather(*(made.complete(prompt=asked(n), max_tokens=3) for n in numbers))
            answers.update(zip(numbers, got, strict=True))
            fetched = made.router.metrics.value("pdserve_router_prefix_fetches_total", {"outcome": "fetched"})
            if fetched:
                break
        assert fetched
        turn = DOCUMENT + first["choices"][0]["token_ids"] + [9] * 40
        answers[-1] = await made.complete(prompt=turn, max_tokens=3)
        assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 2992
        moved = [await worker.scrape() for worker in made.all]
        assert sum(found["pdserve_worker_prefix_fetch_bytes_total"] for found in moved) > 0
        await baseline(*made.all, seconds=10)
    async with real("both") as made:
        for number, answer in answers.items():
            prompt = turn if number < 0 else asked(number)
            alone = await made.complete(prompt=prompt, max_tokens=3)
            assert alone["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
