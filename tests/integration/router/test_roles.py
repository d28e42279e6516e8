"""Workers change their role while requests run: routers follow at once, and nothing that runs is touched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router.policy.pairing import Role
from tests.integration.router.scripted import Leg, ScriptedWorker, decode_answers, until
from tests.integration.router.sites import Site, site


class Gated(ScriptedWorker):
    """Its prefill stream opens when the gate does."""

    def __init__(self, role: str, worker_id: str = "") -> None:
        super().__init__(role, worker_id)
        self.gate = asyncio.Event()

    async def stream(self, commands: AsyncIterator[Any], message: type[Any], event: type[Any]) -> AsyncIterator[Any]:
        if message is prefill_pb2.PrefillEvents:
            await self.gate.wait()
        async for one in super().stream(commands, message, event):
            yield one


def role(made: Site, worker: str) -> Role | None:
    known = made.router.fleet.worker(worker)
    return known.role if known is not None and known.usable else None


async def test_a_worker_that_takes_on_a_second_role_is_never_missing_from_its_first() -> None:
    decode = Gated("decode", "d")
    async with site(ScriptedWorker("prefill", "p"), decode) as made:
        known = made.router.fleet.worker("d")
        assert known is not None
        decode.advertise(role=common_pb2.ROLE_BOTH)
        await until(lambda: known.record.role == common_pb2.ROLE_BOTH)
        assert role(made, "d") is Role.DECODE, "its new stream is not there yet"
        assert (await made.complete())[0] == 200
        decode.gate.set()
        await until(lambda: role(made, "d") is Role.BOTH)
        made.workers[0].advertise(draining=True)
        await until(lambda: role(made, "p") is None)
        status, _ = await made.complete()
        assert status == 200, "it does both alone"
        assert decode.submitted[-1].local


async def test_what_runs_on_a_worker_goes_on_when_its_role_is_another_one() -> None:
    go_on = asyncio.Event()

    async def slow(leg: Leg) -> None:
        await leg.ticket.wait()
        await go_on.wait()
        await decode_answers(leg)

    first = ScriptedWorker("decode", "d0")
    first.decode = slow
    async with site(ScriptedWorker("prefill", "p"), first) as made:
        running = asyncio.create_task(made.complete())
        await first.until(lambda: any(leg.ticket.is_set() for leg in first.submitted))
        first.advertise(role=common_pb2.ROLE_PREFILL)
        await until(lambda: role(made, "d0") is Role.PREFILL)
        assert (await made.complete())[0] == 503, "nobody decodes now"
        go_on.set()
        status, body = await running
        assert (status, body["usage"]["completion_tokens"]) == (200, 4)


async def test_a_request_that_waits_where_nobody_decodes_any_more_has_its_prompt_computed_there_all_the_same() -> None:
    async def gives_up(leg: Leg) -> None:
        await leg.asked.wait()
        detail = common_pb2.ErrorDetail(reason="draining", message="nothing is computed here", retryable=True)
        leg.send(failed=decode_pb2.DecodeFailed(error=detail))

    both, decode = ScriptedWorker("both", "b"), ScriptedWorker("decode", "d")
    both.decode = gives_up
    for worker in (both, decode):
        worker.described.features.append("handover")
    async with site(both, decode) as made:
        decode.advertise(draining=True)
        await until(lambda: role(made, "d") is None)
        running = asyncio.create_task(made.complete())
        await both.until(lambda: bool(both.submitted))
        assert both.submitted[0].local
        decode.advertise(draining=False)
        await until(lambda: role(made, "d") is Role.DECODE)
        both.advertise(role=common_pb2.ROLE_PREFILL)
        status, body = await running
        assert (status, body["usage"]["completion_tokens"]) == (200, 4), body
        assert len(both.submitted) == 2, "the only worker for prompts was asked again"
