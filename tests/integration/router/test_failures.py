"""Workers that refuse, freeze, lie and die, and clients that leave: one terminal event, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable

import pytest

from protos.v1 import common_pb2, decode_pb2
from runtime.errors import WorkerLost
from tests.integration.router.scripted import (
    LENGTH,
    Leg,
    ScriptedWorker,
    decode_answers,
    layout,
    prefill_answers,
    until,
)
from tests.integration.router.sites import Site, config, site

BODY = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


async def forever(leg: Leg) -> None:
    await asyncio.Event().wait()


async def first_then_silence(leg: Leg) -> None:
    leg.ticket_issued()
    leg.first(ord("a"))
    await asyncio.Event().wait()


async def some_then_silence(leg: Leg) -> None:
    await leg.ticket.wait()
    leg.handed_over()
    leg.tokens(1, ord("b"))
    await asyncio.Event().wait()


# --- the client leaves


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
async def test_a_missing_role_is_named_at_once(present: str, missing: str) -> None:
    async with site(ScriptedWorker(present)) as made:
        await made.complete()  # connections and caches are warm
        started = time.perf_counter()
        status, body, headers = await made.post("/v1/completions", BODY)
        took = time.perf_counter() - started

        assert (status, headers["x-pd-reason"]) == (503, f"no_{missing}_worker")
        assert missing in body["error"]["message"]
        assert int(headers["Retry-After"]) >= 1
        assert took < 0.05


async def test_a_request_more_than_every_pool_is_the_clients_fault(pair: Site) -> None:
    pair.worker("decode").refuse = common_pb2.ErrorDetail(
        reason="invalid_request", message="more than the whole pool", field="prompt"
    )

    status, body = await pair.complete()

    assert (status, body["error"]["param"]) == (400, "prompt")
    await pair.quiet()


# --- workers that fail


async def test_a_prefill_worker_killed_while_it_computes_ends_the_request_within_a_second(pair: Site) -> None:
    prefill = pair.worker("prefill")
    prefill.prefill = forever
    call = asyncio.create_task(pair.post("/v1/completions", BODY))
    await prefill.until(lambda: len(prefill.legs) == 1)

    started = time.perf_counter()
    await prefill.die()
    status, body, _ = await call

    assert (status, body["error"]["code"]) == (503, "worker_lost")
    assert time.perf_counter() - started < 1
    await pair.worker("decode").until(lambda: len(pair.worker("decode").cancelled) == 1)
    await pair.quiet()


async def test_a_decode_worker_killed_in_a_stream_gives_one_error_event_and_no_done(pair: Site) -> None:
    decode = pair.worker("decode")
    decode.decode = some_then_silence
    async with pair.http.post("/v1/completions", json=BODY | {"stream": True}) as response:
        text = (await response.content.readuntil(b"\n\n")).decode()
        await decode.until(lambda: any(leg.ticket.is_set() for leg in decode.submitted))
        started = time.perf_counter()
        await decode.die()
        text += (await response.content.read()).decode()

    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    errors = [event for event in events if '"error"' in event]
    assert len(errors) == 1
    assert json.loads(errors[0])["error"]["code"] == "worker_lost"
    assert events[-1] == errors[0]
    assert time.perf_counter() - started < 1
    assert pair.metric("pdserve_requests_total", outcome="failed", reason="worker_lost") == 1


async def test_a_broken_stream_is_attached_again_and_the_answer_goes_on(pair: Site) -> None:
    decode = pair.worker("decode")
    go_on = asyncio.Event()

    async def interrupted(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.handed_over()
        leg.tokens(1, ord("b"))
        await go_on.wait()
        leg.tokens(1, *b"bc")  # what the router may not have seen comes again
        leg.tokens(3, ord("d"), finish=LENGTH)

    decode.decode = interrupted
    call = asyncio.create_task(pair.complete())
    await decode.until(lambda: any(leg.ticket.is_set() for leg in decode.submitted))

    decode.break_streams()
    await until(lambda: len(decode.hellos) == 2)
    go_on.set()

    status, body = await call
    assert (status, body["choices"][0]["text"]) == (200, "abcd")
    assert [entry.ref.request_id for entry in decode.hellos[1].resume] == [decode.submitted[0].ref.request_id]


async def test_what_the_worker_does_not_resume_is_lost(pair: Site) -> None:
    decode = pair.worker("decode")
    decode.decode = some_then_silence
    call = asyncio.create_task(pair.post("/v1/completions", BODY))
    await decode.until(lambda: any(leg.ticket.is_set() for leg in decode.submitted))
    await asyncio.sleep(0)

    decode.legs.clear()
    decode.break_streams()

    status, body, _ = await call
    assert (status, body["error"]["code"]) == (503, "worker_lost")


async def test_a_frozen_prefill_worker_is_found_by_the_first_token_timer() -> None:
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    prefill.prefill = forever
    async with site(prefill, decode, settings=config(first_token_timeout_s=0.2)) as made:
        status, body, _ = await made.post("/v1/completions", BODY)

        assert (status, body["error"]["code"]) == (503, "first_token_timeout")
        await made.quiet(prefill_confirmed=False)


async def test_a_frozen_decode_worker_is_found_by_the_inter_token_timer() -> None:
    """Public report T065 (vllm-project/vllm#39863; vllm-project/vllm#36960)."""
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    decode.decode = some_then_silence
    async with site(prefill, decode, settings=config(inter_token_timeout_s=0.2)) as made:
        status, body, _ = await made.post("/v1/completions", BODY)

        assert (status, body["error"]["code"]) == (503, "inter_token_timeout")
        await made.quiet()


async def test_the_deadline_ends_a_request_and_both_workers_knew_it() -> None:
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    decode.decode = some_then_silence
    async with site(prefill, decode, settings=config(request_timeout_s=0.3)) as made:
        status, body, _ = await made.post("/v1/completions", BODY)

        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert all(0 < leg.work.remaining_ms <= 300 for leg in (*prefill.submitted, *decode.submitted))
        assert made.metric("pdserve_requests_total", outcome="deadline", reason="deadline_exceeded") == 1
        await made.quiet()


async def test_the_ticket_goes_to_another_decode_worker_when_one_fails_before_it_confirmed() -> None:
    prefill = ScriptedWorker("prefill")
    one, two = ScriptedWorker("decode", "d1"), ScriptedWorker("decode", "d2")

    async def refuses(leg: Leg) -> None:
        await leg.ticket.wait()
        error = common_pb2.ErrorDetail(reason="draining", message="draining", retryable=True)
        leg.send(failed=decode_pb2.DecodeFailed(error=error))

    async def answers(leg: Leg) -> None:
        assert leg.fence == 2
        await decode_answers(leg)

    one.decode, two.decode = refuses, answers
    async with site(prefill, one, two) as made:
        status, body = await made.complete(return_ledger=True)

        assert (status, body["choices"][0]["text"]) == (200, "abcd")
        assert (body["ledger"]["decode_attempts"], body["ledger"]["prefill_attempts"]) == (2, 1)
        assert body["ledger"]["decode_worker"] == "d2"
        await made.quiet()


async def test_lost_kv_fails_the_request_and_is_never_decoded(pair: Site) -> None:
    async def lost(leg: Leg) -> None:
        error = common_pb2.ErrorDetail(reason="ticket_invalid", message="unknown ticket", retryable=True)
        leg.send(failed=decode_pb2.DecodeFailed(error=error, kv_lost=True))

    pair.worker("decode").decode = lost

    status, body = await pair.complete()

    assert (status, body["error"]["code"]) == (503, "ticket_invalid")
    await pair.quiet(prefill_confirmed=False)


async def test_a_second_terminal_event_is_dropped_and_counted(pair: Site) -> None:
    async def both(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.emit(
            [
                {"ref": leg.ref, "tokens": decode_pb2.ChoiceTokens(first_sequence=1, tokens=b"bcd", finish=LENGTH)},
                {"ref": leg.ref, "failed": decode_pb2.DecodeFailed(error=common_pb2.ErrorDetail(reason="internal"))},
            ]
        )

    pair.worker("decode").decode = both

    events = await pair.events("/v1/completions", BODY | {"stream": True})

    assert events[-1] == "[DONE]"
    assert not any('"error"' in event for event in events)
    assert pair.metric("pdserve_router_late_events_total") >= 1


async def test_a_worker_that_lies_about_a_choice_fails_that_request_alone(pair: Site) -> None:
    async def foreign(leg: Leg) -> None:
        leg.tokens(1, 98, choice=7)
        await asyncio.Event().wait()

    decode = pair.worker("decode")
    decode.decode = foreign
    bad = await pair.complete()
    decode.decode = decode_answers
    good = await pair.complete()

    assert (bad[0], bad[1]["error"]["code"]) == (503, "bad_choice")
    assert good[0] == 200


# --- who may be used


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_digest": "other"}, "tokenizer_digest_mismatch"),
        ({"model_fingerprint": "other"}, "model_fingerprint_mismatch"),
        ({"vocab_size": 7}, "vocab_size_mismatch"),
        ({"protocol_min": 9, "protocol_max": 9}, "protocol_mismatch"),
        ({"layout": layout(page_tokens=32)}, "page_tokens_mismatch"),
        ({"worker_id": "somebody-else"}, "worker_id_mismatch"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_with_a_metric(change: dict[str, object], reason: str) -> None:
    """Public report T129 (NVIDIA/TensorRT-LLM#14882); T133 (vllm-project/vllm#42895);
    T170 (vllm-project/production-stack#1077)."""
    stranger = ScriptedWorker("both")
    for name, value in change.items():
        if name == "layout":
            stranger.described.layout.CopyFrom(layout(page_tokens=32))
        else:
            setattr(stranger.described, name, value)
    async with site(stranger, wait=False) as made:
        await until(lambda: made.metric("pdserve_router_workers_refused_total", reason=reason) >= 1)

        status, _, _ = await made.post("/v1/completions", BODY)

        assert status == 503
        assert stranger.reserved == []


async def test_a_worker_elsewhere_that_advertises_loopback_is_refused_before_it_is_asked() -> None:
    """Public report T173 (vllm-project/vllm#27083): the address reaches some other process of this machine."""
    stranger = ScriptedWorker("both")
    stranger.advertised["node"] = "another-machine"
    async with site(stranger, wait=False) as made:
        await until(lambda: made.metric("pdserve_router_workers_refused_total", reason="loopback_address") >= 1)

        status, _, _ = await made.post("/v1/completions", BODY)

        assert status == 503
        assert stranger.described_times == 0


async def test_a_worker_is_asked_only_when_its_record_says_ready() -> None:
    late = ScriptedWorker("both")
    late.advertised["ready"] = False
    async with site(late, wait=False) as made:
        await until(lambda: made.router.fleet.worker(late.id) is not None)
        status, _ = await made.complete()
        assert (status, late.described_times) == (503, 0)

        late.advertise(ready=True)

        await until(lambda: made.router.fleet.ready())
        assert late.described_times == 1


async def test_workers_of_different_layouts_are_never_paired() -> None:
    """Public report T133 (vllm-project/vllm#42895)."""
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    decode.described.layout.CopyFrom(layout(chunk_tokens=256))
    async with site(prefill, decode) as made:
        status, _, headers = await made.post("/v1/completions", BODY)

        assert (status, headers["x-pd-reason"]) == (503, "no_compatible_decode_worker")
        assert not made.router.health.ready().ok


async def test_a_worker_that_is_not_ready_or_draining_gets_nothing_new_and_finishes_what_it_has(pair: Site) -> None:
    """Public report T024 (vllm-project/production-stack#1008; vllm-project/router#279)."""
    decode = pair.worker("decode")
    finish = asyncio.Event()

    async def held(leg: Leg) -> None:
        await leg.ticket.wait()
        await finish.wait()
        leg.tokens(1, *b"bcd", finish=LENGTH)

    decode.decode = held
    running = asyncio.create_task(pair.complete())
    await decode.until(lambda: len(decode.submitted) == 1)

    decode.advertise(draining=True)
    await until(lambda: not pair.router.fleet.ready())
    refused, _ = await pair.complete()
    finish.set()

    assert refused == 503
    assert (await running)[0] == 200
    decode.advertise(ready=True, draining=False)
    await until(pair.router.fleet.ready)


async def test_idle_equal_workers_share_the_work() -> None:
    prefills = [ScriptedWorker("prefill", f"p{number}") for number in range(3)]
    async with site(*prefills, ScriptedWorker("decode")) as made:
        for _ in range(30):
            await made.complete(max_tokens=2)

        assert all(len(worker.submitted) == 10 for worker in prefills)


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


async def test_a_router_that_stops_finishes_what_runs_and_takes_nothing_new(pair: Site) -> None:
    decode = pair.worker("decode")
    finish = asyncio.Event()

    async def held(leg: Leg) -> None:
        await leg.ticket.wait()
        await finish.wait()
        leg.tokens(1, *b"bcd", finish=LENGTH)

    decode.decode = held
    running = asyncio.create_task(pair.complete())
    await decode.until(lambda: len(decode.submitted) == 1)

    draining = asyncio.create_task(pair.router.drain())
    await asyncio.sleep(0)
    status, body, headers = await pair.post("/v1/completions", BODY)
    async with pair.http.get("/health/live") as live, pair.http.get("/health/ready") as ready:
        assert (live.status, ready.status) == (200, 503)
    finish.set()

    assert (status, headers["x-pd-reason"]) == (503, "draining")
    assert (await running)[0] == 200
    await draining
    del body


async def test_a_worker_that_misses_its_renewals_keeps_what_it_runs_and_comes_back_as_itself(pair: Site) -> None:
    """Public report T055 (vllm-project/router#197)."""
    decode = pair.worker("decode")
    finish = asyncio.Event()

    async def held(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.handed_over()
        await finish.wait()
        leg.tokens(1, *b"bcd", finish=LENGTH)

    decode.decode = held
    running = asyncio.create_task(pair.complete())
    await decode.until(lambda: len(decode.submitted) == 1)
    known = pair.router.fleet.worker(decode.id)
    assert known is not None

    pair.router.fleet.removed(known.record)
    refused, _ = await pair.complete()
    pair.router.fleet.added(decode.record())
    finish.set()

    assert refused == 503
    assert (await running)[1]["choices"][0]["text"] == "abcd"
    assert (await pair.complete())[0] == 200
    assert len(decode.hellos) == 1


async def test_a_worker_that_leaves_while_it_is_asked_is_a_refusal_and_not_the_clients_going(pair: Site) -> None:
    decode = pair.worker("decode")
    asked = asyncio.Event()

    async def hangs() -> None:
        asked.set()
        await asyncio.Event().wait()

    decode.on_reserve = hangs
    call = asyncio.create_task(pair.post("/v1/completions", BODY))
    await asked.wait()

    known = pair.router.fleet.worker(decode.id)
    assert known is not None
    pair.router.fleet.removed(known.record)
    await known.close(WorkerLost("gone"))

    status, _, headers = await call
    assert (status, headers["x-pd-reason"]) == (503, "no_decode_worker")
    await until(lambda: pair.router.front.permits.inflight == 0)
