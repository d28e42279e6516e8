"""A decode service over an engine and a puller that do what a test says."""

from __future__ import annotations

import asyncio
from typing import Any

from decode_worker.service import DecodeService
from engine.api import Admitted, Tokens
from kvtransfer.source import HandoffStore
from kvtransfer.tickets import TicketMint
from kvtransfer.types import Destination, First, LegKey, Pulled
from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from runtime.clock import FakeClock
from tests.unit.services.fakes import EPOCH, Hold, ScriptedEngine, worker
from tests.unit.services.streams import Stream, decode_stream, ref, work

KEY = LegKey("r1", "decode", 1)
STOP = int(common_pb2.FINISH_REASON_STOP)
PULLED = Pulled(
    state_length=20,
    first=(First(0, 65),),
    bytes_read=4096,
    pages_read=1,
    wait_s=0.25,
    read_s=0.5,
    checksum_s=0.125,
)


class HandPuller:
    """Pulls end when and how the test says."""

    def __init__(self) -> None:
        self.calls: list[tuple[bytes, str, Destination, float, int]] = []
        self.answers: list[asyncio.Future[Pulled]] = []
        self.cancelled = 0

    async def pull(
        self, signed_ticket: bytes, source_address: str, dest: Destination, deadline: float, fence: int
    ) -> Pulled:
        self.calls.append((signed_ticket, source_address, dest, deadline, fence))
        answer: asyncio.Future[Pulled] = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            dest.hold.release()


class Setup:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.engine = ScriptedEngine()
        self.puller = HandPuller()
        self.handoffs = HandoffStore(TicketMint("w-1", EPOCH, b"l" * 32), self.clock, lease_s=10.0)
        self.service = DecodeService(worker(self.engine, self.clock), self.puller, self.handoffs, reattach_s=2.0)
        self.hold = Hold()

    def admit(self, key: LegKey = KEY, ready: int = 0) -> None:
        self.engine.emit(Admitted(key, (5, 6), (), ready, self.hold))

    def tokens(self, first: int, *tokens: int, key: LegKey = KEY, choice: int = 0, finish: int = 0) -> None:
        logprobs = (None,) * len(tokens)
        self.engine.emit(Tokens(key, choice, first, tokens, logprobs, finish, last=finish != 0, decode_s=2.0))

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.service.tick(self.clock.monotonic())


def submit(stream: Stream, request: common_pb2.WorkRequest, *, local: bool = False, fence: int = 1) -> None:
    stream.send(submit=decode_pb2.DecodeSubmit(request=request, local=local, fence=fence))


def ticket(stream: Stream, request_id: str = "r1", attempt: int = 1) -> None:
    issued = prefill_pb2.TicketIssued(ticket=b"signed", source_address="127.0.0.1:1")
    stream.send(ticket=decode_pb2.DecodeTicket(ref=ref(request_id, attempt), ticket=issued))


async def opened(s: Setup) -> Stream:
    stream = decode_stream(s.service)
    await stream.open()
    return stream


async def submitted(s: Setup, *, local: bool = False, fence: int = 1, **asked: Any) -> Stream:
    """A stream on which a prompt of twenty tokens has come. asked: changes the request."""
    stream = await opened(s)
    submit(stream, work(**{"tokens": range(20), **asked}), local=local, fence=fence)
    await stream.settle()
    return stream


async def admitted(s: Setup, *, local: bool = False, fence: int = 1, **asked: Any) -> Stream:
    """A leg that has its pages."""
    stream = await submitted(s, local=local, fence=fence, **asked)
    s.admit()
    return stream


async def cancel(stream: Stream, *choices: int) -> None:
    """The router wants these choices no more, or none of them."""
    stream.send(cancel=common_pb2.Cancel(ref=ref(), choices=choices))
    await stream.settle()


async def pulling(s: Setup) -> Stream:
    """A leg whose pull is under way."""
    stream = await admitted(s, fence=7)
    ticket(stream)
    await stream.settle()
    assert len(s.puller.calls) == 1
    return stream


async def decoding(s: Setup) -> Stream:
    stream = await pulling(s)
    s.puller.answers[0].set_result(PULLED)
    assert (await stream.next()).WhichOneof("event") == "handoff"
    return stream
