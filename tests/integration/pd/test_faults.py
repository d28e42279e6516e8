"""Workers that die, restart or receive damaged bytes, as real processes; what is said and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

import grpc
import pytest

from protos.v1 import common_pb2, decode_pb2, kvsource_pb2
from runtime.errors import EpochMismatch, PdserveError, WorkerLost
from tests.integration.pd.conftest import Start
from tests.integration.pd.router_client import LONG, SHORT, Collected, Link, Router, request
from tests.integration.pd.workers import SLOW, VERY_SLOW, WorkerProcess, at_once, baseline, eventually


async def _busy(worker: WorkerProcess) -> bool:
    return (await worker.load()).running > 0


async def _idle(worker: WorkerProcess) -> bool:
    return (await worker.load()).running == 0


async def test_a_prefill_worker_killed_in_prefill_is_heard_of_at_once_and_d_frees_everything(start: Start) -> None:
    p, d = await at_once(start("prefill", SLOW), start("decode"))
    router = await Router(p, d).open()
    work = request(LONG)
    await router.submit_both(work)
    await router.forward(work)
    await asyncio.sleep(0.05)
    killed = time.monotonic()
    await p.kill()
    with pytest.raises(WorkerLost):
        await router.p.next(work.ref)
    failed = (await router.d.next(work.ref)).failed
    assert time.monotonic() - killed < 1.0
    assert failed.kv_lost
    assert failed.error.retryable
    await baseline(d)


async def test_a_prefill_worker_killed_after_its_ticket_before_the_read_means_prefill_again(start: Start) -> None:
    p, d, other = await at_once(start("prefill"), start("decode"), start("prefill"))
    router = await Router(p, d).open()
    work = request(SHORT)
    await router.p.send(submit=work)
    ticket = (await router.p.next(work.ref)).ticket
    await router.p.next(work.ref)
    await p.kill()
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, fence=1))
    await router.d.send(ticket=decode_pb2.DecodeTicket(ref=work.ref, ticket=ticket))
    assert (await router.d.next(work.ref)).failed.kv_lost
    again = request(SHORT, request_id=work.ref.request_id, attempt=2)
    second = await Router(other, d).open()
    answer = await second.disaggregated(again)
    assert answer.tokens == (await second.local(request(SHORT))).tokens
    await baseline(d, other)


async def test_a_decode_worker_killed_in_decode_leaves_nothing_at_the_source(start: Start) -> None:
    p, d, other = await at_once(start("prefill"), start("decode", SLOW), start("decode"))
    router = await Router(p, d).open()
    work = request(SHORT, max_tokens=40)
    undisturbed = await (await Router(p, other).open()).local(request(SHORT, max_tokens=40))
    await router.submit_both(work)
    await router.forward(work)
    collected = Collected(0, 0)
    collected.first((await router.p.next(work.ref)).done.first)
    await router.d.next(work.ref)
    for _ in range(5):
        collected.add((await router.d.next(work.ref)).tokens)
    killed = time.monotonic()
    await d.kill()
    with contextlib.suppress(WorkerLost):
        while True:
            collected.add((await router.d.next(work.ref)).tokens)
    assert time.monotonic() - killed < 1.0
    await baseline(p)
    # and the router goes on from the tokens it has, on another pair
    taken = collected.tokens[0]
    rest = request([*SHORT, *taken], prompt_len=100, attempt=2, request_id=work.ref.request_id, max_tokens=40)
    answer = await (await Router(p, other).open()).disaggregated(rest)
    assert taken + answer.tokens[0] == undisturbed.tokens[0]


async def test_a_decode_worker_lost_before_it_confirmed_leaves_the_ticket_good_for_another(start: Start) -> None:
    stuck = {"PDSERVE_FAULTS": "kv.read=delay:30"}
    p, d, other = await at_once(start("prefill"), start("decode", stuck), start("decode"))
    router = await Router(p, d).open()
    work = request(SHORT)
    await router.submit_both(work)
    ticket = await router.forward(work)
    first = (await router.p.next(work.ref)).done.first
    await asyncio.sleep(0.1)
    await d.kill()
    link = Link(other, "decode", "router-2")
    await link.open()
    await link.send(submit=decode_pb2.DecodeSubmit(request=work, fence=2))
    await link.send(ticket=decode_pb2.DecodeTicket(ref=work.ref, ticket=ticket))
    assert (await link.next(work.ref)).handoff.times.transfer_pages == 7
    collected = Collected(0, 0)
    collected.first(first)
    while not collected.finish:
        collected.add((await link.next(work.ref)).tokens)
    assert [collected.tokens[0]] == (await (await Router(p, other).open()).local(request(SHORT))).tokens
    await baseline(p, other)


async def test_a_worker_restarted_at_its_address_is_known_as_another_incarnation(start: Start) -> None:
    """Public report T160 (vllm-project/vllm#49238)."""
    p, d = await at_once(start("prefill", worker_id="p-1"), start("decode", worker_id="d-1"))
    router = await Router(p, d).open()
    expected = (await router.disaggregated(request(SHORT))).tokens
    stale = request(LONG[:40])
    await router.p.send(submit=stale)
    old = (await router.p.next(stale.ref)).ticket
    epoch, address = p.epoch, p.address

    await p.kill()  # the prefill worker: same address, same id, new epoch
    p = await start("prefill", worker_id="p-1", listen=address)
    assert p.address == address
    assert p.epoch > epoch
    with pytest.raises(EpochMismatch):
        await Link(p, "prefill", "router-old").open(epoch=epoch)
    watch = p.kvsource.Watch(
        kvsource_pb2.WatchRequest(
            ticket=kvsource_pb2.SignedTicket.FromString(old.ticket), fence=1, worker_id="d-1", epoch=d.epoch
        )
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    again = await Router(p, d).open()
    for tokens in (SHORT, [7, *SHORT]):
        moved = await again.disaggregated(request(tokens))
        assert moved.tokens == (await again.local(request(tokens))).tokens
    assert (await again.disaggregated(request(SHORT))).tokens == expected

    address = d.address  # and the decode worker
    await d.kill()
    d = await start("decode", worker_id="d-1", listen=address)
    third = await Router(p, d).open()
    moved = await third.disaggregated(request(SHORT))
    assert moved.tokens == expected
    assert moved.handoff is not None
    assert moved.handoff.transfer_pages == 7
    await baseline(p, d)


async def test_a_byte_that_changed_in_flight_is_detected_and_the_prompt_recomputed(start: Start) -> None:
    damage = {"PDSERVE_FAULTS": "kv.bytes=corrupt*1"}
    p, d = await at_once(start("prefill"), start("decode", damage))
    router = await Router(p, d).open()
    work = request(SHORT, max_tokens=20)
    answer = await router.disaggregated(work)
    assert answer.handoff is not None
    assert answer.handoff.recomputed_tokens == 100
    undisturbed = await router.local(request(SHORT, max_tokens=20))
    assert answer.tokens == undisturbed.tokens
    clean = await router.disaggregated(request([3, *SHORT]))
    assert clean.handoff is not None
    assert clean.handoff.recomputed_tokens == 0
    await baseline(p, d)


async def test_damage_with_several_choices_is_recomputed_for_all(start: Start) -> None:
    p, d = await at_once(start("prefill"), start("decode", {"PDSERVE_FAULTS": "kv.bytes=corrupt*1"}))
    router = await Router(p, d).open()
    options = {"n": 3, "temperature": 0.9, "seed": 4, "max_tokens": 12}
    answer = await router.disaggregated(request(SHORT, **options))
    assert answer.handoff is not None
    assert answer.handoff.recomputed_tokens > 0
    assert answer.tokens == (await router.local(request(SHORT, **options))).tokens
    await baseline(p, d)


async def test_streams_that_break_are_taken_up_again_without_a_token_lost_or_repeated(start: Start) -> None:
    p, d = await at_once(start("prefill", SLOW), start("decode", SLOW))
    router = await Router(p, d).open()
    work = request(LONG, max_tokens=30)
    await router.p.send(submit=work)
    await router.p.next(work.ref)
    await router.p.cut()  # in prefill
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, fence=1))
    welcome = await router.p.open(common_pb2.Resume(ref=work.ref))
    assert [r.request_id for r in welcome.resumed] == [work.ref.request_id]
    await router.forward(work)  # the ticket once more
    collected = Collected(0, 0)
    collected.first((await router.p.next(work.ref)).done.first)
    await router.d.next(work.ref)
    for _ in range(4):
        collected.add((await router.d.next(work.ref)).tokens)
    await router.d.send(ack=decode_pb2.Ack(ref=work.ref, next_sequence=[3]))
    await router.d.cut()  # in decode
    await asyncio.sleep(0.3)
    welcome = await router.d.open(common_pb2.Resume(ref=work.ref, next_sequence=collected.next_sequence()))
    assert len(welcome.resumed) == 1
    while not collected.finish:
        event = await router.d.next(work.ref)
        if event.WhichOneof("event") == "tokens":
            assert event.tokens.first_sequence == len(collected.tokens[0])  # nothing said twice
            collected.add(event.tokens)
    assert [collected.tokens[0]] == (await router.local(request(LONG, max_tokens=30))).tokens
    await baseline(p, d)


