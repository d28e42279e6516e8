"""What a ticket is good for, and what workers say of themselves and refuse, over a pair that stays up."""

from __future__ import annotations

import grpc
import pytest

from protos.v1 import common_pb2, decode_pb2, kvsource_pb2, worker_pb2
from runtime import rpc
from runtime.errors import EpochMismatch, InvalidRequest, KvLost, LayoutMismatch
from tests.integration.pd.router_client import Link, Router, prompt, request
from tests.integration.pd.workers import WorkerProcess, baseline

pytestmark = pytest.mark.asyncio(loop_scope="package")

# --- tickets ---------------------------------------------------------------------------------------------------------


async def _refused(worker: WorkerProcess, ticket: kvsource_pb2.SignedTicket, first_token: int = 0) -> KvLost:
    watch = worker.kvsource.Watch(
        kvsource_pb2.WatchRequest(ticket=ticket, first_token=first_token, fence=1, worker_id="d-1", epoch=1)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    error = rpc.from_rpc_error(caught.value)
    assert isinstance(error, KvLost)
    return error


async def test_a_forged_ticket_a_released_one_and_one_out_of_range_are_refused(router: Router) -> None:
    """Public report T052 (llm-d/llm-d-router#242; llm-d/llm-d-router#979)."""
    p = router.p.worker
    work = request(prompt(20, 43))
    await router.p.send(submit=work)
    ticket = kvsource_pb2.SignedTicket.FromString((await router.p.next(work.ref)).ticket.ticket)
    await router.p.next(work.ref)

    await _refused(p, kvsource_pb2.SignedTicket(ticket=b"nonsense", mac=ticket.mac))
    other = kvsource_pb2.Ticket.FromString(ticket.ticket)
    other.ref.request_id = "somebody-else"
    await _refused(p, kvsource_pb2.SignedTicket(ticket=other.SerializeToString(), mac=ticket.mac))
    await _refused(p, ticket, first_token=20)
    await _refused(router.d.worker, ticket)  # signed by another worker

    await router.p.send(release=common_pb2.Cancel(ref=work.ref))
    await baseline(p)
    assert "released" in (await _refused(p, ticket)).message


async def test_a_ticket_that_was_used_is_refused_and_the_router_hears_that_the_kv_is_lost(router: Router) -> None:
    work = request(prompt(20, 47))
    await router.submit_both(work)
    ticket = await router.forward(work)
    await router.p.next(work.ref)
    while not (await router.d.next(work.ref)).tokens.finish:
        pass
    await baseline(router.p.worker)
    again = request(prompt(20, 47))
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=again, fence=1))
    await router.d.send(ticket=decode_pb2.DecodeTicket(ref=again.ref, ticket=ticket))
    failed = (await router.d.next(again.ref)).failed
    assert (failed.error.reason, failed.kv_lost) == ("ticket_invalid", True)
    await baseline(router.d.worker)


# --- streams and administration --------------------------------------------------------------------------------------


async def test_a_hello_for_another_epoch_or_protocol_is_refused(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    link = Link(pair[0], "prefill", "router-x")
    with pytest.raises(EpochMismatch):
        await link.open(epoch=pair[0].epoch - 1)
    call = pair[1].decode.Open()
    hello = common_pb2.Hello(router_id="x", worker_epoch=pair[1].epoch, protocol_min=7, protocol_max=9)
    await call.write(decode_pb2.DecodeCommand(hello=hello))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(rpc.from_rpc_error(caught.value), LayoutMismatch)


async def test_a_request_that_can_never_work_fails_alone_on_both_legs(router: Router) -> None:
    bad = request([1, 2, 3], temperature=float("nan"))
    await router.p.send(submit=bad)
    assert (await router.p.next(bad.ref)).failed.field == "sampling.temperature"
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=bad, local=True))
    failed = (await router.d.next(bad.ref)).failed
    assert (failed.error.field, failed.kv_lost) == ("sampling.temperature", False)
    good = await router.disaggregated(request([1, 2, 3]))
    assert len(good.tokens[0]) == 8


