"""Workers that freeze, lie, die and leave: one terminal event, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import json
import time

from protos.v1 import common_pb2, decode_pb2
from runtime.errors import WorkerLost
from tests.integration.router.scripted import (
    LENGTH,
    Leg,
    ScriptedWorker,
    decode_answers,
    forever,
    some_then_silence,
    until,
)
from tests.integration.router.sites import BODY, Site, config, site


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


async def test_what_the_worker_does_not_resume_is_lost(once: Site) -> None:
    decode = once.worker("decode")
    decode.decode = some_then_silence
    call = asyncio.create_task(once.post("/v1/completions", BODY))
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


async def test_a_worker_that_lies_about_a_choice_fails_that_request_alone(once: Site) -> None:
    async def foreign(leg: Leg) -> None:
        leg.tokens(1, 98, choice=7)
        await asyncio.Event().wait()

    decode = once.worker("decode")
    decode.decode = foreign
    bad = await once.complete()
    decode.decode = decode_answers
    good = await once.complete()

    assert (bad[0], bad[1]["error"]["code"]) == (503, "bad_choice")
    assert good[0] == 200


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
