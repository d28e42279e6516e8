"""One worker process, whatever its role: receive, schedule, run, publish.

The one place that composes a worker from engine, transfer and both services. Its life: answer health and register as
not ready, load weights, serve, and at SIGTERM drain: say so, finish what runs, wait until hand-offs are read or their
leases end, then take everything apart and exit 0. A worker whose engine died or stands still, or whose quarantine grew
too old, cannot be repaired from inside: it says so and exits with a status that makes its supervisor start another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable

import structlog

from kvtransfer.layout import fingerprint, layout_to_proto, rank_to_proto
from pdserve._worker_admin import Actions, CacheFeed, WorkerAdmin
from pdserve._worker_advert import Advert, Identity, advertised
from pdserve._worker_parts import Parts, load_runner, make_clock
from pdserve._worker_watch import Standstill, sample
from protos.v1 import common_pb2, decode_pb2_grpc, kvsource_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime import exposure, faults, lifecycle, logs, rpc
from runtime.config import Config
from runtime.errors import Draining, WorkerLost
from runtime.health import Health, HealthService
from runtime.metrics import Metrics
from runtime.modelfiles import ModelFiles

EXIT_FAULT = 70
"""This process is beyond repair; another start may work."""

ENGINE_STALL_S = 30.0
"""An engine that has not turned for this long, although it could have run, stands still (the longest honest step is a
few seconds)."""

TICK_S = 0.1
LOAD_EVERY_S = 1.0
PROPAGATION_S = 0.3
"""How long a draining worker still accepts, until every router has heard of it."""

SERVICES = ("pdserve.v1.Prefill", "pdserve.v1.Decode", "pdserve.v1.KvSource", "pdserve.v1.Worker")

FEATURES = (
    "local", "reattach", "prompt_logprobs", "stream_reserve", "cancel_choices", "handover", "prefix_source",
    "retention",
)  # fmt: skip

_log = structlog.get_logger("pdserve.worker")


def main(config: Config) -> int:
    """Run a worker to its end; the process's exit status."""
    code = lifecycle.run(lambda stopping: serve(config, stopping), use_uvloop=True)
    if code == EXIT_FAULT:
        logs.finish()
        os._exit(code)  # a thread inside a torch operation would abort a regular exit
    return code


async def serve(config: Config, stopping: asyncio.Event | None = None) -> int:
    """Serve until `stopping` is set (by default: until the first signal). Returns the exit status.

    Raises InvalidRequest or NotFound when the configuration cannot work, and nothing was served.
    """
    if stopping is None:
        with lifecycle.signals() as stopping:
            return await serve(config, stopping)
    if config.sim:
        from pdserve import sim

        return await sim.serve(config, stopping)
    identity = Identity.make(config)
    logs.setup(config, worker=identity.worker_id)
    _log.info("configuration", **config.shown())
    if open_doors := exposure.of_worker(config):
        _log.warning("open_to_the_network", doors=open_doors)
    faults.arm_from_environment()
    files = await asyncio.to_thread(ModelFiles.open, config.model)
    return await WorkerProcess(config, identity, files, stopping).run()


