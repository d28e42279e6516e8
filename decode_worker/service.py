"""The Decode service: receive, pull, run, publish. A thin face over the engine loop and the puller.

The failures that shape it: a decode worker that starts on pages that did not arrive (so a leg starts only from a
verified Pulled), pages that are freed while a read may still land in them (so the landing's hold belongs to the puller
alone, whatever happens to the request), two attempts of one request that interleave (so a higher attempt ends the lower
one here), and tokens lost with a connection (so what the router has not acknowledged is kept and said again).

Everything runs on the event loop's thread; the engine's sink only posts to it.
"""

from __future__ import annotations

import asyncio

from decode_worker.departed import Departed
from decode_worker.leg import Leg, Puller
from engine.api import Admitted, Event, Failed, HandedOver, Mode, PromptScores, Tokens
from engine.face import Worker, finish_of, leg_key, ref_of, score_chunks, wire_logprobs
from engine.service import REMEMBERED, Service, unknown
from kvtransfer.source import HandoffStore
from kvtransfer.types import Destination, LegKey, Pulled
from protos.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2
from runtime.errors import Cancelled, ChecksumMismatch, Draining, KvLost, PdserveError, WorkerLost
from runtime.streamhub import Batch, Recent, Session

LEG = "decode"

_Session = Session[decode_pb2.DecodeEvents]
_Batch = Batch[decode_pb2.DecodeEvents, decode_pb2.DecodeEvent]


