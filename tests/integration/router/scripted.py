"""Workers that do what a test tells them, over the real protos and real sockets. What they hold is counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kvsource_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from runtime.ids import new_epoch
from runtime.modelfiles import ModelFiles
from runtime.registry.agent import RegistryAgent

GO_ON = common_pb2.FINISH_REASON_UNSPECIFIED
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE, "both": common_pb2.ROLE_BOTH}
FILES = ModelFiles.open("oracle")

Finish = common_pb2.FinishReason.ValueType
Emit = Callable[[Any], None]


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for what has no event of its own. seconds: where they are the subject; else longer than a machine stands
    still."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def layout(page_tokens: int = 16, chunk_tokens: int = 512) -> kvsource_pb2.Layout:
    part = kvsource_pb2.Component(
        name="kv", paged=True, units=1, layers=1, rows=2, tokens=16, token_bytes=8, dtype="u8"
    )
    return kvsource_pb2.Layout(
        version=1, page_tokens=page_tokens, chunk_tokens=chunk_tokens, components=[part], checksum="wsum64-v1"
    )


@dataclass(slots=True)
class Leg:
    """One submitted attempt at a scripted worker; `ticket` is set when D has it, `asked` when it is to give a choice
    away (`wanted`)."""

    work: common_pb2.WorkRequest
    emit: Emit
    local: bool = False
    fence: int = 0
    ticket: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def ref(self) -> common_pb2.AttemptRef:
        return self.work.ref

    def send(self, **event: Any) -> None:
        """A PrefillEvent or DecodeEvent of this leg, as a message of its own."""
        self.emit([{"ref": self.ref, **event}])

    def ticket_issued(self) -> None:
        self.send(ticket=prefill_pb2.TicketIssued(ticket=b"ticket", source_address="127.0.0.1:1"))

    def first(self, *tokens: int, finish: int = GO_ON, cached: int = 0, logprobs: bool = False) -> None:
        firsts = [
            common_pb2.FirstToken(
                choice=choice, token=token, finish=Finish(finish), logprob=scored(token) if logprobs else None
            )
            for choice, token in enumerate(tokens)
        ]
        times = common_pb2.StageTimes(prefill_s=0.01, cached_tokens=cached, pid=1)
        self.send(done=prefill_pb2.PrefillDone(first=firsts, times=times))

    def handed_over(self) -> None:
        self.send(
            handoff=decode_pb2.HandoffDone(times=common_pb2.StageTimes(transfer_bytes=64, transfer_pages=1, pid=2))
        )

    def tokens(self, sequence: int, *tokens: int, choice: int = 0, finish: int = GO_ON, logprobs: bool = False) -> None:
        scores = [scored(token) for token in tokens] if logprobs else []
        times = common_pb2.StageTimes(decode_s=0.02, pid=2) if finish != GO_ON else None
        self.send(
            tokens=decode_pb2.ChoiceTokens(
                choice=choice,
                first_sequence=sequence,
                tokens=tokens,
                logprobs=scores,
                finish=Finish(finish),
                times=times,
            )
        )


def scored(token: int) -> common_pb2.TokenLogprob:
    top = [common_pb2.TopLogprob(token=token, logprob=-0.5), common_pb2.TopLogprob(token=65, logprob=-1.5)]
    return common_pb2.TokenLogprob(token=token, logprob=-0.5, rank=1, top=top)


PrefillScript = Callable[[Leg], Awaitable[None]]
DecodeScript = Callable[[Leg], Awaitable[None]]


async def prefill_answers(leg: Leg) -> None:
    """The usual: a ticket, then the first token of every choice."""
    leg.ticket_issued()
    n = leg.work.n
    finish = LENGTH if leg.work.sampling.max_tokens == 1 else GO_ON
    leg.first(*[ord("a")] * n, finish=finish, logprobs=leg.work.sampling.logprobs)


async def decode_answers(leg: Leg) -> None:
    """The usual: b, c, d... up to max_tokens, for every choice."""
    start = 0 if leg.local else 1
    if not leg.local:
        await leg.ticket.wait()
        leg.handed_over()
    for sequence in range(start, leg.work.sampling.max_tokens):
        last = sequence == leg.work.sampling.max_tokens - 1
        for choice in range(leg.work.n):
            leg.tokens(
                sequence,
                ord("a") + sequence % 26,
                choice=choice,
                finish=LENGTH if last else GO_ON,
                logprobs=leg.work.sampling.logprobs,
            )
        await asyncio.sleep(0)


async def forever(leg: Leg) -> None:
    await asyncio.Event().wait()


async def first_then_silence(leg: Leg) -> None:
    leg.ticket_issued()
    leg.first(ord("a"))
    await asyncio.Event().wait()


async def some_then_silence(leg: Leg) -> None:
    await leg.ticket.wait()
    leg.handed_over()
    leg.tokens(1, ord("b"))
    await asyncio.Event().wait()


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Set `prefill`, `decode`, `refuse` or `describe` to change what it does. Everything held is in `held()`."""

    def __init__(self, role: str, worker_id: str = "") -> None:
        self.role = role
        self.id = worker_id or f"{role}-1"
        self.epoch = new_epoch()
        self.prefill: PrefillScript = prefill_answers
        self.decode: DecodeScript = decode_answers
        self.refuse: common_pb2.ErrorDetail | None = None
        self.on_reserve: Callable[[], Awaitable[None]] | None = None
        self.reservations: dict[tuple[str, int], str] = {}
        self.reserved: list[common_pb2.ReserveRequest] = []
        self.legs: dict[tuple[str, int], Leg] = {}
        self.submitted: list[Leg] = []
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.ended_choices: list[int] = []
        self.handovers: list[decode_pb2.Handover] = []
        self.hellos: list[common_pb2.Hello] = []
        self.described = self._describe()
        self.load = common_pb2.Load(pages_free=100, pages_total=100)
        self.address = ""
        self.advertised: dict[str, Any] = {"ready": True}  # further fields of its record
        self.described_times = 0  # how often it had to describe itself
        self.server: grpc.aio.Server | None = None
        self.agent: RegistryAgent | None = None
        self.outboxes: list[asyncio.Queue[Any]] = []
        self.seen = asyncio.Condition()

    def held(self) -> int:
        """Reservations and live attempts."""
        return len(self.reservations) + len(self.legs)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5), self.seen:
            await self.seen.wait_for(condition)

    async def _noticed(self) -> None:
        async with self.seen:
            self.seen.notify_all()

    # Worker

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeReply:  # noqa: N802
        self.described_times += 1
        return self.described

    def _describe(self) -> worker_pb2.DescribeReply:
        return worker_pb2.DescribeReply(
            worker_id=self.id,
            epoch=self.epoch,
            role=ROLES[self.role],
            model="oracle",
            model_fingerprint=FILES.fingerprint(),
            tokenizer_digest=FILES.tokenizer_digest,
            vocab_size=FILES.vocab_size,
            max_model_len=FILES.max_model_len,
            layout=layout(),
            features=["cancel_choices"],
            protocol_min=1,
            protocol_max=1,
        )

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainReply:  # noqa: N802
        return worker_pb2.DrainReply(running=len(self.legs))

    async def SetRole(self, request: Any, context: Any) -> worker_pb2.SetRoleReply:  # noqa: N802
        return worker_pb2.SetRoleReply(role=request.role)

    async def CacheEvents(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.CacheEventBatch]:  # noqa: N802
        yield worker_pb2.CacheEventBatch(snapshot=True, snapshot_end=True, epoch=self.epoch)

    def record(self) -> registry_pb2.WorkerRecord:
        return registry_pb2.WorkerRecord(
            worker_id=self.id,
            epoch=self.epoch,
            role=ROLES[self.role],
            address=self.address,
            model="oracle",
            **self.advertised,
        )

    # reservations

    async def reserve(self, request: common_pb2.ReserveRequest) -> common_pb2.ReserveReply:
        self.reserved.append(request)
        if self.on_reserve is not None:
            await self.on_reserve()
        if self.refuse is not None:
            return common_pb2.ReserveReply(refusal=self.refuse)
        key = (request.ref.request_id, request.ref.attempt)
        self.reservations[key] = f"r-{len(self.reserved)}"
        await self._noticed()
        return common_pb2.ReserveReply(reservation_id=self.reservations[key], expires_in_ms=5000)

    async def cancel_reservation(
        self, request: common_pb2.CancelReservationRequest
    ) -> common_pb2.CancelReservationReply:
        gone = self.reservations.pop((request.ref.request_id, request.ref.attempt), None)
        await self._noticed()
        return common_pb2.CancelReservationReply(released=gone is not None)

    # streams

    async def stream(self, commands: AsyncIterator[Any], message: type[Any], event: type[Any]) -> AsyncIterator[Any]:
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.outboxes.append(outbox)

        def emit(events: list[dict[str, Any]]) -> None:
            outbox.put_nowait(message(events=[event(**fields) for fields in events], load=self.load))

        reader = asyncio.create_task(self._read(commands, emit, outbox))
        try:
            while (item := await outbox.get()) is not None:
                yield item
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[Any], emit: Emit, outbox: asyncio.Queue[Any]) -> None:
        async for command in commands:
            kind = command.WhichOneof("command")
            body = getattr(command, kind)
            if kind == "hello":
                self.hellos.append(body)
                emit(
                    [
                        {
                            "welcome": common_pb2.Welcome(
                                worker_epoch=self.epoch, protocol=1, resumed=self._resumed(body, emit)
                            )
                        }
                    ]
                )
            elif kind == "submit":
                self._submit(command, emit)
            elif kind == "tokens":
                self.legs[(body.ref.request_id, body.ref.attempt)].work.tokens.extend(body.tokens)
            elif kind == "ticket":
                leg = self.legs.get((body.ref.request_id, body.ref.attempt))
                if leg is not None:
                    leg.ticket.set()
            elif kind == "handover":
                self._asked(body)
            elif kind == "cancel" and body.choices:
                self.ended_choices += body.choices
            elif kind in ("cancel", "release"):
                self._end(body, self.cancelled if kind == "cancel" else self.released)
            await self._noticed()
        outbox.put_nowait(None)

    def _asked(self, handover: decode_pb2.Handover) -> None:
        self.handovers.append(handover)
        leg = self.legs.get((handover.ref.request_id, handover.ref.attempt))
        if leg is not None:
            leg.wanted.append(handover.choice)
            leg.asked.set()

    def _resumed(self, hello: common_pb2.Hello, emit: Emit) -> list[common_pb2.AttemptRef]:
        known = []
        for entry in hello.resume:
            leg = self.legs.get((entry.ref.request_id, entry.ref.attempt))
            if leg is not None:
                leg.emit = emit
                known.append(entry.ref)
        return known

    def _submit(self, command: Any, emit: Emit) -> None:
        decode = isinstance(command, decode_pb2.DecodeCommand)
        work = command.submit.request if decode else command.submit
        key = (work.ref.request_id, work.ref.attempt)
        assert self.reservations.pop(key, "") == work.reservation_id, "submitted without a reservation"
        leg = Leg(work, emit, local=decode and command.submit.local, fence=command.submit.fence if decode else 0)
        self.legs[key] = leg
        self.submitted.append(leg)
        leg.task = asyncio.create_task(self._play(key, leg, self.decode if decode else self.prefill, decode))

    async def _play(self, key: tuple[str, int], leg: Leg, script: Any, decode: bool) -> None:
        await script(leg)
        if decode:
            self.legs.pop(key, None)
            await self._noticed()

    def _end(self, cancel: common_pb2.Cancel, into: list[str]) -> None:
        into.append(cancel.ref.request_id)
        leg = self.legs.pop((cancel.ref.request_id, cancel.ref.attempt), None)
        if leg is not None and leg.task is not None:
            leg.task.cancel()

    async def die(self) -> None:
        """What kill -9 looks like from outside: the streams break and the port refuses."""
        assert self.server is not None
        for leg in self.submitted:
            if leg.task is not None:
                leg.task.cancel()
        await self.server.stop(0)

    def break_streams(self) -> None:
        """The network drops what is open; the process lives."""
        outboxes, self.outboxes = self.outboxes, []
        for outbox in outboxes:
            outbox.put_nowait(None)

    def advertise(self, **changes: Any) -> None:
        assert self.agent is not None
        record = self.record()
        for name, value in changes.items():
            setattr(record, name, value)
        self.agent.update(record)


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker

    async def Reserve(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self.worker.reserve(request)

    async def CancelReservation(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self.worker.cancel_reservation(request)

    async def Open(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        async for message in self.worker.stream(request_iterator, prefill_pb2.PrefillEvents, prefill_pb2.PrefillEvent):
            yield message


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker

    async def Reserve(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self.worker.reserve(request)

    async def CancelReservation(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self.worker.cancel_reservation(request)

    async def Open(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        async for message in self.worker.stream(request_iterator, decode_pb2.DecodeEvents, decode_pb2.DecodeEvent):
            yield message