class WorkerProcess:
    """Owns the sockets, the record and the parts of one worker."""

    def __init__(self, config: Config, identity: Identity, files: ModelFiles, stopping: asyncio.Event) -> None:
        self._config = config
        self._identity = identity
        self._files = files
        self._stopping = stopping
        self._clock = make_clock(config)
        self._server = rpc.server(config)
        self._address = advertised(config, rpc.bind(self._server, config.listen, config))
        self._metrics = Metrics()
        self._advert = Advert(config, identity, files, self._address, self._metrics)
        self._parts: Parts | None = None
        self._draining = False
        self._still = Standstill(lambda: sample(self._parts.engine.thread_id) if self._parts is not None else None)
        self._health = Health(
            {"model": lambda: self._parts is not None, "registry": lambda: self._advert.registered},
            {"engine": self._engine_turns, "transfer": lambda: not self._transfer_fault()},
        )

    @property
    def parts(self) -> Parts | None:
        """None until the weights are loaded."""
        return self._parts

    @property
    def address(self) -> str:
        return self._address

    async def run(self) -> int:
        HealthService(self._health, SERVICES).add_to(self._server)
        await self._server.start()
        self._advert.start()
        _log.info(
            "listening",
            address=self._address,
            metrics=self._advert.record.metrics_address,
            epoch=self._identity.epoch,
            pid=self._identity.pid,
        )
        try:
            self._parts = await self._load()
            if self._parts is None:
                return 0
            fault = await self._serve(self._parts)
            if not fault:
                await self._drain(self._config.drain_timeout_s)
            await self._end(self._parts, fault)
            return EXIT_FAULT if fault else 0
        finally:
            await self._advert.stop()
            await self._server.stop(1.0)

    # --- start ---------------------------------------------------------------------------------------------------

    async def _load(self) -> Parts | None:
        """The parts, or None when the process was asked to stop meanwhile."""
        loop = asyncio.get_running_loop()
        asked = threading.Event()

        def progress(fraction: float) -> None:
            if asked.is_set():
                raise _Stopped
            text = f"loading weights {100 * fraction:.0f} %"
            loop.call_soon_threadsafe(self._advert.progress, text)

        stop = asyncio.create_task(self._stopping.wait())
        stop.add_done_callback(lambda _: asked.set())
        try:
            runner = await asyncio.to_thread(load_runner, self._config, self._files, progress)
            if self._stopping.is_set():
                return None
            self._advert.progress("allocating pools")
            parts = await Parts.make(
                self._config, self._files, runner, self._identity, self._address, self._clock, self._metrics
            )  # fmt: skip
        except _Stopped:
            return None
        finally:
            stop.cancel()
        self._publish(parts)
        return parts

    def _publish(self, parts: Parts) -> None:
        """Open the services and say ready."""
        actions = Actions(self._describe, self._drain_by_request, self._set_role)
        admin = WorkerAdmin(actions, CacheFeed(parts.engine.cache), self._identity.epoch)
        kvsource_pb2_grpc.add_KvSourceServicer_to_server(parts.source, self._server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(parts.prefill, self._server)
        decode_pb2_grpc.add_DecodeServicer_to_server(parts.decode, self._server)
        worker_pb2_grpc.add_WorkerServicer_to_server(admin, self._server)
        record = self._advert.record
        record.ready = True
        record.progress = ""
        record.layout_fingerprint = fingerprint(parts.layout).hex()
        record.page_tokens = parts.layout.page_tokens
        record.max_model_len = parts.engine.spec.max_model_len
        self._report(parts)
        _log.info("ready", pages=parts.engine.pages.total, transport=parts.transport.name)

    # --- serving -------------------------------------------------------------------------------------------------

    async def _serve(self, parts: Parts) -> str:
        """Until asked to stop (""), or until it cannot go on (why)."""
        reported = self._clock.monotonic()
        while not self._stopping.is_set():
            fault = self._fault()
            if fault:
                return fault
            now = self._clock.monotonic()
            parts.tick(now)
            if now - reported >= LOAD_EVERY_S:
                reported = now
                self._report(parts)
            await _within(self._stopping.wait(), TICK_S)
        return ""

    def _report(self, parts: Parts) -> None:
        self._advert.record.load.CopyFrom(parts.report())
        parts.meter.load(self._advert.record.load)
        self._advert.push()

    def _fault(self) -> str:
        if not self._engine_turns():
            return "the engine does not run"
        return self._transfer_fault()

    def _engine_turns(self) -> bool:
        if self._parts is None:
            return True
        engine = self._parts.engine
        return not engine.dead and not self._stuck()

    def _stuck(self) -> bool:
        assert self._parts is not None
        return self._still.look(self._parts.engine.load().steps_alive_at, self._clock.monotonic()) > ENGINE_STALL_S

    def _transfer_fault(self) -> str:
        return self._parts.puller.unhealthy() if self._parts is not None else ""

    # --- administration ------------------------------------------------------------------------------------------

    def _describe(self) -> worker_pb2.DescribeReply:
        assert self._parts is not None
        parts, record = self._parts, self._advert.record
        return worker_pb2.DescribeReply(
            worker_id=record.worker_id,
            epoch=record.epoch,
            role=record.role,
            model=record.model,
            model_fingerprint=record.model_fingerprint,
            tokenizer_digest=record.tokenizer_digest,
            vocab_size=parts.engine.model.vocab_size,
            max_model_len=parts.engine.spec.max_model_len,
            layout=layout_to_proto(parts.layout),
            ranks=[rank_to_proto(parts.rank)],
            protocol_min=record.protocol_min,
            protocol_max=record.protocol_max,
            features=FEATURES,
            load=parts.report(),
            draining=self._draining,
            pid=record.pid,
            transport=parts.transport.name,
            dtype=parts.engine.model.dtype,
            device=parts.engine.model.device,
        )

    def _set_role(self, role: common_pb2.Role.ValueType) -> None:
        """The role is only what is advertised: what runs goes on."""
        if role == self._advert.record.role:
            return
        _log.info("role", role=common_pb2.Role.Name(role))
        self._advert.record.role = role
        self._advert.push()

    async def _drain_by_request(self, on: bool, timeout_s: float) -> tuple[int, int]:
        assert self._parts is not None
        if on:
            await self._drain(timeout_s)
        elif self._stopping.is_set():
            raise Draining("this worker is stopping: its drain cannot be taken back")
        else:
            self._mark_draining(False)
            self._parts.engine.drain(False)
        return self._parts.running(), self._parts.leases()

    # --- the end -------------------------------------------------------------------------------------------------

    def _mark_draining(self, on: bool) -> None:
        self._draining = self._health.draining = self._advert.record.draining = on
        self._advert.push()

    async def _drain(self, timeout_s: float) -> None:
        """Say so; accept until that has spread; then finish what runs and let waiting hand-offs be read. Ends early
        when it is taken back meanwhile."""
        parts = self._parts
        assert parts is not None
        if not self._draining:
            self._mark_draining(True)
            await self._ticking(parts, PROPAGATION_S, lambda: not self._draining)
        parts.engine.drain(self._draining)  # also where the call that began it was cut off meanwhile
        await self._ticking(parts, timeout_s, lambda: not self._draining or parts.running() + parts.leases() == 0)

    async def _ticking(self, parts: Parts, timeout_s: float, until: Callable[[], bool]) -> None:
        end = self._clock.monotonic() + timeout_s
        while (now := self._clock.monotonic()) < end and not until() and not self._fault():
            parts.tick(now)
            await asyncio.sleep(min(TICK_S / 2, end - now))

    async def _end(self, parts: Parts, fault: str) -> None:
        error = WorkerLost("this worker has failed") if fault else Draining("this worker has stopped")
        if fault:
            _log.error("beyond repair", why=fault)
            self._advert.record.ready = False
            self._advert.push()
        parts.abort(error)
        await parts.close(error, engine_stuck=bool(fault) and self._stuck())


class _Stopped(Exception):
    """Raised in the loading thread when the process was asked to stop."""


async def _within(awaited: Awaitable[object], seconds: float) -> None:
    """Wait for it, at most so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await awaited
