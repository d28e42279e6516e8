"""An Open call without a socket: a router's end of a service's stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.unit.services.fakes import EPOCH


def work(
    request_id: str = "r1",
    attempt: int = 1,
    tokens: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 4,
    n: int = 1,
    prompt_len: int | None = None,
    **fields: Any,
) -> common_pb2.WorkRequest:
    """A plain greedy request; `fields` replace or add WorkRequest fields."""
    request = common_pb2.WorkRequest(
        ref=common_pb2.AttemptRef(request_id=request_id, attempt=attempt),
        tokens=tokens,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        sampling=common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, max_tokens=max_tokens),
        n=n,
        remaining_ms=60_000,
    )
    request.MergeFrom(common_pb2.WorkRequest(**fields))
    return request


def ref(request_id: str = "r1", attempt: int = 1) -> common_pb2.AttemptRef:
    return common_pb2.AttemptRef(request_id=request_id, attempt=attempt)


class Stream:
    """`command` and `events` classes are the service's; every event that arrives is put into one queue."""

    def __init__(self, service: Any, command: Any, router: str = "router-1") -> None:
        self._command = command
        self._router = router
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.messages: list[Any] = []
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self.call = asyncio.create_task(service.Open(self._commands(), self))

    async def _commands(self) -> AsyncIterator[Any]:
        while (command := await self._incoming.get()) is not None:
            yield command

    async def write(self, message: Any) -> None:
        self.messages.append(message)
        for event in message.events:
            self._events.put_nowait(event)

    def send(self, **command: Any) -> None:
        self._incoming.put_nowait(self._command(**command))

    async def open(self, *resume: common_pb2.Resume) -> common_pb2.Welcome:
        hello = common_pb2.Hello(router_id=self._router, worker_epoch=EPOCH, protocol_min=1, protocol_max=1)
        hello.resume.extend(resume)
        self.send(hello=hello)
        event = await self.next()
        assert event.WhichOneof("event") == "welcome"
        return event.welcome  # type: ignore[no-any-return]

    async def next(self) -> Any:
        async with asyncio.timeout(2):
            return await self._events.get()

    async def settle(self) -> None:
        """Until the service has taken every command that was sent, and said what it had to."""
        for _ in range(20):
            await asyncio.sleep(0)

    def silent(self) -> bool:
        return self._events.empty()

    async def drop(self) -> None:
        self.call.cancel()
        await asyncio.wait([self.call])


def prefill_stream(service: Any, router: str = "router-1") -> Stream:
    return Stream(service, prefill_pb2.PrefillCommand, router)


def decode_stream(service: Any, router: str = "router-1") -> Stream:
    return Stream(service, decode_pb2.DecodeCommand, router)
