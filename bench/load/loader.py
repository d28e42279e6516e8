"""One process of a load generator: a share of the plan, one event loop.

    python -m bench.load.loader

stdin: a line of JSON (Job), then `go`, and `stop` to end early; its end ends the process. stdout: JSON lines: {"ready"}
or {"error"}; while it runs {"begun", "results"}; {"end"} at the end, whatever ended it. Times count from `go`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any, Self

import uvloop

from bench.load.drive import Drive, take
from bench.load.plan import Plan
from bench.load.results import COMPLETED
from bench.load.target import Address, Target, opened
from runtime.errors import PdserveError

TICK_S = 0.25
LINE_LIMIT = 1 << 28
"""Bytes of a job: it holds a whole trace."""


@dataclass(frozen=True, slots=True)
class Job:
    """Part `part` of `of`. warm: what is sent before."""

    address: Address
    plan: Plan
    part: int = 0
    of: int = 1
    warm: Plan | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes | str) -> Self:
        raw = json.loads(text)
        warm = Plan.of_json(raw["warm"]) if raw["warm"] else None
        return cls(Address(**raw["address"]), Plan.of_json(raw["plan"]), raw["part"], raw["of"], warm)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def _words() -> AsyncIterator[bytes]:
    """The lines of stdin."""
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.strip()


async def _warm_up(job: Job, target: Target) -> str:
    """Why nothing was answered; "" when something was, or nothing was asked."""
    if job.warm is None:
        return ""
    drive = Drive(target, job.warm, job.part, job.of, job.address.timeout_s, time.perf_counter)
    await drive.run(asyncio.Event())
    reasons = [result.reason for result in drive.results if result.state != COMPLETED]
    return reasons[0] if reasons and len(reasons) == len(drive.results) else ""


async def _run(job: Job, target: Target, stop: asyncio.Event) -> None:
    drive = Drive(target, job.plan, job.part, job.of, job.address.timeout_s, time.perf_counter)
    began, own = time.perf_counter(), time.process_time()
    running = asyncio.create_task(drive.run(stop))
    while not running.done():
        await asyncio.wait({running}, timeout=TICK_S)
        _say({"begun": drive.begun, "results": take(drive)})
    running.result()
    took = time.perf_counter() - began
    _say({"end": {"seconds": took, "own_share": (time.process_time() - own) / took}})


async def _until_stopped(words: AsyncIterator[bytes], stop: asyncio.Event) -> None:
    async for word in words:
        if word == b"stop":
            break
    stop.set()


async def main() -> None:
    words = _words()
    job = Job.of_json(await anext(words))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        async with opened(job.address) as target:
            warming = asyncio.create_task(_warm_up(job, target))
            waiting = asyncio.ensure_future(anext(words, b""))
            await asyncio.wait({warming, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():  # it was told to stop, or nobody listens any more
                warming.cancel()
                return
            if why := warming.result():
                _say({"error": f"no request of the warm-up was answered: {why}"})
                return
            _say({"ready": {"pid": os.getpid()}})
            if await waiting != b"go":
                return
            following = asyncio.create_task(_until_stopped(words, stop))
            await _run(job, target, stop)
            following.cancel()
    except PdserveError as error:
        _say({"error": error.message})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        uvloop.run(main())
