"""The worker's end of the long-lived router streams: one per router and service, multiplexed over requests.

Two failures justify this module. A router that stops reading must not stop the engine, nor make the worker hold an
ever longer queue: what waits for a stream is bounded, and past the bound that stream alone is lost. A broken connection
must not cost every request that was on it: the router's session outlives its stream by `reattach_s`, and only then are
its requests given up. It knows nothing of requests; the services tell it what to send and are told what is lost.
Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from protos.v1 import common_pb2
from runtime.clock import Clock
from runtime.errors import EpochMismatch, InvalidRequest, LayoutMismatch, PdserveError, QuotaExceeded, WorkerLost

M = TypeVar("M", bound=Message)
C = TypeVar("C", bound=Message)
D = TypeVar("D", bound=Message, contravariant=True)
E = TypeVar("E", bound=Message)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

STREAM_BUFFER_BYTES = 32 << 20
"""What may wait for one router. A router that is this far behind has stopped reading."""

FAREWELL_S = 0.05

BATCH_BYTES = 768 << 10
"""A step's events go out in one message up to this size (messages stay below 1 MiB)."""


class Outbox(Generic[M]):
    """Messages on their way to one attached stream. put() never waits; the one reader is drain()."""

    def __init__(self, limit_bytes: int = STREAM_BUFFER_BYTES) -> None:
        self._limit = limit_bytes
        self._queue: deque[tuple[M, int]] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._error: PdserveError | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, message: M) -> None:
        """Queue a message. A full or closed outbox takes nothing more; a full one is lost from then on."""
        if self._closed:
            return
        size = message.ByteSize()
        if self._bytes + size > self._limit:
            self._queue.clear()
            self.close(QuotaExceeded("the stream was not read fast enough", reason="slow_reader"))
            return
        self._queue.append((message, size))
        self._bytes += size
        self._wake.set()

    def close(self, error: PdserveError | None = None) -> None:
        """End the stream after what is queued, with this error if there is one. The first close counts."""
        if self._closed:
            return
        self._closed = True
        self._error = error
        self._wake.set()

    async def drain(self, write: Callable[[M], Awaitable[None]]) -> None:
        """Write queued messages in order until closed. Raises the error of close()."""
        while True:
            while self._queue:
                message, size = self._queue.popleft()
                self._bytes -= size
                await write(message)
            if self._error is not None:
                raise self._error
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()


@dataclass(slots=True, eq=False)
class Session(Generic[M]):
    """A router as one service sees it. `outbox` is None while no stream is attached; `lost_at` says since when."""

    router_id: str
    outbox: Outbox[M] | None = None
    lost_at: float | None = None
    ended: bool = False
    legs: set[Any] = field(default_factory=set)

    def send(self, message: M) -> None:
        """To the attached stream; without one it is dropped (the service keeps what a re-attach may ask for)."""
        if self.outbox is not None:
            self.outbox.put(message)


class Batch(Generic[M, E]):
    """The events of one engine step, by session: one message for each, or several when it would grow too large."""

    def __init__(self, message: Callable[[Sequence[E]], M]) -> None:
        self._message = message
        self._events: dict[Session[M], list[E]] = {}

    def add(self, session: Session[M] | None, event: E) -> None:
        """Nothing is sent without a session; what a re-attach may ask for is kept by the service."""
        if session is not None and session.outbox is not None:
            self._events.setdefault(session, []).append(event)

    def flush(self) -> None:
        for session, events in self._events.items():
            for piece in _pieces(events):
                session.send(self._message(piece))
        self._events = {}


def _pieces(events: list[E]) -> list[list[E]]:
    pieces: list[list[E]] = [[]]
    size = 0
    for event in events:
        event_size = event.ByteSize() + 8
        if pieces[-1] and size + event_size > BATCH_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(event)
        size += event_size
    return pieces


