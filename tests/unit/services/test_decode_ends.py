"""Decode legs that are cancelled, replaced, resumed, ended in part or forgotten."""

from __future__ import annotations

import asyncio

import pytest

from engine.api import Failed, Tokens
from kvtransfer.types import LegKey
from protos.v1 import common_pb2, decode_pb2
from runtime.errors import (
    DeadlineExceeded,
    KvLost,
)
from tests.unit.services.decoding import KEY, STOP, Setup, admitted, cancel, decoding, opened, pulling, submit, ticket
from tests.unit.services.streams import decode_stream, ref, work


async def test_a_cancel_before_admission_gives_the_pages_back_when_they_come(s: Setup) -> None:
    stream = await opened(s)
    submit(stream, work(tokens=range(20)))
    await cancel(stream)
    s.admit()
    await stream.settle()
    assert s.hold.released == 1
    assert s.service.busy() == 0
    await stream.drop()


async def test_a_cancel_while_the_ticket_is_awaited_gives_the_pages_back(s: Setup) -> None:
    stream = await admitted(s)
    await stream.settle()
    await cancel(stream)
    assert s.hold.released == 1
    assert s.engine.cancelled == [KEY]
    ticket(stream)
    await stream.settle()
    assert s.puller.calls == []
    await stream.drop()


async def test_a_cancel_in_a_pull_leaves_the_landing_to_the_puller(s: Setup) -> None:
    stream = await pulling(s)
    await cancel(stream)
    assert s.puller.cancelled == 1
    assert s.hold.released == 1
    assert s.engine.cancelled == [KEY]
    assert stream.silent()
    await stream.drop()


async def test_a_cancel_before_the_pull_has_run_does_not_leak_the_landing(s: Setup) -> None:
    stream = await admitted(s)
    await stream.settle()
    ticket(stream)
    await cancel(stream)
    assert s.hold.released == 1
    await stream.drop()


async def test_a_higher_attempt_ends_the_lower_one(s: Setup) -> None:
    stream = await decoding(s)
    submit(stream, work(attempt=2, tokens=range(20)), fence=2)
    failed = await stream.next()
    assert (failed.ref.attempt, failed.failed.error.reason) == (1, "superseded")
    assert s.engine.cancelled == [KEY]
    s.tokens(1, 66)  # late tokens of the first attempt
    await stream.settle()
    assert stream.silent()
    s.tokens(1, 70, key=LegKey("r1", "decode", 2))
    assert (await stream.next()).ref.attempt == 2
    await stream.drop()


async def test_a_lower_attempt_after_a_higher_one_is_refused(s: Setup) -> None:
    stream = await opened(s)
    submit(stream, work(attempt=2))
    submit(stream, work(attempt=1))
    assert (await stream.next()).failed.error.reason == "superseded"
    assert list(s.engine.submitted) == [LegKey("r1", "decode", 2)]
    await stream.drop()


async def test_the_same_attempt_submitted_twice_runs_once(s: Setup) -> None:
    stream = await decoding(s)
    s.tokens(1, 66)
    await stream.next()
    submit(stream, work(tokens=range(20)))
    assert [(await stream.next()).WhichOneof("event") for _ in range(2)] == ["handoff", "tokens"]
    await stream.drop()


async def test_a_router_that_comes_back_gets_the_tokens_it_missed_and_no_others(s: Setup) -> None:
    stream = await decoding(s)
    s.tokens(1, 66, 67)
    await stream.next()
    await stream.drop()
    s.tokens(3, 68)
    s.tokens(4, 69, finish=STOP)
    back = decode_stream(s.service)
    await back.settle()
    welcome = await back.open(common_pb2.Resume(ref=ref(), next_sequence=[3]))
    assert [r.request_id for r in welcome.resumed] == ["r1"]
    assert (await back.next()).WhichOneof("event") == "handoff"
    assert [list((await back.next()).tokens.tokens) for _ in range(2)] == [[68], [69]]
    await back.drop()


async def test_acknowledged_tokens_are_forgotten(s: Setup) -> None:
    stream = await decoding(s)
    s.tokens(1, 66)
    s.tokens(2, 67)
    await stream.next()
    await stream.next()
    stream.send(ack=decode_pb2.Ack(ref=ref(), next_sequence=[2]))
    await stream.settle()
    await stream.drop()
    back = decode_stream(s.service)
    await back.open(common_pb2.Resume(ref=ref()))
    assert (await back.next()).WhichOneof("event") == "handoff"
    assert (await back.next()).tokens.first_sequence == 2
    await back.drop()


