"""Workers that report numbers which are none: nothing the router has learned or owes becomes one, too."""

from __future__ import annotations

import math

import pytest

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.integration.router.scripted import GO_ON, LENGTH, Leg, ScriptedWorker
from tests.integration.router.sites import config, site


@pytest.mark.parametrize("said", [math.nan, math.inf])
async def test_a_worker_whose_clock_is_broken_spoils_no_prediction_and_no_tenants_account(said: float) -> None:
    times = common_pb2.StageTimes(
        queue_s=said, prefill_s=said, handoff_wait_s=said, transfer_s=said, decode_s=said, checksum_s=said,
        fetch_s=said, transfer_bytes=64, pid=1,
    )  # fmt: skip

    async def prefill(leg: Leg) -> None:
        leg.ticket_issued()
        leg.send(done=prefill_pb2.PrefillDone(first=[common_pb2.FirstToken(token=ord("a"))], times=times))

    async def decode(leg: Leg) -> None:
        if not leg.local:
            await leg.ticket.wait()
            leg.send(handoff=decode_pb2.HandoffDone(times=times))
        start = 0 if leg.local else 1
        for sequence in range(start, 4):
            ends = sequence == 3
            leg.send(
                tokens=decode_pb2.ChoiceTokens(
                    first_sequence=sequence,
                    tokens=[ord("a") + sequence],
                    finish=LENGTH if ends else GO_ON,
                    times=times if ends else None,
                )
            )

    workers = [ScriptedWorker("prefill"), ScriptedWorker("decode")]
    workers[0].prefill, workers[1].decode = prefill, decode
    for worker in workers:
        worker.load = common_pb2.Load(pages_free=10_000, pages_total=10_000)
    async with site(*workers, settings=config(policy="predicted")) as made:
        for number in range(3):
            assert (await made.complete(prompt=f"{number}: what time is it?"))[0] == 200
        speeds = made.router.planner.speeds
        predicted = [
            speeds.prefill_s("prefill-1", 100, 0),
            speeds.step_s("decode-1", 2, 100),
            speeds.transfer_s("prefill-1", "decode-1", 1e6),
            speeds.fetch_s("prefill-1", "decode-1", 1e6),
            speeds.ttft_error.median,
        ]
        assert all(0 <= value < 60 for value in predicted), predicted
        admission = made.router.dispatcher.booking.line._admission
        assert all(math.isfinite(tenant.served) for tenant in admission._tenants.values())
        await made.quiet()
