"""One long-lived stream per (worker, service), multiplexed over requests.

A message carries every request's tokens of one engine step and is handed to the requests by plain calls: no queue and
no task wake-up per request. Commands that wait together leave together, where the worker takes batches. Cancels and
tickets overtake submissions. Reservations go the same way: a unary call costs ten times as much. A lost stream is
attached again within `reattach_s` to the same epoch with (request, attempt, next sequence); what the worker does not
resume, or a worker that is gone for good (its port refuses), is lost to its requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router.pressure import Pressure
from router.workers.commands import COLLECT_S, Density, batched
from runtime.errors import PdserveError, WorkerLost

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
ACK_EVERY = 32
BATCH_COMMANDS = 256
BATCH_BYTES = 512 << 10

_RETRY_S = 0.05
_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009  the stubs do not know it
_BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""How writing to a call that is over ends."""

_log = structlog.get_logger("pdserve.router.links")

Key = tuple[str, int]
Asking = Callable[[common_pb2.ReserveRequest], None]
"""Writes it, in its place in a command: a message that is put into another one is copied."""

Answered = Callable[[common_pb2.ReserveReply | PdserveError], None]
C = TypeVar("C", prefill_pb2.PrefillCommand, decode_pb2.DecodeCommand)
D = TypeVar("D", bound=prefill_pb2.PrefillCommand | decode_pb2.DecodeCommand, covariant=True)


class Leg(Protocol):
    """A request's attempt as a link sees it. None of these may block or await."""

    def on_event(self, kind: str, body: Any) -> None: ...

    def on_step(self) -> None:
        """Everything of one message has been delivered."""
        ...

    def on_lost(self, error: PdserveError) -> None: ...

    def next_sequence(self) -> list[int]: ...


class Service(Protocol[D]):
    """What differs between the prefill and the decode stream."""

    name: str

    def open(self) -> Any:
        """The call. What is written to it is serialised already."""
        ...

    def hello(self, hello: common_pb2.Hello) -> D: ...

    def ack(self, ref: common_pb2.AttemptRef, next_sequence: list[int]) -> D | None: ...

    def reserve(self, fill: Asking) -> D: ...

    def unreserve(self, request: common_pb2.CancelReservationRequest) -> D: ...


