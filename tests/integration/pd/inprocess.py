"""Whole workers inside the test's process, so that a test can read their page memory; in-process transport."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer import hashing
from kvtransfer.checksum import memory
from pdserve._worker_advert import Identity
from pdserve._worker_parts import Parts
from pdserve.worker import WorkerProcess as Composed
from runtime import rpc
from runtime.config import Config
from runtime.modelfiles import ModelFiles
from tests.integration.pd.workers import WorkerProcess


class LocalWorker(WorkerProcess):
    """A worker that looks like a process to the test router, and lets its memory be read."""

    def __init__(self, role: str, config: Config) -> None:
        super().__init__(role, {})
        self._config = config
        self._stopping = asyncio.Event()
        self._run: asyncio.Task[int] | None = None
        self._composed: Composed | None = None

    async def start(self) -> LocalWorker:
        identity = Identity.make(self._config)
        files = await asyncio.to_thread(ModelFiles.open, self._config.model)
        self._composed = Composed(self._config, identity, files, self._stopping)
        self.address, self.epoch = self._composed.address, identity.epoch
        self._run = asyncio.create_task(self._composed.run())
        while self._composed.parts is None:
            assert not self._run.done(), self._run.exception()
            await asyncio.sleep(0.02)
        self.channel = rpc.channel(self.address, Config())
        return self

    @property
    def parts(self) -> Parts:
        assert self._composed is not None
        assert self._composed.parts is not None
        return self._composed.parts

    async def stop(self) -> int:
        self._stopping.set()
        assert self._run is not None
        code = await self._run
        await self.close_channel()
        return code

    def log(self) -> str:
        return ""

    def page_bytes(self, tokens: list[int]) -> npt.NDArray[np.uint8]:
        """[pages, bytes] of every full page of `tokens` that the prefix cache holds, all components."""
        files = ModelFiles.open(self._config.model)
        root = hashing.root(b"", files.name, files.fingerprint())
        engine = self.parts.engine
        pages = engine.cache.match(hashing.page_keys(root, tokens))
        (region,) = engine.regions()
        pool = memory(region).reshape(-1, region.stride)
        copied: npt.NDArray[np.uint8] = pool[pages].copy()
        return copied


def config(model: str, **flags: Any) -> Config:
    return Config(
        model=model, transport="inprocess", metrics_listen="", kv_pool_tokens=8192, deterministic=True, **flags
    )
