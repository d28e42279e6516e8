"""Prompt at P, tokens at D, over real NIXL between two processes. The oracle model turns any wrong byte of the pages
into other tokens, so equality with a local run proves what arrived."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protos.v1 import common_pb2, decode_pb2
from tests.integration.pd.router_client import Router, prompt, request
from tests.integration.pd.workers import WorkerProcess, baseline, eventually

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAGE = 2 * 2 * 16 * 32  # bytes of an oracle page


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 1000])
async def test_a_handed_over_prompt_continues_exactly_as_a_local_one(router: Router, length: int) -> None:
    tokens = prompt(length, length)
    moved = await router.disaggregated(request(tokens, max_tokens=20))
    local = await router.local(request(tokens, max_tokens=20))
    other = await router.local(request([*tokens[:-1], tokens[-1] ^ 1], max_tokens=20))
    assert moved.tokens == local.tokens != other.tokens
    assert moved.finish == local.finish == [common_pb2.FINISH_REASON_LENGTH]
    assert len(moved.tokens[0]) == 20
    assert moved.handoff is not None
    pages = -(-length // 16)
    assert (moved.handoff.transfer_pages, moved.handoff.transfer_bytes) == (pages, pages * PAGE)
    assert moved.handoff.transport == "nixl"
    assert {moved.prefill.pid, moved.handoff.pid} == {router.p.worker.pid, router.d.worker.pid}  # type: ignore[union-attr]


@pytest.mark.parametrize(("length", "held"), [(64, 48), (70, 64), (257, 256), (512, 496)])
async def test_a_decode_worker_that_holds_the_prompt_pulls_only_its_last_page_and_confirms(
    router: Router, length: int, held: int
) -> None:
    tokens = prompt(length, 1000 + length)
    first = await router.disaggregated(request(tokens))
    again = await router.disaggregated(request(tokens))
    assert first.tokens == again.tokens
    assert again.handoff is not None
    assert (again.handoff.cached_tokens, again.handoff.transfer_bytes) == (held, PAGE)
    await baseline(router.p.worker, router.d.worker)


async def test_a_decode_worker_that_holds_a_part_pulls_only_the_rest(router: Router) -> None:
    tokens = prompt(400, 7)
    await router.disaggregated(request(tokens[:160]))
    answer = await router.disaggregated(request(tokens))
    assert answer.handoff is not None
    assert answer.handoff.cached_tokens == 160
    assert answer.handoff.transfer_bytes == (25 - 10) * PAGE
    assert answer.tokens == (await router.local(request(tokens))).tokens


async def test_every_prompt_token_is_counted_once_by_where_its_kv_came_from(router: Router) -> None:
    """Reported elsewhere as T098 and T156: tokens that were transferred count as computed; gauges freeze."""

    async def added(since: dict[str, float], worker: WorkerProcess, leg: str) -> dict[str, float]:
        now, name = await worker.scrape(), "pdserve_worker_prompt_tokens_total"
        keys = {source: f'{name}{{leg="{leg}",source="{source}"}}' for source in ("computed", "cached", "transferred")}
        grown = {source: now.get(key, 0.0) - since.get(key, 0.0) for source, key in keys.items()}
        return {source: count for source, count in grown.items() if count}

    p, d = router.p.worker, router.d.worker
    p_before, d_before = await p.scrape(), await d.scrape()
    tokens = prompt(512, 77)
    await router.disaggregated(request(tokens))
    assert await added(p_before, p, "prefill") == {"computed": 512}
    assert await added(d_before, d, "decode") == {"transferred": 512}
    await router.disaggregated(request(tokens))
    assert await added(p_before, p, "prefill") == {"computed": 512 + 16, "cached": 496}
    assert await added(d_before, d, "decode") == {"transferred": 512 + 16, "cached": 496}
    await router.local(request(tokens))
    assert await added(d_before, d, "decode") == {"transferred": 512 + 16, "cached": 2 * 496, "computed": 16}
    moved = "pdserve_worker_transfer_bytes_total"
    assert (await d.scrape())[moved] - d_before[moved] == (32 + 1) * PAGE
    await baseline(p, d)

    async def idle() -> bool:
        loads = [await one.scrape() for one in (p, d)]
        return not any(load["pdserve_worker_running"] or load["pdserve_worker_leases"] for load in loads)

    await eventually(idle)


@pytest.mark.parametrize("cached", [0, 16, 32])
async def test_a_prompt_of_whole_pages_is_paired_by_position_whatever_is_cached(router: Router, cached: int) -> None:
    """Public report T096 (vllm-project/vllm#50558)."""
    tokens = prompt(32, 2000 + cached)
    if cached:
        await router.local(request(tokens[:cached]))
    answer = await router.disaggregated(request(tokens))
    assert answer.tokens == (await router.local(request(tokens))).tokens


async def test_the_same_prompt_a_hundred_times_frees_the_source_every_time(router: Router) -> None:
    """Public report T028 (vllm-project/vllm#18591; vllm-project/vllm#18632)."""
    tokens = prompt(64, 3)
    seen = set()
    for index in range(100):
        answer = await router.disaggregated(request(tokens, max_tokens=2))
        seen.add(tuple(answer.tokens[0]))
        assert answer.handoff is not None
        assert answer.handoff.transfer_bytes == (4 if index == 0 else 1) * PAGE
    assert len(seen) == 1
    await baseline(router.p.worker)
    assert (await router.p.worker.load()).pages_cached <= 1024


async def test_the_prompt_is_really_moved_and_not_recomputed(router: Router) -> None:
    answer = await router.disaggregated(request(prompt(512, 5)))
    assert answer.handoff is not None
    assert answer.final is not None
    assert answer.handoff.transfer_pages >= 31
    assert answer.final.recomputed_tokens == 0
    assert answer.final.prefill_s == 0.0


async def test_four_choices_share_one_prefill_and_one_hand_off(router: Router) -> None:
    """Public report T138 (vllm-project/vllm#43509)."""
    tokens = prompt(40, 11)
    options = {"n": 4, "seed": 1, "temperature": 0.8, "max_tokens": 30}
    moved = await router.disaggregated(request(tokens, **options))
    local = await router.local(request(tokens, **options))
    assert moved.tokens == local.tokens
    assert len({tuple(t) for t in moved.tokens}) == 4
    assert moved.handoff is not None
    assert moved.handoff.transfer_pages == 3
    await baseline(router.p.worker, router.d.worker)


async def test_seeded_sampling_with_penalties_is_the_same_handed_over_and_local(router: Router) -> None:
    options = {
        "temperature": 1.1, "top_k": 50, "top_p": 0.9, "seed": 99, "presence_penalty": 0.5, "frequency_penalty": 0.2,
        "repetition_penalty": 1.2, "max_tokens": 40, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    tokens = prompt(100, 13)
    moved = await router.disaggregated(request(tokens, **options))
    local = await router.local(request(tokens, **options))
    assert moved.tokens == local.tokens
    assert moved.logprobs == local.logprobs
    assert [len(p.top) for p in moved.logprobs[0]] == [3] * 40


async def test_a_continuation_goes_on_where_the_earlier_attempt_stopped(router: Router) -> None:
    tokens = prompt(50, 17)
    whole = await router.local(request(tokens, max_tokens=24, temperature=0.7, seed=5))
    taken = whole.tokens[0][:9]
    work = request(
        tokens + taken, prompt_len=50, attempt=2, max_tokens=24, temperature=0.7, seed=5, remaining_ms=20_000
    )
    rest = await router.disaggregated(work)
    assert rest.tokens[0] == whole.tokens[0][9:]
    assert rest.finish == whole.finish


async def test_a_request_that_ends_at_its_first_token_moves_nothing(router: Router) -> None:
    work = request(prompt(40, 19), max_tokens=1)
    await router.submit_both(work)
    assert (await router.p.next(work.ref)).WhichOneof("event") == "ticket"
    done = (await router.p.next(work.ref)).done
    assert [f.finish for f in done.first] == [common_pb2.FINISH_REASON_LENGTH]
    await router.d.send(cancel=common_pb2.Cancel(ref=work.ref))
    await router.p.send(release=common_pb2.Cancel(ref=work.ref))
    await baseline(router.p.worker, router.d.worker)
    assert router.d.queue(work.ref).empty()


async def test_a_choice_that_ends_at_its_first_token_leaves_the_others_running(router: Router) -> None:
    tokens = prompt(30, 23)
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 3}
    probe = await router.local(request(tokens, max_tokens=6, **options))
    stop = probe.tokens[1][0]
    options["stop_token_ids"] = [stop]
    moved = await router.disaggregated(request(tokens, max_tokens=6, **options))
    local = await router.local(request(tokens, max_tokens=6, **options))
    assert moved.tokens == local.tokens
    assert moved.finish == local.finish
    assert moved.finish[1] == common_pb2.FINISH_REASON_STOP


async def test_prompt_scores_come_whole_from_either_leg(router: Router) -> None:
    tokens = prompt(3000, 29)
    options = {"prompt_logprobs": True, "prompt_top_logprobs": 20, "max_tokens": 2}
    moved = await router.disaggregated(request(tokens, **options))
    local = await router.local(request(tokens, **options))
    assert len(moved.prompt_scores) == 2999
    assert moved.prompt_scores == local.prompt_scores
    assert [s.token for s in moved.prompt_scores] == tokens[1:]
    assert all(m.ByteSize() <= 1 << 20 for m in router.p.messages)


async def test_many_requests_at_once_share_messages_and_stay_apart(router: Router) -> None:
    prompts = [prompt(20 + i, 100 + i) for i in range(24)]
    before = len(router.d.messages)
    moved = await asyncio.gather(*(router.disaggregated(request(t, max_tokens=32)) for t in prompts))
    messages = router.d.messages[before:]
    local = [await router.local(request(t, max_tokens=32)) for t in prompts]
    assert [a.tokens for a in moved] == [a.tokens for a in local]
    carried = [len(m.events) for m in messages]
    assert max(carried) > 4  # one message carries every request's tokens of a step
    loads = [m.load.sequence for m in router.d.messages]
    assert loads == sorted(set(loads))


async def test_the_ticket_may_come_long_after_admission_or_before_the_submit(router: Router) -> None:
    work = request(prompt(40, 31))
    await router.p.send(submit=work)
    ticket = (await router.p.next(work.ref)).ticket
    await router.d.send(ticket=decode_pb2.DecodeTicket(ref=work.ref, ticket=ticket))
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, fence=1))
    assert (await router.d.next(work.ref)).WhichOneof("event") == "handoff"
    while not (await router.d.next(work.ref)).tokens.finish:
        pass


