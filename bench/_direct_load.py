"""What a hand-off between the null workers takes a program that does nothing else: the router's messages, no router.

python -m bench._direct_load PREFILL DECODE MODEL CONCURRENCY SECONDS RATE SEED -> a line of JSON, as bench._http_load's

Reserve at both, submit to both, hand the ticket on, and wait for the last token: the same messages over the same kind
of streams, from a process on the router's core. Its share of gRPC is in the figure, as the router's is in the router's.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

import grpc
import uvloop

from bench._http_load import QUESTION, Pace, summary
from protos.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from runtime import rpc
from runtime.config import Config
from runtime.ids import new_request_id
from runtime.modelfiles import ModelFiles

TOKENS = 4
_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009  the stubs do not know it


class Stream:
    """One Open call: what is sent, and who waits for what comes."""

    def __init__(self, call: Any, command: Any) -> None:
        self._call = call
        self._command = command
        self._waiting: deque[Any] = deque()
        self._wake = asyncio.Event()
        self.on_event: Any = None
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self, epoch: int) -> None:
        hello = common_pb2.Hello(router_id="direct", worker_epoch=epoch, protocol_min=1, protocol_max=1)
        await self._call.write(self._command(hello=hello))
        await self._call.read()
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def send(self, **command: Any) -> None:
        self._waiting.append(self._command(**command))
        self._wake.set()

    async def _write(self) -> None:
        while True:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            while self._waiting:
                waiting = list(self._waiting)
                self._waiting.clear()
                await self._call.write(waiting[0] if len(waiting) == 1 else self._command(batch=waiting))

    async def _read(self) -> None:
        while (message := await self._call.read()) is not _EOF:
            for event in message.events:
                self.on_event(event)


class Direct:
    """Both streams, and the requests that run over them."""

    def __init__(self, prefill: Stream, decode: Stream, prompt: list[int]) -> None:
        self._prefill, self._decode = prefill, decode
        prefill.on_event, decode.on_event = self._from_prefill, self._from_decode
        self._prompt = prompt
        self._reserved: dict[str, tuple[asyncio.Future[None], list[int]]] = {}
        self._done: dict[str, asyncio.Future[None]] = {}

    async def request(self) -> None:
        loop = asyncio.get_running_loop()
        ref = common_pb2.AttemptRef(request_id=new_request_id(), attempt=1)
        reserved, self._done[ref.request_id] = loop.create_future(), loop.create_future()
        self._reserved[ref.request_id] = (reserved, [2])
        needs = common_pb2.Needs(prompt_tokens=len(self._prompt), choices=1)
        ask = common_pb2.ReserveRequest(ref=ref, router_id="direct", needs=needs, remaining_ms=600_000)
        self._prefill.send(reserve=ask)
        self._decode.send(reserve=ask)
        await reserved
        work = common_pb2.WorkRequest(
            ref=ref,
            tokens=self._prompt,
            prompt_len=len(self._prompt),
            sampling=common_pb2.Sampling(max_tokens=TOKENS),
            n=1,
            reservation_id="r",
            remaining_ms=600_000,
        )
        self._prefill.send(submit=work)
        self._decode.send(submit=decode_pb2.DecodeSubmit(request=work, fence=1))
        await self._done[ref.request_id]
        del self._done[ref.request_id]

    def _granted(self, request_id: str) -> None:
        reserved, left = self._reserved[request_id]
        left[0] -= 1
        if not left[0]:
            del self._reserved[request_id]
            reserved.set_result(None)

    def _from_prefill(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        if kind == "reserved":
            self._granted(event.ref.request_id)
        elif kind == "ticket":
            self._decode.send(ticket=decode_pb2.DecodeTicket(ref=event.ref, ticket=event.ticket))

    def _from_decode(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        if kind == "reserved":
            self._granted(event.ref.request_id)
        elif kind == "tokens" and event.tokens.finish:
            self._done[event.ref.request_id].set_result(None)


async def main(
    prefill: str, decode: str, model: str, concurrency: int, seconds: float, rate: float, seed: int
) -> dict[str, Any]:
    prompt = ModelFiles.open(model).encode(QUESTION, allow_special=True)
    channels = [rpc.channel(address, Config()) for address in (prefill, decode)]
    p_stub: Any = prefill_pb2_grpc.PrefillStub(channels[0])
    d_stub: Any = decode_pb2_grpc.DecodeStub(channels[1])
    streams = [Stream(p_stub.Open(), prefill_pb2.PrefillCommand), Stream(d_stub.Open(), decode_pb2.DecodeCommand)]
    for stream in streams:
        await stream.open(0)
    direct = Direct(streams[0], streams[1], prompt)
    for _ in range(20):
        await direct.request()  # everything is warm
    latencies: list[float] = []
    started = time.perf_counter()
    pace = Pace(started + seconds, concurrency / rate, seed)

    async def connection(number: int) -> None:
        async for begun in pace.starts(number):
            await direct.request()
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(connection(number) for number in range(concurrency)))
    for stream in streams:
        for task in stream.tasks:
            task.cancel()
    for channel in channels:
        await channel.close(None)
    return summary(latencies, every=True)


if __name__ == "__main__":
    count, length, per_s, series = (float(given) for given in sys.argv[4:8])
    print(json.dumps(uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(count), length, per_s, int(series)))))