async def test_a_router_that_does_not_come_back_costs_no_memory(start: Start) -> None:
    p, d = await at_once(start("prefill", VERY_SLOW, reattach_s=0.5), start("decode", SLOW, reattach_s=0.5))
    router = await Router(p, d).open()
    computing, decoding, finished = request(LONG, max_tokens=9), request(SHORT, max_tokens=2000), request(LONG[:64])
    await router.p.send(submit=finished)
    await router.p.next(finished.ref)
    await router.p.next(finished.ref)
    await router.submit_both(computing)
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=decoding, local=True))
    await router.d.next(decoding.ref)
    await router.p.cut()
    await router.d.cut()
    await asyncio.sleep(0.2)
    assert (await d.load()).running > 0
    await baseline(d, seconds=2.0)
    await eventually(lambda: _idle(p))
    assert (await p.load()).leases == 1  # what was finished waits for its lease
    await baseline(p, seconds=4.0)


async def test_a_router_that_is_killed_is_a_lost_stream_and_not_a_farewell(start: Start) -> None:
    (d,) = await at_once(start("decode", SLOW, reattach_s=1.0))
    code = f"""
import asyncio
from tests.integration.pd.router_client import *
async def main():
    d = WorkerProcess("decode", {{}}); d.address, d.epoch = {d.address!r}, {d.epoch}
    d.channel = rpc.channel(d.address, __import__("runtime.config").config.Config())
    link = Link(d, "decode", "killed-router"); await link.open()
    work = request([1, 2, 3], request_id="orphan", max_tokens=2000)
    await link.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    print("sent", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    assert (await child.stdout.readline()) == b"sent\n"
    await eventually(lambda: _busy(d))
    child.kill()
    await child.wait()
    await asyncio.sleep(0.3)
    assert (await d.load()).running == 1  # it might come back
    back = Link(d, "decode", "killed-router")
    ref = common_pb2.AttemptRef(request_id="orphan", attempt=1)
    welcome = await back.open(common_pb2.Resume(ref=ref))
    assert len(welcome.resumed) == 1
    assert (await back.next(ref)).tokens.first_sequence == 0
    await back.close()  # a farewell, which needs no patience
    await baseline(d, seconds=0.8)


async def test_an_engine_that_fails_ends_its_requests_and_then_its_process(start: Start) -> None:
    faults = {"PDSERVE_FAULTS": "engine.step=fail@6"}
    (d,) = await at_once(start("decode", faults))
    router = await Router(d, d).open()
    assert len((await router.local(request(SHORT, max_tokens=2))).tokens[0]) == 2
    reasons: set[str] = set()
    for _ in range(4):
        work = request(SHORT, max_tokens=50)
        try:
            await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
            while (event := await router.d.next(work.ref)).WhichOneof("event") == "tokens":
                pass
            reasons.add(event.failed.error.reason)
            assert "injected" not in event.failed.error.message
        except (PdserveError, asyncio.InvalidStateError, grpc.aio.AioRpcError):
            break
    assert reasons
    assert await d.wait(10) == 70


@pytest.mark.slow
async def test_an_engine_that_stands_still_is_not_alive_and_its_process_is_replaced(start: Start) -> None:
    """Public report T065 (vllm-project/vllm#39863; vllm-project/vllm#36960); T097 (ray-project/ray#61263)."""
    (d,) = await at_once(start("decode", {"PDSERVE_FAULTS": "engine.step=delay:300"}))
    link = Link(d, "decode", "r")
    await link.open()
    work = request(SHORT)
    await link.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    event = await link.next(work.ref, seconds=45)
    assert event.failed.error.reason == "worker_lost"
    assert await d.wait(10) == 70
