"""One worker as the router holds it: its channel, its two streams, what it last said, and what is in flight there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from kvtransfer.types import PAGE_TOKENS
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
from router.policy.pairing import Role, WorkerState
from router.pressure import Pressure
from router.workers.links import Answered, Asking, Key, Link
from runtime import rpc
from runtime.config import Config
from runtime.errors import PdserveError, WorkerLost

ROLES = {common_pb2.ROLE_PREFILL: Role.PREFILL, common_pb2.ROLE_DECODE: Role.DECODE, common_pb2.ROLE_BOTH: Role.BOTH}
DESCRIBE_TIMEOUT_S = 5.0
RESERVE_TIMEOUT_S = 5.0
AWAY_S = 5.0
"""Whoever went or came so long ago at most is waited for, where there is nobody else."""


class PrefillService:
    """The prefill stream's own words."""

    name = "prefill"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = prefill_pb2_grpc.PrefillStub(channel)
        opens: Any = channel.stream_stream  # commands come serialised; the stubs do not know that this may be
        self._open = opens("/pdserve.v1.Prefill/Open", response_deserializer=prefill_pb2.PrefillEvents.FromString)

    def open(self) -> Any:
        return self._open()

    def hello(self, hello: common_pb2.Hello) -> prefill_pb2.PrefillCommand:
        return prefill_pb2.PrefillCommand(hello=hello)

    def reserve(self, fill: Asking) -> prefill_pb2.PrefillCommand:
        command = prefill_pb2.PrefillCommand()
        fill(command.reserve)
        return command

    def unreserve(self, request: common_pb2.CancelReservationRequest) -> prefill_pb2.PrefillCommand:
        return prefill_pb2.PrefillCommand(cancel_reservation=request)

    def ack(self, ref: common_pb2.AttemptRef, next_sequence: list[int]) -> None:
        del ref, next_sequence  # nothing to forget before the leg is done


class DecodeService:
    """The decode stream's own words."""

    name = "decode"

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = decode_pb2_grpc.DecodeStub(channel)
        opens: Any = channel.stream_stream  # commands come serialised; the stubs do not know that this may be
        self._open = opens("/pdserve.v1.Decode/Open", response_deserializer=decode_pb2.DecodeEvents.FromString)

    def open(self) -> Any:
        return self._open()

    def hello(self, hello: common_pb2.Hello) -> decode_pb2.DecodeCommand:
        return decode_pb2.DecodeCommand(hello=hello)

    def reserve(self, fill: Asking) -> decode_pb2.DecodeCommand:
        command = decode_pb2.DecodeCommand()
        fill(command.reserve)
        return command

    def unreserve(self, request: common_pb2.CancelReservationRequest) -> decode_pb2.DecodeCommand:
        return decode_pb2.DecodeCommand(cancel_reservation=request)

    def ack(self, ref: common_pb2.AttemptRef, next_sequence: list[int]) -> decode_pb2.DecodeCommand:
        return decode_pb2.DecodeCommand(ack=decode_pb2.Ack(ref=ref, next_sequence=next_sequence))


@dataclass(slots=True, eq=False)
class Charge:
    """What one request adds to a worker's load in this router's forecast. Closed once, by its owner."""

    worker: Worker
    prefill_tokens: int
    requests: int

    def close(self) -> None:
        """Idempotent."""
        if self.requests:
            self.worker.give_back(self.prefill_tokens, self.requests)
        self.prefill_tokens = self.requests = 0


