"""What the routers of a deployment know of workers' caches, kept in Redis for the next one.

Without it a new router asks every worker for its whole cache at once: each builds its snapshot under the lock its
engine needs. With it, one router (whoever holds the writer's share) keeps a log of each worker there: a snapshot and
what changed since, in the worker's own sequence numbers. A new router reads the logs and asks the workers only for what
came after; a log that is missing, old, of another life of the worker or not authentic costs one snapshot from the
worker, as before. So nothing here is ever waited for by a request, and nothing is lost with it.

It deliberately does not share bookings, speeds or expectations: those are corrected by what workers report.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from google.protobuf.message import DecodeError

from protos.v1 import worker_pb2
from router.policy.index import PrefixIndex
from router.shared.cache_wire import batch_of, snapshot_of
from router.shared.index_log import GENERATION_BYTES, Frames, Unreadable
from runtime.clock import Clock
from runtime.errors import InvalidRequest, RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry.pools import Wish
from runtime.registry.store import MAX_LOG_BYTES, MAX_READ_BYTES, Store

FLUSH_S = 0.25
WRITER_TTL_S = 3.0
KEEP_S = 900.0
"""A log that nobody wrote to for so long is forgotten."""

MAX_PENDING_BYTES = 4 << 20
"""Of one worker, while Redis does not take them; beyond that its log is written anew."""

GROWTH_BYTES = 1 << 20
"""A log of more than twice its snapshot and this is written anew."""

REWRITES_PER_FLUSH = 8
"""So that a router that becomes the writer of many logs has time for its streams."""

LOAD_S = 2.0
LOADS_AT_ONCE = 4
AWAY_S = 2.0
"""After a failed load the others ask their workers at once."""

_KEY_BYTES = 32
_log = structlog.get_logger("pdserve.router.shared_index")


@dataclass(slots=True)
class _Log:
    """One worker's log as its writer knows it. current: what is stored and pending is all that was heard."""

    frames: Frames
    generation: bytes = b""
    number: int = 0
    epoch: int = 0
    size: int = 0
    base: int = 0
    written_at: float = 0.0
    current: bool = False
    not_before: float = float("-inf")  # a cache that was too large is not tried again at once
    pending: list[bytes] = field(default_factory=list)
    pending_bytes: int = 0

    def seal(self, message: bytes) -> bytes:
        self.number += 1
        return self.frames.seal(self.generation, self.number - 1, message)

    def stale(self) -> None:
        """It will be written anew."""
        self.current = False
        self.pending, self.pending_bytes = [], 0


