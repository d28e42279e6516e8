"""The embedded registry's store: plain dictionaries of one process and one event loop. Expiry is by the clock given."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.clock import Clock
from runtime.errors import InvalidRequest
from runtime.registry.pools import Claim, Pool, Wish
from runtime.registry.store import (
    MAX_READ_BYTES,
    MAX_WORKERS,
    Snapshot,
    WorkerRecord,
    bounded,
    checked,
    differs,
    superseded,
)


@dataclass(slots=True)
class _Held:
    record: WorkerRecord
    expires: float


@dataclass(slots=True)
class _Log:
    data: bytes
    expires: float


@dataclass(slots=True)
class _Counter:
    value: int
    expires: float


class MemoryStore:
    """Implements Store. Not thread-safe: all calls on one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._logs: dict[str, _Log] = {}
        self._pools: dict[str, Pool] = {}
        self._counters: dict[str, _Counter] = {}
        self._version = 0
        self._moved = asyncio.Event()

    async def put(self, record: WorkerRecord, ttl_s: float) -> None:
        self._expire()
        held = self._held.get(checked(record).worker_id)
        if held and held.record.epoch > record.epoch:
            raise superseded()
        if held is None and len(self._held) >= MAX_WORKERS:
            raise InvalidRequest("too many workers", field="worker_id", limit=f"{MAX_WORKERS} workers")
        copy = WorkerRecord()
        copy.CopyFrom(record)
        self._held[record.worker_id] = _Held(copy, self._clock.monotonic() + ttl_s)
        if differs(held.record if held else None, record):
            self._wake()

    async def remove(self, worker_id: str, epoch: int) -> bool:
        self._expire()
        held = self._held.get(worker_id)
        if held is None or held.record.epoch > epoch:
            return False
        del self._held[worker_id]
        self._wake()
        return True

    async def snapshot(self) -> Snapshot:
        self._expire()
        return Snapshot({key: held.record for key, held in self._held.items()}, str(self._version))

    async def wait(self, cursor: str, timeout_s: float) -> None:
        if cursor != str(self._version):
            return
        moved = self._moved
        try:
            async with asyncio.timeout(timeout_s):
                await moved.wait()
        except TimeoutError:
            return

    async def write_log(self, log: str, parts: Sequence[bytes], ttl_s: float) -> None:
        self._logs[log] = _Log(b"".join(bounded(parts)), self._clock.monotonic() + ttl_s)

    async def append_logs(self, items: Mapping[str, bytes], ttl_s: float) -> Mapping[str, int]:
        for log, data in items.items():
            self._logs[log] = _Log(self._log(log) + data, self._clock.monotonic() + ttl_s)
        return {log: len(self._logs[log].data) for log in items}

    async def read_log(self, log: str, start: int) -> bytes:
        return self._log(log)[start : start + MAX_READ_BYTES]

    async def claim(self, pool: str, holder: str, wishes: Mapping[str, Wish], ttl_s: float) -> Claim:
        now_ms = int(self._clock.monotonic() * 1000)
        return self._pools.setdefault(pool, Pool()).claim(holder, wishes, now_ms, int(ttl_s * 1000))

    async def add(self, deltas: Mapping[str, int], ttl_s: float) -> Mapping[str, int]:
        now = self._clock.monotonic()
        for name, delta in deltas.items():
            held = self._counters.get(name)
            value = held.value if held is not None and held.expires > now else 0
            self._counters[name] = _Counter(value + delta, now + ttl_s)
        return {name: self._counters[name].value for name in deltas}

    async def close(self) -> None:
        self._wake()

    def _log(self, log: str) -> bytes:
        held = self._logs.get(log)
        return held.data if held is not None and held.expires > self._clock.monotonic() else b""

    def _expire(self) -> None:
        now = self._clock.monotonic()
        dead = [key for key, held in self._held.items() if held.expires <= now]
        for key in dead:
            del self._held[key]
        if dead:
            self._wake()

    def _wake(self) -> None:
        self._version += 1
        self._moved.set()
        self._moved = asyncio.Event()
