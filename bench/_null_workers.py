"""Workers that take no time: the real protos and streams, tokens from a list. One process, one P and one D.

python -m bench._null_workers ROUTER_GRPC MODEL [TOKENS_PER_STEP] -> one line each: role and address, when it listens

Every step gives every running request its next token in one message; the next step begins when gRPC has taken the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import uvloop

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
from runtime import rpc
from runtime.config import Config
from runtime.ids import new_epoch
from runtime.modelfiles import ModelFiles
from runtime.registry.agent import RegistryAgent

TEXT = " The quick brown fox jumps over the lazy dog while seven wizards make toxic brew for the evil queen and jack."
LOAD = common_pb2.Load(pages_free=1 << 20, pages_total=1 << 20)
ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
LENGTH = common_pb2.FINISH_REASON_LENGTH


def layout() -> kvsource_pb2.Layout:
    part = kvsource_pb2.Component(
        name="kv", paged=True, units=1, layers=1, rows=2, tokens=16, token_bytes=8, dtype="u8"
    )
    return kvsource_pb2.Layout(version=1, page_tokens=16, chunk_tokens=512, components=[part], checksum="wsum64-v1")


class Describing(worker_pb2_grpc.WorkerServicer):
    def __init__(self, role: str, files: ModelFiles) -> None:
        self.epoch = new_epoch()
        self.reply = worker_pb2.DescribeReply(
            worker_id=f"null-{role}",
            epoch=self.epoch,
            role=ROLES[role],
            model=files.name,
            model_fingerprint=files.fingerprint(),
            tokenizer_digest=files.tokenizer_digest,
            vocab_size=files.vocab_size,
            max_model_len=files.max_model_len,
            layout=layout(),
            features=["stream_reserve", "cancel_choices"],
            protocol_min=1,
            protocol_max=1,
        )

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeReply:  # noqa: N802
        return self.reply

    async def Drain(self, request: Any, context: Any) -> worker_pb2.DrainReply:  # noqa: N802
        return worker_pb2.DrainReply()

    async def SetRole(self, request: Any, context: Any) -> worker_pb2.SetRoleReply:  # noqa: N802
        return worker_pb2.SetRoleReply(role=request.role)

    async def CacheEvents(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.CacheEventBatch]:  # noqa: N802
        yield worker_pb2.CacheEventBatch(snapshot=True, snapshot_end=True, epoch=self.epoch)
        await asyncio.Event().wait()


class Stream(ABC):
    """One Open call: commands in, steps out."""

    message: Any = None
    event: Any = None

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._said: deque[Any] = deque()
        self._wake = asyncio.Event()

    async def serve(self, commands: AsyncIterator[Any], write: Any) -> None:
        reader = asyncio.create_task(self._read(commands))
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while not reader.done():
                events = self._step()
                if events:
                    await write(self.message(events=events, load=LOAD))
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[Any]) -> None:
        async for message in commands:
            for command in message.batch or (message,):
                self._command(command)
            self._wake.set()

    def _command(self, command: Any) -> None:
        kind = command.WhichOneof("command")
        if kind == "hello":
            self._said.append(self.event(welcome=common_pb2.Welcome(worker_epoch=self._epoch, protocol=1)))
        elif kind == "reserve":
            reply = common_pb2.ReserveReply(reservation_id="r", expires_in_ms=5000)
            self._said.append(self.event(ref=command.reserve.ref, reserved=reply))
        else:
            self.take(kind, command)

    def _step(self) -> list[Any]:
        events = list(self._said)
        self._said.clear()
        return events

    @abstractmethod
    def take(self, kind: str, command: Any) -> None:
        """A command that is the service's own."""


