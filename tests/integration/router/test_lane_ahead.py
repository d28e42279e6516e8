"""What clients send behind a request of the lane, part by part."""

from __future__ import annotations

import asyncio

import pytest

from router.api.server import PARTS_AHEAD
from tests.integration.router.scripted import ScriptedWorker, until
from tests.integration.router.sites import site
from tests.integration.router.test_lane import GOOD, TE, Client, asking, held, post

BAD = b"POST /v1/completions HTTP/1.1\r\nHost : x\r\n\r\n"
OLD = post(asking(), version=b"HTTP/1.0")
CHUNKED = TE % (len(asking()), asking())


@pytest.mark.parametrize(
    ("behind", "statuses"),
    [
        ([GOOD, BAD], [200, 200, 400]),
        ([CHUNKED, BAD], [200, 200, 400]),
        ([GOOD[:-7], GOOD[-7:], CHUNKED, BAD], [200, 200, 200, 400]),
        ([OLD, GOOD], [200, 200]),
    ],
)
async def test_what_is_sound_is_answered_before_what_is_not_that_came_after_it(
    behind: list[bytes], statuses: list[int]
) -> None:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        for by_lane in (False, True):
            submitted = len(made.worker("prefill").submitted)
            client = Client(made, by_lane=by_lane)
            with held(made) as goes_on:
                await client.send(GOOD)
                await until(lambda count=submitted + 1: len(made.worker("prefill").submitted) == count)  # type: ignore[misc]
                await client.send(*behind)
                goes_on.set()
            await client.answered(*statuses, closed=True)


async def test_many_small_parts_behind_a_request_are_few() -> None:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        client = Client(made)
        with held(made) as goes_on:
            await client.send(GOOD)
            for place in range(len(GOOD * 3)):
                client.protocol.data_received((GOOD * 3)[place : place + 1])
            assert len(client.protocol._ahead) == PARTS_AHEAD
            await asyncio.sleep(0)
            goes_on.set()
        await client.answered(200, 200, 200, 200)
