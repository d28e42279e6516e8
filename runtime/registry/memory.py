"""The embedded registry's store: plain dictionaries of one process and one event loop. Expiry is by the clock given."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from runtime.clock import Clock
from runtime.errors import InvalidRequest
from runtime.registry.store import (
    JOURNAL_ENTRIES,
    MAX_ENTRY_BYTES,
    MAX_WORKERS,
    JournalPage,
    Snapshot,
    WorkerRecord,
    checked,
    differs,
    superseded,
)


@dataclass(slots=True)
class _Held:
    record: WorkerRecord
    expires: float


@dataclass(slots=True)
class _Journal:
    entries: deque[bytes] = field(default_factory=deque)
    end: int = 0  # number of entries ever appended = cursor of the newest


@dataclass(slots=True)
class _Counter:
    value: int = 0
    expires: float = float("inf")


class MemoryStore:
    """Implements Store. Not thread-safe: all calls on one event loop."""

    def __init__(self, clock: Clock, journal_entries: int = JOURNAL_ENTRIES) -> None:
        self._clock = clock
        self._journal_entries = journal_entries
        self._held: dict[str, _Held] = {}
        self._journals: dict[str, _Journal] = {}
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

    async def append(self, journal: str, entry: bytes) -> str:
        if len(entry) > MAX_ENTRY_BYTES:
            raise InvalidRequest("the journal entry is too large", field="entry", limit=f"{MAX_ENTRY_BYTES} bytes")
        kept = self._journals.setdefault(journal, _Journal())
        kept.entries.append(entry)
        kept.end += 1
        if len(kept.entries) > self._journal_entries:
            kept.entries.popleft()
        return str(kept.end)

    async def read(self, journal: str, after: str = "", limit: int = 1000) -> JournalPage:
        kept = self._journals.get(journal, _Journal())
        oldest = kept.end - len(kept.entries)  # the cursor just before the oldest kept entry
        start = oldest if after == "" else int(after)
        gap = after != "" and not oldest < start <= kept.end
        start = oldest if gap else start
        skip = start - oldest
        entries = tuple(kept.entries)[skip : skip + limit]
        return JournalPage(entries, str(start + len(entries)) if start + len(entries) else "", gap)

    async def add(self, counter: str, delta: int = 1, ttl_s: float = 0.0) -> int:
        now = self._clock.monotonic()
        held = self._counters.get(counter)
        if held is None or held.expires <= now:
            held = self._counters[counter] = _Counter()
        held.value += delta
        if ttl_s > 0:
            held.expires = now + ttl_s
        return held.value

    async def close(self) -> None:
        self._wake()

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