class Worker:
    """Owned by the fleet. `facts` is None until Describe has answered and everything fits."""

    def __init__(
        self,
        record: registry_pb2.WorkerRecord,
        config: Config,
        router_id: str,
        on_change: Callable[[], None],
        on_late: Callable[[], None],
        pressure: Pressure,
    ) -> None:
        self.record = record
        self._state: WorkerState | None = None
        self._standing: tuple[Role, bool, int] | None = None  # the part of it that requests do not change
        self.facts: worker_pb2.DescribeReply | None = None
        self.group = ""  # whoever shares it may exchange pages
        self.has_slots = False
        self.inflight_prefill_tokens = 0
        self.inflight_requests = 0
        self.served = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.lost = asyncio.Event()  # a stream is gone for good
        self.announced = asyncio.Event()  # its record says ready: before that, asking it is a waste
        self.refused = False  # it does not fit this router's model
        self._away_since = time.monotonic()
        self.heard(record)
        self._asking: set[asyncio.Future[common_pb2.ReserveReply]] = set()
        self._load = common_pb2.Load()
        self._then = (0, 0)  # what this router had here when that was reported
        self._config = config
        self._router_id = router_id
        self._on_change = on_change
        self._on_late = on_late
        self._pressure = pressure
        self._channel = rpc.channel(record.address, config)
        self._prefill_service = PrefillService(self._channel)
        self._decode_service = DecodeService(self._channel)
        self.prefill: Link[prefill_pb2.PrefillCommand] | None = None
        self.decode: Link[decode_pb2.DecodeCommand] | None = None

    def heard(self, record: registry_pb2.WorkerRecord) -> None:
        """What the registry says of it now."""
        self.record = record
        self.forgotten = False
        self.id = record.worker_id
        self._state = self._standing = None
        if record.ready:
            if not self.announced.is_set():
                self._away_since = time.monotonic()
            self.announced.set()
        else:
            self.announced.clear()

    @property
    def role(self) -> Role | None:
        """What it can be asked for now: of a worker that does both, what its streams are there for. So one that takes
        on a second role does not miss from its first while the new stream is being opened."""
        role = ROLES.get(self.record.role)
        if role is not Role.BOTH:
            return role
        prefills, decodes = (link is not None and link.connected.is_set() for link in (self.prefill, self.decode))
        if prefills == decodes:
            return role
        return Role.PREFILL if prefills else Role.DECODE

    def can(self, feature: str) -> bool:
        """Whether it named the feature in Describe."""
        return self.facts is not None and feature in self.facts.features

    async def describe(self) -> worker_pb2.DescribeReply:
        """Raises PdserveError."""
        stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        with rpc.translated():
            reply: worker_pb2.DescribeReply = await stub.Describe(
                worker_pb2.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S
            )
        return reply

    def connect(self, facts: worker_pb2.DescribeReply) -> None:
        """Open the streams its role needs. Called again when the role changes."""
        self._state = self._standing = None
        self.facts = facts
        self.group = layout_group(facts.layout)
        self.has_slots = any(not part.paged for part in facts.layout.components)
        role = ROLES.get(self.record.role)
        if role is not Role.DECODE and self.prefill is None:
            self.prefill = self._link(self._prefill_service, facts.epoch)
        if role is not Role.PREFILL and self.decode is None:
            self.decode = self._link(self._decode_service, facts.epoch)
        self.reported(facts.load)

    def reported(self, load: common_pb2.Load) -> None:
        """A load report from a stream, a record or Describe; an older one than the newest is ignored."""
        if load.sequence < self._load.sequence:
            return
        freer = (
            load.pages_free > self._load.pages_free
            or load.running < self._load.running
            or load.waiting < self._load.waiting
            or load.queued_prefill_tokens < self._load.queued_prefill_tokens
        )
        self._load.CopyFrom(load)
        self._then = (self.inflight_prefill_tokens, self.inflight_requests)
        self._state = None
        if freer:
            self._on_change()

    def charge(self, *, prefill_tokens: int = 0, requests: int = 0) -> Charge:
        self._state = None
        self.inflight_prefill_tokens += prefill_tokens
        self.inflight_requests += requests
        self.idle.clear()
        self.served += 1
        return Charge(self, prefill_tokens, requests)

    def give_back(self, prefill_tokens: int, requests: int) -> None:
        """What a Charge held."""
        self._state = None
        self.inflight_prefill_tokens -= prefill_tokens
        self.inflight_requests -= requests
        if not self.inflight_requests:
            self.idle.set()

    def state(self) -> WorkerState:
        """As it is now; made again only after a change, since every request looks at every worker."""
        if self._state is None:
            self._state = self._new_state()
        return self._state

    def _new_state(self) -> WorkerState:
        """What was reported, by whichever routers it came, and what this one has sent since."""
        prompts, requests = self.inflight_prefill_tokens - self._then[0], self.inflight_requests - self._then[1]
        if self._standing is None:
            self._standing = (self.role or Role.BOTH, self._usable(), self.facts.max_model_len if self.facts else 0)
        role, usable, max_model_len = self._standing
        return WorkerState(
            worker_id=self.id,
            role=role,
            usable=usable,
            prefill_load=max(self._load.queued_prefill_tokens + prompts, self.inflight_prefill_tokens),
            decode_load=max(self._load.running + self._load.waiting + requests, self.inflight_requests),
            pages_free=self._load.pages_free,
            max_model_len=max_model_len,
            group=self.group,
            served=self.served,
        )

    def room(self) -> tuple[int, int]:
        """(tokens its pages hold, its state slots), 0 = not known."""
        return PAGE_TOKENS * self._load.pages_total, self._load.slots_total

    @property
    def load(self) -> common_pb2.Load:
        """What it last reported of itself. Read only."""
        return self._load

    async def cache_events(self, epoch: int, sequence: int) -> AsyncIterator[worker_pb2.CacheEventBatch]:
        """Its cache's changes after `sequence` of `epoch`; 0 = a snapshot first. Raises grpc.RpcError."""
        stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        call = stub.CacheEvents(worker_pb2.CacheEventsRequest(after_sequence=sequence, epoch=epoch))
        try:
            async for batch in call:
                yield batch
        finally:
            call.cancel()

    @property
    def usable(self) -> bool:
        """Ready, compatible, and its streams are attached."""
        return self._usable()

    def returning(self, role: Role) -> bool:
        """It cannot be asked for that just now, and will be, as far as anybody knows: it says that it is there, and was
        until a moment ago, or has just come. So it is where a stream breaks because this router, or the machine, stood
        still, and where another process takes the place of one that died. Or, of a worker whose record has expired: it
        was late with it, for its streams are there."""
        record = self.record
        if not record.ready or record.draining or ROLES.get(record.role) not in (role, Role.BOTH) or self.refused:
            return False
        return self.usable is self.forgotten and time.monotonic() - self._away_since < AWAY_S

    def forget(self) -> None:
        """Its record has expired, or it has said goodbye."""
        self.forgotten = True
        self._away_since = time.monotonic()

    def _usable(self) -> bool:
        record = self.record
        if self.facts is None or self.role is None or not record.ready or record.draining or not record.address:
            return False
        needed: list[Link[Any] | None] = []
        if self.role is not Role.DECODE:
            needed.append(self.prefill)
        if self.role is not Role.PREFILL:
            needed.append(self.decode)
        return all(link is not None and link.connected.is_set() for link in needed)

    def reserve(self, leg: str, key: Key, fill: Asking, then: Answered) -> None:
        """leg: "prefill" or "decode". `then` is called once with the answer, or with PdserveError when there is none;
        after forget_reserve() only with that. What is granted after that is given back."""
        link: Link[Any] | None = self.prefill if leg == "prefill" else self.decode
        if link is not None and link.streams_reserve:
            link.reserve(key, fill, then)
            return
        request = common_pb2.ReserveRequest()
        fill(request)
        call = asyncio.ensure_future(self._reserve(leg, request))
        self._asking.add(call)

        def done(call: asyncio.Future[common_pb2.ReserveReply]) -> None:
            self._asking.discard(call)
            error = WorkerLost("the worker is gone") if call.cancelled() else call.exception()
            if error is None:
                then(call.result())
            else:
                then(error if isinstance(error, PdserveError) else PdserveError("internal error"))

        call.add_done_callback(done)

    def forget_reserve(self, leg: str, ref: common_pb2.AttemptRef) -> None:
        """The answer did not come in time: `then` hears of that now, and of nothing later. A unary call has a timeout
        of its own."""
        link: Link[Any] | None = self.prefill if leg == "prefill" else self.decode
        if link is not None:
            link.forget_reserve((ref.request_id, ref.attempt))

    async def _reserve(self, leg: str, request: common_pb2.ReserveRequest) -> common_pb2.ReserveReply:
        stub = self._stub(leg)
        timeout = min(RESERVE_TIMEOUT_S, request.remaining_ms / 1000)
        try:
            with rpc.translated():
                reply: common_pb2.ReserveReply = await stub.Reserve(request, timeout=timeout)
        except (asyncio.CancelledError, grpc.aio.UsageError) as exc:
            if _really_cancelled(exc):
                raise
            raise WorkerLost("the worker is gone") from exc
        return reply

    def cancel_reservation(
        self, leg: str, reservation_id: str, ref: common_pb2.AttemptRef
    ) -> Coroutine[Any, Any, None] | None:
        """Idempotent; what is left to await, if anything. A worker that does not answer lets it expire by itself."""
        request = common_pb2.CancelReservationRequest(reservation_id=reservation_id, ref=ref)
        link: Link[Any] | None = self.prefill if leg == "prefill" else self.decode
        if link is not None and link.streams_reserve:
            link.unreserve(request)
            return None
        return self._cancel_reservation(leg, request)

    async def _cancel_reservation(self, leg: str, request: common_pb2.CancelReservationRequest) -> None:
        try:
            with rpc.translated():
                await self._stub(leg).CancelReservation(request, timeout=RESERVE_TIMEOUT_S)
        except PdserveError:
            return
        except (asyncio.CancelledError, grpc.aio.UsageError) as exc:
            if _really_cancelled(exc):
                raise

    def _stub(self, leg: str) -> Any:
        return (self._prefill_service if leg == "prefill" else self._decode_service).stub

    def _link(self, service: Any, epoch: int) -> Link[Any]:
        link: Link[Any] = Link(
            service,
            self._router_id,
            epoch,
            self._config.reattach_s,
            on_load=self.reported,
            on_lost=lambda _: self.lost.set(),
            on_connected=self._link_changed,
            on_late=self._on_late,
            pressure=self._pressure,
            streams_reserve=self.can("stream_reserve"),
        )
        link.start()
        return link

    def _link_changed(self, connected: bool) -> None:
        self._state = self._standing = None
        self._away_since = time.monotonic()
        if connected:
            self._on_change()

    async def disconnect(self, error: PdserveError) -> None:
        """Close both streams; their requests are told. The worker may be connected again."""
        links = [link for link in (self.prefill, self.decode) if link is not None]
        self.prefill = self.decode = None
        self.facts = None
        self._state = self._standing = None
        for link in links:
            await link.close(error)

    async def close(self, error: PdserveError) -> None:
        await self.disconnect(error)
        await self._channel.close(None)


def _really_cancelled(exc: BaseException) -> bool:
    """gRPC raises CancelledError for a call whose channel was closed, too: only the task itself knows better."""
    task = asyncio.current_task()
    return isinstance(exc, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def layout_group(layout: kvsource_pb2.Layout) -> str:
    """Workers with equal values may exchange pages; parallel sizes may differ. Readable, for the refusal's text."""
    parts = [
        f"{part.name}:{part.units}x{part.layers}x{part.rows}x{part.tokens}x{part.token_bytes}:{part.dtype}:{part.codec}"
        for part in layout.components
    ]
    return (
        f"v{layout.version} page={layout.page_tokens} chunk={layout.chunk_tokens} "
        f"checksum={layout.checksum} {' '.join(sorted(parts))}"
    )
