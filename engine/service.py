"""What the prefill and the decode service have in common: their calls, the legs they know, commands in, events out.

A leg is one attempt of one request. It is keyed by (request, attempt): to submit it again, on this stream or on a later
one, runs it once and says again what its router may have missed. What has ended stays ended, also when its end
overtakes its submission. A request whose tokens come in pieces is put together here, bounded in size and time.

Everything runs on the event loop's thread; the engine's sink only posts to it. The services add what a leg means.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from engine.api import Admitted, EngineRequest, Event, HandedOver, Mode
from engine.face import Assembly, Worker, engine_request, leg_key, reserve
from engine.fetch import Fetched, Fetcher
from engine.order import due_at
from kvtransfer.types import LegKey
from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from runtime.errors import DeadlineExceeded, InvalidRequest, PdserveError
from runtime.ids import trace_id
from runtime.rpc_errors import ServicerContext
from runtime.streamhub import Batch, Recent, Session, StreamHub

REMEMBERED = 4096

C = TypeVar("C", prefill_pb2.PrefillCommand, decode_pb2.DecodeCommand)
M = TypeVar("M", prefill_pb2.PrefillEvents, decode_pb2.DecodeEvents)
E = TypeVar("E", prefill_pb2.PrefillEvent, decode_pb2.DecodeEvent)


@dataclass(slots=True, eq=False)
class ServiceLeg(Generic[M]):
    """One attempt as a service sees it. session: of its router; None when that is lost or wants nothing more of it.
    deadline: on the monotonic clock. token_count: of the complete request."""

    key: LegKey
    session: Session[M] | None
    deadline: float
    token_count: int = field(default=0, kw_only=True)
    assembly: Assembly | None = field(default=None, kw_only=True)
    fetch: asyncio.Task[None] | None = field(default=None, kw_only=True)  # of a prefix, before the engine gets it
    fetched: Fetched | None = field(default=None, kw_only=True)
    submitted: bool = field(default=False, kw_only=True)  # the engine has it, or had

    @property
    def ended(self) -> bool:
        """Nothing the engine says of it counts any more."""
        raise AssertionError("each service knows when its legs end")

    def move(self, session: Session[M] | None) -> None:
        """To another of its router's sessions, or to none."""
        if self.session is not None:
            self.session.legs.discard(self.key)
        self.session = session
        if session is not None:
            session.legs.add(self.key)


L = TypeVar("L", bound=ServiceLeg[Any])