class PrefillStream(Stream):
    message = prefill_pb2.PrefillEvents
    event = prefill_pb2.PrefillEvent

    def __init__(self, epoch: int, tokens: list[int]) -> None:
        super().__init__(epoch)
        self._tokens = tokens

    def take(self, kind: str, command: Any) -> None:
        if kind != "submit":
            return
        work = command.submit
        finish = LENGTH if work.sampling.max_tokens == 1 else common_pb2.FINISH_REASON_UNSPECIFIED
        first = [common_pb2.FirstToken(choice=c, token=self._tokens[0], finish=finish) for c in range(work.n)]
        ticket = prefill_pb2.TicketIssued(ticket=b"t" * 96, source_address="127.0.0.1:1")
        times = common_pb2.StageTimes(pid=1)
        self._said.append(self.event(ref=work.ref, ticket=ticket))
        self._said.append(self.event(ref=work.ref, done=prefill_pb2.PrefillDone(first=first, times=times)))


class DecodeStream(Stream):
    message = decode_pb2.DecodeEvents
    event = decode_pb2.DecodeEvent

    def __init__(self, epoch: int, tokens: list[int], per_step: int) -> None:
        super().__init__(epoch)
        self._tokens = tokens
        self._per_step = per_step
        self._waiting: dict[tuple[str, int], common_pb2.WorkRequest] = {}
        self._running: dict[tuple[str, int], list[Any]] = {}

    def take(self, kind: str, command: Any) -> None:
        if kind == "submit":
            work = command.submit.request
            self._waiting[(work.ref.request_id, work.ref.attempt)] = work
        elif kind == "ticket":
            ref = command.ticket.ref
            work = self._waiting.pop((ref.request_id, ref.attempt), None)
            if work is not None:
                self._said.append(self.event(ref=ref, handoff=decode_pb2.HandoffDone()))
                if work.sampling.max_tokens > 1:
                    self._running[(ref.request_id, ref.attempt)] = [work.ref, 1, work.sampling.max_tokens]
        elif kind == "cancel":
            key = (command.cancel.ref.request_id, command.cancel.ref.attempt)
            self._waiting.pop(key, None)
            self._running.pop(key, None)

    def _step(self) -> list[Any]:
        events = super()._step()
        tokens, count = self._tokens, self._per_step
        for key, state in list(self._running.items()):
            ref, sequence, limit = state
            upto = min(sequence + count, limit)
            made = decode_pb2.ChoiceTokens(
                first_sequence=sequence, tokens=[tokens[i % len(tokens)] for i in range(sequence, upto)]
            )
            if upto == limit:
                made.finish = LENGTH
                made.times.pid = 2
                del self._running[key]
            state[1] = upto
            events.append(self.event(ref=ref, tokens=made))
        return events


async def _reserve(request: Any, context: Any) -> common_pb2.ReserveReply:
    return common_pb2.ReserveReply(reservation_id="r", expires_in_ms=5000)


async def _unreserve(request: Any, context: Any) -> common_pb2.CancelReservationReply:
    return common_pb2.CancelReservationReply(released=True)


class _Service:
    """Reserve, CancelReservation and Open of either service."""

    def __init__(self, make: Any) -> None:
        self.Reserve = _reserve
        self.CancelReservation = _unreserve
        self._make = make

    async def Open(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        await self._make().serve(request_iterator, context.write)


async def serve(role: str, router: str, files: ModelFiles, tokens: list[int], per_step: int) -> None:
    config = Config(listen="127.0.0.1:0", registry=router)
    server = rpc.server(config)
    worker = Describing(role, files)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    if role == "prefill":
        service = _Service(lambda: PrefillStream(worker.epoch, tokens))
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)  # type: ignore[arg-type]
    else:
        service = _Service(lambda: DecodeStream(worker.epoch, tokens, per_step))
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server)  # type: ignore[arg-type]
    address = rpc.bind(server, config.listen, config)
    await server.start()
    record = registry_pb2.WorkerRecord(
        worker_id=f"null-{role}",
        epoch=worker.epoch,
        role=ROLES[role],
        address=address,
        model=files.name,
        ready=True,
    )
    print(role, address, flush=True)
    RegistryAgent(config, record).start()
    await server.wait_for_termination()


async def main(router: str, model: str, per_step: int) -> None:
    files = ModelFiles.open(model)
    tokens = files.encode(TEXT, allow_special=False, add_special_tokens=False)
    gc.freeze()
    await asyncio.gather(*(serve(role, router, files, tokens, per_step) for role in ROLES))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1))
