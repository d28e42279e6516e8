"""The router process: compose the parts, listen, serve until told to stop, drain, leave nothing behind.

Starts with the base dependencies alone: no torch, triton, nixl or ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import structlog
from aiohttp import web
from grpc_reflection.v1alpha import reflection

from kvtransfer.types import PAGE_TOKENS
from protos.v1 import registry_pb2
from router.admission.tenants import Keys
from router.api.front import Front
from router.api.http import HttpFace
from router.api.inference import InferenceService
from router.api.lane import Endpoint
from router.api.server import Handler, Runner
from router.dispatch.dispatch import Dispatcher
from router.params import Limits, model_defaults
from router.sharing import Sharing
from router.stats import Stats
from router.text.codec import Codec
from router.workers.fleet import Expected, Fleet
from router.workers.planner import Planner
from router.workers.worker import Worker
from runtime import exposure, lifecycle, listeners, logs, rpc
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.health import Health, HealthService
from runtime.ids import new_worker_id
from runtime.metrics import Metrics
from runtime.modelfiles import ModelFiles
from runtime.registry import open_store
from runtime.registry.feed import Feed
from runtime.registry.heir import Heir
from runtime.registry.service import RegistryService

INFERENCE = "pdserve.v1.Inference"
REGISTRY = "pdserve.v1.Registry"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
HEALTH = "grpc.health.v1.Health"
GOODBYE_S = 1.0
LOOK_AROUND_S = 15.0
STEP_ASIDE_S = 0.2
"""For connections that were dealt to us and are still to be accepted."""

SILENCE_S = 1.0
"""A connection on which nothing is asked for so long is closed by a router that leaves."""

YOUNG_OBJECTS = 50_000
"""Containers made and not freed before the collector looks at them."""

_log = structlog.get_logger("pdserve.router")


async def serve(
    config: Config, stopping: asyncio.Event | None = None, on_start: Callable[[], None] | None = None
) -> None:
    """Serve until `stopping` is set (by default: until the first signal), then drain. on_start: called once it listens.

    Raises InvalidRequest or NotFound when the configuration cannot work, and nothing was served.
    """
    if stopping is None:
        with lifecycle.signals() as stopping:
            await serve(config, stopping, on_start)
        return
    logs.setup(config, role="router")
    router = await Router.start(config)
    if on_start is not None:
        on_start()
    try:
        await stopping.wait()
        await router.drain()
    finally:
        await router.close()


def _spare_the_collector() -> None:
    """A fifth of the time of a busy router went into looking for cycles among objects that wait for a worker's answer.
    What was made at the start is never looked at again, and what is made since only once in many requests: next to
    nothing here is in a cycle, so the memory this costs is a few tens of MB at most."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 50)


def main(config: Config) -> int:
    """The process: exit status 0 after an orderly end."""

    def started() -> None:
        _spare_the_collector()
        lifecycle.tell_ready()

    return lifecycle.run(lambda stopping: serve(config, stopping, started), use_uvloop=True)


