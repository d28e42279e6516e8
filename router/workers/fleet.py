"""The router's view of its workers: fed by the registry, confirmed by Describe, kept current by the streams.

A record is a hint. A worker counts only after it has described itself with the router's model and tokenizer, and while
its streams are attached; a record that says not ready or draining takes it out at once, without touching what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from protos.v1 import common_pb2, registry_pb2, worker_pb2
from router.policy.pairing import Role, WorkerState
from router.pressure import Pressure
from router.workers.links import PROTOCOL_MAX, PROTOCOL_MIN
from router.workers.worker import Worker
from runtime.config import Config
from runtime.errors import LayoutMismatch, PdserveError, WorkerLost
from runtime.metrics import Metrics

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0

_log = structlog.get_logger("pdserve.router.fleet")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a worker must agree on to serve this router's model. page_tokens is the fleet constant."""

    tokenizer_digest: str
    fingerprint: str
    vocab_size: int
    page_tokens: int

    def check(self, facts: worker_pb2.DescribeReply) -> None:
        """Raises LayoutMismatch naming both values."""
        pairs = (
            ("tokenizer_digest", self.tokenizer_digest, facts.tokenizer_digest),
            ("model_fingerprint", self.fingerprint, facts.model_fingerprint),
            ("vocab_size", str(self.vocab_size), str(facts.vocab_size)),
            ("page_tokens", str(self.page_tokens), str(facts.layout.page_tokens)),
        )
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise LayoutMismatch(
                    f"{name} differs: router {ours[:64]}, worker {theirs[:64]}", reason=f"{name}_mismatch"
                )
        if facts.protocol_max < PROTOCOL_MIN or facts.protocol_min > PROTOCOL_MAX:
            raise LayoutMismatch(
                f"protocol differs: router {PROTOCOL_MIN}..{PROTOCOL_MAX}, "
                f"worker {facts.protocol_min}..{facts.protocol_max}",
                reason="protocol_mismatch",
            )


