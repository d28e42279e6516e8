"""Twice what the fleet can do: who is taken is served in time, everybody else hears so at once and with a reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from protos.v1 import common_pb2
from tests.integration.router.scripted import Leg, ScriptedWorker, decode_answers, until
from tests.integration.router.sites import config, site

PLACES = 4
QUEUE = 6


class Small(ScriptedWorker):
    """Has room for a few at once and says no to the rest; `most`: how many it ever held."""

    most = 0

    @property
    def load(self) -> common_pb2.Load:
        """As a real one reports it: with every message, and never the same when something has ended."""
        held = self.held()
        return common_pb2.Load(pages_free=max(PLACES - held, 0), pages_total=PLACES, running=held)

    @load.setter
    def load(self, load: common_pb2.Load) -> None:
        return None

    async def reserve(self, request: common_pb2.ReserveRequest) -> common_pb2.ReserveReply:
        self.most = max(self.most, self.held())
        if self.held() >= PLACES:
            full = common_pb2.ErrorDetail(reason="saturated", retryable=True)
            return common_pb2.ReserveReply(refusal=full)
        return await super().reserve(request)


async def slowly(leg: Leg) -> None:
    await asyncio.sleep(0.05)
    await decode_answers(leg)


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_what_is_too_much_is_refused_with_a_reason_and_nothing_stays_behind(policy: Any) -> None:
    settings = config(policy=policy, max_queue=QUEUE, queue_timeout_s=20.0)
    prefill, decode = ScriptedWorker("prefill"), Small("decode")
    decode.decode = slowly
    async with site(prefill, decode, settings=settings) as made:
        line = made.router.dispatcher.booking.line
        longest = 0

        async def ask(number: int) -> tuple[int, str, str]:
            nonlocal longest
            await asyncio.sleep(0.004 * number)
            body = {"prompt": f"request {number}", "max_tokens": 4}
            status, _, headers = await made.post("/v1/completions", body)
            longest = max(longest, len(line))
            return status, headers.get("x-pd-reason", ""), headers.get("Retry-After", "")

        answers = await asyncio.gather(*(ask(number) for number in range(60)))
        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) == {200, 503}
        assert statuses[200] >= PLACES + QUEUE, "the line was served"
        for status, reason, after in answers:
            if status == 503:
                assert reason == "queue_full"
                assert int(after) >= 1
        assert longest <= QUEUE
        assert decode.most <= PLACES
        await until(lambda: made.idle(True), 5)
        assert (await made.complete())[0] == 200