class Recent(Generic[K, V]):
    """The last `limit` things remembered; older ones are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V) -> None:
        self._entries.pop(key, None)
        self._entries[key] = value
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        return self._entries.get(key)

    def pop(self, key: K) -> V | None:
        return self._entries.pop(key, None)


class Face(Protocol[M, D]):
    """What a service gives the hub. None of these may block."""

    def hello_of(self, command: D) -> common_pb2.Hello | None: ...

    def unpack(self, command: D) -> Sequence[Any]:
        """The commands of one message, in order."""
        ...

    def attached(self, session: Session[M], hello: common_pb2.Hello, welcome: common_pb2.Welcome) -> None:
        """A stream is attached: send the Welcome, then what the router missed of the legs it resumes. Legs of the
        session that it does not name are lost."""
        ...

    def command(self, session: Session[M], command: D) -> None:
        """Any message after the Hello. Raises PdserveError to end the whole stream: the peer breaks the protocol."""
        ...

    def lost(self, session: Session[M]) -> None:
        """The session is over: nobody will ask for its requests again."""
        ...


class StreamHub(Generic[M, C]):
    """Sessions of one service, by router id."""

    def __init__(
        self,
        face: Face[M, C],
        epoch: int,
        clock: Clock,
        reattach_s: float,
        buffer_bytes: int = STREAM_BUFFER_BYTES,
    ) -> None:
        self._face = face
        self._epoch = epoch
        self._clock = clock
        self._reattach_s = reattach_s
        self._buffer_bytes = buffer_bytes
        self._sessions: dict[str, Session[M]] = {}

    def sessions(self) -> list[Session[M]]:
        return list(self._sessions.values())

    async def serve(self, commands: AsyncIterator[C], write: Callable[[M], Awaitable[None]]) -> None:
        """One Open call from Hello to its end."""
        session, outbox = self._attach(await self._first(commands))
        reader = asyncio.create_task(self._read(session, outbox, commands))
        reader.add_done_callback(lambda _: outbox.close())
        try:
            await outbox.drain(write)
        finally:
            reader.cancel()  # no effect on one that has ended
            self._detach(session, outbox, clean=_ended_well(reader))
            await asyncio.gather(reader, return_exceptions=True)
        if not reader.cancelled():
            reader.result()  # what was no PdserveError is for the RPC boundary to log

    def expire(self, now: float) -> None:
        """End the sessions whose router has not come back in time."""
        for session in self.sessions():
            if session.lost_at is not None and now - session.lost_at >= self._reattach_s:
                self._end(session)

    def close(self, error: PdserveError) -> None:
        """End every stream with `error` (the worker stops)."""
        for session in self.sessions():
            if session.outbox is not None:
                session.outbox.close(error)

    async def _first(self, commands: AsyncIterator[C]) -> common_pb2.Hello:
        async for command in commands:
            hello = self._face.hello_of(command)
            if hello is None:
                raise InvalidRequest("the first message of a stream must be a hello", field="hello")
            return hello
        raise InvalidRequest("the stream ended before its hello", field="hello")

    def _attach(self, hello: common_pb2.Hello) -> tuple[Session[M], Outbox[M]]:
        protocol = self._agree(hello)
        session = self._sessions.get(hello.router_id)
        if session is None:
            session = Session(hello.router_id)
            self._sessions[hello.router_id] = session
        elif session.outbox is not None:
            session.outbox.close(WorkerLost("the router opened another stream", reason="superseded"))
        outbox: Outbox[M] = Outbox(self._buffer_bytes)
        session.outbox = outbox
        session.lost_at = None
        try:
            self._face.attached(session, hello, common_pb2.Welcome(worker_epoch=self._epoch, protocol=protocol))
        except BaseException:
            self._detach(session, outbox, clean=False)
            raise
        return session, outbox

    def _agree(self, hello: common_pb2.Hello) -> int:
        """The protocol both speak. Raises EpochMismatch, LayoutMismatch, InvalidRequest."""
        if not hello.router_id:
            raise InvalidRequest("router_id is missing", field="hello.router_id")
        if hello.worker_epoch != self._epoch:
            raise EpochMismatch(f"this worker's epoch is {self._epoch}, the router asked for {hello.worker_epoch}")
        low, high = max(PROTOCOL_MIN, hello.protocol_min), min(PROTOCOL_MAX, hello.protocol_max)
        if low > high:
            raise LayoutMismatch(
                f"the worker speaks protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, "
                f"the router {hello.protocol_min} to {hello.protocol_max}",
                reason="protocol_mismatch",
            )
        return high

    async def _read(self, session: Session[M], outbox: Outbox[M], commands: AsyncIterator[C]) -> bool:
        """True when the router closed its side, which is a farewell; False when it broke the protocol."""
        try:
            async for command in commands:
                if outbox.closed:
                    return False
                for one in self._face.unpack(command):
                    if self._face.hello_of(one) is not None:
                        raise InvalidRequest("a second hello", field="hello")
                    self._face.command(session, one)
        except PdserveError as error:
            outbox.close(error)
            return False
        # A dead peer reads as an end of its messages, too, just before gRPC cancels the call: a farewell is an end
        # that no cancellation follows.
        await asyncio.sleep(FAREWELL_S)
        return True

    def _detach(self, session: Session[M], outbox: Outbox[M], *, clean: bool) -> None:
        outbox.close()
        if session.outbox is not outbox:
            return
        session.outbox = None
        session.lost_at = self._clock.monotonic()
        if clean:
            self._end(session)

    def _end(self, session: Session[M]) -> None:
        if self._sessions.get(session.router_id) is session:
            del self._sessions[session.router_id]
        session.ended = True
        self._face.lost(session)


def _ended_well(reader: asyncio.Task[bool]) -> bool:
    return reader.done() and not reader.cancelled() and reader.exception() is None and reader.result()