class DecodeService(  # type: ignore[misc]  # its Open is a coroutine that writes, which gRPC takes too
    Service[decode_pb2.DecodeCommand, decode_pb2.DecodeEvents, decode_pb2.DecodeEvent, Leg],
    decode_pb2_grpc.DecodeServicer,
):
    """Reserve, CancelReservation and Open of protos/v1/decode.proto."""

    name = LEG

    def __init__(self, worker: Worker, puller: Puller, handoffs: HandoffStore, reattach_s: float) -> None:
        super().__init__(worker, reattach_s)
        self._puller = puller
        self._departed = Departed(worker, handoffs)
        self._reattach_s = reattach_s
        self._attempts: dict[str, int] = {}  # request id -> its highest attempt here, while that one has a leg
        self._early: Recent[LegKey, prefill_pb2.TicketIssued] = Recent(REMEMBERED)
        self._pulls: set[asyncio.Task[None]] = set()

    # --- what the worker asks ----------------------------------------------------------------------------------

    def abort(self, error: PdserveError) -> None:
        """End everything that still runs with `error`."""
        batch = self._batch()
        for leg in list(self._legs.values()):
            if leg.over_at is None:
                self._fail(leg, error, batch)
        batch.flush()

    async def close(self, error: PdserveError) -> None:
        """End every router's stream and wait until no pull is under way."""
        self._hub.close(error)
        for task in list(self._pulls):
            task.cancel()
        if self._pulls:
            await asyncio.wait(self._pulls)

    # --- the hub's face ----------------------------------------------------------------------------------------

    def attached(self, session: _Session, hello: common_pb2.Hello, welcome: common_pb2.Welcome) -> None:
        wanted = {leg_key(r.ref, LEG): list(r.next_sequence) for r in hello.resume}
        events: list[decode_pb2.DecodeEvent] = []
        for key in list(session.legs):
            leg = self._legs[key]
            missed = leg.missed(wanted[key]) if key in wanted else None
            if missed is None:
                self._cancel(leg, WorkerLost("the router gave it up", reason="stream_lost"))
            else:
                welcome.resumed.append(ref_of(key))
                events += missed
        batch = self._batch()
        batch.add(session, decode_pb2.DecodeEvent(welcome=welcome))
        for event in events:
            batch.add(session, event)
        batch.flush()

    def lost(self, session: _Session) -> None:
        for key in list(session.legs):
            self._cancel(self._legs[key], WorkerLost("the router's stream was lost", reason="stream_lost"))

    # --- commands ----------------------------------------------------------------------------------------------

    def _command(self, session: _Session, kind: str, command: decode_pb2.DecodeCommand) -> None:
        match kind:
            case "submit":
                self._submitted(session, command.submit)
            case "ticket":
                self._ticket(leg_key(command.ticket.ref, LEG), command.ticket.ticket)
            case "cancel":
                self._cancelled(command.cancel)
            case "handover":
                self._handover(leg_key(command.handover.ref, LEG), command.handover.choice)
            case "ack":
                leg = self._legs.get(leg_key(command.ack.ref, LEG))
                if leg is not None:
                    leg.acknowledge(list(command.ack.next_sequence))
            case _:
                raise unknown(kind)

    def _submitted(self, session: _Session, submit: decode_pb2.DecodeSubmit) -> None:
        if not self._again(submit.request, session):
            key = leg_key(submit.request.ref, LEG)
            leg = Leg.of(submit, key, session, self._worker.clock.monotonic(), self._worker.limits.max_n)
            self._submit(leg, submit.request)

    def _mode(self, leg: Leg) -> Mode:
        return Mode.LOCAL if leg.local else Mode.REMOTE

    def _reserved(self, ref: common_pb2.AttemptRef, reply: common_pb2.ReserveReply) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(ref=ref, reserved=reply)

    def _enter(self, leg: Leg) -> None:
        """A higher attempt of a request ends the lower ones here, so their tokens never mix. Raises Cancelled."""
        newest = self._attempts.get(leg.key.request_id, 0)
        if newest > leg.key.attempt:
            raise Cancelled("a later attempt of this request is here", reason="superseded")
        self._attempts[leg.key.request_id] = leg.key.attempt
        older = self._legs.get(LegKey(leg.key.request_id, LEG, newest))
        if older is not None:
            error = Cancelled("a later attempt of this request took over", reason="superseded")
            if older.over_at is None:
                self._fail_now(older, error)
            self._forget(older)
            self._attempts[leg.key.request_id] = leg.key.attempt

    def _say_again(self, leg: Leg, batch: _Batch) -> None:
        """What it has not acknowledged."""
        for event in leg.missed([]) or ():
            batch.add(leg.session, event)

    def _complete(self, leg: Leg) -> None:
        early = self._early.pop(leg.key)
        if early is not None:
            leg.ticket = early

    def _ticket(self, key: LegKey, ticket: prefill_pb2.TicketIssued) -> None:
        """In any order with submit and admission: the pull begins when all three are there."""
        leg = self._legs.get(key)
        if leg is None:
            if self._over.get(key) is None:
                self._early.put(key, ticket)
        elif leg.over_at is None and leg.pull is None:
            leg.ticket = ticket
            self._maybe_pull(leg)

    def _cancelled(self, cancel: common_pb2.Cancel) -> None:
        """The whole leg, or only choices whose end the router has seen by itself (a stop string), or of which it does
        not want what they have left."""
        key = leg_key(cancel.ref, LEG)
        leg = self._legs.get(key)
        if leg is not None:
            self._departed.release(leg, cancel.choices or leg.departed)
        if cancel.choices and leg is not None:
            leg.open -= set(cancel.choices)
            if leg.open:
                self._worker.engine.end_choices(key, list(cancel.choices))
                return
            if self._departed.held(leg):  # nothing runs here any more; what has left is still to be read
                if leg.over_at is None:
                    self._stop(leg)
                return
        self._drop(key)

    def _handover(self, key: LegKey, choice: int) -> None:
        """Give a choice away. What has been said of it already is said again; of what has ended, its end was."""
        leg = self._legs.get(key)
        if leg is None:
            return
        said = leg.departed.get(choice)
        if said is not None:
            batch = self._batch()
            batch.add(leg.session, said)
            batch.flush()
        elif leg.submitted:
            self._worker.engine.handover(key, choice)
        else:
            self._fail_now(leg, Draining("nothing of this request is computed here"))

    def _drop(self, key: LegKey) -> None:
        self._over.put(key, error := Cancelled("cancelled by the router"))
        self._early.pop(key)
        leg = self._legs.get(key)
        if leg is not None:
            self._cancel(leg, error)

    # --- the hand-off ------------------------------------------------------------------------------------------

    def _maybe_pull(self, leg: Leg) -> None:
        admitted = leg.admitted
        if admitted is None or leg.ticket is None or leg.pull is not None or leg.local:
            return
        leg.waited_s = self._worker.clock.monotonic() - leg.admitted_at
        destination = Destination(
            pages=admitted.pages,
            slots=admitted.slots,
            token_count=leg.token_count,
            held=admitted.ready,
            hold=admitted.hold,
        )
        leg.pull = asyncio.create_task(self._pull(leg, leg.ticket, destination))
        self._pulls.add(leg.pull)
        leg.pull.add_done_callback(self._pulls.discard)

    async def _pull(self, leg: Leg, ticket: prefill_pb2.TicketIssued, destination: Destination) -> None:
        leg.landing = None  # from here on the hold is the puller's; a task cancelled before it ran never took it
        try:
            pulled = await self._puller.pull(ticket.ticket, ticket.source_address, destination, leg.deadline, leg.fence)
            self._start(leg, pulled)
        except ChecksumMismatch:
            self._recompute(leg)
        except PdserveError as error:
            self._fail_now(leg, error)
        except Exception as error:  # noqa: BLE001  supervises the pull: a bug costs this request, and is heard of
            self._log.error("pull_failed", request_id=leg.key.request_id, exc_info=error)
            self._fail_now(leg, PdserveError("internal error"))

    def _start(self, leg: Leg, pulled: Pulled) -> None:
        """Raises KvLost for a hand-off that is not what was asked for."""
        if leg.over_at is not None:
            return
        leg.take(pulled, self._worker.limits.vocab_size)
        self._worker.engine.start(leg.key, pulled.first)
        batch = self._batch()
        self._handed_off(leg, 0, batch)
        batch.flush()

    def _recompute(self, leg: Leg) -> None:
        """The bytes that arrived are not those that were sent: they are never used; HandoffDone follows the work."""
        if leg.over_at is None:
            leg.recomputing = True
            self._worker.engine.recompute(leg.key)

    def _handed_off(self, leg: Leg, recomputed: int, batch: _Batch) -> None:
        times = leg.times(self._worker.pid, self._worker.transport)
        times.recomputed_tokens = recomputed
        self._worker.meter.prompt(LEG, leg.token_count, times, remote=True)
        self._say(leg, decode_pb2.DecodeEvent(handoff=decode_pb2.HandoffDone(times=times)), batch)

    # --- events ------------------------------------------------------------------------------------------------

    def _event(self, leg: Leg, event: Event, batch: _Batch) -> None:
        match event:
            case Admitted():
                self._admitted(leg, event)
            case Tokens():
                self._new_tokens(leg, event, batch)
            case PromptScores():
                for offset, entries in score_chunks(event.offset, event.entries):
                    scores = prefill_pb2.PromptLogprobs(offset=offset, entries=entries)
                    self._say(leg, decode_pb2.DecodeEvent(prompt_logprobs=scores), batch)
            case HandedOver():
                self._handed_over(leg, event, batch)
            case Failed():
                self._fail(leg, event.error, batch)
            case _:
                raise AssertionError(f"{type(event).__name__} is not an event of a decode leg")

    def _admitted(self, leg: Leg, event: Admitted) -> None:
        if leg.local:
            event.hold.release()
            return
        leg.admitted = event
        leg.landing = event.hold
        leg.admitted_at = self._worker.clock.monotonic()
        self._maybe_pull(leg)

    def _new_tokens(self, leg: Leg, event: Tokens, batch: _Batch) -> None:
        if leg.recomputing:
            leg.recomputing = False
            self._handed_off(leg, event.recomputed_tokens, batch)
        tokens = decode_pb2.ChoiceTokens(
            choice=event.choice,
            first_sequence=event.first_sequence,
            tokens=event.tokens,
            logprobs=wire_logprobs(event.logprobs),
            finish=finish_of(event.finish),
        )
        if event.last:
            tokens.times.CopyFrom(leg.final_times(event, self._worker.pid, self._worker.transport))
            leg.over_at = self._worker.clock.monotonic()
        if tokens.logprobs:
            leg.newest[event.choice] = tokens.logprobs[-1]
        leg.meter(self._worker.meter, tokens, event.cached_tokens)
        self._say(leg, decode_pb2.DecodeEvent(tokens=tokens), batch)
        if event.finish:
            self._choice_over(leg, event.choice)

    def _handed_over(self, leg: Leg, event: HandedOver, batch: _Batch) -> None:
        """The choice's last word here. Its metrics are those of who goes on with it."""
        if event.choice in leg.open:
            said = decode_pb2.DecodeEvent(handed_over=self._departed.open(leg, event))
            leg.departed[event.choice] = said
            self._say(leg, said, batch)
        else:  # the router has seen its end meanwhile
            event.hold.release()
        if event.last:
            leg.over_at = self._worker.clock.monotonic()
        self._choice_over(leg, event.choice)

    def _choice_over(self, leg: Leg, choice: int) -> None:
        leg.open.discard(choice)
        if not leg.open and leg.over_at is None:  # the router ended the others meanwhile: nothing more will come
            self._stop(leg)

    # --- legs --------------------------------------------------------------------------------------------------

    def _cancel(self, leg: Leg, error: PdserveError) -> None:
        """Silent: nothing more is said of this leg and nothing of it kept."""
        self._over.put(leg.key, error)
        self._stop(leg)
        self._forget(leg)

    def _fail(self, leg: Leg, error: PdserveError, batch: _Batch) -> None:
        if leg.over_at is not None:
            return
        self._over.put(leg.key, error)
        self._stop(leg)
        self._worker.meter.failed(LEG, error.reason)
        failed = decode_pb2.DecodeFailed(error=error.detail(), kv_lost=isinstance(error, KvLost))
        self._say(leg, decode_pb2.DecodeEvent(failed=failed), batch)

    def _stop(self, leg: Leg) -> None:
        """Engine, pull and landing let go. A pull under way releases its landing itself, when no read can touch it."""
        leg.over_at = self._worker.clock.monotonic()
        self._unfetch(leg)
        self._worker.engine.cancel(leg.key)
        if leg.pull is not None and leg.pull is not asyncio.current_task():
            leg.pull.cancel()
        if leg.landing is not None:
            leg.landing.release()
            leg.landing = None

    def _outlived(self, leg: Leg, now: float) -> None:
        assert leg.over_at is not None
        if now - leg.over_at < 2 * self._reattach_s or self._departed.held(leg):
            return
        if self._over.get(leg.key) is None:
            self._over.put(leg.key, Cancelled("this attempt is over", reason="attempt_over"))
        self._forget(leg)

    def _forget(self, leg: Leg) -> None:
        super()._forget(leg)
        if self._attempts.get(leg.key.request_id) == leg.key.attempt:
            del self._attempts[leg.key.request_id]

    def _say(self, leg: Leg, event: decode_pb2.DecodeEvent, batch: _Batch) -> None:
        event.ref.CopyFrom(ref_of(leg.key))
        leg.keep(event)
        batch.add(leg.session, event)

    def _batch(self) -> _Batch:
        return Batch(
            lambda events: decode_pb2.DecodeEvents(
                events=events, load=self._worker.load(), step=self._worker.engine.load().step
            )
        )
