"""Real source processes, started and ended by the test that needs them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.types import Layout
from runtime.config import Config
from tests.integration.transfer.worker import Worker, layout

ROOT = Path(__file__).parents[3]
Make = Callable[..., Any]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Worker] = []

    async def one(worker_id: str, epoch: int = 1, shape: Layout | None = None, **options: Any) -> Worker:
        config = Config(**options.pop("config", {}))
        worker = await Worker(worker_id, epoch, shape or layout(), config, **options).start()
        made.append(worker)
        return worker

    yield one
    for worker in made:
        await worker.close()


@dataclass
class Source:
    """A source process and its command line."""

    process: asyncio.subprocess.Process
    address: str

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        while not (line := await self.process.stdout.readline()).startswith(b"{"):
            assert line, "the source has died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def open(self, request: str, pages: list[int], tokens: int, ready: int = 0) -> bytes:
        answer = await self.ask("open", request=request, pages=pages, tokens=tokens, ready=ready)
        return bytes.fromhex(answer["ticket"])

    async def wait_for(self, request: str, state: str) -> dict[str, Any]:
        while (answer := await self.ask("state", request=request))["state"] != state:  # noqa: ASYNC110  the event is in another process
            await asyncio.sleep(0.01)
        return answer

    async def quit(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await self.process.wait()


class Sources:
    """Starts source processes; ends what is left at the end."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, worker_id: str = "p", epoch: int = 1, **spec: Any) -> Source:
        environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **spec.pop("env", {}))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.integration.transfer.worker",
            json.dumps({"worker_id": worker_id, "epoch": epoch, **spec}),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        self.processes.append(process)
        assert process.stdout is not None
        while not (line := await process.stdout.readline()).startswith(b"{"):
            assert line, "the source did not start"
        return Source(process, json.loads(line)["address"])

    async def end(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.fixture
async def sources() -> AsyncIterator[Sources]:
    started = Sources()
    yield started
    await started.end()


@pytest.fixture
async def reader() -> AsyncIterator[Worker]:
    worker = await Worker("d", 1, layout(), Config(), transport="nixl").start()
    yield worker
    await worker.close()


@pytest.fixture
async def pair(make: Make) -> tuple[Worker, Worker]:
    return await make("p"), await make("d")
