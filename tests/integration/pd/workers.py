"""Real worker processes, started and ended by a test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from protos.v1 import common_pb2, decode_pb2_grpc, kvsource_pb2_grpc, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.config import Config

ROOT = Path(__file__).resolve().parents[3]
START_S = 90.0
SLOW = {"PDSERVE_FAULTS": "engine.step=delay:0.03"}
VERY_SLOW = {"PDSERVE_FAULTS": "engine.step=delay:0.3"}
PATIENT = {"reservation_s": 60.0}
"""Fetching a prefix may take half of it: half of the usual 5 s is too short on a machine with too much to do."""


@dataclass(eq=False)
class WorkerProcess:
    """`python -m pdserve worker` with our flags. Its log lines are kept; address and epoch come from them."""

    role: str
    flags: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    address: str = ""
    metrics_address: str = ""
    epoch: int = 0
    lines: list[str] = field(default_factory=list)
    process: asyncio.subprocess.Process | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _reader: asyncio.Task[None] | None = None
    channel: grpc.aio.Channel | None = None

    async def start(self) -> WorkerProcess:
        argv = [sys.executable, "-m", "pdserve", "worker", "--role", self.role]
        for key, value in self.flags.items():
            argv += [f"--{key.replace('_', '-')}", str(value)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PDSERVE_FAULTS": "", "NIXL_LOG_LEVEL": "ERROR", **self.env}
        self.process = await asyncio.create_subprocess_exec(
            *argv, cwd=ROOT, env=env, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        self._reader = asyncio.create_task(self._read())
        try:
            async with asyncio.timeout(START_S):
                await self._ready.wait()
        except TimeoutError:
            raise AssertionError(f"the worker did not start:\n{self.log()}") from None
        assert self.address, f"the worker ended:\n{self.log()}"
        tls = {key: value for key, value in self.flags.items() if key.startswith("tls_")}
        self.channel = rpc.channel(self.address, Config(**tls))
        return self

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode("utf-8", "replace").rstrip()
            self.lines.append(line)
            if line.startswith("{"):
                self._note(json.loads(line))
        self._ready.set()

    def _note(self, entry: dict[str, Any]) -> None:
        if entry.get("event") == "listening":
            self.address, self.epoch, self.metrics_address = entry["address"], entry["epoch"], entry["metrics"]
        elif entry.get("event") == "ready":
            self._ready.set()

    def log(self) -> str:
        return "\n".join(self.lines[-40:])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def prefill(self) -> Any:
        return prefill_pb2_grpc.PrefillStub(self._channel())

    @property
    def decode(self) -> Any:
        return decode_pb2_grpc.DecodeStub(self._channel())

    @property
    def kvsource(self) -> Any:
        return kvsource_pb2_grpc.KvSourceStub(self._channel())

    @property
    def admin(self) -> Any:
        return worker_pb2_grpc.WorkerStub(self._channel())

    def _channel(self) -> grpc.aio.Channel:
        assert self.channel is not None
        return self.channel

    async def describe(self) -> worker_pb2.DescribeReply:
        reply: worker_pb2.DescribeReply = await self.admin.Describe(worker_pb2.DescribeRequest(), timeout=5)
        return reply

    async def load(self) -> common_pb2.Load:
        return (await self.describe()).load

    async def scrape(self) -> dict[str, float]:
        """What its /metrics says: name with labels -> value."""
        reading = urllib.request.urlopen
        with await asyncio.to_thread(reading, f"http://{self.metrics_address}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return {key: float(value) for key, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def wait(self, seconds: float = 20.0) -> int:
        """The exit status."""
        assert self.process is not None
        async with asyncio.timeout(seconds):
            return await self.process.wait()

    async def kill(self) -> None:
        """kill -9, and gone."""
        self.signal(signal.SIGKILL)
        await self.wait()
        await self.close_channel()

    async def close_channel(self) -> None:
        if self.channel is not None:
            await self.channel.close(None)

    async def stop(self) -> int:
        """SIGTERM, then SIGKILL; the exit status."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await self.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        await self.close_channel()
        if self._reader is not None:
            await self._reader
        assert self.process.returncode is not None
        return self.process.returncode


async def at_once(*starting: Awaitable[WorkerProcess]) -> list[WorkerProcess]:
    return list(await asyncio.gather(*starting))


def busy(load: common_pb2.Load) -> tuple[int, ...]:
    """What must be zero when nothing is held for any request: running, waiting, booked, leased, quarantined, and
    pages neither free nor evictable."""
    return (
        load.running,
        load.waiting,
        load.pages_reserved,
        load.leases,
        load.quarantined_pages,
        load.pages_total - load.pages_free,
    )


async def eventually(holds: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    """Wait until a worker's state, which can only be asked for, is as expected."""
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110  the state is another process's
            await asyncio.sleep(0.02)


async def baseline(*workers: WorkerProcess, seconds: float = 1.0) -> None:
    """Assert that every worker is back at its baseline within so many seconds."""
    loads: list[tuple[int, ...]] = []
    try:
        async with asyncio.timeout(seconds):
            while True:
                loads = [busy(await worker.load()) for worker in workers]
                if not any(any(load) for load in loads):
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"still held (running, waiting, reserved, leases, quarantined, pages): {loads}") from None
