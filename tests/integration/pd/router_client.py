"""A small router: speaks the protobuf contract to a prefill and a decode worker, and checks what it is told.

It holds workers to the invariants of the wire: sequence numbers contiguous, one terminal event, nothing after it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from runtime import ids, rpc
from runtime.errors import WorkerLost
from tests.integration.pd.workers import WorkerProcess

LONG = [(i * 13) % 250 for i in range(2000)]
SHORT = LONG[:100]

_numbers = itertools.count(1)


def prompt(length: int, seed: int) -> list[int]:
    """Tokens that no other seed's prompt begins with."""
    return [seed % 251, seed // 251, *((seed * 31 + i * 7) % 250 for i in range(2, length))][:length]


class Link:
    """One Open stream to one service of one worker. Events go to the queue of their request and attempt."""

    def __init__(self, worker: WorkerProcess, leg: str, router_id: str) -> None:
        self.worker = worker
        self.leg = leg
        self._router_id = router_id
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._queues: dict[tuple[str, int], asyncio.Queue[Any]] = {}
        self._welcomed: asyncio.Queue[common_pb2.Welcome] = asyncio.Queue()
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self.messages: list[Any] = []
        self.load = common_pb2.Load()
        self.error: grpc.aio.AioRpcError | None = None
        self.ended = asyncio.Event()

    async def open(self, *resume: common_pb2.Resume, epoch: int | None = None) -> common_pb2.Welcome:
        self.ended.clear()
        stub = self.worker.prefill if self.leg == "prefill" else self.worker.decode
        self._call = stub.Open()
        self._reader = asyncio.create_task(self._read(self._call))
        hello = common_pb2.Hello(
            router_id=self._router_id,
            worker_epoch=self.worker.epoch if epoch is None else epoch,
            protocol_min=1,
            protocol_max=1,
            resume=resume,
        )
        await self.send(hello=hello)
        got = asyncio.create_task(self._welcomed.get())
        ended = asyncio.create_task(self.ended.wait())
        await asyncio.wait([got, ended], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not got.done():
            got.cancel()
            assert self.error is not None, "neither welcomed nor refused"
            raise rpc.from_rpc_error(self.error)
        return got.result()

    async def send(self, **command: Any) -> None:
        kind = prefill_pb2.PrefillCommand if self.leg == "prefill" else decode_pb2.DecodeCommand
        async with self._writing:
            await self._call.write(kind(**command))

    def queue(self, ref: common_pb2.AttemptRef) -> asyncio.Queue[Any]:
        return self._queues.setdefault((ref.request_id, ref.attempt), asyncio.Queue())

    async def next(self, ref: common_pb2.AttemptRef, seconds: float = 60.0) -> Any:
        """The next event of an attempt; a lost stream raises its error."""
        get = asyncio.create_task(self.queue(ref).get())
        ended = asyncio.create_task(self.ended.wait())
        await asyncio.wait([get, ended], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if get.done():
            return get.result()
        get.cancel()
        if self.error is not None:
            raise rpc.from_rpc_error(self.error)
        if self.ended.is_set():  # a channel that was closed before the worker's end was heard of
            raise WorkerLost("the stream was cut")
        raise AssertionError(f"no event of {ref.request_id} within {seconds} s\n{self.worker.log()}")

    async def _read(self, call: Any) -> None:
        try:
            async for message in call:
                self.messages.append(message)
                self.load = message.load
                for event in message.events:
                    if event.WhichOneof("event") == "welcome":
                        self._welcomed.put_nowait(event.welcome)
                    else:
                        self.queue(event.ref).put_nowait(event)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        self.ended.set()

    async def cut(self) -> None:
        """Lose the stream, as a broken connection does."""
        self._call.cancel()
        if self._reader is not None:
            await self._reader

    async def close(self) -> None:
        """Say farewell."""
        if self._call is None or self.ended.is_set():
            return
        try:
            async with asyncio.timeout(5):
                await self._call.done_writing()
                await self.ended.wait()
        finally:
            self._call.cancel()


@dataclass
class Answer:
    """tokens per choice, from sequence len(tokens) - prompt_len on; times of both legs."""

    tokens: list[list[int]]
    finish: list[int]
    prefill: common_pb2.StageTimes | None = None
    handoff: common_pb2.StageTimes | None = None
    final: common_pb2.StageTimes | None = None
    prompt_scores: list[common_pb2.TokenLogprob] = field(default_factory=list)
    logprobs: list[list[common_pb2.TokenLogprob]] = field(default_factory=list)


@dataclass
class Collected:
    """Tokens as they arrive; drops what it has, refuses gaps."""

    base: int
    first_choice: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list[common_pb2.TokenLogprob]] = field(default_factory=dict)

    def first(self, first: Sequence[common_pb2.FirstToken]) -> None:
        for one in first:
            self.tokens.setdefault(one.choice, []).append(one.token)
            self.logprobs.setdefault(one.choice, []).append(one.logprob)
            if one.finish:
                self.finish[one.choice] = one.finish

    def add(self, event: decode_pb2.ChoiceTokens) -> None:
        have = self.tokens.setdefault(event.choice, [])
        expected = self.base + len(have)
        skip = expected - event.first_sequence
        assert 0 <= skip <= len(event.tokens), f"choice {event.choice}: {event.first_sequence} after {expected}"
        fresh = list(event.tokens)[skip:]
        assert not fresh or event.choice not in self.finish, "a token after the finish"
        have += fresh
        self.logprobs.setdefault(event.choice, []).extend(list(event.logprobs)[skip:])
        if event.finish:
            assert event.choice not in self.finish, "two finishes"
            self.finish[event.choice] = event.finish

    def next_sequence(self) -> list[int]:
        return [self.base + len(self.tokens.get(c, [])) for c in sorted(self.tokens)]


def request(tokens: Sequence[int], **options: Any) -> common_pb2.WorkRequest:
    """A request with a fresh id. options: WorkRequest fields, or Sampling fields by name."""
    sampling = common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, max_tokens=8)
    mine = {key: options.pop(key) for key in list(options) if key in common_pb2.Sampling.DESCRIPTOR.fields_by_name}
    for key, value in mine.items():
        if isinstance(value, list):
            getattr(sampling, key).extend(value)
        else:
            setattr(sampling, key, value)
    attempt = options.pop("attempt", 1)
    name = options.pop("request_id", "") or f"{ids.new_request_id()}-{next(_numbers)}"
    fields = {"n": 1, "prompt_len": len(tokens), "remaining_ms": 60_000, **options}
    return common_pb2.WorkRequest(
        ref=common_pb2.AttemptRef(request_id=name, attempt=attempt), tokens=tokens, sampling=sampling, **fields
    )


class Router:
    """Both streams to one pair (which may be one worker)."""

    def __init__(self, prefill: WorkerProcess, decode: WorkerProcess) -> None:
        router_id = ids.new_request_id()
        self.p = Link(prefill, "prefill", router_id)
        self.d = Link(decode, "decode", router_id)

    async def open(self) -> Router:
        await self.p.open()
        await self.d.open()
        return self

    async def close(self) -> None:
        await self.p.close()
        await self.d.close()

    async def local(self, work: common_pb2.WorkRequest) -> Answer:
        """Prefill and decode at D, without hand-off."""
        await self.d.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
        return await self._collect(work, Collected(len(work.tokens) - work.prompt_len, work.choice))

    async def submit_both(self, work: common_pb2.WorkRequest, fence: int = 1) -> None:
        await self.p.send(submit=work)
        await self.d.send(submit=decode_pb2.DecodeSubmit(request=work, fence=fence))

    async def forward(self, work: common_pb2.WorkRequest) -> prefill_pb2.TicketIssued:
        """P's ticket, passed on to D."""
        event = await self.p.next(work.ref)
        assert event.WhichOneof("event") == "ticket", event
        await self.d.send(ticket=decode_pb2.DecodeTicket(ref=work.ref, ticket=event.ticket))
        ticket: prefill_pb2.TicketIssued = event.ticket
        return ticket

    async def disaggregated(self, work: common_pb2.WorkRequest) -> Answer:
        """P computes, D pulls and decodes."""
        await self.submit_both(work)
        await self.forward(work)
        collected = Collected(len(work.tokens) - work.prompt_len, work.choice)
        scores: list[common_pb2.TokenLogprob] = []
        while (event := await self.p.next(work.ref)).WhichOneof("event") == "prompt_logprobs":
            assert event.prompt_logprobs.offset == 1 + len(scores)
            scores += event.prompt_logprobs.entries
        assert event.WhichOneof("event") == "done", event
        collected.first(event.done.first)
        answer = await self._collect(work, collected)
        answer.prefill, answer.prompt_scores = event.done.times, scores
        return answer

    async def _collect(self, work: common_pb2.WorkRequest, collected: Collected) -> Answer:
        choices = range(work.n) if work.n > 1 else range(work.choice, work.choice + 1)
        answer = Answer([], [])
        while answer.final is None:
            event = await self.d.next(work.ref)
            match event.WhichOneof("event"):
                case "tokens":
                    collected.add(event.tokens)
                    if event.tokens.HasField("times"):
                        answer.final = event.tokens.times
                case "handoff":
                    assert answer.handoff is None, "handed off twice"
                    answer.handoff = event.handoff.times
                case "prompt_logprobs":
                    answer.prompt_scores += event.prompt_logprobs.entries
                case _:
                    raise AssertionError(f"{event}\nP: {self.p.worker.log()}\nD: {self.d.worker.log()}")
        assert self.d.queue(work.ref).empty(), "events after the last one"
        answer.tokens = [collected.tokens[c] for c in choices]
        answer.finish = [collected.finish[c] for c in choices]
        answer.logprobs = [collected.logprobs[c] for c in choices]
        return answer

    async def cancel(self, work: common_pb2.WorkRequest) -> None:
        """What a router does when its client is gone: both legs, at once."""
        await self.p.send(cancel=common_pb2.Cancel(ref=work.ref, reason="client_gone"))
        await self.d.send(cancel=common_pb2.Cancel(ref=work.ref, reason="client_gone"))
