from __future__ import annotations

import pytest

from engine.api import Admitted, Failed, Mode, PromptScores, RangeReady, SourceDone
from engine.plan import Logprob
from kvtransfer.source import HandoffStore, State
from kvtransfer.tickets import TicketMint
from kvtransfer.types import First, LegKey
from prefill_worker.service import PrefillService
from protos.v1 import common_pb2
from runtime.clock import FakeClock
from runtime.errors import DeadlineExceeded, Draining, InvalidRequest
from tests.unit.services.fakes import EPOCH, Hold, ScriptedEngine, worker
from tests.unit.services.streams import prefill_stream, ref, work

KEY = LegKey("r1", "prefill", 1)


class Setup:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = ScriptedEngine()
        self.store = HandoffStore(TicketMint("w-1", EPOCH, b"l" * 32), self.clock, lease_s=10.0)
        self.service = PrefillService(worker(self.engine, self.clock), self.store, reattach_s=2.0)
        self.hold = Hold()

    def admit(self, key: LegKey = KEY, ready: int = 0) -> None:
        pages = tuple(range(1, 2 + (len(self.engine.submitted[key].tokens) - 1) // 16))
        self.engine.emit(Admitted(key, pages, (), ready, self.hold))

    def done(self, key: LegKey = KEY, finish: int = 0) -> None:
        first = tuple(First(c, 65 + c, finish) for c in range(self.engine.submitted[key].n))
        self.engine.emit(SourceDone(key, first, cached_tokens=0, queue_s=0.5, prefill_s=0.25))

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.store.expire()
        self.service.tick(self.clock.monotonic())


@pytest.fixture
async def s() -> Setup:
    return Setup()


async def test_a_prompt_gets_its_ticket_at_admission_and_then_its_first_token(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work(tokens=range(20)))
    await stream.settle()
    assert s.engine.submitted[KEY].mode is Mode.SOURCE

    s.admit(ready=16)
    ticket = (await stream.next()).ticket
    assert ticket.source_address == "127.0.0.1:9"
    assert s.store.state(KEY) is State.COMPUTING

    s.engine.emit(RangeReady(KEY, 16, 20))
    s.done()
    done = (await stream.next()).done
    assert [(f.choice, f.token) for f in done.first] == [(0, 65)]
    assert (done.times.queue_s, done.times.prefill_s, done.times.pid) == (0.5, 0.25, 4711)
    assert s.store.state(KEY) is State.FINAL
    assert s.hold.released == 0
    await stream.drop()


async def test_every_message_carries_the_load(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    assert stream.messages[0].load.pages_total == 9
    await stream.drop()


async def test_the_same_attempt_submitted_twice_runs_once_and_gets_the_same_ticket(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    await stream.settle()
    s.admit()
    first = await stream.next()
    stream.send(submit=work())
    again = await stream.next()
    assert first.ticket == again.ticket
    s.done()
    await stream.next()
    stream.send(submit=work())
    assert [(await stream.next()).WhichOneof("event") for _ in range(2)] == ["ticket", "done"]
    assert s.store.counts().pages == 1
    await stream.drop()


async def test_a_prompt_may_come_in_several_messages(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work(tokens=(1, 2), prompt_len=5, more_tokens=True))
    stream.send(tokens=common_pb2.TokenChunk(ref=ref(), offset=2, tokens=[3], more=True))
    stream.send(tokens=common_pb2.TokenChunk(ref=ref(), offset=3, tokens=[4, 5]))
    await stream.settle()
    assert s.engine.submitted[KEY].tokens == (1, 2, 3, 4, 5)
    await stream.drop()


async def test_a_gap_between_token_messages_fails_that_request_alone(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work(tokens=(1, 2), prompt_len=5, more_tokens=True))
    stream.send(tokens=common_pb2.TokenChunk(ref=ref(), offset=3, tokens=[3]))
    failed = (await stream.next()).failed
    assert (failed.reason, failed.field) == ("invalid_request", "tokens.offset")
    stream.send(submit=work("r2"))
    await stream.settle()
    assert LegKey("r2", "prefill", 1) in s.engine.submitted
    await stream.drop()


async def test_a_prompt_that_never_arrives_whole_ends_at_its_deadline(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work(tokens=(1, 2), prompt_len=5, more_tokens=True))
    await stream.settle()
    s.tick(61)
    assert (await stream.next()).failed.reason == "deadline_exceeded"
    await stream.drop()


BAD = {
    "tokens": {"tokens": []},
    "prompt_len": {"prompt_len": 9},
    "n": {"n": 99},
    "choice": {"choice": 1, "n": 2},
    "adapter": {"adapter": common_pb2.Adapter(id="a")},
    "multimodal": {"multimodal": [common_pb2.MultimodalItem(position=1)]},
    "salt": {"salt": b"s" * 2000},
    "sampling.temperature": {"sampling": common_pb2.Sampling(temperature=float("nan"))},
    "sampling.top_p": {"sampling": common_pb2.Sampling(top_p=1.5)},
    "sampling.max_tokens": {"max_tokens": 0},
    "sampling.min_tokens": {"sampling": common_pb2.Sampling(min_tokens=5)},
    "sampling.top_logprobs": {"sampling": common_pb2.Sampling(top_logprobs=6)},
    "sampling.logit_bias": {"sampling": common_pb2.Sampling(logit_bias=[common_pb2.LogitBias(token=1, bias=101)])},
    "sampling.stop_token_ids": {"sampling": common_pb2.Sampling(stop_token_ids=[256])},
}


@pytest.mark.parametrize("field", BAD)
async def test_what_can_never_work_is_refused_by_field_and_the_engine_never_sees_it(s: Setup, field: str) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work(**BAD[field]))  # type: ignore[arg-type]
    failed = (await stream.next()).failed
    assert failed.field == field
    assert not failed.retryable
    assert s.engine.submitted == {}
    await stream.drop()


async def test_a_token_outside_the_vocabulary_and_a_prompt_that_fills_the_context_are_refused(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work("a", tokens=(1, 256)))
    assert (await stream.next()).failed.limit == "255"
    stream.send(submit=work("b", tokens=[1] * 4096))
    assert (await stream.next()).failed.reason == "context_length_exceeded"
    await stream.drop()


async def test_a_draining_engine_refuses_with_its_reason(s: Setup) -> None:
    s.engine.refuse = Draining("this worker is draining")
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    failed = (await stream.next()).failed
    assert (failed.reason, failed.retryable) == ("draining", True)
    await stream.drop()


async def test_a_cancel_in_prefill_frees_everything_and_says_nothing(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    await stream.settle()
    s.admit()
    await stream.next()
    stream.send(cancel=common_pb2.Cancel(ref=ref()))
    await stream.settle()
    assert s.engine.cancelled == [KEY]
    assert s.hold.released == 1
    assert stream.silent()
    await stream.drop()


async def test_an_admission_that_crosses_a_cancel_gives_its_pages_back(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    await stream.settle()
    stream.send(cancel=common_pb2.Cancel(ref=ref()))
    await stream.settle()
    s.admit()
    await stream.settle()
    assert s.hold.released == 1
    assert s.store.counts().pages == 0
    await stream.drop()


async def test_a_cancel_that_overtakes_its_submit_is_remembered(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(cancel=common_pb2.Cancel(ref=ref()))
    stream.send(submit=work())
    assert (await stream.next()).failed.reason == "cancelled"
    assert s.engine.submitted == {}
    await stream.drop()


async def test_a_release_frees_a_hand_off_nobody_will_read(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    await stream.settle()
    s.admit()
    s.done(finish=common_pb2.FINISH_REASON_STOP)
    assert [(await stream.next()).WhichOneof("event") for _ in range(2)] == ["ticket", "done"]
    stream.send(release=common_pb2.Cancel(ref=ref()))
    await stream.settle()
    assert s.hold.released == 1
    await stream.drop()


async def test_an_attempt_whose_hand_off_is_over_does_not_run_again(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    await stream.settle()
    s.admit()
    s.done()
    assert [(await stream.next()).WhichOneof("event") for _ in range(2)] == ["ticket", "done"]
    s.store.release(KEY)  # the decode worker has read it
    s.tick(0.1)
    stream.send(submit=work())
    assert (await stream.next()).failed.reason == "attempt_over"
    assert s.service.busy() == 0
    await stream.drop()


async def test_a_release_of_an_earlier_attempt_leaves_the_later_one_alone(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work(attempt=2))
    await stream.settle()
    s.admit(LegKey("r1", "prefill", 2))
    await stream.next()
    stream.send(release=common_pb2.Cancel(ref=ref(attempt=1)))
    await stream.settle()
    assert s.hold.released == 0
    await stream.drop()


async def test_a_failure_in_the_engine_reaches_router_and_watcher(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    await stream.settle()
    s.admit()
    await stream.next()
    s.engine.emit(Failed(KEY, DeadlineExceeded("too late")))
    assert (await stream.next()).failed.reason == "deadline_exceeded"
    assert s.store.state(KEY) is State.FAILED
    assert s.hold.released == 1
    await stream.drop()


async def test_prompt_scores_come_in_bounded_pieces_before_done(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work(tokens=[1] * 4000))
    await stream.settle()
    s.admit()
    top = tuple((t, -1.0) for t in range(20))
    s.engine.emit(PromptScores(KEY, 1, tuple(Logprob(t % 256, -0.5, 1, top) for t in range(3999))))
    s.done()
    assert (await stream.next()).WhichOneof("event") == "ticket"
    seen = 1
    while (event := await stream.next()).WhichOneof("event") == "prompt_logprobs":
        assert event.prompt_logprobs.offset == seen
        assert event.ByteSize() < 1 << 20
        seen += len(event.prompt_logprobs.entries)
    assert seen == 4000
    assert event.WhichOneof("event") == "done"
    assert all(m.ByteSize() < 1 << 20 for m in stream.messages)
    await stream.drop()


async def test_a_lost_stream_cancels_what_computes_and_leaves_finished_hand_offs_to_their_lease(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work("computing"))
    stream.send(submit=work())
    await stream.settle()
    s.admit()
    s.done()
    await stream.settle()
    await stream.drop()
    s.tick(1.9)
    assert s.engine.cancelled == []
    s.tick(0.2)
    assert s.engine.cancelled == [LegKey("computing", "prefill", 1)]
    assert s.hold.released == 0
    s.tick(10.0)
    assert s.hold.released == 1
    assert s.service.busy() == 0


async def test_a_router_that_comes_back_hears_again_what_it_resumes_and_loses_the_rest(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    for name in ("r1", "other"):
        stream.send(submit=work(name))
    await stream.settle()
    s.admit()
    await stream.next()
    await stream.drop()
    s.done()
    back = prefill_stream(s.service)
    welcome = await back.open(common_pb2.Resume(ref=ref()), common_pb2.Resume(ref=ref("unknown")))
    assert [r.request_id for r in welcome.resumed] == ["r1"]
    assert [(await back.next()).WhichOneof("event") for _ in range(2)] == ["ticket", "done"]
    assert s.engine.cancelled == [LegKey("other", "prefill", 1)]
    await back.drop()


async def test_a_failure_while_the_router_was_away_is_told_when_it_is_back(s: Setup) -> None:
    stream = prefill_stream(s.service)
    await stream.open()
    stream.send(submit=work())
    await stream.settle()
    await stream.drop()
    s.engine.emit(Failed(KEY, DeadlineExceeded("too late")))
    back = prefill_stream(s.service)
    await back.settle()
    await back.open(common_pb2.Resume(ref=ref()))
    assert (await back.next()).failed.reason == "deadline_exceeded"
    await back.drop()


async def test_a_reservation_is_the_engines_answer(s: Setup) -> None:
    request = common_pb2.ReserveRequest(ref=ref(), needs=common_pb2.Needs(prompt_tokens=20), remaining_ms=1000)
    reply = await s.service.Reserve(request, None)  # type: ignore[arg-type]
    assert (reply.reservation_id, reply.expires_in_ms, reply.free.pages) == ("r-1", 5000, 9)
    cancel = common_pb2.CancelReservationRequest(reservation_id="r-1")
    assert (await s.service.CancelReservation(cancel, None)).released  # type: ignore[arg-type]
    s.engine.refuse = Draining("draining")
    reply = await s.service.Reserve(request, None)  # type: ignore[arg-type]
    assert (reply.reservation_id, reply.refusal.reason, reply.free.batch) == ("", "draining", 4)


async def test_no_time_left_is_refused_before_anything_is_booked(s: Setup) -> None:
    with pytest.raises(DeadlineExceeded):
        await s.service.Reserve(common_pb2.ReserveRequest(ref=ref()), None)  # type: ignore[arg-type]
    assert s.engine.reserved == {}


@pytest.mark.parametrize("count", [2**64 - 1, 10**6])
async def test_a_booking_of_more_work_than_a_context_is_refused(s: Setup, count: int) -> None:
    """It was added to the queue that every message tells of: beyond 64 bits no message could be written, and each of
    the worker's streams ended with an internal error."""
    needs = common_pb2.Needs(prompt_tokens=20, prefill_tokens=count)
    with pytest.raises(InvalidRequest) as caught:
        await s.service.Reserve(common_pb2.ReserveRequest(ref=ref(), needs=needs, remaining_ms=9), None)  # type: ignore[arg-type]
    assert caught.value.field == "needs.prefill_tokens"
    assert s.engine.reserved == {}
