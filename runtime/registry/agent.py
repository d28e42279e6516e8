"""The worker's side of the registry: keep one record registered, for ever, whatever happens to the other end.

The record is sent at once when it changes and renewed three times a TTL. A registry that is away is tried again with
growing pauses, without end; the worker goes on serving meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any, Protocol

import grpc
import structlog

from protos.v1 import registry_pb2, registry_pb2_grpc
from runtime import rpc
from runtime.config import Config
from runtime.errors import PdserveError, RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry import is_redis, open_redis
from runtime.registry.service import RENEWALS_PER_TTL, credentials
from runtime.registry.store import Store, WorkerRecord, checked

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_FAREWELL_S = 1.0

_log = structlog.get_logger("pdserve.registry")


class _Session(Protocol):
    """One connection to a registry. send() returns when the registry has the record, with the seconds to the next
    renewal; raises PdserveError."""

    async def send(self, record: WorkerRecord) -> float: ...

    async def close(self) -> None: ...


class RegistryAgent:
    """Keeps `record` registered at config.registry ("host:port" or "redis://..."). Owner calls start() and stop().

    `registered` is set while the registry knows the newest state; it is one of a worker's readiness checks.
    """

    def __init__(self, config: Config, record: WorkerRecord, metrics: Metrics | None = None) -> None:
        assert config.registry, "an agent needs a registry address"
        self._config = config
        self._metrics = metrics or Metrics()
        self._record = _copy(checked(record))
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.registered = asyncio.Event()
        self._losses = self._metrics.counter("pdserve_registry_losses", "Times the registry could not be reached")

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="registry-agent")

    def update(self, record: WorkerRecord) -> None:
        """Replace the record; sent at once. The worker id and the epoch must stay. Event loop thread only."""
        assert (record.worker_id, record.epoch) == (self._record.worker_id, self._record.epoch)
        self._record = _copy(checked(record))
        self._changed.set()

    async def stop(self) -> None:
        """Say goodbye if the registry is there (within a second), then end. Idempotent."""
        self._stopping.set()
        self._changed.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            session = _GrpcSession(self._config) if not is_redis(self._config.registry) else self._redis_session()
            try:
                await self._keep(session)
            except PdserveError as exc:
                if self.registered.is_set():
                    pause = _FIRST_PAUSE_S
                self._lost(exc, pause)
                await self._sleep(pause * random.uniform(0.75, 1.25))
                pause = min(pause * 2, _LONGEST_PAUSE_S)
            finally:
                self.registered.clear()
                await session.close()

    async def _keep(self, session: _Session) -> None:
        """Register and renew until told to stop, then say goodbye."""
        while not self._stopping.is_set():
            self._changed.clear()
            renew_s = await session.send(self._record)
            if not self.registered.is_set():
                _log.info("registered", worker=self._record.worker_id)
                self.registered.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(renew_s):
                    await self._changed.wait()
        farewell = _copy(self._record)
        farewell.gone = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await session.send(farewell)

    def _redis_session(self) -> _Session:
        return _StoreSession(open_redis(self._config, self._metrics), self._config.registry_ttl_s)

    def _lost(self, exc: PdserveError, pause: float) -> None:
        self._losses.inc()
        _log.warning("registry_lost", reason=exc.reason, retry_in_s=round(pause, 1))

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


class _GrpcSession:
    """A Register stream; every record waits for its acknowledgement."""

    def __init__(self, config: Config) -> None:
        self._ack_s = config.registry_ttl_s
        self._channel = rpc.channel(config.registry, config)
        open_stream: Any = registry_pb2_grpc.RegistryStub(self._channel).Register  # the stubs ask for an iterator
        self._call: grpc.aio.StreamStreamCall[WorkerRecord, registry_pb2.RegisterAck] = open_stream(
            metadata=credentials(config)
        )

    async def send(self, record: WorkerRecord) -> float:
        try:
            async with asyncio.timeout(self._ack_s):
                await self._call.write(record)
                ack = await self._call.read()
        except TimeoutError as exc:  # frozen, or gone without a trace
            raise RegistryUnavailable("the registry does not answer") from exc
        except grpc.RpcError as exc:
            raise rpc.from_rpc_error(exc) from exc
        except asyncio.InvalidStateError as exc:  # the stream ended between two renewals
            raise RegistryUnavailable("the registry closed the stream") from exc
        if not isinstance(ack, registry_pb2.RegisterAck):
            raise RegistryUnavailable("the registry closed the stream")
        return max(0.001, ack.renew_every_ms / 1000)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)


class _StoreSession:
    """Straight into a store that is not at the router."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s

    async def send(self, record: WorkerRecord) -> float:
        if record.gone:
            await self._store.remove(record.worker_id, record.epoch)
        else:
            await self._store.put(record, self._ttl_s)
        return self._ttl_s / RENEWALS_PER_TTL

    async def close(self) -> None:
        await self._store.close()


def _copy(record: WorkerRecord) -> WorkerRecord:
    copy = WorkerRecord()
    copy.CopyFrom(record)
    return copy
