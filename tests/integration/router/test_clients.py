"""Clients that leave, wait or read too slowly: each gets one end, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from protos.v1 import common_pb2
from router.admission.line import Place
from runtime.errors import InvalidRequest
from tests.integration.router.scripted import (
    Leg,
    ScriptedWorker,
    decode_answers,
    first_then_silence,
    forever,
    prefill_answers,
    some_then_silence,
    until,
)
from tests.integration.router.sites import BODY, Site, config, site


def _reserving(prefill: ScriptedWorker, decode: ScriptedWorker) -> Callable[[], bool]:
    asked = asyncio.Event()

    async def slow() -> None:
        asked.set()
        await asyncio.sleep(0.2)

    prefill.on_reserve = slow
    return asked.is_set


def _queued(prefill: ScriptedWorker, decode: ScriptedWorker) -> Callable[[], bool]:
    decode.refuse = common_pb2.ErrorDetail(reason="saturated", retryable=True)
    return lambda: len(decode.reserved) > 0


def _prefill(prefill: ScriptedWorker, decode: ScriptedWorker) -> Callable[[], bool]:
    prefill.prefill = forever
    return lambda: len(prefill.legs) == 1 and len(decode.legs) == 1


def _between(prefill: ScriptedWorker, decode: ScriptedWorker) -> Callable[[], bool]:
    prefill.prefill = first_then_silence
    decode.decode = forever
    return lambda: any(leg.ticket.is_set() for leg in decode.submitted)


def _decode(prefill: ScriptedWorker, decode: ScriptedWorker) -> Callable[[], bool]:
    decode.decode = some_then_silence
    return lambda: any(leg.ticket.is_set() for leg in decode.submitted)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stage", [_reserving, _queued, _prefill, _between, _decode])
async def test_a_client_that_leaves_leaves_nothing_behind(
    pair: Site, stage: Callable[[ScriptedWorker, ScriptedWorker], Callable[[], bool]], streamed: bool
) -> None:
    """Public report T093 (ai-dynamo/dynamo#13855; llm-d/llm-d#1138); T157 (vllm-project/router#215)."""
    prefill, decode = pair.worker("prefill"), pair.worker("decode")
    reached = stage(prefill, decode)
    call = asyncio.create_task(pair.post("/v1/completions", BODY | {"stream": streamed, "max_tokens": 50}))
    await until(reached)

    call.cancel()

    await until(lambda: pair.metric("pdserve_requests_total", outcome="cancelled", reason="cancelled") == 1, 1)
    await pair.quiet(prefill_confirmed=stage is _decode)
    prefill.on_reserve, prefill.prefill, decode.decode, decode.refuse = None, prefill_answers, decode_answers, None
    status, _ = await pair.complete()
    assert status == 200


async def test_leaving_while_the_first_bytes_are_read_is_told_to_both_legs(pair: Site) -> None:
    pair.worker("decode").decode = some_then_silence
    async with pair.http.post("/v1/completions", json=BODY | {"stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        response.close()

    await pair.worker("decode").until(lambda: len(pair.worker("decode").cancelled) == 1)
    await pair.quiet()


# --- refusals and the queue


async def test_when_one_worker_refuses_the_others_booking_is_given_back() -> None:
    one, two = ScriptedWorker("prefill", "p1"), ScriptedWorker("prefill", "p2")
    decode = ScriptedWorker("decode")
    one.refuse = common_pb2.ErrorDetail(reason="saturated", retryable=True)
    async with site(one, two, decode) as made:
        for _ in range(4):
            status, _ = await made.complete()
            assert status == 200

        assert len(two.submitted) == 4
        await made.quiet()
        assert decode.reservations == {}


async def test_a_request_waits_in_line_until_there_is_room(pair: Site) -> None:
    decode = pair.worker("decode")
    decode.refuse = common_pb2.ErrorDetail(reason="saturated", retryable=True)
    calls = [asyncio.create_task(pair.complete(prompt=f"call {number}")) for number in range(3)]
    await until(lambda: len(pair.router.dispatcher.booking.line) == 3)

    decode.refuse = None

    assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200, 200]
    assert len(pair.router.dispatcher.booking.line) == 0


async def test_waiting_ends_with_503_and_the_line_is_bounded() -> None:
    """Public report T086 (ray-project/ray#64399)."""
    settings = config(max_queue=1, queue_timeout_s=0.3)
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    prefill.refuse = common_pb2.ErrorDetail(reason="saturated", retryable=True)
    async with site(prefill, decode, settings=settings) as made:
        waiting = asyncio.create_task(made.post("/v1/completions", BODY))
        await until(lambda: len(made.router.dispatcher.booking.line) == 1)

        status, body, headers = await made.post("/v1/completions", BODY)
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "queue_full", "1")

        status, body, headers = await waiting
        assert (status, headers["x-pd-reason"]) == (503, "queue_timeout")
        assert prefill.submitted == []
        await made.quiet()


@pytest.mark.parametrize(("present", "missing"), [("prefill", "decode"), ("decode", "prefill")])
async def test_a_missing_role_is_named_at_once(present: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(Place, "turn", lambda place, patience_s=None: waited.append(place))
    async with site(ScriptedWorker(present)) as made:
        status, body, headers = await made.post("/v1/completions", BODY)

        assert (status, headers["x-pd-reason"]) == (503, f"no_{missing}_worker")
        assert missing in body["error"]["message"]
        assert int(headers["Retry-After"]) >= 1
        assert not waited


@pytest.mark.parametrize("reason", ["invalid_request", "exceeds_capacity"])
async def test_a_request_more_than_every_pool_is_the_clients_fault(pair: Site, reason: str) -> None:
    pair.worker("decode").refuse = InvalidRequest("more than the whole pool", reason=reason, field="prompt").detail()

    status, body = await pair.complete()

    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "prompt", reason)
    await pair.quiet()


async def test_a_slow_reader_is_cut_off_and_others_go_on(pair: Site) -> None:
    decode = pair.worker("decode")

    async def held_when_long(leg: Leg) -> None:
        await (forever if len(leg.work.tokens) > 1000 else decode_answers)(leg)

    decode.decode = held_when_long
    host, _, port = pair.router.http.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    big = BODY | {"prompt": ["x" * 8000] * 64, "n": 16, "echo": True, "stream": True}  # 8 MB of echo, never read
    body = json.dumps(big).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    await until(lambda: pair.metric("pdserve_router_client_events_total", event="slow") == 1)

    await pair.quiet(prefill_confirmed=False)
    assert len(decode.cancelled) == len(decode.submitted) > 0
    assert (await pair.complete())[0] == 200
    writer.close()


async def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    """Public report T092 (vllm-project/vllm#47647; BerriAI/litellm#34819)."""
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    go_on = asyncio.Event()

    async def slow(leg: Leg) -> None:
        leg.ticket_issued()
        await go_on.wait()
        leg.first(ord("a"))

    prefill.prefill = slow
    async with site(prefill, decode, settings=config(sse_keepalive_s=0.05)) as made:
        async with made.http.post("/v1/completions", json=BODY | {"stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            go_on.set()
            rest = (await response.content.read()).decode()

        assert rest.rstrip().endswith("data: [DONE]")
