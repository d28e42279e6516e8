"""What a link sends, and when: nothing is left behind, and under pressure what comes together leaves together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router.pressure import Pressure
from router.workers import links
from router.workers.commands import Density, batched
from router.workers.links import Link
from router.workers.worker import PrefillService
from runtime.errors import PdserveError, WorkerLost


class Call:
    """A stream whose worker welcomes when told to and says nothing else. `seen` after every message."""

    def __init__(self) -> None:
        self.written: list[prefill_pb2.PrefillCommand] = []
        self.welcome = asyncio.Event()
        self.seen = asyncio.Condition()
        self._welcomed = False

    async def write(self, message: bytes) -> None:
        async with self.seen:
            self.written.append(prefill_pb2.PrefillCommand.FromString(message))
            self.seen.notify_all()

    async def read(self) -> prefill_pb2.PrefillEvents:
        await (asyncio.Event().wait() if self._welcomed else self.welcome.wait())
        self._welcomed = True
        return prefill_pb2.PrefillEvents(events=[prefill_pb2.PrefillEvent(welcome=common_pb2.Welcome(protocol=1))])

    def cancel(self) -> None:
        """The link is closed."""

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5), self.seen:
            await self.seen.wait_for(lambda: len(self.written) >= count)


class Service(PrefillService):
    def __init__(self, opened: Callable[[], Call]) -> None:
        self._opened = opened

    def open(self) -> Any:
        return self._opened()


class Leg:
    """Nobody's: only what is sent counts."""

    def on_event(self, kind: str, body: Any) -> None: ...

    def on_step(self) -> None: ...

    def on_lost(self, error: PdserveError) -> None: ...

    def next_sequence(self) -> list[int]:
        return []


def ref(number: int) -> common_pb2.AttemptRef:
    return common_pb2.AttemptRef(request_id=str(number), attempt=1)


def submit(number: int) -> prefill_pb2.PrefillCommand:
    return prefill_pb2.PrefillCommand(submit=common_pb2.WorkRequest(ref=ref(number)))


@asynccontextmanager
async def linked(
    pressure: Pressure, opened: Callable[[], Call] | None = None
) -> AsyncIterator[tuple[Link[prefill_pb2.PrefillCommand], Call]]:
    call = Call()
    link: Link[prefill_pb2.PrefillCommand] = Link(
        Service(opened or (lambda: call)),
        "router",
        1,
        1.0,
        on_load=lambda _: None,
        on_lost=lambda _: None,
        on_connected=lambda _: None,
        on_late=lambda: None,
        pressure=pressure,
        streams_reserve=True,
    )
    link.start()
    try:
        yield link, call
    finally:
        await link.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_what_was_queued_before_the_stream_was_attached_is_sent_then(busy: bool) -> None:
    pressure = Pressure()
    pressure.now = busy
    async with linked(pressure) as (link, call):
        await call.until(1)  # the hello
        link.attach(("1", 1), Leg(), submit(1))

        call.welcome.set()

        await call.until(2)
        assert call.written[0].HasField("hello")
        assert call.written[1] == submit(1)


def test_a_batch_is_what_protobuf_would_write() -> None:
    commands = [submit(1), prefill_pb2.PrefillCommand(), submit(2)]
    commands[2].submit.tokens.extend(range(20_000))
    decode = [decode_pb2.DecodeCommand(ack=decode_pb2.Ack(ref=ref(1), next_sequence=[3])), decode_pb2.DecodeCommand()]

    assert batched([one.SerializeToString() for one in commands]) == (
        prefill_pb2.PrefillCommand(batch=commands).SerializeToString()
    )
    assert batched([one.SerializeToString() for one in decode]) == (
        decode_pb2.DecodeCommand(batch=decode).SerializeToString()
    )


@pytest.mark.parametrize("dense", [True, False])
async def test_under_pressure_what_comes_densely_within_two_milliseconds_is_one_message(dense: bool) -> None:
    pressure = Pressure()
    pressure.now = True
    async with linked(pressure) as (link, call):
        link._density._gap_s = 0.0001 if dense else 0.01
        call.welcome.set()
        async with asyncio.timeout(5):
            await link.connected.wait()

        for number in range(3):
            link.attach((str(number), 1), Leg(), submit(number))
            await asyncio.sleep(0)  # the writer is awake from the first on
            await asyncio.sleep(0)

        if dense:
            await call.until(2)
            assert list(call.written[1].batch) == [submit(number) for number in range(3)]
        else:
            await call.until(4)
            assert call.written[1:] == [submit(number) for number in range(3)]