class Fleet:
    """added/changed/removed are the registry feed's callbacks. `changed_event()` wakes whoever waits for capacity."""

    def __init__(self, config: Config, router_id: str, expected: Expected, metrics: Metrics) -> None:
        self._config = config
        self._router_id = router_id
        self._expected = expected
        self._workers: dict[str, Worker] = {}
        self._retired: dict[str, Worker] = {}
        self._keepers: dict[Worker, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self.pressure = Pressure()
        self.on_joined: Callable[[Worker], None] | None = None
        self.on_left: Callable[[Worker], None] | None = None
        self.on_reported: Callable[[Worker, common_pb2.Load], None] | None = None  # with the record, tiers and all
        self._refused = metrics.counter(
            "pdserve_router_workers_refused", "Workers that do not fit this router's model", ["reason"]
        )
        self._late = metrics.counter("pdserve_router_late_events", "Events of requests that were over, dropped")
        self._usable = metrics.gauge("pdserve_router_workers_usable", "Workers that can be chosen", ["role"])
        self._inflight = metrics.gauge(
            "pdserve_router_worker_inflight", "Requests of this router at a worker", ["worker"]
        )

    # the feed's callbacks

    def added(self, record: registry_pb2.WorkerRecord) -> None:
        if record.worker_id in self._workers:
            self.removed(self._workers[record.worker_id].record)
        worker = self._revived(record)
        if worker is None:
            worker = Worker(record, self._config, self._router_id, self._notify, self._late.inc, self.pressure)
            self._keepers[worker] = asyncio.create_task(self._keep(worker), name=f"worker-{worker.id}")
        self._workers[worker.id] = worker
        self._notify()

    def changed(self, old: registry_pb2.WorkerRecord, record: registry_pb2.WorkerRecord) -> None:
        worker = self._workers.get(record.worker_id)
        if worker is None or record.address != old.address:
            if worker is not None:
                self.removed(old)
            self.added(record)
            return
        worker.heard(record)
        worker.reported(record.load)
        if self.on_reported is not None:
            self.on_reported(worker, record.load)
        if worker.facts is not None:
            worker.connect(worker.facts)
        if (old.ready, old.draining, old.role) != (record.ready, record.draining, record.role):
            self._notify()

    def removed(self, record: registry_pb2.WorkerRecord) -> None:
        """Nothing new goes there. What runs there goes on: a record that was not renewed in time proves nothing, and
        a worker that is really gone breaks its streams."""
        worker = self._workers.pop(record.worker_id, None)
        if worker is None:
            return
        self._retired[worker.id] = worker
        worker.forget()
        closing = asyncio.create_task(self._retire(worker))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        with contextlib.suppress(KeyError):
            self._inflight.remove(worker.id)
        self._notify()

    # what dispatch asks

    def states(self) -> list[WorkerState]:
        return [worker.state() for worker in self._workers.values()]

    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def worker(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def returning(self, role: Role) -> bool:
        """Somebody who can be asked for that may be back in a moment."""
        return any(worker.returning(role) for worker in (*self._workers.values(), *self._retired.values()))

    def changed_event(self) -> asyncio.Event:
        """Set once at the next change that may make room. Take it before looking, wait after."""
        return self._change

    def ready(self) -> bool:
        """At least one pair, or one worker that does both, can be chosen."""
        usable = [state for state in self.states() if state.usable]
        prefill = {state.group for state in usable if state.role.value != "decode"}
        decode = {state.group for state in usable if state.role.value != "prefill"}
        return bool(prefill & decode)

    def observe(self) -> None:
        """Bring the gauges up to date (when they are read)."""
        states = self.states()
        for role in ("prefill", "decode", "both"):
            self._usable.labels(role).set(sum(state.usable and state.role.value == role for state in states))
        for worker in self._workers.values():
            self._inflight.labels(worker.id).set(worker.inflight_requests)

    async def close(self) -> None:
        for closing in self._closing:
            closing.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await asyncio.gather(*(self._close(worker) for worker in list(self._keepers)))

    # keeping a worker connected

    async def _keep(self, worker: Worker) -> None:
        """Describe, connect, wait until lost, again: until the registry says it is gone."""
        pause = RETRY_FIRST_S
        while True:
            await worker.announced.wait()
            worker.lost.clear()
            try:
                await self._admit(worker)
                pause = RETRY_FIRST_S
                await worker.lost.wait()
                await worker.disconnect(WorkerLost("the worker is gone"))
                self._notify()
            except PdserveError as error:
                _log.info("worker_not_usable", worker=worker.id, reason=error.reason, message=error.message)
            except Exception as exc:  # noqa: BLE001  supervises: a worker that was met with a bug is met again
                _log.error("worker_not_kept", worker=worker.id, exc_info=exc)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)

    async def _admit(self, worker: Worker) -> None:
        try:
            if _elsewhere_on_loopback(worker.record):
                raise LayoutMismatch(
                    "a worker on another machine advertises a loopback address", reason="loopback_address"
                )
            facts = await worker.describe()
            if facts.worker_id != worker.id:
                raise LayoutMismatch("another worker answers at this address", reason="worker_id_mismatch")
            self._expected.check(facts)
        except LayoutMismatch as error:
            worker.refused = True
            self._refused.labels(error.reason).inc()
            _log.error("worker_refused", worker=worker.id, reason=error.reason, message=error.message)
            raise
        worker.refused = False
        worker.connect(facts)
        if self.on_joined is not None:
            self.on_joined(worker)
        self._report_strangers(worker)

    def _report_strangers(self, worker: Worker) -> None:
        """Workers that fit the model but not each other are usable, apart; say so once, with both values."""
        for other in self._workers.values():
            if other.facts is None or other is worker:
                continue
            if other.group != worker.group:
                self._refused.labels("layout_mismatch").inc()
                _log.warning(
                    "workers_not_pairable",
                    worker=worker.id,
                    layout=worker.group,
                    other=other.id,
                    other_layout=other.group,
                )
            elif other.facts.max_model_len != worker.facts.max_model_len:  # type: ignore[union-attr]
                _log.warning("context_differs", worker=worker.id, other=other.id)

    # leaving

    def _revived(self, record: registry_pb2.WorkerRecord) -> Worker | None:
        """The same process, back before it was let go: its streams and what runs on them stay."""
        worker = self._retired.get(record.worker_id)
        if worker is None or (worker.record.epoch, worker.record.address) != (record.epoch, record.address):
            return None
        del self._retired[worker.id]
        worker.heard(record)
        return worker

    async def _retire(self, worker: Worker) -> None:
        """Let go of a worker when nothing of ours runs there any more."""
        await worker.idle.wait()
        if self._retired.get(worker.id) is worker:
            del self._retired[worker.id]
        if self._workers.get(worker.id) is not worker:
            await self._close(worker)

    async def _close(self, worker: Worker) -> None:
        if self.on_left is not None and self._workers.get(worker.id) in (None, worker):
            self.on_left(worker)
        keeper = self._keepers.pop(worker, None)
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        await worker.close(WorkerLost("the worker left"))

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _elsewhere_on_loopback(record: registry_pb2.WorkerRecord) -> bool:
    """Such an address reaches some process of this machine instead: T173 (vllm-project/vllm#27083)."""
    host = record.address.rsplit(":", 1)[0].strip("[]")
    return bool(record.node) and record.node != socket.gethostname() and (host == "::1" or host.startswith("127."))
