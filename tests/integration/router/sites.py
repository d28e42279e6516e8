"""A router with scripted workers around it, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from protos.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc
from router.app import Router
from runtime import rpc
from runtime.config import Config
from runtime.registry.agent import RegistryAgent
from tests.integration.router.scripted import DecodeServicer, PrefillServicer, ScriptedWorker, until

BODY = {"prompt": "hello", "max_tokens": 4}


@asynccontextmanager
async def serving(worker: ScriptedWorker, router: Router | None = None) -> AsyncIterator[None]:
    """The worker on a port of its own, registered where the router looks: at the router or in Redis."""
    shared = {"registry_ttl_s", "registry_token", "tls_cert", "tls_key", "tls_ca"}
    settings = {key: getattr(router.config, key) for key in shared} if router else {}
    registry = (router.config.registry or router.grpc) if router else ""
    config = Config(listen="127.0.0.1:0", registry=registry, **settings)
    server = rpc.server(config)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(worker), server)
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(worker), server)
    worker.address = rpc.bind(server, config.listen, config)
    await server.start()
    agent = RegistryAgent(config, worker.record()) if router else None
    worker.server, worker.agent = server, agent
    try:
        if agent is not None:
            agent.start()
        yield
    finally:
        for leg in worker.submitted:
            if leg.task is not None:
                leg.task.cancel()
        if agent is not None:
            await agent.stop()
        await server.stop(0)
        worker.server = worker.agent = None


def config(**changes: Any) -> Config:
    base: dict[str, Any] = {
        "model": "oracle",
        "http_listen": "127.0.0.1:0",
        "grpc_listen": "127.0.0.1:0",
        "registry_ttl_s": 10.0,
        "reattach_s": 0.5,
    }
    return Config(**(base | changes))


@dataclass(slots=True)
class Site:
    """A router with its workers, and a client."""

    router: Router
    workers: list[ScriptedWorker]
    http: aiohttp.ClientSession

    def worker(self, role: str) -> ScriptedWorker:
        return next(worker for worker in self.workers if worker.role == role)

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any, Any]:
        """(status, JSON body, headers)."""
        async with self.http.post(path, json=body, **more) as response:
            return response.status, await response.json(), response.headers

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        status, body, _ = await self.post("/v1/completions", {"prompt": "hello", "max_tokens": 4} | fields)
        return status, body

    async def events(self, path: str, body: Any) -> list[str]:
        """The data of every SSE event, in order."""
        async with self.http.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
        return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]

    async def quiet(self, prefill_confirmed: bool = True) -> None:
        """Wait until nothing is held anywhere; fails after a second."""
        await until(lambda: self.idle(prefill_confirmed), 1)

    def idle(self, prefill_confirmed: bool) -> bool:
        workers = self.workers if not prefill_confirmed else [w for w in self.workers if w.role != "prefill"]
        fleet = [self.router.fleet.worker(worker.id) for worker in self.workers]
        return (
            all(worker.held() == 0 for worker in workers)
            and self.router.front.permits.inflight == 0
            and len(self.router.dispatcher.booking.line) == 0
            and all(known is None or known.inflight_requests == 0 for known in fleet)
            and all(known is None or known.inflight_prefill_tokens == 0 for known in fleet)
            and self.metric("pdserve_requests_inflight") == 0
        )

    def metric(self, name: str, **labels: str) -> float:
        return self.router.metrics.value(name, labels)


@asynccontextmanager
async def site(*workers: ScriptedWorker, settings: Config | None = None, wait: bool = True) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        router = await Router.start(settings or config())
        stack.push_async_callback(router.close)
        for worker in workers:
            await stack.enter_async_context(serving(worker, router))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{router.http}"))
        made = Site(router, list(workers), http)
        if wait:
            await until(lambda: sum(state.usable for state in router.fleet.states()) == len(workers))
        yield made
