"""The gRPC face: the same abilities, statuses instead of HTTP codes, health and reflection."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.client import AsyncClient
from protos.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from runtime import rpc
from runtime.errors import InvalidRequest, NotFound
from tests.integration.router.scripted import Leg, ScriptedWorker, until
from tests.integration.router.sites import Site, config, site


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


@pytest.fixture
async def stub(pair: Site) -> AsyncIterator[Any]:
    async with rpc.channel(pair.router.grpc, config()) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


async def events(stub: Any, **fields: Any) -> list[inference_pb2.GenerateEvent]:
    return [event async for event in stub.Generate(inference_pb2.GenerateRequest(**fields), timeout=10)]


async def test_a_call_starts_streams_finishes_and_completes_once(pair: Site, stub: Any) -> None:
    found = await events(stub, prompt="hello", max_tokens=4, return_ledger=True, logprobs=1)

    kinds = [event.WhichOneof("event") for event in found]
    assert kinds[0] == "started"
    assert kinds[-2:] == ["finished", "completed"]
    assert set(kinds[1:-2]) == {"delta"}
    deltas = [event.delta for event in found[1:-2]]
    assert "".join(delta.text for delta in deltas) == "abcd"
    assert [token for delta in deltas for token in delta.token_ids] == list(b"abcd")
    assert [entry.token for delta in deltas for entry in delta.logprobs] == list(b"abcd")
    assert found[0].started.prompt_tokens == 5
    assert found[-2].finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert found[-1].completed.usage == inference_pb2.Usage(prompt_tokens=5, completion_tokens=4, total_tokens=9)
    assert found[-1].completed.ledger.decode_worker == "decode-1"
    await pair.quiet()


async def test_hints_for_the_cache_are_passed_on_and_bounded(pair: Site, stub: Any) -> None:
    hint = {"session": "talk", "priority": 4, "ttl_ms": 9000}
    async with AsyncClient(pair.router.grpc) as client:
        await client.generate("hi", max_tokens=2, retention=hint)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as refused:
            await client.generate("hi", max_tokens=2, retention=hint | {"priority": 40})  # type: ignore[arg-type]
    assert refused.value.field == "cache_retention.priority"
    found = pair.worker("prefill").submitted[-1].work.retention
    assert (found.priority, found.ttl_ms) == (4, 9000)
    assert found.session
    assert "talk" not in found.session


async def test_the_python_client_works(pair: Site) -> None:
    async with AsyncClient(pair.router.grpc) as client:
        answer = await client.chat("hi", max_tokens=3)
        assert answer.text == "abc"
        assert (await client.tokenize("hé"))[:3] == (104, 195, 169)
        with pytest.raises(InvalidRequest):
            await client.generate("x", temperature=-1.0)


async def test_text_and_tokens_go_both_ways(stub: Any) -> None:
    chat = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="a<|im_end|>")])
    rendered = await stub.Render(inference_pb2.RenderRequest(chat=chat))
    assert rendered.text.startswith("<|im_start|>user\na<|im_end|><|im_end|>")
    assert list(rendered.token_ids).count(258) == 1
    assert (await stub.Derender(inference_pb2.DerenderRequest(token_ids=[104, 105, 258]))).text == "hi"
    assert list((await stub.Tokenize(inference_pb2.TokenizeRequest(text="ab"))).token_ids) == [97, 98]
    assert (await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).token_ids == rendered.token_ids
    assert (await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[97, 258]))).text == "a<|im_end|>"
    models = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert [(card.id, card.max_model_len, card.vocab_size) for card in models.models] == [("oracle", 8192, 259)]
    assert len(models.models[0].fingerprint) == 64


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": float("nan")}, "temperature"),
    ({"prompt": "x", "top_p": float("inf")}, "top_p"),
    ({"prompt": "x", "n": 2**31}, "n"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "stop": ["s"] * 17}, "stop"),
    ({"prompt": "x", "logit_bias": {1000: 1.0}}, "logit_bias"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt_tokens": inference_pb2.TokenIds(ids=[259])}, "prompt_tokens"),
    ({"prompt_tokens": inference_pb2.TokenIds()}, "prompt_tokens"),
    ({"prompt": "x" * 9000}, "prompt"),
    ({"chat": inference_pb2.ChatMessages()}, "messages"),
]


@pytest.mark.parametrize(("fields", "field"), BAD)
async def test_bad_input_is_invalid_argument_with_its_field(
    pair: Site, stub: Any, fields: dict[str, Any], field: str
) -> None:
    """Public report T120 (ray-project/ray#58851)."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events(stub, **fields)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(refused.value.details() or "") < 4096
    assert rpc.from_rpc_error(refused.value).field == field
    assert all(worker.reserved == [] for worker in pair.workers)


async def test_statuses_follow_the_table(pair: Site, stub: Any) -> None:
    """Public report T120 (ray-project/ray#58851)."""
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await events(stub, prompt="x", model="other")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert isinstance(rpc.from_rpc_error(unknown.value), NotFound)

    pair.worker("decode").advertise(ready=False)
    await until(lambda: not pair.router.fleet.ready())
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await events(stub, prompt="x")
    assert missing.value.code() is grpc.StatusCode.UNAVAILABLE
    error = rpc.from_rpc_error(missing.value)
    assert (error.reason, error.retry_after_ms > 0) == ("no_decode_worker", True)


async def silent(leg: Leg) -> None:
    await leg.ticket.wait()
    leg.handed_over()
    leg.tokens(1, ord("b"))
    await asyncio.Event().wait()


async def test_a_deadline_reaches_the_workers_and_ends_the_work(pair: Site, stub: Any) -> None:
    """Public report T143 (ray-project/ray#40761; ray-project/ray#38925)."""
    decode = pair.worker("decode")
    decode.decode = silent

    with pytest.raises(grpc.aio.AioRpcError) as late:
        async for _ in stub.Generate(inference_pb2.GenerateRequest(prompt="hello", max_tokens=1000), timeout=0.5):
            pass

    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0 < decode.submitted[0].work.remaining_ms <= 500
    await pair.quiet()


async def test_a_cancelled_call_is_cancelled_at_both_workers(pair: Site, stub: Any) -> None:
    """Public report T143 (ray-project/ray#40761; ray-project/ray#38925)."""
    decode = pair.worker("decode")
    decode.decode = silent
    call = stub.Generate(inference_pb2.GenerateRequest(prompt="hello", max_tokens=1000))
    assert (await call.read()).WhichOneof("event") == "started"

    call.cancel()

    await decode.until(lambda: len(decode.cancelled) == 1)
    await pair.quiet()
    assert pair.metric("pdserve_requests_total", outcome="cancelled", reason="cancelled") == 1


async def test_a_failure_in_the_stream_is_its_one_terminal_event(pair: Site, stub: Any) -> None:
    decode = pair.worker("decode")
    decode.decode = silent
    found: list[str] = []

    async for event in stub.Generate(inference_pb2.GenerateRequest(prompt="hello", max_tokens=1000)):
        found.append(event.WhichOneof("event") or "")
        if found[-1] == "delta" and event.delta.text == "b":
            await decode.die()

    assert found[-1] == "failed"
    assert "completed" not in found
    assert pair.metric("pdserve_requests_total", outcome="failed", reason="worker_lost") == 1


async def test_keys_are_asked_for_here_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"{hashlib.sha256(b'one').hexdigest()}: {{tenant: a}}\n")
    workers = ScriptedWorker("prefill"), ScriptedWorker("decode")
    async with site(*workers, settings=config(api_keys_file=str(file), registry_token="token")) as made:
        async with rpc.channel(made.router.grpc, config()) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            calls = [
                stub.ListModels(inference_pb2.ListModelsRequest()),
                stub.Tokenize(inference_pb2.TokenizeRequest(text="x")),
                stub.Render(inference_pb2.RenderRequest()),
                stub.Generate(inference_pb2.GenerateRequest(prompt="x")).read(),
            ]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(answer, grpc.aio.AioRpcError)
                assert answer.code() is grpc.StatusCode.UNAUTHENTICATED
        async with AsyncClient(made.router.grpc, api_key="one") as client:
            assert (await client.generate("hello", max_tokens=2)).text == "ab"


async def test_health_and_reflection_answer(pair: Site) -> None:
    async with rpc.channel(pair.router.grpc, config()) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING

        reflected: Any = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter(
                [
                    reflection_pb2.ServerReflectionRequest(list_services=""),
                    reflection_pb2.ServerReflectionRequest(file_containing_symbol="pdserve.v1.Inference"),
                ]
            )
        )
        answers = [answer async for answer in reflected]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"pdserve.v1.Inference", "pdserve.v1.Registry", "grpc.health.v1.Health"} <= names
    file = FileDescriptorProto.FromString(answers[1].file_descriptor_response.file_descriptor_proto[0])
    assert [service.name for service in file.service] == ["Inference"]