class Service(ABC, Generic[C, M, E, L]):
    """name: the leg's, "prefill" or "decode". The abstract methods are what a leg means."""

    name: ClassVar[str]

    def __init__(self, worker: Worker, reattach_s: float) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._hub: StreamHub[M, C] = StreamHub(self, worker.epoch, worker.clock, reattach_s)
        self._legs: dict[LegKey, L] = {}
        self._over: Recent[LegKey, PdserveError] = Recent(REMEMBERED)
        self._fetches: set[asyncio.Task[None]] = set()
        self._sink = self._post
        self._log = structlog.get_logger(f"pdserve.{self.name}")

    # --- RPCs --------------------------------------------------------------------------------------------------

    async def Reserve(  # noqa: N802
        self, request: common_pb2.ReserveRequest, context: ServicerContext
    ) -> common_pb2.ReserveReply:
        return reserve(self._worker, self.name, request)

    async def CancelReservation(  # noqa: N802
        self, request: common_pb2.CancelReservationRequest, context: ServicerContext
    ) -> common_pb2.CancelReservationReply:
        released = self._worker.engine.cancel_reservation(request.reservation_id)
        return common_pb2.CancelReservationReply(released=released)

    async def Open(  # noqa: N802  a coroutine that writes, which gRPC takes too
        self, request_iterator: AsyncIterator[C], context: ServicerContext
    ) -> None:
        await self._hub.serve(request_iterator, context.write)

    # --- what the worker asks ----------------------------------------------------------------------------------

    def busy(self) -> int:
        """Legs that still run."""
        return sum(not leg.ended for leg in self._legs.values())

    def remembered(self) -> int:
        """Legs with an entry here: those that run and those a router may still ask about."""
        return len(self._legs)

    async def settle(self) -> None:
        """End the fetches of prefixes that are under way, and wait until they are over."""
        for task in self._fetches:
            task.cancel()
        if self._fetches:
            await asyncio.wait(self._fetches)

    def tick(self, now: float) -> None:
        """Housekeeping, a few times a second: sessions not re-attached, legs nobody will ask about."""
        self._hub.expire(now)
        for leg in list(self._legs.values()):
            if leg.ended:
                self._outlived(leg, now)
            elif leg.assembly is not None and now >= leg.deadline:
                self._fail_now(leg, DeadlineExceeded("the prompt did not arrive in time"))

    # --- the hub's face ----------------------------------------------------------------------------------------

    def hello_of(self, command: C) -> common_pb2.Hello | None:
        return command.hello if command.WhichOneof("command") == "hello" else None

    def unpack(self, command: C) -> Sequence[C]:
        return command.batch or (command,)

    @abstractmethod
    def attached(self, session: Session[M], hello: common_pb2.Hello, welcome: common_pb2.Welcome) -> None: ...

    @abstractmethod
    def lost(self, session: Session[M]) -> None: ...

    def command(self, session: Session[M], command: C) -> None:
        match command.WhichOneof("command"):
            case "tokens":
                self._tokens(command.tokens)
            case "reserve":
                self._reserve(session, command.reserve)
            case "cancel_reservation":
                self._worker.engine.cancel_reservation(command.cancel_reservation.reservation_id)
            case kind:
                self._command(session, kind or "", command)

    # --- what a leg means --------------------------------------------------------------------------------------

    @abstractmethod
    def _command(self, session: Session[M], kind: str, command: C) -> None:
        """A command of this service alone. Raises InvalidRequest, which ends the stream, for one that is unknown."""

    @abstractmethod
    def _mode(self, leg: L) -> Mode:
        """How the engine runs it."""

    @abstractmethod
    def _event(self, leg: L, event: Event, batch: Batch[M, E]) -> None:
        """Something the engine says of a leg that has not ended."""

    @abstractmethod
    def _fail(self, leg: L, error: PdserveError, batch: Batch[M, E]) -> None:
        """End the leg: its router is told, nothing is held any more."""

    @abstractmethod
    def _outlived(self, leg: L, now: float) -> None:
        """Forget a leg that has ended when nobody will ask about it any more."""

    @abstractmethod
    def _say_again(self, leg: L, batch: Batch[M, E]) -> None:
        """Everything its router may have missed."""

    @abstractmethod
    def _reserved(self, ref: common_pb2.AttemptRef, reply: common_pb2.ReserveReply) -> E:
        """The event that answers a reservation."""

    @abstractmethod
    def _batch(self) -> Batch[M, E]:
        """To collect the events of one step in."""

    def _enter(self, leg: L) -> None:
        """A new leg has come, its request not looked at yet. Raises PdserveError."""

    def _complete(self, leg: L) -> None:
        """All of its tokens are here; the engine gets it next."""

    # --- commands ----------------------------------------------------------------------------------------------

    def _reserve(self, session: Session[M], request: common_pb2.ReserveRequest) -> None:
        """The unary call's twin: every refusal is an answer here, an error would end the stream."""
        try:
            reply = reserve(self._worker, self.name, request)
        except PdserveError as error:
            reply = common_pb2.ReserveReply(refusal=error.detail())
        batch = self._batch()
        batch.add(session, self._reserved(request.ref, reply))
        batch.flush()

    def _again(self, request: common_pb2.WorkRequest, session: Session[M]) -> bool:
        """Whether this attempt is here already: it runs once, and its router hears again what it may have missed."""
        leg = self._legs.get(self._key(request.ref))
        if leg is None:
            return False
        leg.move(session)
        batch = self._batch()
        self._say_again(leg, batch)
        batch.flush()
        return True

    def _submit(self, leg: L, request: common_pb2.WorkRequest) -> None:
        """A leg that is not here yet."""
        self._legs[leg.key] = leg
        leg.move(leg.session)
        try:
            self._enter(leg)
            over = self._over.get(leg.key)
            if over is not None:
                raise over
            if request.more_tokens:
                leg.assembly = Assembly(request, self._worker.limits.max_model_len)
            else:
                self._run(leg, request)
        except PdserveError as error:
            self._fail_now(leg, error)

    def _tokens(self, chunk: common_pb2.TokenChunk) -> None:
        leg = self._legs.get(self._key(chunk.ref))
        if leg is None or leg.assembly is None:  # failed or cancelled meanwhile
            return
        try:
            if leg.assembly.add(chunk):
                request, leg.assembly = leg.assembly.request, None
                self._run(leg, request)
        except PdserveError as error:
            self._fail_now(leg, error)

    def _run(self, leg: L, request: common_pb2.WorkRequest) -> None:
        """The request is complete: the engine's from here on. Raises PdserveError."""
        work = engine_request(self._worker, request, self.name, self._mode(leg), leg.deadline)
        leg.token_count = len(work.tokens)
        self._complete(leg)
        self._log.debug(
            "submit", request_id=leg.key.request_id, attempt=leg.key.attempt, trace=trace_id(request.traceparent)
        )
        source, fetcher = request.prefix_source, self._worker.fetcher
        if fetcher is not None and source.worker_id and work.mode is not Mode.REMOTE:
            leg.fetch = asyncio.create_task(self._fetch_first(leg, work, fetcher, source))
            self._fetches.add(leg.fetch)
            leg.fetch.add_done_callback(self._fetches.discard)
        else:
            self._hand_in(leg, work)

    def _hand_in(self, leg: L, work: EngineRequest) -> None:
        leg.submitted = True
        self._worker.engine.submit(work, self._sink)

    async def _fetch_first(
        self, leg: L, work: EngineRequest, fetcher: Fetcher, source: common_pb2.PrefixSource
    ) -> None:
        """A cached prefix is brought from another worker, if that works out in time; then the engine gets the
        request, which has its place by when it came."""
        work = replace(work, due=due_at(work.due, work.priority, self._worker.clock.monotonic()))
        leg.fetched = await fetcher.fetch(work, source)
        leg.fetch = None
        if self._legs.get(leg.key) is not leg or leg.ended:
            return
        try:
            self._hand_in(leg, work)
        except PdserveError as error:
            self._fail_now(leg, error)

    # --- events ------------------------------------------------------------------------------------------------

    def _post(self, events: Sequence[Event]) -> None:
        """The engine's sink, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._handle, events)

    def _handle(self, events: Sequence[Event]) -> None:
        batch = self._batch()
        for event in events:
            leg = self._legs.get(event.key)
            if leg is None or leg.ended:
                _let_go(event)  # cancelled while the event was on its way
                continue
            try:
                self._event(leg, event, batch)
            except Exception as error:  # noqa: BLE001  supervises: one request's fault must not cost the others' events
                self._log.error("event_failed", request_id=leg.key.request_id, exc_info=error)
                _let_go(event)
                self._worker.engine.cancel(leg.key)
                self._fail(leg, PdserveError("internal error"), batch)
        batch.flush()

    # --- legs --------------------------------------------------------------------------------------------------

    def _key(self, ref: common_pb2.AttemptRef) -> LegKey:
        """Raises InvalidRequest."""
        return leg_key(ref, self.name)

    def _fail_now(self, leg: L, error: PdserveError) -> None:
        batch = self._batch()
        self._fail(leg, error, batch)
        batch.flush()

    @staticmethod
    def _unfetch(leg: L) -> None:
        """The leg is over: what is fetched for it is not wanted any more."""
        if leg.fetch is not None:
            leg.fetch.cancel()
            leg.fetch = None

    def _forget(self, leg: L) -> None:
        self._unfetch(leg)
        leg.move(None)
        self._legs.pop(leg.key, None)


def _let_go(event: Event) -> None:
    """An event nobody takes must not take its hold along."""
    if isinstance(event, Admitted | HandedOver):
        event.hold.release()


def unknown(kind: str) -> InvalidRequest:
    """A command this service does not know: its sender breaks the protocol."""
    return InvalidRequest("unknown command", field=kind or "command")