async def test_a_leg_that_kept_too_little_for_the_router_is_not_resumed(s: Setup) -> None:
    stream = await decoding(s)
    await stream.drop()
    for start in range(1, 9001, 100):
        s.tokens(start, *([65] * 100))
    back = decode_stream(s.service)
    await back.settle()
    assert list((await back.open(common_pb2.Resume(ref=ref(), next_sequence=[1]))).resumed) == []
    assert s.engine.cancelled == [KEY]
    await back.drop()


async def test_choices_are_resumed_each_from_its_own_sequence(s: Setup) -> None:
    stream = await opened(s)
    submit(stream, work(n=2), local=True)
    await stream.settle()
    for choice in (0, 1):
        s.tokens(0, 65 + choice, choice=choice)
        await stream.next()
    await stream.drop()
    back = decode_stream(s.service)
    await back.open(common_pb2.Resume(ref=ref(), next_sequence=[1, 0]))
    assert (await back.next()).tokens.choice == 1
    await back.settle()
    assert back.silent()
    await back.drop()


async def test_a_stream_lost_for_good_cancels_its_requests_at_every_stage(s: Setup) -> None:
    stream = await pulling(s)
    submit(stream, work("waiting"))
    await stream.settle()
    await stream.drop()
    s.tick(1.9)
    assert s.engine.cancelled == []
    s.tick(0.2)
    await asyncio.sleep(0)
    assert set(s.engine.cancelled) == {KEY, LegKey("waiting", "decode", 1)}
    assert s.hold.released == 1
    assert s.service.busy() == 0


async def test_an_engine_failure_ends_the_request_once(s: Setup) -> None:
    stream = await decoding(s)
    s.engine.emit(Failed(KEY, DeadlineExceeded("too late")), Failed(KEY, DeadlineExceeded("again")))
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.kv_lost) == ("deadline_exceeded", False)
    await stream.settle()
    assert stream.silent()
    await stream.drop()


async def test_a_finished_leg_is_forgotten_and_cannot_run_again(s: Setup) -> None:
    stream = await decoding(s)
    s.tokens(1, 66, finish=STOP)
    await stream.next()
    s.tick(4.0)
    submit(stream, work(tokens=range(20)))
    assert (await stream.next()).failed.error.reason == "attempt_over"
    await stream.drop()


async def test_what_runs_is_ended_with_a_reason_when_the_worker_stops(s: Setup) -> None:
    stream = await pulling(s)
    s.service.abort(KvLost("the worker stops"))
    assert (await stream.next()).failed.error.reason == "kv_lost"
    await s.service.close(KvLost("the worker stops"))
    with pytest.raises(KvLost):
        await stream.call
    assert s.puller.cancelled == 1


async def test_choices_the_router_has_seen_the_end_of_stop_and_the_others_go_on(s: Setup) -> None:
    stream = await admitted(s, local=True, n=3)

    await cancel(stream, 1)

    assert s.engine.ended == [(KEY, (1,))]
    assert s.engine.cancelled == []
    s.engine.emit(Tokens(KEY, 0, 0, (65,), (None,), STOP, last=False))
    await stream.settle()
    assert s.service.busy() == 1

    await cancel(stream, 2)
    assert s.engine.cancelled == [KEY], "the last one is the whole request"
    assert s.service.busy() == 0


async def test_a_choice_that_ends_as_the_router_ends_the_others_ends_the_leg(s: Setup) -> None:
    stream = await admitted(s, local=True, n=2)
    await cancel(stream, 0)

    s.engine.emit(Tokens(KEY, 1, 0, (65,), (None,), STOP, last=False))  # said before the engine heard of the cancel
    await stream.settle()

    assert s.service.busy() == 0
    assert s.engine.cancelled == [KEY]


async def test_reservations_may_come_over_the_stream_several_in_one_message(s: Setup) -> None:
    stream = await opened(s)
    asks = [
        common_pb2.ReserveRequest(
            ref=ref(name, 1), needs=common_pb2.Needs(prompt_tokens=5, choices=1), remaining_ms=left
        )
        for name, left in (("r1", 1000), ("r2", 0))
    ]
    stream.send(batch=[decode_pb2.DecodeCommand(reserve=ask) for ask in asks])

    granted, refused = await stream.next(), await stream.next()

    assert (granted.ref.request_id, granted.reserved.reservation_id) == ("r1", "r-1")
    assert (refused.ref.request_id, refused.reserved.refusal.reason) == ("r2", "deadline_exceeded")
    stream.send(cancel_reservation=common_pb2.CancelReservationRequest(reservation_id="r-1", ref=ref("r1", 1)))
    await stream.settle()
