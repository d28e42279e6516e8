"""A worker in the registry from its start to its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from deploy.ports import free_ports
from protos.v1 import common_pb2, decode_pb2, registry_pb2, worker_pb2
from runtime import rpc
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.registry.memory import MemoryStore
from runtime.registry.service import RegistryService
from tests.integration.pd.conftest import Start
from tests.integration.pd.router_client import Link, request
from tests.integration.pd.workers import WorkerProcess

Record = registry_pb2.WorkerRecord


@dataclass
class Registry:
    """The router's embedded one, recording every state of every worker."""

    address: str
    store: MemoryStore
    history: list[Record]

    async def until(self, what: Callable[[Record], bool], seconds: float = 30.0) -> Record:
        """The first recorded state that is as asked."""
        async with asyncio.timeout(seconds):
            while True:
                for record in self.history:
                    if what(record):
                        return record
                await asyncio.sleep(0.02)


class RecordingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.history: list[Record] = []

    async def put(self, record: Record, ttl_s: float) -> None:
        self.history.append(record)
        await super().put(record, ttl_s)

    async def remove(self, worker_id: str, epoch: int) -> bool:
        self.history.append(registry_pb2.WorkerRecord(worker_id=worker_id, epoch=epoch, gone=True))
        return await super().remove(worker_id, epoch)


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    config = Config()
    store = RecordingStore()
    server = rpc.server(config)
    RegistryService(store, Config(registry_ttl_s=1.0)).add_to(server)
    address = rpc.bind(server, "127.0.0.1:0", config)
    await server.start()
    yield Registry(address, store, store.history)
    await server.stop(0)


async def test_a_worker_is_seen_starting_ready_busy_of_another_role_draining_and_gone(
    start: Start, registry: Registry
) -> None:
    d = await start("decode", {"PDSERVE_FAULTS": "engine.step=delay:0.02"}, registry=registry.address, worker_id="d-7")
    starting = await registry.until(lambda r: not r.ready)
    assert (starting.worker_id, starting.epoch, starting.pid) == ("d-7", d.epoch, d.pid)
    assert starting.progress
    ready = await registry.until(lambda r: r.ready)
    about = await d.describe()
    assert ready.address == d.address
    assert ready.role == common_pb2.ROLE_DECODE
    assert (ready.page_tokens, ready.max_model_len, ready.progress) == (16, 8192, "")
    assert (ready.model, ready.model_fingerprint, ready.tokenizer_digest) == (
        about.model, about.model_fingerprint, about.tokenizer_digest,
    )  # fmt: skip
    assert len(ready.layout_fingerprint) == 64

    link = Link(d, "decode", "r")
    await link.open()
    work = request([1, 2, 3], max_tokens=2000)
    await link.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    await link.next(work.ref)
    busy = await registry.until(lambda r: r.load.running == 1, 5)
    assert busy.load.sequence > ready.load.sequence
    await link.send(cancel=common_pb2.Cancel(ref=work.ref))

    await d.admin.SetRole(worker_pb2.SetRoleRequest(role=common_pb2.ROLE_BOTH))
    await registry.until(lambda r: r.role == common_pb2.ROLE_BOTH, 2)
    d.signal(signal.SIGTERM)
    await registry.until(lambda r: r.draining and r.ready, 2)
    await registry.until(lambda r: r.gone, 10)
    assert await d.wait() == 0
    assert not (await registry.store.snapshot()).records


async def test_a_worker_serves_without_its_registry_and_registers_when_it_comes(start: Start) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    d = await start("decode", registry=f"127.0.0.1:{port}")
    assert (await d.describe()).epoch == d.epoch
    config = Config()
    store = RecordingStore()
    server = rpc.server(config)
    RegistryService(store, Config(registry_ttl_s=1.0)).add_to(server)
    rpc.bind(server, f"127.0.0.1:{port}", config)
    await server.start()
    registry = Registry("", store, store.history)
    assert (await registry.until(lambda r: r.ready, 15)).epoch == d.epoch
    await server.stop(0)


async def test_weights_show_their_progress_and_a_stop_in_the_middle_is_a_clean_end(registry: Registry) -> None:
    flags = {"model": "smollm2", "registry": registry.address, "listen": "127.0.0.1:0", "kv_pool_tokens": 2048}
    worker = WorkerProcess("prefill", flags)
    starting = asyncio.create_task(worker.start())
    await registry.until(lambda r: r.progress.startswith("loading weights"), 60)
    worker.signal(signal.SIGTERM)
    assert await worker.wait(60) == 0, worker.log()  # it looks up between two layers
    await asyncio.wait([starting])
    assert not any(record.ready for record in registry.history)
    await worker.stop()
