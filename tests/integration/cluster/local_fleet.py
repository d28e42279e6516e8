"""A router and whole oracle workers inside the test's process: what Ray and processes would add is start-up time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from deploy.actors import RayFailed
from deploy.fleet import Fleet
from pdserve._worker_advert import Identity
from pdserve.worker import WorkerProcess
from router.app import Router
from runtime.config import Config
from runtime.modelfiles import ModelFiles
from tests.integration.router.scripted import until

FILES = ModelFiles.open("oracle")


class LocalWorker:
    """One worker that can be started again under its name, as its supervisor would."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lives = 0

    async def start(self) -> None:
        self._stopping = asyncio.Event()
        self.composed = WorkerProcess(self.config, Identity.make(self.config), FILES, self._stopping)
        self._running = asyncio.create_task(self.composed.run())
        self.lives += 1

    async def stop(self) -> None:
        self._stopping.set()
        await self._running


@dataclass
class LocalFleet:
    """failed: answers that were not 200, or connections that broke."""

    router: Router
    fleet: Fleet
    http: aiohttp.ClientSession
    workers: dict[str, LocalWorker] = field(default_factory=dict)
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # workers whose supervisor does not answer

    def replace(self, worker: str) -> int:
        """On a thread, as a supervising actor would be asked."""
        if worker in self.broken:
            raise RayFailed("no answer")
        asyncio.run_coroutine_threadsafe(self._again(self.workers[worker]), self._loop).result(20)
        return 1

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def _again(self, worker: LocalWorker) -> None:
        await worker.stop()
        await worker.start()

    def roles(self) -> dict[str, str]:
        """Of the workers that can be chosen."""
        known = ((name, self.router.fleet.worker(name)) for name in self.workers)
        return {name: one.role.value for name, one in known if one is not None and one.usable and one.role}

    async def ask(self, prompt: int, answer: int, number: int) -> None:
        body = {
            "prompt": [(7 * i + number) % 250 for i in range(prompt)],
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with self.http.post("/v1/completions", json=body) as reply:
            text = await reply.text()
        if reply.status == 200:
            self.answered += 1
        else:
            self.failed.append(text)

    @asynccontextmanager
    async def under_load(self, clients: int, prompt: int, answer: int) -> AsyncIterator[None]:
        """So many clients ask one question after another. All that was asked is answered at the end."""
        over = asyncio.Event()

        async def client(number: int) -> None:
            while not over.is_set():
                await self.ask(prompt, answer, number)
                number += clients

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*tasks)


@asynccontextmanager
async def local_fleet(*roles: str, **settings: Any) -> AsyncIterator[LocalFleet]:
    """Workers of these roles, named prefill-0 and so on, ready behind a router."""
    async with AsyncExitStack() as stack:
        base: dict[str, Any] = {"model": "oracle", "transport": "inprocess", "metrics_listen": "", **settings}
        config = Config(**base, http_listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", registry_ttl_s=5.0)
        router = await Router.start(config)
        stack.push_async_callback(router.close)
        fleet = await stack.enter_async_context(Fleet(router.grpc, config))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(f"http://{router.http}", connector=aiohttp.TCPConnector(limit=0))
        )
        made = LocalFleet(router, fleet, http)
        for role in roles:
            name = f"{role}-{sum(one.startswith(role) for one in made.workers)}"
            own = Config(**base, role=role, worker_id=name, registry=router.grpc, kv_pool_tokens=16384)
            made.workers[name] = LocalWorker(own)
            await made.workers[name].start()
            stack.push_async_callback(made.workers[name].stop)
        await until(lambda: len(made.roles()) == len(roles), 20)
        yield made
