from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from protos.v1 import common_pb2, prefill_pb2
from runtime.clock import FakeClock
from runtime.errors import (
    Cancelled,
    EpochMismatch,
    InvalidRequest,
    LayoutMismatch,
    PdserveError,
    QuotaExceeded,
    WorkerLost,
)
from runtime.streamhub import Batch, Outbox, Recent, Session, StreamHub

Command = prefill_pb2.PrefillCommand
Events = prefill_pb2.PrefillEvents


@dataclass
class Recorder:
    """A face that notes what it is told."""

    commands: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    sessions: list[Session[Events]] = field(default_factory=list)

    def hello_of(self, command: Command) -> common_pb2.Hello | None:
        return command.hello if command.HasField("hello") else None

    def unpack(self, command: Command) -> Sequence[Command]:
        return command.batch or (command,)

    def attached(self, session: Session[Events], hello: common_pb2.Hello, welcome: common_pb2.Welcome) -> None:
        self.sessions.append(session)
        if any(not one.ref.request_id for one in hello.resume):
            raise InvalidRequest("no request id")
        session.send(Events(events=[prefill_pb2.PrefillEvent(welcome=welcome)]))

    def command(self, session: Session[Events], command: Command) -> None:
        if command.cancel.reason == "break":
            raise InvalidRequest("broken")
        if command.cancel.reason == "bug":
            raise ValueError("a bug")
        self.commands.append(command.cancel.ref.request_id)

    def lost(self, session: Session[Events]) -> None:
        self.ended.append(session.router_id)


class Wire:
    """One Open call without a socket: what the router sends and what it gets."""

    def __init__(self, hub: StreamHub[Events, Command]) -> None:
        self.incoming: asyncio.Queue[Command | None] = asyncio.Queue()
        self.got: asyncio.Queue[Events] = asyncio.Queue()
        self.reading = asyncio.Event()
        self.reading.set()
        self.call = asyncio.create_task(hub.serve(self._commands(), self._write))

    async def _commands(self) -> AsyncIterator[Command]:
        while (command := await self.incoming.get()) is not None:
            yield command

    async def _write(self, message: Events) -> None:
        await self.reading.wait()
        self.got.put_nowait(message)

    def hello(self, epoch: int = 5, low: int = 1, high: int = 1, router: str = "router-1") -> Wire:
        hello = common_pb2.Hello(router_id=router, worker_epoch=epoch, protocol_min=low, protocol_max=high)
        self.incoming.put_nowait(Command(hello=hello))
        return self

    async def drop(self) -> None:
        self.call.cancel()
        await asyncio.wait([self.call])


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def face() -> Recorder:
    return Recorder()


@pytest.fixture
def hub(face: Recorder, clock: FakeClock) -> StreamHub[Events, Command]:
    return StreamHub(face, epoch=5, clock=clock, reattach_s=2.0, buffer_bytes=1000)


Hub = StreamHub[Events, Command]


async def test_a_hello_of_the_right_epoch_is_welcomed(hub: Hub) -> None:
    wire = Wire(hub).hello(low=1, high=9)
    welcome = (await wire.got.get()).events[0].welcome
    assert (welcome.worker_epoch, welcome.protocol) == (5, 1)
    await wire.drop()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"epoch": 4}, EpochMismatch),
        ({"low": 2, "high": 3}, LayoutMismatch),
        ({"router": ""}, InvalidRequest),
    ],
)
async def test_a_hello_that_does_not_fit_ends_the_call(
    hub: Hub, face: Recorder, arguments: dict[str, object], error: type[PdserveError]
) -> None:
    wire = Wire(hub).hello(**arguments)  # type: ignore[arg-type]
    with pytest.raises(error):
        await wire.call
    assert face.sessions == []


async def test_a_stream_must_begin_with_a_hello(hub: Hub) -> None:
    wire = Wire(hub)
    wire.incoming.put_nowait(Command(cancel=common_pb2.Cancel()))
    with pytest.raises(InvalidRequest):
        await wire.call


async def test_a_peer_that_breaks_the_protocol_loses_its_stream_with_the_reason(hub: Hub) -> None:
    wire = Wire(hub).hello()
    wire.incoming.put_nowait(Command(cancel=common_pb2.Cancel(reason="break")))
    with pytest.raises(InvalidRequest, match="broken"):
        await wire.call


async def expires(hub: Hub, clock: FakeClock) -> bool:
    """Whether nothing of any session is left when the time to re-attach is over."""
    clock.advance(2.1)
    hub.expire(clock.monotonic())
    return hub.sessions() == []


async def test_a_bug_in_a_command_ends_the_call_with_it_and_leaves_no_session_for_ever(
    hub: Hub, face: Recorder, clock: FakeClock
) -> None:
    wire = Wire(hub).hello()
    wire.incoming.put_nowait(Command(cancel=common_pb2.Cancel(reason="bug")))
    with pytest.raises(ValueError, match="a bug"):
        await wire.call
    assert await expires(hub, clock)
    assert face.ended == ["router-1"]


async def test_a_broken_message_of_a_stream_leaves_no_session_for_ever(
    hub: Hub, face: Recorder, clock: FakeClock
) -> None:
    wire = Wire(hub)

    async def commands() -> AsyncIterator[Command]:
        yield Command(hello=common_pb2.Hello(router_id="router-2", worker_epoch=5, protocol_min=1, protocol_max=1))
        raise RuntimeError("the transport's own trouble")

    with pytest.raises(RuntimeError, match="own trouble"):
        await hub.serve(commands(), wire._write)
    assert await expires(hub, clock)
    assert face.ended == ["router-2"]
    await wire.drop()