async def test_the_same_attempt_submitted_again_gets_the_same_ticket_and_holds_its_pages_once(router: Router) -> None:
    work = request(prompt(64, 53))
    await router.p.send(submit=work)
    first = (await router.p.next(work.ref)).ticket
    done = (await router.p.next(work.ref)).done
    await router.p.send(submit=work)
    assert (await router.p.next(work.ref)).ticket == first
    assert (await router.p.next(work.ref)).done == done
    load = await router.p.worker.load()
    assert (load.leases, load.pages_total - load.pages_free) == (1, 4)
    await router.p.send(release=common_pb2.Cancel(ref=work.ref))


async def test_a_deadline_ends_a_request_wherever_it_is(router: Router) -> None:
    work = request(prompt(20, 59), max_tokens=4000, remaining_ms=150)
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    while (event := await router.d.next(work.ref)).WhichOneof("event") == "tokens":
        pass
    assert event.failed.error.reason == "deadline_exceeded"
    waiting = request(prompt(20, 61), remaining_ms=150)  # a hand-off whose ticket never comes
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=waiting, fence=1))
    assert (await router.d.next(waiting.ref)).failed.error.reason == "deadline_exceeded"
    await baseline(router.d.worker)


async def test_a_worker_describes_itself_and_its_role_is_only_what_it_says(router: Router) -> None:
    p, d = router.p.worker, router.d.worker
    about, other = await p.describe(), await d.describe()
    assert (about.model, about.vocab_size, about.layout.page_tokens) == ("oracle", 259, 16)
    assert (about.transport, about.pid, about.epoch) == ("nixl", p.pid, p.epoch)
    assert about.layout == other.layout
    assert about.role == common_pb2.ROLE_PREFILL
    await p.admin.SetRole(worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE))
    assert (await p.describe()).role == common_pb2.ROLE_DECODE
    back = await Router(d, p).open()  # the prefill worker decodes what the decode worker computed
    tokens = prompt(90, 67)
    assert (await back.disaggregated(request(tokens))).tokens == (await router.local(request(tokens))).tokens
    await back.close()
    await p.admin.SetRole(worker_pb2.SetRoleRequest(role=common_pb2.ROLE_PREFILL))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await p.admin.SetRole(worker_pb2.SetRoleRequest())
    assert isinstance(rpc.from_rpc_error(caught.value), InvalidRequest)


async def test_one_worker_may_be_both_ends_of_a_hand_off(pair: tuple[WorkerProcess, WorkerProcess]) -> None:
    both = await Router(pair[1], pair[1]).open()
    tokens = prompt(77, 71)
    answer = await both.disaggregated(request(tokens))
    assert answer.tokens == (await both.local(request(tokens))).tokens
    await both.close()
    await baseline(pair[1])


async def test_the_cache_feed_starts_with_a_snapshot_and_goes_on_without_a_gap(router: Router) -> None:
    d = router.d.worker
    feed = d.admin.CacheEvents(worker_pb2.CacheEventsRequest())
    known: set[bytes] = set()
    while True:
        batch = await feed.read()
        assert batch.snapshot
        assert batch.epoch == d.epoch
        known.update(key for event in batch.events for key in event.page_keys)
        if batch.snapshot_end:
            break
    await router.disaggregated(request(prompt(64, 73)))
    fresh: set[bytes] = set()
    sequence = batch.first_sequence
    while len(fresh) < 4:
        batch = await feed.read()
        assert not batch.snapshot
        assert batch.first_sequence == sequence + 1
        sequence += len(batch.events)
        stored = {k for e in batch.events if e.kind == worker_pb2.CacheEvent.KIND_STORED for k in e.page_keys}
        fresh |= stored
    assert all(len(key) == 32 for key in fresh)
    assert not fresh & known
    feed.cancel()
    later = d.admin.CacheEvents(worker_pb2.CacheEventsRequest(after_sequence=sequence - 1, epoch=d.epoch))
    batch = await later.read()
    assert (batch.snapshot, batch.first_sequence) == (False, sequence)
    later.cancel()
    stale = d.admin.CacheEvents(worker_pb2.CacheEventsRequest(after_sequence=1, epoch=1))
    assert (await stale.read()).snapshot
    stale.cancel()
