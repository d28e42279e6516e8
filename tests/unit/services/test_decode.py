from __future__ import annotations

import asyncio
import resource

import pytest

from decode_worker.service import DecodeService
from engine.api import Admitted, Failed, Mode, Tokens
from kvtransfer.source import HandoffStore
from kvtransfer.tickets import TicketMint
from kvtransfer.types import Destination, First, LegKey, Pulled
from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from runtime.clock import FakeClock
from runtime.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    KvLost,
    LayoutMismatch,
    PdserveError,
    TicketInvalid,
    TransferFailed,
)
from tests.unit.services.fakes import EPOCH, Hold, ScriptedEngine, worker
from tests.unit.services.streams import Stream, decode_stream, ref, work

KEY = LegKey("r1", "decode", 1)
STOP = int(common_pb2.FINISH_REASON_STOP)
PULLED = Pulled(
    state_length=20,
    first=(First(0, 65),),
    bytes_read=4096,
    pages_read=1,
    wait_s=0.25,
    read_s=0.5,
    checksum_s=0.125,
)


class HandPuller:
    """Pulls end when and how the test says."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, str, Destination, float, int]] = []
        self.answers: list[asyncio.Future[Pulled]] = []
        self.cancelled = 0

    async def pull(
        self, signed_ticket: bytes, source_address: str, dest: Destination, deadline: float, fence: int
    ) -> Pulled:
        self.calls.append((signed_ticket, source_address, dest, deadline, fence))
        answer: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            dest.hold.release()


class Setup:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = ScriptedEngine()
        self.puller = HandPuller()
        self.handoffs = HandoffStore(TicketMint("w-1", EPOCH, b"l" * 32), self.clock, lease_s=10.0)
        self.service = DecodeService(worker(self.engine, self.clock), self.puller, self.handoffs, reattach_s=2.0)
        self.hold = Hold()

    def admit(self, key: LegKey = KEY, ready: int = 0) -> None:
        self.engine.emit(Admitted(key, (5, 6), (), ready, self.hold))

    def tokens(self, first: int, *tokens: int, key: LegKey = KEY, choice: int = 0, finish: int = 0) -> None:
        logprobs = (None,) * len(tokens)
        self.engine.emit(Tokens(key, choice, first, tokens, logprobs, finish, last=finish != 0, decode_s=2.0))

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.service.tick(self.clock.monotonic())


@pytest.fixture
async def s() -> Setup:
    return Setup()


def submit(stream: Stream, request: common_pb2.WorkRequest, *, local: bool = False, fence: int = 1) -> None:
    stream.send(submit=decode_pb2.DecodeSubmit(request=request, local=local, fence=fence))


def ticket(stream: Stream, request_id: str = "r1", attempt: int = 1) -> None:
    issued = prefill_pb2.TicketIssued(ticket=b"signed", source_address="127.0.0.1:1")
    stream.send(ticket=decode_pb2.DecodeTicket(ref=ref(request_id, attempt), ticket=issued))


async def pulling(s: Setup) -> Stream:
    """A leg whose pull is under way."""
    stream = decode_stream(s.service)
    await stream.open()
    submit(stream, work(tokens=range(20)), fence=7)
    await stream.settle()
    s.admit()
    ticket(stream)
    await stream.settle()
    assert len(s.puller.calls) == 1
    return stream


async def decoding(s: Setup) -> Stream:
    stream = await pulling(s)
    s.puller.answers[0].set_result(PULLED)
    assert (await stream.next()).WhichOneof("event") == "handoff"
    return stream


async def test_a_verified_hand_off_starts_decoding_from_the_first_token(s: Setup) -> None:
    stream = await pulling(s)
    signed, address, destination, _, fence = s.puller.calls[0]
    assert (signed, address, fence) == (b"signed", "127.0.0.1:1", 7)
    assert (destination.pages, destination.token_count, destination.held) == ((5, 6), 20, 0)
    assert s.engine.started == {}
    s.puller.answers[0].set_result(PULLED)
    times = (await stream.next()).handoff.times
    assert (times.transfer_bytes, times.transfer_pages, times.transfer_s) == (4096, 1, 0.5)
    assert (times.pid, times.transport) == (4711, "inprocess")
    assert s.engine.started == {KEY: (First(0, 65),)}
    s.tokens(1, 66, 67)
    s.tokens(3, 68, finish=STOP)
    assert list((await stream.next()).tokens.tokens) == [66, 67]
    last = (await stream.next()).tokens
    assert (last.first_sequence, last.finish, last.times.decode_s) == (3, STOP, 2.0)
    assert last.times.transfer_bytes == 4096
    await stream.drop()


@pytest.mark.parametrize("order", ["ticket first", "admission first", "ticket before submit"])
async def test_ticket_and_admission_may_come_in_any_order(s: Setup, order: str) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    if order == "ticket before submit":
        ticket(stream)
    submit(stream, work(tokens=range(20)))
    await stream.settle()
    if order == "ticket first":
        ticket(stream)
        await stream.settle()
    assert s.puller.calls == []
    s.admit(ready=16)
    if order == "admission first":
        ticket(stream)
    await stream.settle()
    assert [c[2].held for c in s.puller.calls] == [16]
    await stream.drop()


async def test_all_tokens_of_a_step_travel_in_one_message(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    for name in ("a", "b", "c"):
        submit(stream, work(name), local=True)
    await stream.settle()
    before = len(stream.messages)
    keys = [LegKey(name, "decode", 1) for name in ("a", "b", "c")]
    s.engine.emit(*(Tokens(k, 0, 0, (65,), (None,), 0, last=False) for k in keys))
    await stream.settle()
    assert [len(m.events) for m in stream.messages[before:]] == [3]
    assert stream.messages[-1].step == 3
    assert stream.messages[-1].load.pages_total == 9
    await stream.drop()


async def test_a_local_leg_needs_no_ticket_and_no_pull(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    submit(stream, work(), local=True)
    await stream.settle()
    assert s.engine.submitted[KEY].mode is Mode.LOCAL
    s.engine.emit(Admitted(KEY, (5,), (), 0, s.hold))
    ticket(stream)
    s.engine.emit(Tokens(KEY, 0, 0, (65,), (None,), STOP, last=True, cached_tokens=2, prefill_s=1.0))
    last = (await stream.next()).tokens
    assert (last.times.cached_tokens, last.times.prefill_s, last.times.transport) == (2, 1.0, "")
    assert s.puller.calls == []
    assert s.hold.released == 1
    await stream.drop()


async def test_a_checksum_mismatch_is_recomputed_and_never_started(s: Setup) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_exception(ChecksumMismatch("page 3"))
    await stream.settle()
    assert s.engine.recomputed == [KEY]
    assert s.engine.started == {}
    s.engine.emit(Tokens(KEY, 0, 0, (65,), (None,), 0, last=False, recomputed_tokens=20))
    assert (await stream.next()).handoff.times.recomputed_tokens == 20
    assert (await stream.next()).tokens.first_sequence == 0
    await stream.drop()


@pytest.mark.parametrize(
    ("error", "kv_lost"),
    [
        (TicketInvalid("expired"), True),
        (KvLost("gone"), True),
        (TransferFailed("reset"), True),
        (LayoutMismatch("page_tokens differs"), False),
        (DeadlineExceeded("too late"), False),
    ],
)
async def test_a_failed_pull_ends_the_leg_and_says_whether_the_prompt_is_needed_again(
    s: Setup, error: PdserveError, kv_lost: bool
) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_exception(error)
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.kv_lost) == (error.reason, kv_lost)
    assert s.engine.cancelled == [KEY]
    assert s.hold.released == 1
    await stream.drop()


async def test_a_bug_in_a_pull_costs_one_request_and_shows_no_text(s: Setup) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_exception(ValueError("/secret/path"))
    failed = (await stream.next()).failed
    assert failed.error.reason == "internal"
    assert "secret" not in failed.error.message
    await stream.drop()


async def test_a_hand_off_of_another_length_is_not_started(s: Setup) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_result(Pulled(19, (First(0, 65),), 1, 1, 0, 0, 0))
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.kv_lost) == ("length_mismatch", True)
    assert s.engine.started == {}
    await stream.drop()


@pytest.mark.parametrize(
    "first",
    [
        First(0, 256),
        First(0, 2**32 - 1),
        First(0, 65, finish=77),
        First(0, 65, finish=5),
        First(0, 65, logprob=b"\xff"),
    ],
)
async def test_a_first_token_that_no_model_of_ours_samples_is_not_started(s: Setup, first: First) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_result(Pulled(20, (first,), 1, 1, 0, 0, 0))
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.kv_lost) == ("first_mismatch", True)
    assert s.engine.started == {}
    assert s.engine.cancelled == [KEY]
    await stream.drop()


@pytest.mark.parametrize("more", [False, True])
async def test_a_number_of_choices_is_no_size_before_it_is_checked(s: Setup, *, more: bool) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    submit(stream, work(n=20_000_000, more_tokens=more), local=True)
    if more:
        stream.send(tokens=common_pb2.TokenChunk(ref=ref(), offset=3, tokens=[4]))
    failed = (await stream.next()).failed
    assert failed.error.field == "n"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 100_000  # KiB; a set of them takes 1.5 GB
    await stream.drop()


async def test_the_time_the_rest_of_a_prompt_takes_is_the_requests_own(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    arrived = s.clock.monotonic()
    submit(stream, work(more_tokens=True), local=True)
    await stream.settle()
    s.clock.advance(50.0)
    stream.send(tokens=common_pb2.TokenChunk(ref=ref(), offset=3, tokens=[4]))
    await stream.settle()
    assert s.engine.submitted[KEY].deadline == arrived + 60.0
    await stream.drop()


async def test_a_cancel_before_admission_gives_the_pages_back_when_they_come(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    submit(stream, work(tokens=range(20)))
    stream.send(cancel=common_pb2.Cancel(ref=ref()))
    await stream.settle()
    s.admit()
    await stream.settle()
    assert s.hold.released == 1
    assert s.service.busy() == 0
    await stream.drop()


async def test_a_cancel_while_the_ticket_is_awaited_gives_the_pages_back(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    submit(stream, work(tokens=range(20)))
    await stream.settle()
    s.admit()
    await stream.settle()
    stream.send(cancel=common_pb2.Cancel(ref=ref()))
    await stream.settle()
    assert s.hold.released == 1
    assert s.engine.cancelled == [KEY]
    ticket(stream)
    await stream.settle()
    assert s.puller.calls == []
    await stream.drop()


async def test_a_cancel_in_a_pull_leaves_the_landing_to_the_puller(s: Setup) -> None:
    stream = await pulling(s)
    stream.send(cancel=common_pb2.Cancel(ref=ref()))
    await stream.settle()
    assert s.puller.cancelled == 1
    assert s.hold.released == 1
    assert s.engine.cancelled == [KEY]
    assert stream.silent()
    await stream.drop()


async def test_a_cancel_before_the_pull_has_run_does_not_leak_the_landing(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    submit(stream, work(tokens=range(20)))
    await stream.settle()
    s.admit()
    await stream.settle()
    ticket(stream)
    stream.send(cancel=common_pb2.Cancel(ref=ref()))
    await stream.settle()
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
    stream = decode_stream(s.service)
    await stream.open()
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
    stream = decode_stream(s.service)
    await stream.open()
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
    stream = decode_stream(s.service)
    await stream.open()
    submit(stream, work(tokens=range(20), n=3), local=True)
    await stream.settle()
    s.admit()

    stream.send(cancel=common_pb2.Cancel(ref=ref("r1", 1), choices=[1]))
    await stream.settle()

    assert s.engine.ended == [(KEY, (1,))]
    assert s.engine.cancelled == []
    s.engine.emit(Tokens(KEY, 0, 0, (65,), (None,), STOP, last=False))
    await stream.settle()
    assert s.service.busy() == 1

    stream.send(cancel=common_pb2.Cancel(ref=ref("r1", 1), choices=[2]))
    await stream.settle()
    assert s.engine.cancelled == [KEY], "the last one is the whole request"
    assert s.service.busy() == 0


async def test_a_choice_that_ends_as_the_router_ends_the_others_ends_the_leg(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
    submit(stream, work(tokens=range(20), n=2), local=True)
    await stream.settle()
    s.admit()
    stream.send(cancel=common_pb2.Cancel(ref=ref("r1", 1), choices=[0]))
    await stream.settle()

    s.engine.emit(Tokens(KEY, 1, 0, (65,), (None,), STOP, last=False))  # said before the engine heard of the cancel
    await stream.settle()

    assert s.service.busy() == 0
    assert s.engine.cancelled == [KEY]


async def test_reservations_may_come_over_the_stream_several_in_one_message(s: Setup) -> None:
    stream = decode_stream(s.service)
    await stream.open()
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
