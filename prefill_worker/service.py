"""The Prefill service: receive, schedule, run, publish. A thin face over the engine loop and the hand-off store.

The failure that shapes it: a response that is lost after the work was done. A leg is keyed by (request, attempt); to
submit it again, on this stream or on a later one, gives the same ticket and the same answer, and one set of pages is
held. What a router has cancelled stays cancelled, also when the cancel overtakes the submit.

Who owns the pages of a leg: the engine until SourceDone; beside it, from Admitted on, the hand-off store through its
hold, until the decode worker or the router releases them or the lease ends. This service owns only what it must say
again. Everything runs on the event loop's thread; the engine's sink only posts to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.api import Admitted, Event, Failed, Mode, PromptScores, RangeReady, SourceDone
from engine.face import Worker, leg_key, ref_of, score_chunks, wire_first
from engine.service import Service, ServiceLeg, unknown
from kvtransfer.source import HandoffStore, State
from kvtransfer.types import LegKey
from protos.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.errors import Cancelled, PdserveError, TicketInvalid, WorkerLost
from runtime.streamhub import Batch, Session

LEG = "prefill"

_Session = Session[prefill_pb2.PrefillEvents]
_Batch = Batch[prefill_pb2.PrefillEvents, prefill_pb2.PrefillEvent]


@dataclass(slots=True, eq=False)
class Leg(ServiceLeg[prefill_pb2.PrefillEvents]):
    """said: everything a router may have to be told again. done: its done or failed event is among that."""

    admitted: Admitted | None = None
    said: list[prefill_pb2.PrefillEvent] = field(default_factory=list)
    done: bool = False

    @property
    def ended(self) -> bool:
        return self.done


class PrefillService(  # type: ignore[misc]  # its Open is a coroutine that writes, which gRPC takes too
    Service[prefill_pb2.PrefillCommand, prefill_pb2.PrefillEvents, prefill_pb2.PrefillEvent, Leg],
    prefill_pb2_grpc.PrefillServicer,
):
    """Reserve, CancelReservation and Open of protos/v1/prefill.proto."""

    name = LEG

    def __init__(self, worker: Worker, handoffs: HandoffStore, reattach_s: float) -> None:
        super().__init__(worker, reattach_s)
        self._handoffs = handoffs

    # --- what the worker asks ----------------------------------------------------------------------------------

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

    def lost(self, session: _Session) -> None:
        for key in list(session.legs):
            self._lose(self._legs[key])

    # --- commands ----------------------------------------------------------------------------------------------

    def _command(self, session: _Session, kind: str, command: prefill_pb2.PrefillCommand) -> None:
        match kind:
            case "submit":
                self._submitted(session, command.submit)
            case "cancel":
                self._drop(leg_key(command.cancel.ref, LEG), Cancelled("cancelled by the router"))
            case "release":
                self._handoffs.release(leg_key(command.release.ref, LEG))
                self._drop(leg_key(command.release.ref, LEG), TicketInvalid("the hand-off was released"))
            case _:
                raise unknown(kind)

    def _submitted(self, session: _Session, request: common_pb2.WorkRequest) -> None:
        if not self._again(request, session):
            deadline = self._worker.clock.monotonic() + request.remaining_ms / 1000
            self._submit(Leg(leg_key(request.ref, LEG), session, deadline), request)

    def _mode(self, leg: Leg) -> Mode:
        return Mode.SOURCE

    def _reserved(self, ref: common_pb2.AttemptRef, reply: common_pb2.ReserveReply) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(ref=ref, reserved=reply)

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
            token_count=leg.token_count,
            ready=event.ready,
            hold=event.hold,
            deadline=leg.deadline,
        )
        ticket = prefill_pb2.TicketIssued(ticket=signed, source_address=self._worker.address)
        self._say(leg, prefill_pb2.PrefillEvent(ref=ref_of(leg.key), ticket=ticket), batch)

    def _source_done(self, leg: Leg, event: SourceDone, batch: _Batch) -> None:
        assert leg.admitted is not None
        self._handoffs.final(leg.key, state_length=leg.token_count, first=event.first, slots=leg.admitted.slots)
        times = common_pb2.StageTimes(
            queue_s=event.queue_s,
            prefill_s=event.prefill_s,
            cached_tokens=event.cached_tokens,
            pid=self._worker.pid,
            transport=self._worker.transport,
        )
        if leg.fetched is not None:
            leg.fetched.put_into(times)
        meter = self._worker.meter
        meter.prompt(LEG, leg.token_count, times)
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

    # --- legs --------------------------------------------------------------------------------------------------

    def _lose(self, leg: Leg) -> None:
        """Its router is gone. What computes is cancelled; a finished hand-off goes on under its lease."""
        if leg.done:
            leg.move(None)
            return
        self._worker.engine.cancel(leg.key)
        self._handoffs.fail(leg.key, WorkerLost("the router's stream was lost", reason="stream_lost"))
        self._forget(leg)

    def _outlived(self, leg: Leg, now: float) -> None:
        """Its pages are no longer held."""
        if self._handoffs.state(leg.key) is not State.FINAL:
            self._over.put(leg.key, TicketInvalid("the hand-off of this attempt is over", reason="attempt_over"))
            self._forget(leg)

    def _say(self, leg: Leg, event: prefill_pb2.PrefillEvent, batch: _Batch) -> None:
        leg.said.append(event)
        batch.add(leg.session, event)

    def _say_again(self, leg: Leg, batch: _Batch) -> None:
        for event in leg.said:
            batch.add(leg.session, event)

    def _batch(self) -> _Batch:
        return Batch(lambda events: prefill_pb2.PrefillEvents(events=events, load=self._worker.load()))