class Link(Generic[C]):
    """The stream to one service of one worker. on_load gets every Load report; on_lost is called once, when the stream
    will not come back; on_connected with True when it is attached and False when it broke; on_late for every event of
    a request that is over here."""

    def __init__(
        self,
        service: Service[C],
        router_id: str,
        epoch: int,
        reattach_s: float,
        on_load: Callable[[common_pb2.Load], None],
        on_lost: Callable[[PdserveError], None],
        on_connected: Callable[[bool], None],
        on_late: Callable[[], None],
        pressure: Pressure,
        streams_reserve: bool = False,
    ) -> None:
        self.streams_reserve = streams_reserve
        self._service: Service[C] = service
        self._router_id = router_id
        self._epoch = epoch
        self._reattach_s = reattach_s
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_connected = on_connected
        self._on_late = on_late
        self._pressure = pressure
        self._legs: dict[Key, Leg] = {}
        self._unacked: dict[Key, int] = {}
        self._urgent: deque[C] = deque()
        self._submissions: deque[tuple[Key, C]] = deque()
        self._unsent: dict[Key, int] = {}  # submissions that wait, by request
        self._reserving: dict[Key, Answered] = {}
        self._density = Density()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lost_at: float | None = None
        self.connected = asyncio.Event()
        self.closed = False

    @property
    def legs(self) -> int:
        return len(self._legs)

    def start(self) -> None:
        self._task = asyncio.create_task(self._live(), name=f"link-{self._service.name}")

    async def close(self, error: PdserveError | None = None) -> None:
        """End the stream; its requests are told. Idempotent."""
        self.closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._lose_all(error or WorkerLost("the worker left"))

    def attach(self, key: Key, leg: Leg, *commands: C) -> None:
        """Send a request's first commands and take its events from now on. Raises WorkerLost when there is no way."""
        if self.closed:
            raise WorkerLost("the worker is gone")
        self._legs[key] = leg
        self._enqueue(key, commands)
        self._wake.set()

    def detach(self, key: Key, *last: C) -> bool:
        """The request is over here: later events of it are late and dropped. `last` tells the worker.

        False when the submission never left: it is taken back, and the worker knows nothing but its reservation.
        """
        self._legs.pop(key, None)
        self._unacked.pop(key, None)
        if self._unsent.pop(key, 0):
            waiting = [command for owner, command in self._submissions if owner == key]
            self._submissions = deque(entry for entry in self._submissions if entry[0] != key)
            if any(command.HasField("submit") for command in waiting):
                return False
        self.send(key, *last)
        return True

    def send(self, key: Key, *commands: C) -> None:
        """Ahead of waiting submissions (but never of the request's own), in order among themselves."""
        if not commands or self.closed:
            return
        if key in self._unsent:
            self._enqueue(key, commands)
        else:
            self._urgent.extend(commands)
        self._wake.set()

    def reserve(self, key: Key, fill: Asking, then: Answered) -> None:
        """`then` is called with the answer, or WorkerLost. Only where the worker takes reservations over the stream."""
        if self.closed or not self.connected.is_set():
            then(WorkerLost("the worker is gone"))
            return
        self._reserving[key] = then
        self._urgent.append(self._service.reserve(fill))
        self._wake.set()

    def forget_reserve(self, key: Key) -> None:
        """Nobody waits any longer: an answer that comes yet is given back."""
        then = self._reserving.pop(key, None)
        if then is not None:
            then(WorkerLost("the worker does not answer", reason="reserve_timeout"))

    def unreserve(self, request: common_pb2.CancelReservationRequest) -> None:
        """Not answered: a reservation that stays expires by itself."""
        if not self.closed:
            self._urgent.append(self._service.unreserve(request))
            self._wake.set()

    def _enqueue(self, key: Key, commands: Sequence[C]) -> None:
        for command in commands:
            self._submissions.append((key, command))
        self._unsent[key] = self._unsent.get(key, 0) + len(commands)

    async def _live(self) -> None:
        while not self.closed:
            try:
                await self._stream()
                error: PdserveError = WorkerLost("the worker ended its stream")
                gone = False
            except grpc.aio.AioRpcError as exc:
                gone = _is_gone(exc)
                error = WorkerLost("the worker's stream broke")
            except asyncio.CancelledError:
                if _told_to_end():
                    raise
                gone, error = False, WorkerLost("the worker's stream was given up")  # by its writer
            except Exception as exc:  # noqa: BLE001  supervises: a worker is not lost for good over one message
                _log.error("link_failed", service=self._service.name, exc_info=exc)
                gone, error = False, WorkerLost("the worker's stream failed")
            self.connected.clear()
            self._on_connected(False)
            if gone or self._too_late():
                self.closed = True
                self._lose_all(error)
                self._on_lost(error)
                return
            await asyncio.sleep(_RETRY_S)

    def _too_late(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._lost_at is None:
            self._lost_at = now
        return now - self._lost_at >= self._reattach_s

    async def _stream(self) -> None:
        """One call from Hello to its end."""
        self._lose_halves()
        call = self._service.open()
        resumed = dict(self._legs)
        try:
            resume = [
                common_pb2.Resume(
                    ref=common_pb2.AttemptRef(request_id=key[0], attempt=key[1]), next_sequence=leg.next_sequence()
                )
                for key, leg in resumed.items()
                if key not in self._unsent
            ]
            hello = common_pb2.Hello(
                router_id=self._router_id,
                worker_epoch=self._epoch,
                protocol_min=PROTOCOL_MIN,
                protocol_max=PROTOCOL_MAX,
                resume=resume,
            )
            await call.write(self._service.hello(hello).SerializeToString())
            asked = {(entry.ref.request_id, entry.ref.attempt) for entry in resume}
            await self._read(call, asked)
        finally:
            call.cancel()
            self._lose_reservations()

    def _lose_halves(self) -> None:
        """Of these a part has left, on a stream that is no more: the rest of it would mean nothing to the worker."""
        begins: dict[Key, C] = {}
        for key, command in self._submissions:
            begins.setdefault(key, command)
        halves = {key for key, command in begins.items() if not command.HasField("submit")}
        if halves:
            self._submissions = deque(entry for entry in self._submissions if entry[0] not in halves)
        for key in halves:
            del self._unsent[key]
            self._lose(key, WorkerLost("the worker's stream broke"))

    def _lose_reservations(self) -> None:
        """Their answers went with the stream."""
        asked, self._reserving = self._reserving, {}
        for then in asked.values():
            then(WorkerLost("the worker's stream broke"))

    async def _read(self, call: Any, asked: set[Key]) -> None:
        writer: asyncio.Task[None] | None = None
        try:
            while (message := await call.read()) is not _EOF:
                if writer is None and message.events and message.events[0].HasField("welcome"):
                    self._welcome(message.events[0].welcome, asked)
                    writer = asyncio.create_task(self._write(call))
                    writer.add_done_callback(lambda _: call.cancel())  # what cannot be written is not read either
                self._deliver(message)
        finally:
            if writer is not None:
                writer.cancel()
                ended = await asyncio.gather(writer, return_exceptions=True)
                if isinstance(ended[0], Exception) and not isinstance(ended[0], _BROKEN):
                    _log.error("link_writer_failed", service=self._service.name, exc_info=ended[0])

    def _welcome(self, welcome: common_pb2.Welcome, asked: set[Key]) -> None:
        self._lost_at = None
        self.connected.set()
        self._on_connected(True)
        resumed = {(ref.request_id, ref.attempt) for ref in welcome.resumed}
        for key in asked - resumed:
            self._lose(key, WorkerLost("the worker no longer knows the request"))

    async def _write(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not (self._urgent or self._submissions):
                self._wake.clear()
                await self._wake.wait()
            if self._pressure.now and self.streams_reserve and self._density.worth_collecting:
                await asyncio.sleep(COLLECT_S)
            count = len(self._urgent) + len(self._submissions)
            if count:
                self._density.sent(count, loop.time())
            while self._urgent or self._submissions:
                await call.write(self._next_message())

    def _next_message(self) -> bytes:
        """One command, or as many as wait and fit, in order."""
        first = self._pop().SerializeToString()
        if not self.streams_reserve or not (self._urgent or self._submissions):
            return first
        commands, size = [first], len(first)
        while (self._urgent or self._submissions) and len(commands) < BATCH_COMMANDS:
            command = (self._urgent[0] if self._urgent else self._submissions[0][1]).SerializeToString()
            size += len(command) + 4
            if size > BATCH_BYTES:  # then it is written out twice, as ByteSize() would do with all of them
                break
            self._pop()
            commands.append(command)
        return first if len(commands) == 1 else batched(commands)

    def _pop(self) -> C:
        if self._urgent:
            return self._urgent.popleft()
        key, command = self._submissions.popleft()
        left = self._unsent[key] - 1
        if left:
            self._unsent[key] = left
        else:
            del self._unsent[key]
        return command

    def _deliver(self, message: Any) -> None:
        """The hot path: every event of one engine step, straight to its request."""
        legs = self._legs
        touched: dict[Key, Leg] = {}
        for event in message.events:
            kind = event.WhichOneof("event")
            ref = event.ref
            key = (ref.request_id, ref.attempt)
            leg = legs.get(key)
            if leg is None:
                self._stray(kind, key, event)
                continue
            try:
                leg.on_event(kind, getattr(event, kind))
            except Exception as exc:  # noqa: BLE001  RPC boundary: one request's fault must not end the others'
                self._isolate(key, exc)
                continue
            touched[key] = leg
        for key, leg in touched.items():
            try:
                leg.on_step()
            except Exception as exc:  # noqa: BLE001  as above
                self._isolate(key, exc)
            self._acknowledge(key, leg)
        if message.HasField("load"):
            self._on_load(message.load)

    def _stray(self, kind: str | None, key: Key, event: Any) -> None:
        """Of no running leg: an answer to reserve, or late, or of a superseded attempt."""
        if kind == "reserved":
            then = self._reserving.pop(key, None)
            if then is not None:
                then(event.reserved)
                return
            if event.reserved.reservation_id:  # nobody waits for it any more
                reservation_id = event.reserved.reservation_id
                self.unreserve(common_pb2.CancelReservationRequest(ref=event.ref, reservation_id=reservation_id))
        if kind != "welcome":
            self._on_late()

    def _acknowledge(self, key: Key, leg: Leg) -> None:
        if key not in self._legs:
            return
        count = self._unacked.get(key, 0) + 1
        if count < ACK_EVERY:
            self._unacked[key] = count
            return
        self._unacked[key] = 0
        ref = common_pb2.AttemptRef(request_id=key[0], attempt=key[1])
        ack = self._service.ack(ref, leg.next_sequence())
        if ack is not None:
            self.send(key, ack)

    def _isolate(self, key: Key, exc: Exception) -> None:
        _log.error("request_handler_failed", request_id=key[0], exc_info=exc)
        self._lose(key, exc if isinstance(exc, PdserveError) else PdserveError("internal error"))

    def _lose(self, key: Key, error: PdserveError) -> None:
        leg = self._legs.pop(key, None)
        self._unacked.pop(key, None)
        if leg is not None:
            leg.on_lost(error)

    def _lose_all(self, error: PdserveError) -> None:
        self._urgent.clear()
        self._submissions.clear()
        self._unsent.clear()
        self._lose_reservations()
        for key in list(self._legs):
            self._lose(key, error)


def _told_to_end() -> bool:
    """gRPC raises CancelledError for a call that was cancelled, too: only the task itself knows better."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _is_gone(exc: grpc.aio.AioRpcError) -> bool:
    """Nobody listens any more, or somebody else does: waiting cannot help."""
    if exc.code() is grpc.StatusCode.UNAVAILABLE:
        return "refused" in (exc.details() or "").lower()
    return exc.code() in (
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
    )