async def test_reserved_capacity_is_taken_by_the_submit_and_a_cancelled_reservation_is_free(router: Router) -> None:
    p, d = router.p.worker, router.d.worker
    work = request(prompt(100, 37))
    needs = common_pb2.Needs(prompt_tokens=100, headroom_tokens=64, choices=1, prefill_tokens=100)
    ask = common_pb2.ReserveRequest(ref=work.ref, router_id="r", needs=needs, remaining_ms=60_000)
    at_p = await p.prefill.Reserve(ask)
    at_d = await d.decode.Reserve(ask)
    assert at_p.reservation_id
    assert at_d.reservation_id
    assert (await d.load()).pages_reserved >= 7
    assert (await d.decode.Reserve(ask)).reservation_id == at_d.reservation_id  # a lost answer asked for again
    work.reservation_id = at_p.reservation_id
    await router.p.send(submit=work)
    work.reservation_id = at_d.reservation_id
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, fence=1))
    await router.forward(work)
    await router.p.next(work.ref)
    while not (await router.d.next(work.ref)).tokens.finish:
        pass
    other = common_pb2.ReserveRequest(ref=request([1]).ref, needs=needs, remaining_ms=60_000)
    kept = await p.prefill.Reserve(other)
    cancel = common_pb2.CancelReservationRequest(reservation_id=kept.reservation_id)
    assert (await p.prefill.CancelReservation(cancel)).released
    assert not (await p.prefill.CancelReservation(cancel)).released
    await baseline(p, d)


