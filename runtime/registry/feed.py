"""The router's view of the registry: who came, who changed, who went.

Each turn lists everything and compares, so a missed notice costs one turn and never a stale worker for hours; notices
only make the turn come early. While the store is away the last view stays (fail-static), and when it is back nobody is
declared gone for one TTL: a restarted, empty store fills up again as workers renew. The same holds for one worker whose
record somebody has spoiled, and for all of them when it was this process that stood still: their renewals wait to be
read, and a machine that stood still has kept the workers from sending any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from runtime.clock import Clock
from runtime.errors import RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry.store import Store, WorkerRecord

_TURNS_PER_TTL = 4
_LATE_SHARE = 0.5
"""Of a TTL between two turns, and this process did not get to run as it should."""
_log = structlog.get_logger("pdserve.registry")


class Feed:
    """Calls back on the event loop: added(record), changed(old, new), removed(record).

    A worker that comes back with another epoch is removed, then added. Callbacks must not raise.
    `workers` is the current view; `synced` is set once the first listing succeeded.
    """

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        clock: Clock,
        *,
        added: Callable[[WorkerRecord], None],
        changed: Callable[[WorkerRecord, WorkerRecord], None],
        removed: Callable[[WorkerRecord], None],
        metrics: Metrics | None = None,
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._clock = clock
        self._added = added
        self._changed = changed
        self._removed = removed
        self._grace_until = 0.0
        self._looked_at: float | None = None
        self._cursor = ""
        self._spoiled: dict[str, float] = {}
        self._incarnation = ""
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.workers: dict[str, WorkerRecord] = {}
        self.available = True
        self.synced = asyncio.Event()
        metrics = metrics or Metrics()
        self._outages = metrics.counter("pdserve_registry_outages", "Times the registry store stopped answering")
        self._known = metrics.gauge("pdserve_registry_workers", "Workers in the router's view")

    def start(self) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name="registry-feed")

    async def stop(self) -> None:
        self._stopping = True  # cancelling alone is not enough: the Redis client has been seen to swallow it
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def turn(self) -> None:
        """List and compare once. An unavailable store changes nothing."""
        try:
            snapshot = await self._store.snapshot()
        except RegistryUnavailable:
            if self.available:
                _log.warning("registry_unavailable", workers=len(self.workers))
                self._outages.inc()
            self.available = False
            return
        emptied = bool(self._incarnation) and snapshot.incarnation != self._incarnation
        self._incarnation = snapshot.incarnation
        if not self.available or emptied:
            self.available = True
            self._grace_until = self._clock.monotonic() + self._ttl_s
            _log.info("registry_back", workers=len(snapshot.records))
        self._cursor = snapshot.cursor
        now = self._clock.monotonic()
        self._spoiled = {worker: self._spoiled.get(worker, now) for worker in snapshot.unreadable}
        self._compare(snapshot.records)
        self.synced.set()

    def _mind_the_gap(self) -> None:
        """Called once a turn."""
        now = self._clock.monotonic()
        if self._looked_at is not None and now - self._looked_at > _LATE_SHARE * self._ttl_s:
            self._grace_until = now + self._ttl_s
            _log.warning("registry_feed_late", seconds=round(now - self._looked_at, 1))
        self._looked_at = now

    def _compare(self, records: dict[str, WorkerRecord]) -> None:
        now = self._clock.monotonic()
        for worker_id, old in list(self.workers.items()):
            new = records.get(worker_id)
            in_grace = now < max(self._grace_until, self._spoiled.get(worker_id, float("-inf")) + self._ttl_s)
            if (new is None and not in_grace) or (new is not None and new.epoch != old.epoch):
                del self.workers[worker_id]
                self._removed(old)
        for worker_id, new in records.items():
            known = self.workers.get(worker_id)
            self.workers[worker_id] = new
            if known is None:
                self._added(new)
            elif known != new:
                self._changed(known, new)
        self._known.set(len(self.workers))

    async def _run(self) -> None:
        while not self._stopping:
            self._mind_the_gap()
            try:
                await self.turn()
            except Exception as exc:  # noqa: BLE001  supervises: a fault over one worker hides no other from the router
                _log.error("turn_failed", exc_info=exc)
            pause = self._ttl_s / _TURNS_PER_TTL
            if not self.available:
                await asyncio.sleep(min(pause, 0.5))
                continue
            with suppress(RegistryUnavailable):  # the next turn finds out and counts it
                await self._store.wait(self._cursor, pause)
