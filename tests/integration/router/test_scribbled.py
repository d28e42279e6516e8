"""Messages that no client and no worker of ours would send to a router: refused one by one, the rest goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos.v1 import inference_pb2 as inference
from protos.v1 import inference_pb2_grpc, registry_pb2, registry_pb2_grpc
from runtime import rpc
from runtime.config import Config
from runtime.errors import PdserveError
from tests.integration.router.scripted import ScriptedWorker
from tests.integration.router.sites import site
from tests.scribble import fill, scribbled


async def reason(call: Any) -> str:
    """Why it was refused; "" when it was not."""
    try:
        async with asyncio.timeout(5):
            with rpc.translated():
                await call
    except PdserveError as error:
        return error.reason
    return ""


async def generated(stub: Any, request: Any) -> str:
    """Why it failed, before its stream began or in it; "" when it did not."""
    last = None
    try:
        async for event in stub.Generate(request, timeout=2):
            last = event
    except grpc.aio.AioRpcError as error:
        return rpc.from_rpc_error(error).reason
    assert last is not None, "a stream without an end"
    return str(last.failed.reason) if last.WhichOneof("event") == "failed" else ""


def a_part_wrong(chance: random.Random) -> Any:
    """A request that would be answered, but for one field of it."""
    request = inference.GenerateRequest(model="oracle", prompt="hello", max_tokens=3)
    other = inference.GenerateRequest()
    fill(other, chance)
    for name in ("model", "prompt", "prompt_tokens", "chat", "n"):
        other.ClearField(name)
    set_fields = other.ListFields()
    keep = chance.choice(set_fields)[0].name if set_fields else ""
    for field, _ in set_fields:
        if field.name != keep:
            other.ClearField(field.name)  # type: ignore[arg-type]  # one of its own
    request.MergeFrom(other)
    return request


@pytest.mark.parametrize(
    ("seed", "rounds"), [(1, 25), *(pytest.param(seed, 250, marks=pytest.mark.slow) for seed in range(2, 4))]
)
async def test_no_message_is_an_internal_error_or_costs_anybody_else_anything(seed: int, rounds: int) -> None:
    chance, reasons = random.Random(seed), set()
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        channel = rpc.channel(made.router.grpc, Config())
        front, registry = inference_pb2_grpc.InferenceStub(channel), registry_pb2_grpc.RegistryStub(channel)
        unary: list[tuple[Any, Any]] = [
            (front.Render, inference.RenderRequest),
            (front.Derender, inference.DerenderRequest),
            (front.Tokenize, inference.TokenizeRequest),
            (front.Detokenize, inference.DetokenizeRequest),
        ]
        for _ in range(rounds):
            for method, kind in unary:
                given = {"model": "oracle"} if chance.random() < 0.8 else {}
                reasons.add(await reason(method(scribbled(kind, chance, **given))))
            reasons.add(await generated(front, scribbled(inference.GenerateRequest, chance, model="oracle", n=1)))
            reasons.add(await generated(front, a_part_wrong(chance)))
            reasons.add(await registered(registry, chance))
        assert "internal" not in reasons
        assert {"", "invalid_request"} <= reasons
        assert (await made.complete())[0] == 200
        await made.quiet()
        await channel.close(None)


async def registered(registry: Any, chance: random.Random) -> str:
    async def records() -> AsyncIterator[registry_pb2.WorkerRecord]:
        for _ in range(2):
            yield scribbled(registry_pb2.WorkerRecord, chance)

    call = registry.Register(records(), timeout=5)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:  # a stream that is refused while it writes has no reason here
        return rpc.from_rpc_error(error).reason if error.code() is not grpc.StatusCode.INTERNAL else "ended"
    return ""
