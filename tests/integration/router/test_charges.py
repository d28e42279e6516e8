"""What a tenant is charged for a request: seconds of prefill, bytes moved, and tokens for as long as they were held."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.integration.router.scripted import Leg, decode_answers, until
from tests.integration.router.sites import BODY, Site

HELD_S = 0.2
PROMPT = len("hello")


@pytest.fixture
def charged(pair: Site, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What the line is told at the end of each request."""
    line, told = pair.router.dispatcher.booking.line, []
    usual = line.over

    def over(request_id: str, **used: float) -> None:
        told.append(used)
        usual(request_id, **used)

    monkeypatch.setattr(line, "over", over)
    return told


async def slowly(leg: Leg) -> None:
    await asyncio.sleep(HELD_S)
    await decode_answers(leg)


async def test_prefill_bytes_and_residency_are_all_charged(pair: Site, charged: list[dict[str, float]]) -> None:
    pair.worker("decode").decode = slowly
    status, _ = await pair.complete()
    assert status == 200
    (used,) = charged
    assert used["prefill_s"] == pytest.approx(0.01), "what the worker reported, not what was predicted"
    assert used["moved"] == 64
    assert used["token_seconds"] >= PROMPT * HELD_S
    assert used["token_seconds"] < (PROMPT + 4) * 60


async def test_whoever_leaves_in_the_middle_has_used_what_it_held_until_then(
    pair: Site, charged: list[dict[str, float]]
) -> None:
    went_on = asyncio.Event()

    async def stalls(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.handed_over()
        leg.tokens(1, ord("b"))
        went_on.set()
        await asyncio.Event().wait()

    pair.worker("decode").decode = stalls
    body: dict[str, Any] = BODY | {"stream": True}
    async with pair.http.post("/v1/completions", json=body, timeout=aiohttp.ClientTimeout(20)) as response:
        await response.content.readany()
        await went_on.wait()
        await asyncio.sleep(HELD_S)
    await until(lambda: len(charged) == 1)
    assert charged[0]["prefill_s"] == pytest.approx(0.01)
    assert charged[0]["moved"] == 64
    assert charged[0]["token_seconds"] >= PROMPT * HELD_S


async def test_a_request_that_was_refused_has_used_nothing(pair: Site, charged: list[dict[str, float]]) -> None:
    prefill = pair.worker("prefill")

    async def fails(leg: Leg) -> None:
        leg.send(failed={"reason": "invalid_request", "message": "no"})

    prefill.prefill = fails
    status, _ = await pair.complete()
    assert status == 400
    assert charged == [{"prefill_s": 0.0, "moved": 0.0, "token_seconds": 0.0}]
