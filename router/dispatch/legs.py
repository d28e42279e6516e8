"""One attempt of one leg of a request at one worker: its reservation, its stream entry and its charge, as one value.

    RESERVING -> RESERVED -> RUNNING -> OVER
close() from any state gives back what that state holds: a reservation is cancelled (one still on its way as soon as it
arrives), a running leg is told to stop. It is idempotent, and nothing of a closed leg reaches the request any more.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any, Protocol

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router.policy.trust import sound
from router.workers.commands import split_tokens
from router.workers.links import Link
from router.workers.planner import Booked
from router.workers.worker import Charge, Worker
from runtime import errors
from runtime.errors import PdserveError, WorkerLost

Spawn = Callable[[Coroutine[Any, Any, None]], None]
Fill = Callable[[common_pb2.WorkRequest, common_pb2.AttemptRef], None]
"""Writes all of a submission but its reservation."""


class State(Enum):
    RESERVING = "reserving"
    RESERVED = "reserved"
    RUNNING = "running"
    OVER = "over"


class Owner(Protocol):
    """The request a leg belongs to."""

    def prefill_event(self, leg: PrefillLeg, kind: str, body: Any) -> None: ...

    def decode_event(self, leg: DecodeLeg, kind: str, body: Any) -> None: ...

    def leg_lost(self, leg: PrefillLeg | DecodeLeg, error: PdserveError) -> None: ...

    def step(self) -> None: ...

    def next_sequences(self) -> list[int]: ...


class _Leg:
    name = ""

    def __init__(self, owner: Owner, worker: Worker, ref: common_pb2.AttemptRef, charge: Charge, spawn: Spawn) -> None:
        self.owner = owner
        self.worker = worker
        self.ref = ref
        self.key = (ref.request_id, ref.attempt)
        self.state = State.RESERVING
        self.reservation_id = ""
        self.refusal: PdserveError | None = None
        self.booked: Booked | None = None  # its place in the router's own books
        self.heard = False  # its breaker knows how it went
        self.charge = charge
        self._spawn = spawn

    def ask(
        self, router_id: str, needs: Callable[[common_pb2.Needs], None], remaining_ms: int, then: Callable[[], None]
    ) -> None:
        """Ask the worker to book the capacity; `then` is called with its answer in `refusal` (None: it is booked).
        needs: writes them."""

        def fill(request: common_pb2.ReserveRequest) -> None:
            request.ref.CopyFrom(self.ref)
            request.router_id = router_id
            request.remaining_ms = remaining_ms
            needs(request.needs)

        def answered(answer: common_pb2.ReserveReply | PdserveError) -> None:
            self._answered(answer)
            then()

        self.worker.reserve(self.name, self.key, fill, answered)

    def no_answer(self) -> None:
        """The time for an answer is over."""
        self.worker.forget_reserve(self.name, self.ref)

    def _answered(self, answer: common_pb2.ReserveReply | PdserveError) -> None:
        if isinstance(answer, PdserveError):
            self.refusal = answer
            self._end()
            self._give_back("")  # it may have been granted before the answer was lost
        elif not answer.reservation_id:
            self.refusal = errors.from_detail(answer.refusal)
            self._end()
        elif self.state is State.OVER:
            self._give_back(answer.reservation_id)
        else:
            self.reservation_id = answer.reservation_id
            self.state = State.RESERVED

    def over(self) -> None:
        """The worker has ended the leg by itself."""
        if self.state is State.RUNNING:
            link = self.link
            if link is not None:
                link.detach(self.key)
        self._end()

    def close(self, reason: str) -> None:
        state = self.state
        self._end()
        if state is State.RUNNING:
            self._stop(reason)
        elif state is State.RESERVED:
            self._give_back(self.reservation_id)

    @property
    def link(self) -> Any:
        raise AssertionError("each leg has its link")

    def _stop(self, reason: str) -> None:
        raise AssertionError("each leg stops in its own words")

    def _end(self) -> None:
        self.state = State.OVER
        self.charge.close()
        if self.booked is not None:
            self.booked.release()

    def _give_back(self, reservation_id: str) -> None:
        job = self.worker.cancel_reservation(self.name, reservation_id, self.ref)
        if job is not None:
            self._spawn(job)

    # links.Leg

    def on_step(self) -> None:
        self.owner.step()

    def next_sequence(self) -> list[int]:
        return self.owner.next_sequences()

    def _lost(self, error: PdserveError) -> bool:
        if self.state is State.OVER:
            return False
        self._end()
        return True


class PrefillLeg(_Leg):
    name = "prefill"
    done = False

    @property
    def link(self) -> Link[prefill_pb2.PrefillCommand] | None:
        return self.worker.prefill

    def submit(self, fill: Fill) -> None:
        """Raises WorkerLost."""
        command = prefill_pb2.PrefillCommand()
        work = command.submit
        fill(work, self.ref)
        work.reservation_id = self.reservation_id
        chunks = split_tokens(work)
        link = self.link
        if link is None:
            raise WorkerLost("the prefill worker is gone")
        link.attach(
            self.key,
            self,
            command,
            *(prefill_pb2.PrefillCommand(tokens=chunk) for chunk in chunks),
        )
        self.state = State.RUNNING

    def on_event(self, kind: str, body: Any) -> None:
        if kind == "done":
            sound(body.times)
        self.owner.prefill_event(self, kind, body)

    def on_lost(self, error: PdserveError) -> None:
        if self._lost(error):
            self.owner.leg_lost(self, error)

    def _stop(self, reason: str) -> None:
        cancel = common_pb2.Cancel(ref=self.ref, reason=reason)
        command = prefill_pb2.PrefillCommand(release=cancel) if self.done else prefill_pb2.PrefillCommand(cancel=cancel)
        link = self.link
        if link is not None and not link.detach(self.key, command):
            self._give_back(self.reservation_id)


class DecodeLeg(_Leg):
    name = "decode"

    @property
    def link(self) -> Link[decode_pb2.DecodeCommand] | None:
        return self.worker.decode

    def submit(self, fill: Fill, *, local: bool) -> None:
        """Raises WorkerLost. The attempt's number is its fence: a later attempt supersedes an earlier one at P."""
        command = decode_pb2.DecodeCommand()
        submit = command.submit
        fill(submit.request, self.ref)
        submit.request.reservation_id = self.reservation_id
        submit.local = local
        submit.fence = self.ref.attempt
        chunks = split_tokens(submit.request)
        link = self.link
        if link is None:
            raise WorkerLost("the decode worker is gone")
        link.attach(
            self.key,
            self,
            command,
            *(decode_pb2.DecodeCommand(tokens=chunk) for chunk in chunks),
        )
        self.state = State.RUNNING

    def ticket(self, ticket: prefill_pb2.TicketIssued) -> None:
        link = self.link
        if link is not None and self.state is State.RUNNING:
            command = decode_pb2.DecodeCommand()
            command.ticket.ref.CopyFrom(self.ref)
            command.ticket.ticket.CopyFrom(ticket)
            link.send(self.key, command)

    def handover(self, choice: int) -> None:
        """Ask for a running choice: it leaves the worker, which answers with what is needed to go on elsewhere."""
        link = self.link
        if link is not None and self.state is State.RUNNING:
            handover = decode_pb2.Handover(ref=self.ref, choice=choice)
            link.send(self.key, decode_pb2.DecodeCommand(handover=handover))

    def end_choice(self, choice: int) -> None:
        """A stop string ended this choice here: the worker need not go on with it. The others do."""
        link = self.link
        if link is not None and self.state is State.RUNNING and self.worker.can("cancel_choices"):
            cancel = common_pb2.Cancel(ref=self.ref, reason="stop string", choices=[choice])
            link.send(self.key, decode_pb2.DecodeCommand(cancel=cancel))

    def on_event(self, kind: str, body: Any) -> None:
        if kind == "handoff" or (kind == "tokens" and body.finish):
            sound(body.times)
        self.owner.decode_event(self, kind, body)

    def on_lost(self, error: PdserveError) -> None:
        if self._lost(error):
            self.owner.leg_lost(self, error)

    def _stop(self, reason: str) -> None:
        command = decode_pb2.DecodeCommand(cancel=common_pb2.Cancel(ref=self.ref, reason=reason))
        link = self.link
        if link is not None and not link.detach(self.key, command):
            self._give_back(self.reservation_id)


class DepartedLeg:
    """What a choice that has left a decode worker holds there: to who goes on with it, the source, whose work is done.
    It ends when it has been read, or is given back by close()."""

    name = "decode"
    done = True
    heard = True  # that it left says nothing of the worker

    def __init__(self, leg: DecodeLeg, choice: int) -> None:
        self.worker = leg.worker
        self.key = leg.key
        self._ref = leg.ref
        self._choice = choice
        self._over = False

    def over(self) -> None:
        """It has been read: the reader has said so to the worker."""
        self._over = True

    def close(self, reason: str) -> None:
        """Nobody will read it (any more). Idempotent."""
        link = self.worker.decode
        if not self._over and link is not None:
            cancel = common_pb2.Cancel(ref=self._ref, reason=reason, choices=[self._choice])
            link.send(self.key, decode_pb2.DecodeCommand(cancel=cancel))
        self._over = True