async def test_more_than_the_pool_is_refused_for_ever_and_too_much_now_only_for_now(router: Router) -> None:
    def ask(tokens: int) -> common_pb2.ReserveRequest:
        needs = common_pb2.Needs(prompt_tokens=tokens, choices=1)
        return common_pb2.ReserveRequest(ref=request([1]).ref, needs=needs, remaining_ms=60_000)

    never = await router.p.worker.prefill.Reserve(ask(20_000))
    assert (never.reservation_id, never.refusal.retryable) == ("", False)
    held = [await router.p.worker.prefill.Reserve(ask(8_000)) for _ in range(2)]
    later = await router.p.worker.prefill.Reserve(ask(8_000))
    assert (later.reservation_id, later.refusal.retryable) == ("", True)
    assert later.free.pages < 500
    for one in held:
        await router.p.worker.prefill.CancelReservation(
            common_pb2.CancelReservationRequest(reservation_id=one.reservation_id)
        )


async def test_a_prompt_longer_than_a_message_comes_in_pieces_to_both(router: Router) -> None:
    tokens = prompt(5000, 41)
    work = request(tokens, max_tokens=4)
    head = common_pb2.WorkRequest()
    head.CopyFrom(work)
    del head.tokens[2000:]
    head.more_tokens = True
    rest = [(2000, 2000, True), (4000, 1000, False)]
    await router.p.send(submit=head)
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=head, fence=1))
    for offset, count, more in rest:
        chunk = common_pb2.TokenChunk(ref=work.ref, offset=offset, tokens=tokens[offset : offset + count], more=more)
        await router.p.send(tokens=chunk)
        await router.d.send(tokens=chunk)
    await router.forward(work)
    first = (await router.p.next(work.ref)).done.first[0].token
    assert (await router.d.next(work.ref)).handoff.times.transfer_pages == 313
    assert first == (await router.local(request(tokens, max_tokens=1))).tokens[0][0]
    while not (await router.d.next(work.ref)).tokens.finish:
        pass