def test_collecting_is_worth_it_where_two_more_commands_are_to_be_expected() -> None:
    density, now = Density(), 100.0
    assert not density.worth_collecting

    def paced(gap_s: float, count: int = 1, times: int = 100) -> bool:
        nonlocal now
        for _ in range(times):
            now += gap_s * count
            density.sent(count, now)
        return density.worth_collecting

    assert paced(0.0009)
    assert not paced(0.0011)
    assert paced(0.0004, count=5), "collected ones count as what they are"
    assert paced(60.0, times=1), "one pause is not sparseness"
    assert not paced(60.0, times=20)


async def test_a_reservation_nobody_waits_for_any_longer_is_told_once() -> None:
    async with linked(Pressure()) as (link, call):
        call.welcome.set()
        async with asyncio.timeout(5):
            await link.connected.wait()
        told: list[Any] = []
        link.reserve(("1", 1), lambda request: request.ref.CopyFrom(ref(1)), told.append)

        link.forget_reserve(("1", 1))
        link.forget_reserve(("1", 1))

        assert [(type(error), error.reason) for error in told] == [(WorkerLost, "reserve_timeout")]


class Brittle(Call):
    """A stream that fails where gRPC does not say so: its writer, or its reader, with an error of no kind known."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self._fails = fails
        self._ended = asyncio.Event()
        self.welcome.set()

    async def write(self, message: bytes) -> None:
        if self._fails == "writing" and not prefill_pb2.PrefillCommand.FromString(message).HasField("hello"):
            raise ValueError("a message that cannot be written")
        await super().write(message)

    async def read(self) -> prefill_pb2.PrefillEvents:
        if not self._welcomed:
            return await super().read()
        if self._fails == "reading":
            raise ZeroDivisionError
        await self._ended.wait()
        raise asyncio.CancelledError  # as gRPC does for a call that was cancelled

    def cancel(self) -> None:
        self._ended.set()


@pytest.mark.parametrize("fails", ["writing", "reading"])
async def test_a_stream_that_fails_in_a_way_of_its_own_is_attached_again(fails: str) -> None:
    calls = [Brittle(fails), Call()]
    opened: list[Call] = []

    def open_one() -> Call:
        opened.append(calls[len(opened)])
        return opened[-1]

    async with linked(Pressure(), open_one) as (link, _):
        await calls[0].until(1)
        link.send(("1", 1), submit(1))
        await calls[1].until(1)
        calls[1].welcome.set()
        async with asyncio.timeout(5):
            await link.connected.wait()
        assert len(opened) == 2
        assert not link.closed


class Told(Leg):
    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def on_lost(self, error: PdserveError) -> None:
        assert isinstance(error, WorkerLost)
        self.lost.set()


class Cut(Brittle):
    """It breaks in the middle of a prompt that takes several messages."""

    async def write(self, message: bytes) -> None:
        if prefill_pb2.PrefillCommand.FromString(message).HasField("tokens"):
            raise asyncio.InvalidStateError
        await super().write(message)


async def test_of_a_prompt_half_of_which_has_left_the_other_half_is_not_sent_to_a_stream_that_knows_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "BATCH_COMMANDS", 1)
    calls: list[Call] = [Cut(""), Call()]
    opened: list[Call] = []

    def open_one() -> Call:
        opened.append(calls[len(opened)])
        return opened[-1]

    async with linked(Pressure(), open_one) as (link, _):
        halved, whole = Told(), Told()
        rest = [prefill_pb2.PrefillCommand(tokens=common_pb2.TokenChunk(ref=ref(1), offset=n)) for n in (1, 2)]
        link.attach(("1", 1), halved, submit(1), *rest)
        link.attach(("2", 1), whole, submit(2))
        await calls[1].until(1)
        calls[1].welcome.set()
        await calls[1].until(2)
        async with asyncio.timeout(5):
            await halved.lost.wait()
    assert [command.WhichOneof("command") for command in calls[0].written] == ["hello", "submit"]
    assert [command.WhichOneof("command") for command in calls[1].written] == ["hello", "submit"]
    assert calls[1].written[1].submit.ref.request_id == "2"