class Router:
    """A running router. http and grpc: "host:port" as really bound."""

    def __init__(self, config: Config, files: ModelFiles) -> None:
        self.config = config
        self.metrics = Metrics()
        self.clock = SystemClock()
        self._pool = ThreadPoolExecutor(
            max_workers=max(1, min(4, (os.cpu_count() or 2) - 1)), thread_name_prefix="tokenizer"
        )
        context = min(config.max_model_len or files.max_model_len, files.max_model_len)
        limits = Limits.of(config, files.vocab_size, context)
        codec = Codec(files, limits, self._pool)
        router_id = new_worker_id("router")
        expected = Expected(files.tokenizer_digest, files.fingerprint(), files.vocab_size, PAGE_TOKENS)
        self.fleet = Fleet(config, router_id, expected, self.metrics)
        keys = Keys.load(config)
        self.planner = Planner(config, files.name, files.fingerprint(), self.clock, self.metrics, self.fleet.workers)
        self.fleet.on_joined, self.fleet.on_left = self.planner.joined, self.planner.left
        self.fleet.on_reported = self.planner.reported
        self.dispatcher = Dispatcher(
            self.fleet, self.planner, codec, config, self.clock, router_id, self.metrics, keys.tenants()
        )
        self.stats = Stats(self.metrics)
        name = config.served_model_name or files.name
        revision = files.fingerprint()
        self.front = Front(codec, self.dispatcher, limits, config, self.clock, self.stats, name, revision, keys)
        self._store = open_store(config, self.metrics, self.clock)
        self.sharing = Sharing(
            config, self._store, self.planner, (files.name, files.fingerprint()), router_id, self.clock, self.metrics
        )
        self.sharing.limit(keys.tenants(), self.front.permits, self.dispatcher.booking.line)
        self.health = Health({"workers": self.fleet.ready, "registry": lambda: self._feed.synced.is_set()})
        self._defaults = model_defaults(files.generation_config)
        self._face = HttpFace(self.front, self.health, self.metrics, self._observe, self._defaults)
        self._queue = self.metrics.gauge("pdserve_router_queue", "Requests waiting for capacity")
        self._held = self.metrics.gauge("pdserve_router_prompts_inflight", "Prompts that hold a permit")
        self._feed = Feed(
            self._store,
            config.registry_ttl_s,
            self.clock,
            added=self.fleet.added,
            changed=self.fleet.changed,
            removed=self._removed,
            metrics=self.metrics,
        )
        self._shares_port = config.routers > 1 or config.reuse_port
        self._registry = RegistryService(self._store, config)
        self._heir = Heir(self._store, config, config.grpc_listen)
        self._server = rpc.server(config, shares_port=self._shares_port)
        self._leaving: asyncio.Task[None] | None = None
        self._runners: list[Runner] = []
        self.http = ""
        self.admin = ""
        self.grpc = ""

    @classmethod
    async def start(cls, config: Config) -> Router:
        files = await asyncio.to_thread(_open, config.model)
        router = cls(config, files)
        try:
            await router._listen()
        except BaseException:
            await router.close()
            raise
        return router

    async def _listen(self) -> None:
        self._registry.add_to(self._server)
        InferenceService(self.front, self._defaults).add_to(self._server)
        HealthService(self.health, [INFERENCE, REGISTRY]).add_to(self._server)
        reflection.enable_server_reflection((INFERENCE, REGISTRY, HEALTH, REFLECTION), self._server)
        self.sharing.start()
        if self._shares_port and not self.config.registry:
            await self._heir.start()
        self._feed.start()
        self.dispatcher.start()
        if self._shares_port:
            await self._look_around()
        self.grpc = rpc.bind(self._server, self.config.grpc_listen, self.config)
        await self._server.start()
        separate = bool(self.config.admin_listen)
        app, direct, lane = self._face.app(with_metrics=not separate), self._face.direct(), self._face.lane()
        self.http = await self._serve_http(app, self.config.http_listen, direct, lane)
        if separate:
            self.admin = await self._serve_http(self._face.admin_app(), self.config.admin_listen)
        _log.info("configuration", **self.config.shown())
        if open_doors := exposure.of_router(self.config):
            _log.warning("open_to_the_network", doors=open_doors)
        _log.info("listening", http=self.http, grpc=self.grpc, admin=self.admin, model=self.front.model)

    async def _look_around(self) -> None:
        """Know the workers and their caches before this process gets its part of the connections, as far as that goes
        in LOOK_AROUND_S: until then the others serve them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_AROUND_S):
                await self._feed.synced.wait()
                while not all(self._knows(worker) for worker in self.fleet.workers() if worker.record.ready):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    def _knows(self, worker: Worker) -> bool:
        return worker.usable and (not self.planner.listening or self.planner.index.synced(worker.id))

    async def _serve_http(
        self,
        app: web.Application,
        listen: str,
        direct: Mapping[tuple[str, str], Handler] | None = None,
        lane: Mapping[str, Endpoint] | None = None,
    ) -> str:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise InvalidRequest("http_listen must be host:port", field="http_listen", limit="host:port, port 0..65535")
        runner = Runner(app, GOODBYE_S, direct, lane)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, int(port), reuse_port=self._shares_port or None)
        try:
            await site.start()
        except OSError as exc:
            raise InvalidRequest("the HTTP address is taken or not one of this machine", field="http_listen") from exc
        return f"{host}:{runner.addresses[0][1]}"

    def _removed(self, record: registry_pb2.WorkerRecord) -> None:
        self.dispatcher.booking.forget(record.worker_id)  # its next life starts with a clean record
        self.fleet.removed(record)

    def _observe(self) -> None:
        self.fleet.observe()
        self.planner.observe()
        self._queue.set(len(self.dispatcher.booking.line))
        self._held.set(self.front.permits.inflight)

    async def drain(self) -> None:
        """Leave the ports to whoever else listens there, or will; finish what runs within drain_timeout_s."""
        self.health.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_timeout_s):
                leaving = await self._step_aside()
                await asyncio.gather(*(runner.left(SILENCE_S) for runner in self._runners))
                await self.front.permits.idle()
                await asyncio.wait((leaving,), timeout=GOODBYE_S)  # some calls never end, those that watch

    async def _step_aside(self) -> asyncio.Task[None]:
        """New connections are somebody else's, and so are the workers' records; those known here stay as they are."""
        for runner in self._runners:
            runner.leave()
        listeners.turn_away(
            {int(address.rpartition(":")[2]) for address in (self.http, self.grpc, self.admin) if address}
        )
        if not self.config.registry:
            await self._feed.stop()
        await asyncio.sleep(STEP_ASIDE_S)
        for runner in self._runners:
            for site in list(runner.sites):
                await site.stop()
        self._leaving = asyncio.create_task(self._server.stop(self.config.drain_timeout_s))
        if not self.config.registry:
            self._registry.leave()
        return self._leaving

    async def close(self) -> None:
        """Cut what is left. Idempotent."""
        for runner in self._runners:
            await runner.cleanup()
        await self._server.stop(GOODBYE_S if self.front.permits.inflight else 0)
        if self._leaving is not None:
            await self._leaving
        await self._heir.stop()
        await self._feed.stop()
        await self.dispatcher.close()
        await self.planner.close()
        await self.sharing.close()
        await self.fleet.close()
        await self._store.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _open(model: str) -> ModelFiles:
    """Read the files and build the tokenizer, which takes a second for a big one."""
    files = ModelFiles.open(model)
    files.tokenizer()
    files.fingerprint()
    return files
