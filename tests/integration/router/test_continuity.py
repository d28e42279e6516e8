"""Workers that die, freeze and fail under requests that can go on: one answer, the undisturbed one, and one end.

The history of every request is checked (reliability.md, I1 to I3): exactly one terminal event, sequence numbers without
gap or repeat (the text shows both), and the text of a run nobody disturbed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from protos.v1 import common_pb2, decode_pb2
from runtime.errors import Saturated, TicketInvalid
from tests.integration.router.honest import (
    Decoding,
    busy,
    fleet,
    history,
    hold_decodes,
    honest_prefill,
    text,
    token,
)
from tests.integration.router.scripted import Leg, scored, until
from tests.integration.router.sites import Site, config, site


@pytest.fixture
async def two() -> AsyncIterator[Site]:
    """2P2D, all honest."""
    async with site(*fleet(), settings=config(first_token_timeout_s=0.5, inter_token_timeout_s=0.5)) as made:
        yield made


# --- after the first token


@pytest.mark.parametrize("stop_at", [1, 2, 17, 39])
async def test_a_decode_worker_killed_in_a_stream_is_not_noticed_by_the_client(two: Site, stop_at: int) -> None:
    scripts = hold_decodes(two, stop_at)
    call = asyncio.create_task(history(two))
    await until(lambda: any(script.waiting for script in scripts.values()))

    dead = next(worker for worker in two.workers if worker.id in scripts and scripts[worker.id].waiting)
    for script in scripts.values():
        script.go.set()
    await dead.die()

    seen = await call
    assert (seen.texts, seen.finishes, seen.errors) == ({0: text(40)}, {0: "length"}, [])
    assert two.metric("pdserve_requests_total", outcome="completed", reason="") == 1


async def test_a_frozen_decode_worker_is_left_at_its_timer_and_told_so(two: Site) -> None:
    scripts = hold_decodes(two, 5)
    call = asyncio.create_task(history(two))
    await until(lambda: any(script.waiting for script in scripts.values()))
    frozen = next(worker for worker in two.workers if worker.id in scripts and scripts[worker.id].waiting)
    for name, script in scripts.items():
        if name != frozen.id:
            script.go.set()
    started = time.perf_counter()

    seen = await call

    assert seen.texts == {0: text(40)}
    assert time.perf_counter() - started < 1.5
    await frozen.until(lambda: len(frozen.cancelled) == 1)
    await two.quiet()


async def test_a_stop_string_over_the_break_still_ends_the_answer_and_log_probabilities_are_whole(two: Site) -> None:
    scripts = hold_decodes(two, 6)  # "abcdef" is there
    call = asyncio.create_task(two.complete(max_tokens=40, stop="efgh", logprobs=1, include_stop_str_in_output=True))
    await until(lambda: any(script.waiting for script in scripts.values()))
    dead = next(worker for worker in two.workers if worker.id in scripts and scripts[worker.id].waiting)
    for script in scripts.values():
        script.go.set()
    await dead.die()

    status, body = await call
    choice = body["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "abcdefgh", "stop")
    assert choice["logprobs"]["tokens"] == list("abcdefgh")
    assert body["usage"]["completion_tokens"] == 8


async def test_each_choice_goes_on_alone_and_one_that_has_ended_does_not(two: Site) -> None:
    scripts = hold_decodes(two, 6)
    call = asyncio.create_task(history(two, n=3, stop="kl", max_tokens=30))  # choice 1 says "hijklm..." first
    await until(lambda: any(script.waiting for script in scripts.values()))
    dead = next(worker for worker in two.workers if worker.id in scripts and scripts[worker.id].waiting)
    await dead.until(lambda: dead.ended_choices == [1])  # the router has seen its stop string
    for script in scripts.values():
        script.go.set()
    await dead.die()

    seen = await call
    assert seen.texts[1] == "hij"
    assert seen.finishes[1] == "stop"
    assert seen.texts[0] == text(30).split("kl")[0]
    assert seen.texts[2] == text(30, 2).split("kl")[0]
    again = [
        leg.work for worker in two.workers for leg in worker.submitted if leg.work.prompt_len < len(leg.work.tokens)
    ]
    assert {(work.choice, work.n) for work in again} == {(0, 1), (2, 1)}
    assert len({work.ref.request_id for work in again}) == 2


async def test_an_answer_that_has_all_its_tokens_ends_without_asking_anybody(two: Site) -> None:
    async def almost(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.handed_over()
        leg.tokens(1, *(token(i, 0) for i in range(1, leg.work.sampling.max_tokens)))  # and no finish
        await asyncio.Event().wait()

    for worker in two.workers:
        worker.decode = almost
    call = asyncio.create_task(history(two, max_tokens=8))
    decode = await busy(two, "decode")
    await asyncio.sleep(0.05)
    await decode.die()

    seen = await call
    assert (seen.texts, seen.finishes) == ({0: text(8)}, {0: "length"})
    assert sum(len(worker.submitted) for worker in two.workers) == 2


# --- before the first token


async def test_a_prefill_worker_killed_in_its_work_costs_nothing_but_time(two: Site) -> None:
    async def forever(leg: Leg) -> None:
        await asyncio.Event().wait()

    for worker in two.workers:
        worker.prefill = forever
    call = asyncio.create_task(history(two))
    dead = await busy(two, "prefill")
    for worker in two.workers:
        worker.prefill = honest_prefill
    await dead.die()

    seen = await call
    assert (seen.texts, seen.errors) == ({0: text(40)}, [])
    assert sum(len(worker.submitted) for worker in two.workers if worker.role == "prefill") == 2


async def test_a_frozen_prefill_worker_is_left_at_its_timer(two: Site) -> None:
    async def frozen(leg: Leg) -> None:
        for worker in two.workers:
            worker.prefill = honest_prefill
        await asyncio.Event().wait()

    for worker in two.workers:
        worker.prefill = frozen

    assert (await history(two)).texts == {0: text(40)}


async def test_pages_that_are_lost_are_computed_again_and_never_decoded_from(two: Site) -> None:
    async def lost(leg: Leg) -> None:
        for worker in two.workers:
            worker.decode = Decoding()
        await leg.ticket.wait()
        error = common_pb2.ErrorDetail(reason="kv_lost", message="gone", retryable=True)
        leg.send(failed=decode_pb2.DecodeFailed(error=error, kv_lost=True))

    for worker in two.workers:
        worker.decode = lost

    seen = await history(two)
    assert (seen.texts, seen.errors) == ({0: text(40)}, [])
    assert sum(len(worker.submitted) for worker in two.workers if worker.role == "prefill") == 2


async def test_prompt_scores_come_once_although_the_prompt_is_computed_twice(two: Site) -> None:
    prefills = [worker for worker in two.workers if worker.role == "prefill"]
    tries = 0

    async def scores(leg: Leg) -> None:
        nonlocal tries
        tries += 1
        leg.send(
            prompt_logprobs={"offset": 1, "entries": [scored(t) for t in leg.work.tokens[1 : 3 if tries == 1 else 5]]}
        )
        if tries == 1:
            await asyncio.Event().wait()
        await honest_prefill(leg)

    for worker in prefills:
        worker.prefill = scores
    call = asyncio.create_task(two.complete(max_tokens=3, prompt_logprobs=1))
    dead = await busy(two, "prefill")
    await until(lambda: tries == 1)
    await asyncio.sleep(0.05)
    await dead.die()

    status, body = await call
    assert status == 200
    assert [None if entry is None else len(entry) > 0 for entry in body["choices"][0]["prompt_logprobs"]] == [None] + [
        True
    ] * 4


# --- where nothing can be done


async def test_without_retries_a_lost_worker_is_one_error_within_a_second() -> None:
    workers = fleet()
    async with site(*workers, settings=config(retries=0)) as made:
        scripts = hold_decodes(made, 5)
        call = asyncio.create_task(history(made))
        await until(lambda: any(script.waiting for script in scripts.values()))
        dead = next(worker for worker in workers if worker.id in scripts and scripts[worker.id].waiting)
        started = time.perf_counter()
        await dead.die()

        seen = await call
        assert (seen.errors, seen.done) == (["worker_lost"], 0)
        assert time.perf_counter() - started < 1


async def test_what_the_client_did_wrong_is_tried_once(two: Site) -> None:
    async def refuses(leg: Leg) -> None:
        leg.send(failed=common_pb2.ErrorDetail(reason="invalid_request", message="no", field="prompt"))

    for worker in two.workers:
        worker.prefill = refuses

    status, body = await two.complete()
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert sum(len(worker.submitted) for worker in two.workers if worker.role == "prefill") == 1


async def test_a_failing_fleet_is_asked_so_often_and_no_more(two: Site) -> None:
    async def fails(leg: Leg) -> None:
        leg.send(failed=common_pb2.ErrorDetail(reason="worker_lost", message="broken", retryable=True))

    for worker in two.workers:
        worker.prefill = fails
    asked = 60
    answers = await asyncio.gather(*(two.complete(prompt=f"{i}") for i in range(asked)))

    assert {status for status, _ in answers} == {503}
    sent = sum(len(worker.submitted) for worker in two.workers if worker.role == "prefill")
    assert asked <= sent <= asked + 0.1 * asked + 10 + 1
    assert two.metric("pdserve_router_retries_refused_total") > 0


async def test_a_worker_that_always_fails_is_left_alone_and_comes_back(two: Site) -> None:
    bad = next(worker for worker in two.workers if worker.role == "prefill")

    async def fails(leg: Leg) -> None:
        leg.send(failed=common_pb2.ErrorDetail(reason="worker_lost", message="broken", retryable=True))

    bad.prefill = fails
    for _ in range(12):
        assert (await history(two)).errors == []
    sent = len(bad.submitted)
    for _ in range(6):
        assert (await history(two)).errors == []
    assert len(bad.submitted) == sent, "its breaker is open"

    bad.prefill = honest_prefill
    async with asyncio.timeout(10):
        while len(bad.submitted) == sent:
            assert (await history(two)).errors == []
            await asyncio.sleep(0.05)
    assert (await history(two)).errors == []


# --- under load


async def test_killing_a_prefill_and_a_decode_worker_under_load_costs_no_request() -> None:
    workers = fleet(3, 3)
    async with site(*workers, settings=config()) as made:
        counts = [3 + 7 * (i % 9) for i in range(60)]
        calls = [
            asyncio.create_task(history(made, prompt=f"call {i}", max_tokens=count, n=1 + i % 2))
            for i, count in enumerate(counts)
        ]
        await until(lambda: sum(len(worker.submitted) for worker in workers if worker.role == "decode") > 20)
        await asyncio.gather(workers[0].die(), workers[3].die())

        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            seen = await call
            assert seen.errors == [], i
            assert seen.texts == {c: text(count, c) for c in range(1 + i % 2)}, i
        assert made.metric("pdserve_requests_total", outcome="completed", reason="") == 60
        assert made.metric("pdserve_router_duplicate_terminals_total") == 0
        made.workers = [worker for worker in workers if worker not in (workers[0], workers[3])]
        await made.quiet()


async def test_lost_pages_are_their_sources_fault_and_the_decode_worker_may_go_on() -> None:
    workers = fleet(2, 1)  # nobody else could decode
    async with site(*workers, settings=config()) as made:

        async def lost(leg: Leg) -> None:
            workers[2].decode = Decoding()
            await leg.ticket.wait()
            error = common_pb2.ErrorDetail(reason="kv_lost", message="gone", retryable=True)
            leg.send(failed=decode_pb2.DecodeFailed(error=error, kv_lost=True))

        workers[2].decode = lost
        assert (await history(made)).texts == {0: text(40)}
        assert [len(worker.submitted) for worker in workers[:2]] == [1, 1], "the other source computed it again"


async def test_pages_that_a_worker_read_before_it_died_are_no_fault_of_their_source_and_computed_there_again() -> None:
    workers = fleet(1, 2)  # nobody else could compute the prompt
    async with site(*workers, settings=config()) as made:
        read = asyncio.Event()

        async def reads_once(leg: Leg) -> None:
            await leg.ticket.wait()
            if not read.is_set():
                read.set()
                await asyncio.Event().wait()  # and is not heard of again
            for worker in workers[1:]:
                worker.decode = Decoding()
            error = TicketInvalid("the hand-off is released").detail()
            leg.send(failed=decode_pb2.DecodeFailed(error=error, kv_lost=True))

        for worker in workers[1:]:
            worker.decode = reads_once
        call = asyncio.create_task(history(made, n=2))
        await read.wait()
        await next(worker for worker in workers[1:] if worker.submitted).die()

        seen = await call
        assert seen.errors == []
        assert seen.texts == {choice: text(40, choice) for choice in range(2)}
        assert len(workers[0].submitted) == 3, "and once more for each choice"


# --- where nobody else is left


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
@pytest.mark.parametrize("others", [0, 1])
async def test_pages_lost_by_the_only_source_are_computed_there_again(policy: str, others: int) -> None:
    """others: decode workers beside the one that finds them lost."""
    workers = fleet(1, 1 + others)
    async with site(*workers, settings=config(policy=policy)) as made:

        async def lost(leg: Leg) -> None:
            for worker in workers[1:]:
                worker.decode = Decoding()
            await leg.ticket.wait()
            error = common_pb2.ErrorDetail(reason="transfer_failed", message="gone", retryable=True)
            leg.send(failed=decode_pb2.DecodeFailed(error=error, kv_lost=True))

        for worker in workers[1:]:
            worker.decode = lost
        seen = await history(made)

        assert (seen.texts, seen.errors) == ({0: text(40)}, [])
        if policy == "least_load":  # the other may have whoever decodes compute it
            assert len(workers[0].submitted) == 2
        await made.quiet()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_worker_that_failed_a_request_gets_it_again_only_when_nobody_else_is_left(leg: str) -> None:
    workers = fleet(1, 1)
    async with site(*workers, settings=config()) as made:
        worker, honest = made.worker(leg), {"prefill": honest_prefill, "decode": Decoding()}[leg]

        async def fails(attempt: Leg) -> None:
            setattr(worker, leg, honest)
            error = common_pb2.ErrorDetail(reason="worker_lost", message="broken", retryable=True)
            attempt.send(failed=decode_pb2.DecodeFailed(error=error) if leg == "decode" else error)

        setattr(worker, leg, fails)
        seen = await history(made)

        assert (seen.texts, seen.errors) == ({0: text(40)}, [])
        assert len(worker.submitted) == 2


async def test_the_only_worker_is_asked_as_often_as_retries_allow_and_its_client_hears_the_first_failure() -> None:
    workers = fleet(1, 1)
    async with site(*workers, settings=config(retries=2)) as made:

        async def lost(leg: Leg) -> None:
            error = common_pb2.ErrorDetail(reason="kv_lost", message="gone", retryable=True)
            leg.send(failed=decode_pb2.DecodeFailed(error=error, kv_lost=True))

        workers[1].decode = lost
        status, body = await made.complete()

        assert (status, body["error"]["code"]) == (503, "kv_lost")
        assert len(workers[0].submitted) == 3
        await made.quiet(prefill_confirmed=False)


async def test_a_failed_request_waits_for_the_only_worker_while_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for one that is not there: for that, not at all here."""
    monkeypatch.setattr("router.dispatch.dispatch.PATIENCE_S", 0.0)
    workers = fleet(1, 1)
    async with site(*workers, settings=config()) as made:

        async def lost(leg: Leg) -> None:
            workers[1].decode = Decoding()
            workers[0].refuse = Saturated("no pages").detail()
            error = common_pb2.ErrorDetail(reason="kv_lost", message="gone", retryable=True)
            leg.send(failed=decode_pb2.DecodeFailed(error=error, kv_lost=True))

        workers[1].decode = lost
        call = asyncio.create_task(history(made))
        await until(lambda: len(workers[0].reserved) == 4 or call.done())  # refused three times
        workers[0].refuse = None

        seen = await call
        assert (seen.texts, seen.errors) == ({0: text(40)}, [])


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_worker_that_said_nothing_does_not_cost_its_timer_twice(leg: str) -> None:
    workers = fleet(1, 1)
    async with site(*workers, settings=config(first_token_timeout_s=0.2, inter_token_timeout_s=0.2)) as made:

        async def silent(attempt: Leg) -> None:
            await asyncio.Event().wait()

        setattr(made.worker(leg), leg, silent)
        status, body = await made.complete()

        code = {"prefill": "first_token_timeout", "decode": "inter_token_timeout"}[leg]
        assert (status, body["error"]["code"]) == (503, code)
        assert len(made.worker(leg).submitted) == 1