async def test_a_hello_that_resumes_nonsense_leaves_no_session_for_ever(
    hub: Hub, face: Recorder, clock: FakeClock
) -> None:
    wire = Wire(hub)
    hello = common_pb2.Hello(router_id="router-1", worker_epoch=5, protocol_min=1, protocol_max=1)
    hello.resume.add()
    wire.incoming.put_nowait(Command(hello=hello))
    with pytest.raises(InvalidRequest, match="no request id"):
        await wire.call
    assert await expires(hub, clock)
    assert face.ended == ["router-1"]


async def test_a_lost_stream_leaves_the_session_until_the_time_to_reattach_is_over(
    hub: Hub, face: Recorder, clock: FakeClock
) -> None:
    wire = Wire(hub).hello()
    await wire.got.get()
    await wire.drop()
    clock.advance(1.9)
    hub.expire(clock.monotonic())
    assert face.ended == []
    clock.advance(0.2)
    hub.expire(clock.monotonic())
    assert face.ended == ["router-1"]
    assert hub.sessions() == []


async def test_a_router_that_comes_back_in_time_finds_its_session(hub: Hub, face: Recorder, clock: FakeClock) -> None:
    first = Wire(hub).hello()
    await first.got.get()
    await first.drop()
    clock.advance(1.0)
    second = Wire(hub).hello()
    await second.got.get()
    clock.advance(10.0)
    hub.expire(clock.monotonic())
    assert face.sessions[0] is face.sessions[1]
    assert face.ended == []
    await second.drop()


async def test_a_router_that_closes_its_side_says_farewell(hub: Hub, face: Recorder) -> None:
    wire = Wire(hub).hello()
    await wire.got.get()
    wire.incoming.put_nowait(None)
    await wire.call
    assert face.ended == ["router-1"]


async def test_an_end_of_messages_before_a_cancelled_call_is_no_farewell(hub: Hub, face: Recorder) -> None:
    wire = Wire(hub).hello()
    await wire.got.get()
    wire.incoming.put_nowait(None)
    await asyncio.sleep(0)
    await wire.drop()
    assert face.ended == []


async def test_a_second_stream_of_a_router_replaces_the_first(hub: Hub, face: Recorder) -> None:
    first = Wire(hub).hello()
    await first.got.get()
    second = Wire(hub).hello()
    await second.got.get()
    with pytest.raises(WorkerLost):
        await first.call
    assert face.sessions[0].outbox is not None
    assert not face.sessions[0].outbox.closed
    await second.drop()


async def test_a_router_that_stops_reading_loses_its_stream_and_nothing_waits(hub: Hub, face: Recorder) -> None:
    wire = Wire(hub).hello()
    await wire.got.get()
    wire.reading.clear()
    session = face.sessions[0]
    message = Events(events=[prefill_pb2.PrefillEvent(ref=common_pb2.AttemptRef(request_id="x" * 400, attempt=1))])
    for _ in range(5):
        session.send(message)
    wire.reading.set()
    with pytest.raises(QuotaExceeded):
        await wire.call
    assert session.outbox is None


async def test_an_outbox_closed_without_error_still_says_what_was_queued() -> None:
    outbox: Outbox[Events] = Outbox()
    outbox.put(Events(load=common_pb2.Load(sequence=1)))
    outbox.close()
    outbox.put(Events(load=common_pb2.Load(sequence=2)))
    said: list[int] = []

    async def write(message: Events) -> None:
        said.append(message.load.sequence)

    await outbox.drain(write)
    assert said == [1]


def test_the_events_of_a_step_go_out_in_one_message_per_session_of_bounded_size() -> None:
    sent: list[Events] = []

    class Heard(Outbox[Events]):
        def put(self, message: Events) -> None:
            sent.append(message)

    session: Session[Events] = Session("r", outbox=Heard())
    batch: Batch[Events, prefill_pb2.PrefillEvent] = Batch(lambda events: Events(events=events))
    for index in range(3):
        batch.add(session, prefill_pb2.PrefillEvent(ref=common_pb2.AttemptRef(request_id=str(index))))
    batch.flush()
    assert [[e.ref.request_id for e in m.events] for m in sent] == [["0", "1", "2"]]
    sent.clear()
    for _ in range(4):
        batch.add(session, prefill_pb2.PrefillEvent(ref=common_pb2.AttemptRef(request_id="y" * 300_000)))
    batch.flush()
    assert [len(m.events) for m in sent] == [2, 2]
    assert all(m.ByteSize() < 1 << 20 for m in sent)


def test_only_the_last_things_are_remembered() -> None:
    recent: Recent[str, int] = Recent(2)
    for index, key in enumerate("abca"):
        recent.put(key, index)
    assert (recent.get("a"), recent.get("b"), recent.get("c")) == (3, None, 2)


def test_errors_of_an_attempt_can_be_remembered_by_key() -> None:
    recent: Recent[str, PdserveError] = Recent(4)
    recent.put("k", Cancelled("gone"))
    assert recent.pop("k") is not None
    assert recent.pop("k") is None
