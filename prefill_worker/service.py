"""The Prefill service: receive, schedule, run, publish. A thin face over the engine loop and the hand-off store.

The failure that shapes it: a response that is lost after the work was done. A leg is keyed by (request, attempt); to
submit it again, on this stream or on a later one, gives the same ticket and the same answer, and one set of pages is
held. What a router has cancelled stays cancelled, also when the cancel overtakes the submit.

Who owns the pages of a leg: the engine until SourceDone; beside it, from Admitted on, the hand-off store through its
hold, until the decode worker or the router releases them or the lease ends. This service owns only what it must say
again. Everything runs on the event loop's thread; the engine's sink only posts to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import structlog

from engine.api import Admitted, Event, Failed, Mode, PromptScores, RangeReady, SourceDone
from engine.face import (
    Assembly,
    Worker,
    engine_request,
    leg_key,
    ref_of,
    reserve,
    score_chunks,
    wire_first,
)
from kvtransfer.source import HandoffStore, State
from kvtransfer.types import LegKey
from protos.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.errors import Cancelled, DeadlineExceeded, InvalidRequest, PdserveError, TicketInvalid, WorkerLost
from runtime.ids import trace_id
from runtime.rpc_errors import ServicerContext
from runtime.streamhub import Batch, Recent, Session, StreamHub

LEG = "prefill"
REMEMBERED = 4096

_log = structlog.get_logger("pdserve.prefill")
_Session = Session[prefill_pb2.PrefillEvents]
_Batch = Batch[prefill_pb2.PrefillEvents, prefill_pb2.PrefillEvent]


@dataclass(slots=True, eq=False)
class Leg:
    """One attempt and everything a router may have to be told again about it.

    state_length: its tokens, N. outcome: its done or failed event; None while it computes.
    """

    key: LegKey
    session: _Session | None
    deadline: float
    state_length: int = 0
    assembly: Assembly | None = None
    admitted: Admitted | None = None
    said: list[prefill_pb2.PrefillEvent] = field(default_factory=list)
    done: bool = False


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Reserve, CancelReservation and Open of protos/v1/prefill.proto."""

    def __init__(self, worker: Worker, handoffs: HandoffStore, reattach_s: float) -> None:
        self._worker = worker
        self._handoffs = handoffs
        self._loop = asyncio.get_running_loop()
        self._hub: StreamHub[prefill_pb2.PrefillEvents, prefill_pb2.PrefillCommand] = StreamHub(
            self, worker.epoch, worker.clock, reattach_s
        )
        self._legs: dict[LegKey, Leg] = {}
        self._over: Recent[LegKey, PdserveError] = Recent(REMEMBERED)
        self._sink = self._post

    # --- RPCs --------------------------------------------------------------------------------------------------

    async def Reserve(  # noqa: N802
        self, request: common_pb2.ReserveRequest, context: ServicerContext
    ) -> common_pb2.ReserveReply:
        return reserve(self._worker, LEG, request)

    async def CancelReservation(  # noqa: N802
        self, request: common_pb2.CancelReservationRequest, context: ServicerContext
    ) -> common_pb2.CancelReservationReply:
        released = self._worker.engine.cancel_reservation(request.reservation_id)
        return common_pb2.CancelReservationReply(released=released)

    async def Open(  # type: ignore[override]  # noqa: N802  a coroutine that writes, which gRPC takes too
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: ServicerContext
    ) -> None:
        await self._hub.serve(request_iterator, context.write)

    # --- what the worker asks ----------------------------------------------------------------------------------

    def busy(self) -> int:
        """Legs that still compute."""
        return sum(not leg.done for leg in self._legs.values())

    def remembered(self) -> int:
        """Legs with an entry here: those that run and those a router may still ask about."""
        return len(self._legs)

    def tick(self, now: float) -> None:
        """Housekeeping, a few times a second: sessions not re-attached, legs whose pages are no longer held."""
        self._hub.expire(now)
        for leg in list(self._legs.values()):
            if leg.done and self._handoffs.state(leg.key) is not State.FINAL:
                self._over.put(leg.key, TicketInvalid("the hand-off of this attempt is over", reason="attempt_over"))
                self._forget(leg)
            elif leg.assembly is not None and now >= leg.deadline:
                self._fail_now(leg, DeadlineExceeded("the prompt did not arrive in time"))

    def abort(self, error: PdserveError) -> None:
        """End what still computes with `error`; hand-offs that wait are failed to their watchers too."""
        batch = self._batch()
        for leg in list(self._legs.values()):
            self._worker.engine.cancel(leg.key)
            self._fail(leg, error, batch)
        batch.flush()

    def close(self, error: PdserveError) -> None:
        """End every router's stream."""
        self._hub.close(error)

    # --- the hub's face ----------------------------------------------------------------------------------------

    def hello_of(self, command: prefill_pb2.PrefillCommand) -> common_pb2.Hello | None:
        return command.hello if command.WhichOneof("command") == "hello" else None

    def unpack(self, command: prefill_pb2.PrefillCommand) -> Sequence[prefill_pb2.PrefillCommand]:
        return command.batch or (command,)

    def attached(self, session: _Session, hello: common_pb2.Hello, welcome: common_pb2.Welcome) -> None:
        resumed = {leg_key(r.ref, LEG) for r in hello.resume}
        for key in [k for k in session.legs if k not in resumed]:
            self._lose(self._legs[key])
        again = [self._legs[key] for key in resumed if key in session.legs]
        welcome.resumed.extend(ref_of(leg.key) for leg in again)
        failed = [(key, self._over.get(key)) for key in resumed if key not in session.legs]
        batch = self._batch()
        batch.add(session, prefill_pb2.PrefillEvent(welcome=welcome))
        for leg in again:
            self._say_again(leg, batch)
        for key, error in failed:
            if error is not None:  # it ended while the router was away
                batch.add(session, prefill_pb2.PrefillEvent(ref=ref_of(key), failed=error.detail()))
        batch.flush()

    def command(self, session: _Session, command: prefill_pb2.PrefillCommand) -> None:
        match command.WhichOneof("command"):
            case "submit":
                self._submit(session, command.submit)
            case "tokens":
                self._tokens(command.tokens)
            case "cancel":
                self._drop(leg_key(command.cancel.ref, LEG), Cancelled("cancelled by the router"))
            case "release":
                self._handoffs.release(leg_key(command.release.ref, LEG))
                self._drop(leg_key(command.release.ref, LEG), TicketInvalid("the hand-off was released"))
            case "reserve":
                self._reserve(session, command.reserve)
            case "cancel_reservation":
                self._worker.engine.cancel_reservation(command.cancel_reservation.reservation_id)
            case other:
                raise InvalidRequest("unknown command", field=other or "command")

    def lost(self, session: _Session) -> None:
        for key in list(session.legs):
            self._lose(self._legs[key])

    # --- commands ----------------------------------------------------------------------------------------------

    def _reserve(self, session: _Session, request: common_pb2.ReserveRequest) -> None:
        """The unary call's twin: every refusal is an answer here, an error would end the stream."""
        try:
            reply = reserve(self._worker, LEG, request)
        except PdserveError as error:
            reply = common_pb2.ReserveReply(refusal=error.detail())
        batch = self._batch()
        batch.add(session, prefill_pb2.PrefillEvent(ref=request.ref, reserved=reply))
        batch.flush()

    def _submit(self, session: _Session, request: common_pb2.WorkRequest) -> None:
        key = leg_key(request.ref, LEG)
        known = self._legs.get(key)
        if known is not None:
            self._move(known, session)
            batch = self._batch()
            self._say_again(known, batch)
            batch.flush()
            return
        leg = Leg(key, session, deadline=self._worker.clock.monotonic() + request.remaining_ms / 1000)
        self._legs[key] = leg
        session.legs.add(key)
        try:
            over = self._over.get(key)
            if over is not None:
                raise over
            if request.more_tokens:
                leg.assembly = Assembly(request, self._worker.limits.max_model_len)
            else:
                self._run(leg, request)
        except PdserveError as error:
            self._fail_now(leg, error)

    def _tokens(self, chunk: common_pb2.TokenChunk) -> None:
        leg = self._legs.get(leg_key(chunk.ref, LEG))
        if leg is None or leg.assembly is None:  # failed or cancelled meanwhile
            return
        try:
            if leg.assembly.add(chunk):
                request, leg.assembly = leg.assembly.request, None
                self._run(leg, request)
        except PdserveError as error:
            self._fail_now(leg, error)

    def _run(self, leg: Leg, request: common_pb2.WorkRequest) -> None:
        work = engine_request(self._worker, request, LEG, Mode.SOURCE, leg.deadline)
        leg.state_length = len(work.tokens)
        _log.debug(
            "submit", request_id=leg.key.request_id, attempt=leg.key.attempt, trace=trace_id(request.traceparent)
        )
        self._worker.engine.submit(work, self._sink)

    def _drop(self, key: LegKey, error: PdserveError) -> None:
        """The router wants nothing more of this leg: nothing is computed and no page held from now on."""
        self._over.put(key, error)
        leg = self._legs.get(key)
        if leg is None:
            return
        self._worker.engine.cancel(key)
        self._handoffs.fail(key, error)
        self._forget(leg)

    # --- events ------------------------------------------------------------------------------------------------

    def _post(self, events: Sequence[Event]) -> None:
        """The engine's sink, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._handle, events)

    def _handle(self, events: Sequence[Event]) -> None:
        batch = self._batch()
        for event in events:
            leg = self._legs.get(event.key)
            if leg is None or leg.done:
                if isinstance(event, Admitted):  # cancelled while the event was on its way
                    event.hold.release()
                continue
            self._event(leg, event, batch)
        batch.flush()

    def _event(self, leg: Leg, event: Event, batch: _Batch) -> None:
        match event:
            case Admitted():
                self._admitted(leg, event, batch)
            case RangeReady():
                self._handoffs.range_ready(leg.key, event.start, event.end)
            case PromptScores():
                for offset, entries in score_chunks(event.offset, event.entries):
                    scores = prefill_pb2.PromptLogprobs(offset=offset, entries=entries)
                    self._say(leg, prefill_pb2.PrefillEvent(ref=ref_of(leg.key), prompt_logprobs=scores), batch)
            case SourceDone():
                self._source_done(leg, event, batch)
            case Failed():
                self._fail(leg, event.error, batch)
            case _:
                raise AssertionError(f"{type(event).__name__} is not an event of a prefill leg")

    def _admitted(self, leg: Leg, event: Admitted, batch: _Batch) -> None:
        leg.admitted = event
        signed = self._handoffs.open(
            leg.key,
            pages=event.pages,
            token_count=leg.state_length,
            ready=event.ready,
            hold=event.hold,
            deadline=leg.deadline,
        )
        ticket = prefill_pb2.TicketIssued(ticket=signed, source_address=self._worker.address)
        self._say(leg, prefill_pb2.PrefillEvent(ref=ref_of(leg.key), ticket=ticket), batch)

    def _source_done(self, leg: Leg, event: SourceDone, batch: _Batch) -> None:
        assert leg.admitted is not None
        self._handoffs.final(leg.key, state_length=leg.state_length, first=event.first, slots=leg.admitted.slots)
        times = common_pb2.StageTimes(
            queue_s=event.queue_s,
            prefill_s=event.prefill_s,
            cached_tokens=event.cached_tokens,
            pid=self._worker.pid,
            transport=self._worker.transport,
        )
        meter = self._worker.meter
        meter.prompt(LEG, leg.state_length, times)
        meter.generated(LEG, len(event.first))
        meter.finished(LEG, times)
        done = prefill_pb2.PrefillDone(first=wire_first(event.first), times=times)
        leg.done = True
        self._say(leg, prefill_pb2.PrefillEvent(ref=ref_of(leg.key), done=done), batch)

    def _fail(self, leg: Leg, error: PdserveError, batch: _Batch) -> None:
        """Ends the leg: its router and whoever watches the hand-off are told, nothing is held any more."""
        self._over.put(leg.key, error)
        self._handoffs.fail(leg.key, error)
        if not leg.done:
            self._worker.meter.failed(LEG, error.reason)
            self._say(leg, prefill_pb2.PrefillEvent(ref=ref_of(leg.key), failed=error.detail()), batch)
        self._forget(leg)

    def _fail_now(self, leg: Leg, error: PdserveError) -> None:
        batch = self._batch()
        self._fail(leg, error, batch)
        batch.flush()

    # --- legs --------------------------------------------------------------------------------------------------

    def _lose(self, leg: Leg) -> None:
        """Its router is gone. What computes is cancelled; a finished hand-off goes on under its lease."""
        if leg.done:
            self._move(leg, None)
            return
        self._worker.engine.cancel(leg.key)
        self._handoffs.fail(leg.key, WorkerLost("the router's stream was lost", reason="stream_lost"))
        self._forget(leg)

    def _move(self, leg: Leg, session: _Session | None) -> None:
        if leg.session is not None:
            leg.session.legs.discard(leg.key)
        leg.session = session
        if session is not None:
            session.legs.add(leg.key)

    def _forget(self, leg: Leg) -> None:
        self._move(leg, None)
        self._legs.pop(leg.key, None)

    def _say(self, leg: Leg, event: prefill_pb2.PrefillEvent, batch: _Batch) -> None:
        leg.said.append(event)
        batch.add(leg.session, event)

    def _say_again(self, leg: Leg, batch: _Batch) -> None:
        for event in leg.said:
            batch.add(leg.session, event)

    def _batch(self) -> _Batch:
        return Batch(lambda events: prefill_pb2.PrefillEvents(events=events, load=self._worker.load()))
