"""Messages that no router of ours would send: each is refused by itself, and the worker serves on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from protos.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kvsource_pb2,
    kvsource_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from runtime import rpc
from runtime.errors import PdserveError
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import SHORT, Router, request
from tests.integration.router.scripted import until
from tests.scribble import fill, scribbled

END: Any = vars(grpc.aio)["EOF"]
LATER = {"saturated", "worker_draining", "deadline_exceeded", "worker_lost"}
SOONER_S = {"lease_s": 1.0, "lease_margin_s": 0.3, "reattach_s": 0.2}


def calls(channel: Any) -> list[tuple[Callable[..., Any], Any]]:
    prefill, decode = prefill_pb2_grpc.PrefillStub(channel), decode_pb2_grpc.DecodeStub(channel)
    source, worker = kvsource_pb2_grpc.KvSourceStub(channel), worker_pb2_grpc.WorkerStub(channel)
    return [
        (prefill.Reserve, common_pb2.ReserveRequest),
        (decode.Reserve, common_pb2.ReserveRequest),
        (prefill.CancelReservation, common_pb2.CancelReservationRequest),
        (source.Handshake, kvsource_pb2.HandshakeRequest),
        (source.OfferPrefix, kvsource_pb2.OfferPrefixRequest),
        (source.Renew, kvsource_pb2.RenewRequest),
        (source.Release, kvsource_pb2.ReleaseRequest),
        (worker.SetRole, worker_pb2.SetRoleRequest),
    ]


async def reason(call: Any) -> str:
    """Why it was refused; "" when it was not."""
    try:
        async with asyncio.timeout(5):
            with rpc.translated():
                await call
    except PdserveError as error:
        return error.reason
    return ""


def submit(leg: str, chance: random.Random) -> Any:
    """A request that would run, but for one part of it."""
    work = request(SHORT[: chance.randint(1, 50)], max_tokens=3)
    part = chance.choice(["sampling", "retention", "prefix_source", "ref", ""])
    if part:
        fill(getattr(work, part), chance)
    else:
        work = scribbled(common_pb2.WorkRequest, chance, ref=work.ref, tokens=list(work.tokens))
    if leg == "prefill":
        return prefill_pb2.PrefillCommand(submit=work)
    return decode_pb2.DecodeCommand(submit=decode_pb2.DecodeSubmit(request=work, fence=1, local=True))


async def stream(worker: LocalWorker, leg: str, chance: random.Random) -> list[str]:
    """Reasons of everything that failed on one stream of a few commands."""
    kind: Any = prefill_pb2.PrefillCommand if leg == "prefill" else decode_pb2.DecodeCommand
    stub: Any = worker.prefill if leg == "prefill" else worker.decode
    call, found = stub.Open(), []
    hello = common_pb2.Hello(router_id="scribbler", worker_epoch=worker.epoch, protocol_min=1, protocol_max=1)
    await call.write(kind(hello=hello))
    await call.read()
    try:
        for _ in range(5):
            await call.write(submit(leg, chance) if chance.random() < 0.7 else scribbled(kind, chance))
        async with asyncio.timeout(0.2):
            while (message := await call.read()) is not END:
                failed = [event.failed for event in message.events if event.WhichOneof("event") == "failed"]
                found += [one.error.reason if leg == "decode" else one.reason for one in failed]
    except (TimeoutError, asyncio.InvalidStateError):
        pass
    except grpc.aio.AioRpcError as error:
        found.append(rpc.from_rpc_error(error).reason if error.code() is not grpc.StatusCode.INTERNAL else "")
    call.cancel()
    return found


def at_baseline(worker: LocalWorker) -> bool:
    try:
        worker.parts.engine.check_baseline()
    except AssertionError:
        return False
    return worker.parts.prefill.remembered() + worker.parts.decode.remembered() == 0


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 12), *(pytest.param(seed, 150, marks=pytest.mark.slow) for seed in range(2, 5))]
)
async def test_no_message_is_an_internal_error_or_costs_anybody_else_anything(seed: int, rounds: int) -> None:
    worker = await LocalWorker("both", config("oracle", **SOONER_S)).start()
    chance = random.Random(seed)
    router = await Router(worker, worker).open()
    expected = await router.local(request(SHORT, max_tokens=4))
    reasons: set[str] = set()
    for number in range(rounds):
        reasons |= {await reason(method(scribbled(kind, chance))) for method, kind in calls(worker.channel)}
        reasons |= set(await stream(worker, ("prefill", "decode")[number % 2], chance))
    assert not reasons & {"internal", "engine_fault", "worker_failed"}
    assert reasons - {""} - LATER, "some were refused"
    assert (await router.local(request(SHORT, max_tokens=4))).tokens == expected.tokens
    await router.close()
    if rounds > 20:
        await until(lambda: at_baseline(worker), 30)  # what nobody gives back ends by itself
    assert await worker.stop() == 0
