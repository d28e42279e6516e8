"""Faults reported of systems like this one that no other test here holds off. Numbers: see CONTRIBUTING.md, Tests."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos.v1 import common_pb2, decode_pb2, inference_pb2, inference_pb2_grpc
from runtime import rpc
from tests.integration.router.scripted import GO_ON, LENGTH, Leg, ScriptedWorker, decode_answers, until
from tests.integration.router.sites import Site, config, site


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_a_worker_refuses_is_one_whole_json_error_with_its_status(
    pair: Site, role: str, streamed: bool
) -> None:
    """T150 (sgl-project/sglang#27523): a worker's length or headers on a body the router wrapped anew."""
    refusal = common_pb2.ErrorDetail(reason="invalid_request", message="no such thing", field="logit_bias")

    async def refuse(leg: Leg) -> None:
        failed = {"failed": refusal if role == "prefill" else decode_pb2.DecodeFailed(error=refusal)}
        leg.send(**failed)

    async def wait(leg: Leg) -> None:
        """No first token before the refusal: it would begin the stream, and the status could not change any more."""
        await asyncio.Event().wait()

    for leg in ("prefill", "decode"):
        setattr(pair.worker(leg), leg, refuse if leg == role else wait)
    body = {"prompt": "hello", "max_tokens": 4, "stream": streamed}
    async with pair.http.post("/v1/completions", json=body) as response:
        raw = await response.read()
        answer = json.loads(raw)

    assert (response.status, answer["error"]["param"]) == (400, "logit_bias")
    assert int(response.headers["Content-Length"]) == len(raw)
    assert response.headers["Content-Type"].startswith("application/json")
    await pair.quiet()


async def test_sixty_clients_that_leave_count_for_nothing_and_the_next_ones_are_spread() -> None:
    """T157 (vllm-project/router#215): phantom load of aborted requests, and a worker at zero that attracts all."""
    decodes = [ScriptedWorker("decode", f"d{number}") for number in range(3)]
    prefill = ScriptedWorker("prefill")
    async with site(prefill, *decodes) as made:

        async def silent(leg: Leg) -> None:
            await leg.ticket.wait()
            leg.handed_over()
            leg.tokens(1, ord("b"))
            await asyncio.Event().wait()

        for decode in decodes:
            decode.decode = silent
        body = {"prompt": "hello", "max_tokens": 50}
        calls = [
            asyncio.create_task(made.post("/v1/completions", body | {"stream": bool(number % 2)}))
            for number in range(60)
        ]
        await until(lambda: sum(len(decode.submitted) for decode in decodes) == 60)
        for call in calls:
            call.cancel()
        await until(lambda: made.metric("pdserve_requests_inflight") == 0)
        await made.quiet()

        for decode in decodes:
            decode.decode, decode.submitted = decode_answers, []
        for number in range(30):
            await made.complete(prompt=f"prompt {number}")
        assert all(5 <= len(decode.submitted) <= 15 for decode in decodes)
        await made.quiet()


async def test_every_choice_is_there_however_early_its_siblings_stop(pair: Site) -> None:
    """T105 (vllm-project/vllm#52398): fewer than n choices, at random."""

    async def ragged(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.handed_over()
        for choice in (3, 0, 7, 1, 6, 2, 5, 4):
            leg.tokens(1, *b"bcdefghi"[: choice + 1], choice=choice, finish=LENGTH)
            await asyncio.sleep(0)

    pair.worker("decode").decode = ragged
    for _ in range(20):
        status, body = await pair.complete(n=8, temperature=1, max_tokens=20)
        assert status == 200
        assert [choice["index"] for choice in body["choices"]] == list(range(8))
        assert [len(choice["text"]) for choice in body["choices"]] == list(range(2, 10))


async def test_tokens_and_scores_and_usage_all_end_at_the_stop(pair: Site) -> None:
    """T041 (vllm-project/vllm#47616): the text is cut at the stop, ids, scores and usage are not. One step brings
    the stop and tokens after it."""

    async def beyond(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.handed_over()
        leg.tokens(1, *b"bcdefgh", logprobs=True, finish=GO_ON)
        await asyncio.Event().wait()

    pair.worker("decode").decode = beyond
    for streamed in (False, True):
        body: dict[str, Any] = {"prompt": "x", "stop": "de", "logprobs": 1, "max_tokens": 50, "return_token_ids": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        if streamed:
            chunks = [json.loads(event) for event in (await pair.events("/v1/completions", body))[:-1]]
            choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
            usage = chunks[-1]["usage"]
        else:
            _, answer, _ = await pair.post("/v1/completions", body)
            choices, usage = answer["choices"], answer["usage"]
        scored = sum(len(choice["logprobs"]["tokens"]) for choice in choices if choice["logprobs"])
        ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        assert "".join(choice["text"] for choice in choices) == "abc"
        assert ids == list(b"abcde")
        assert scored == len(ids) == usage["completion_tokens"]


async def test_tokens_cached_on_both_sides_are_counted_once(pair: Site) -> None:
    """T174 (sgl-project/sglang#25972): more cached tokens than prompt tokens."""

    async def warm_prefill(leg: Leg) -> None:
        leg.ticket_issued()
        leg.first(ord("a"), cached=4)

    async def warm_decode(leg: Leg) -> None:
        await leg.ticket.wait()
        times = common_pb2.StageTimes(pid=2, cached_tokens=4)
        leg.send(handoff=decode_pb2.HandoffDone(times=times))
        leg.tokens(1, *b"bcd", finish=LENGTH)

    pair.worker("prefill").prefill, pair.worker("decode").decode = warm_prefill, warm_decode
    _, body = await pair.complete()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert body["usage"]["prompt_tokens"] == 5


async def test_a_packed_body_is_refused_whatever_is_in_it() -> None:
    """The limit on a body is on what it becomes (the case behind T136, vllm-project/production-stack#836), and a body
    that does not unpack, or stops in the middle, is no fault of ours."""
    packed = zlib.compressobj(wbits=31)
    bomb = b"".join(packed.compress(b" " * (1 << 20)) for _ in range(64)) + packed.flush()
    assert len(bomb) < 100_000
    async with site(settings=config(max_body_bytes=200_000)) as made:
        for encoding, body in (("gzip", bomb), ("gzip", b"{}"), ("gzip", bomb[:50]), ("deflate", b"{}"), ("br", b"{}")):
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            async with made.http.post("/v1/completions", data=body, headers=headers) as response:
                assert response.status == 415
                assert (await response.json())["error"]["param"] == "Content-Encoding"


@pytest.mark.parametrize("field", ["bad_words", "min_tokens_to_keep", "guided_json", "api_base"])
async def test_a_field_that_is_not_honoured_is_refused_and_not_ignored(pair: Site, field: str) -> None:
    """T155 (vllm-project/vllm#52311), T074 (BerriAI/litellm#37053): accepted and then without effect."""
    status, body = await pair.complete(**{field: ["New York"]})
    assert (status, body["error"]["param"]) == (400, field)


async def test_a_full_line_is_unavailable_over_grpc_with_its_detail() -> None:
    """T120 (ray-project/ray#58851): the handler's status replaced by INTERNAL, a trace in the details. Full is
    503 and its gRPC twin here; RESOURCE_EXHAUSTED is 429, a tenant's own limit."""
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    prefill.refuse = common_pb2.ErrorDetail(reason="saturated", retryable=True)
    async with site(prefill, decode, settings=config(max_queue=1)) as made:
        waiting = asyncio.create_task(made.complete())
        await until(lambda: len(made.router.dispatcher.booking.line) == 1)
        async with rpc.channel(made.router.grpc, config()) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as full:
                await stub.Generate(inference_pb2.GenerateRequest(prompt="x")).read()
        waiting.cancel()
    assert full.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(full.value.details() or "") < 4096
    assert "Traceback" not in (full.value.details() or "")
    error = rpc.from_rpc_error(full.value)
    assert (error.reason, error.retry_after_ms > 0) == ("queue_full", True)