class SharedIndex:
    """load() and heard() are called by whoever follows a worker's feed. Owner calls start() and close()."""

    def __init__(
        self,
        store: Store,
        index: PrefixIndex,
        namespace: tuple[str, ...],
        secret: bytes,
        router_id: str,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._index = index
        self._namespace = namespace
        self._secret = secret
        self._router_id = router_id
        self._clock = clock
        self._writers = f"index-writer:{Frames(secret, namespace, '').name}"
        self._logs: dict[str, _Log] = {}
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)
        self._away_until = float("-inf")
        self._claimed_at = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.writing = False
        self._loaded = metrics.counter(
            "pdserve_router_index_logs", "Logs of workers' caches in Redis, by what came of reading them", ["outcome"]
        )
        self._written = metrics.counter("pdserve_router_index_log_bytes", "Bytes written to logs of workers' caches")

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="shared-index")

    async def close(self) -> None:
        """Leaves the logs, and the writer's share to whoever wants it."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self.writing:
            with suppress(RegistryUnavailable, TimeoutError):
                async with asyncio.timeout(WRITER_TTL_S):
                    await self._store.claim(self._writers, self._router_id, {}, WRITER_TTL_S)

    # --- reading --------------------------------------------------------------------------------------------------

    async def load(self, worker_id: str, group: str, epoch: int) -> bool:
        """Put what other routers know of this life of the worker into the index. False: nothing was taken."""
        async with self._loads:
            outcome = await self._load(worker_id, group, epoch)
        self._loaded.labels(outcome).inc()
        return outcome == "taken"

    async def _load(self, worker_id: str, group: str, epoch: int) -> str:
        if self._index.synced(worker_id) or self._clock.monotonic() < self._away_until:
            return "skipped"
        try:
            async with asyncio.timeout(LOAD_S):
                frames = self._of(worker_id, group).frames
                log = await self._whole(f"index:{frames.name}")
                batches = [await _parsed(message) for message in frames.messages(log)]
        except (RegistryUnavailable, TimeoutError):
            self._away_until = self._clock.monotonic() + AWAY_S
            return "unavailable"
        except (Unreadable, DecodeError):
            _log.warning("index_log_ignored", worker=worker_id)
            return "unreadable"
        if not batches or batches[-1].epoch != epoch:
            return "stale" if batches else "none"
        for batch in batches:
            if batch.epoch == epoch and not self._index.apply(worker_id, batch_of(batch)):
                return "unreadable"
            await asyncio.sleep(0)
        return "taken"

    async def _whole(self, name: str) -> bytes:
        """Raises Unreadable beyond what a router writes."""
        parts: list[bytes] = []
        size = 0
        while True:
            part = await self._store.read_log(name, size)
            parts.append(part)
            size += len(part)
            if size > MAX_LOG_BYTES:
                raise Unreadable("the log is too long")
            if len(part) < MAX_READ_BYTES:
                return b"".join(parts)

    # --- writing --------------------------------------------------------------------------------------------------

    def heard(self, worker_id: str, group: str, batch: worker_pb2.CacheEventBatch) -> None:
        """The index has taken this from the worker's feed."""
        log = self._of(worker_id, group)
        if not self.writing or not log.current:
            return
        if batch.snapshot or batch.epoch != log.epoch or log.pending_bytes > MAX_PENDING_BYTES:
            log.stale()
            return
        message = batch.SerializeToString()
        log.pending.append(message)
        log.pending_bytes += len(message)

    def left(self, worker_id: str) -> None:
        """Its log stays for a while: it may only have been this router that lost it."""
        self._logs.pop(worker_id, None)

    async def flush(self) -> None:
        """One turn of the writer, if this router is it or becomes it. Raises RegistryUnavailable."""
        await self._claim()
        if not self.writing:
            return
        for worker_id, log in self._due()[:REWRITES_PER_FLUSH]:
            await self._rewrite(worker_id, log)
        self._keep_alive()
        fresh = {f"index:{log.frames.name}": log for log in self._logs.values() if log.pending and log.current}
        if not fresh:
            return
        data = {name: _sealed(log) for name, log in fresh.items()}
        sizes = await self._store.append_logs(data, KEEP_S)
        self._written.inc(sum(map(len, data.values())))
        for name, log in fresh.items():
            log.size += len(data[name])
            log.written_at = self._clock.monotonic()
            if sizes[name] != log.size or log.size > 2 * log.base + GROWTH_BYTES:
                log.stale()  # somebody else wrote there, it was forgotten, or it has grown long

    async def _claim(self) -> None:
        now = self._clock.monotonic()
        if now - self._claimed_at < WRITER_TTL_S / 3:
            return
        claim = await self._store.claim(self._writers, self._router_id, {"writer": Wish(1, 1)}, WRITER_TTL_S)
        self._claimed_at = now
        writing = claim.shares["writer"].held == 1
        if writing != self.writing:
            _log.info("index_writer", writing=writing, workers=len(self._logs))
            self._forget_all()
        self.writing = writing

    def _due(self) -> list[tuple[str, _Log]]:
        now = self._clock.monotonic()
        return [
            (worker_id, log)
            for worker_id, log in self._logs.items()
            if not log.current and log.not_before <= now and self._index.synced(worker_id)
        ]

    async def _rewrite(self, worker_id: str, log: _Log) -> None:
        export = self._index.export(worker_id)
        if export is None:
            return
        log.stale()
        log.generation, log.number, log.epoch = secrets.token_bytes(GENERATION_BYTES), 0, export.epoch
        log.current = True  # what is heard from here on is pending
        parts = []
        for batch in snapshot_of(export):
            parts.append(log.seal(batch.SerializeToString()))
            await asyncio.sleep(0)
        try:
            await self._store.write_log(f"index:{log.frames.name}", parts, KEEP_S)
        except InvalidRequest:  # too large a cache: its worker is asked, as ever
            log.stale()
            log.not_before = self._clock.monotonic() + KEEP_S / 3
            return
        log.size = log.base = sum(map(len, parts))
        log.written_at = self._clock.monotonic()
        self._written.inc(log.size)

    def _keep_alive(self) -> None:
        """A cache in which nothing happens is known all the same."""
        for worker_id, log in self._logs.items():
            if log.current and not log.pending and self._clock.monotonic() - log.written_at > KEEP_S / 3:
                epoch, sequence = self._index.position(worker_id)
                nothing = worker_pb2.CacheEventBatch(first_sequence=sequence + 1, epoch=epoch)
                log.pending.append(nothing.SerializeToString())

    def _forget_all(self) -> None:
        for log in self._logs.values():
            log.stale()

    def _of(self, worker_id: str, group: str) -> _Log:
        log = self._logs.get(worker_id)
        if log is None:
            log = self._logs[worker_id] = _Log(Frames(self._secret, (*self._namespace, group), worker_id))
        return log

    async def _run(self) -> None:
        while not self._stopping:
            try:
                await self.flush()
            except RegistryUnavailable:  # what was stored is unknown now
                self._forget_all()
                self._claimed_at = float("-inf")
                self.writing = False
            except Exception as exc:  # noqa: BLE001  supervises: a fault over one log ends no other
                _log.error("index_flush_failed", exc_info=exc)
                self._forget_all()
            await asyncio.sleep(FLUSH_S)


def _sealed(log: _Log) -> bytes:
    data = b"".join(log.seal(message) for message in log.pending)
    log.pending, log.pending_bytes = [], 0
    return data


async def _parsed(message: bytes) -> worker_pb2.CacheEventBatch:
    """Raises DecodeError and Unreadable. Lets others run: a log may have many."""
    await asyncio.sleep(0)
    batch = worker_pb2.CacheEventBatch.FromString(message)
    if any(len(key) != _KEY_BYTES for event in batch.events for key in event.page_keys):
        raise Unreadable("a key is not a key")
    return batch
