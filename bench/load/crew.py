"""The load generators of a run: processes here, or spread over machines by a process that speaks for them.

They start together, and end with this process: each ends when its stdin does. One that is lost costs its share of the
run; what was under way there counts as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Self

from bench.load.loader import LINE_LIMIT, Job
from bench.load.plan import concurrency
from bench.load.results import FAILED, Result, unpack
from runtime.errors import PdserveError

LOST = "load_generator_lost"
READY_S = 120.0
"""Processes, and places on other machines."""

GRACE_S = 10.0
NO_WORDS = "it gave no reason"
_FRAME = " |+-"
"""Of a traceback of several errors."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A command that starts loaders elsewhere. It takes `request`, with all jobs in it, as its first line, passes `go`
    and `stop` on, and says what they say, each line with its "loader"; {"failed"} when it cannot."""

    command: tuple[str, ...]
    request: Mapping[str, Any]
    env: Mapping[str, str]


def patience_s(job: Job) -> float:
    """Until a loader is ready: its warm-up may be one in which every request takes its timeout."""
    if job.warm is None:
        return READY_S
    share, places = -(-job.warm.requests // job.of), concurrency(job.warm, job.part, job.of)
    return READY_S + job.address.timeout_s * -(-share // places)


@dataclass(slots=True)
class Loader:
    """What one process has done. error: it could not start; lost: it ended without having said so."""

    node: str
    pid: int = 0
    begun: int = 0
    seconds: float = 0.0
    own_share: float = 0.0
    ready: bool = False
    ended: bool = False
    lost: bool = False
    error: str = ""
    results: list[Result] = field(default_factory=list)

    def take(self, line: Mapping[str, Any]) -> None:
        if "ready" in line:
            self.ready, self.pid = True, line["ready"]["pid"]
        elif "begun" in line:
            self.begun = line["begun"]
            self.results += unpack(line["results"])
        elif "end" in line:
            self.ended = True
            self.seconds, self.own_share = line["end"]["seconds"], line["end"]["own_share"]
        elif "node" in line:
            self.node = line["node"]
        else:
            self.error = line["error"]

    def gone(self) -> None:
        """Its process has no more to say. The requests nobody will hear of are failed."""
        if self.ended or self.lost:
            return
        self.lost = True
        missing = self.begun - len(self.results)
        self.results += [Result(-1, FAILED, LOST) for _ in range(missing)]


class Crew:
    """An asynchronous context manager; nothing of it is left after it. why: what is known of a loader that was lost."""

    def __init__(self, jobs: Sequence[Job], spread: Spread | None = None) -> None:
        self.loaders = [Loader(socket.gethostname()) for _ in jobs]
        self.why = ""
        self._jobs, self._spread = jobs, spread
        self._processes: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._errors: list[IO[bytes]] = []
        self._failed = ""
        self._going = False
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        try:
            if self._spread is not None:
                jobs = [job.to_json() for job in self._jobs]
                line = json.dumps({**self._spread.request, "jobs": jobs})
                await self._start(self._spread.command, self._spread.env, line, range(len(jobs)))
            else:
                command = (sys.executable, "-m", "bench.load.loader")
                for number, job in enumerate(self._jobs):
                    await self._start(command, os.environ | {"OMP_NUM_THREADS": "1"}, job.to_json(), [number])
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def ready(self, stop: asyncio.Event) -> bool:
        """Until all wait for the start; False when it was stopped before. Raises PdserveError."""
        patience = max(patience_s(job) for job in self._jobs)
        try:
            async with asyncio.timeout(patience):
                while not all(loader.ready for loader in self.loaders):
                    self._check()
                    if not await self._more(stop):
                        return False
        except TimeoutError:
            raise PdserveError(f"the load generators were not ready within {patience:.0f} s") from None
        return True

    async def run(self, stop: asyncio.Event, report: Callable[[], None]) -> None:
        """Until all have ended; `report` is called when there is news."""
        self._going = True
        await self._say(b"go\n")
        while not self._over() and await self._more(stop):
            report()
        if self._over():
            return
        await self._say(b"stop\n")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                while not self._over():
                    await self._more(None)

    def _over(self) -> bool:
        return all(loader.ended or loader.lost for loader in self.loaders)

    def _check(self) -> None:
        """Raises PdserveError for what makes a start impossible."""
        errors = [loader.error for loader in self.loaders if loader.error]
        if self._failed or errors:
            raise PdserveError(self._failed or errors[0])
        if any(loader.lost for loader in self.loaders):
            raise PdserveError(f"a load generator ended before the start: {self._last_words() or NO_WORDS}")

    async def _more(self, stop: asyncio.Event | None) -> bool:
        """Waits for news, or for `stop`: then False."""
        waits = [asyncio.create_task(self._news.wait())]
        waits += [asyncio.create_task(stop.wait())] if stop is not None else []
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._news.clear()
        return stop is None or not stop.is_set()

    # --- processes

    async def _start(self, command: Sequence[str], env: Mapping[str, str], line: str, numbers: Sequence[int]) -> None:
        errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in _end
        self._errors.append(errors)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=dict(env),
            limit=LINE_LIMIT,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        self._processes.append(process)
        self._readers.append(asyncio.create_task(self._read(process, numbers)))
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process, numbers: Sequence[int]) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            if "failed" in said:
                self._failed = said["failed"]
            else:
                loader = self.loaders[said.pop("loader", numbers[0])]
                loader.gone() if "lost" in said else loader.take(said)
            self._news.set()
        for number in numbers:
            self.loaders[number].gone()
        self._news.set()

    async def _say(self, word: bytes) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(ConnectionError):
                process.stdin.write(word)

    def _last_words(self) -> str:
        for errors in self._errors:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").splitlines()
            if words := [line.strip(_FRAME) for line in lines if line.strip(_FRAME)]:
                return words[-1]
        return ""

    async def _end(self) -> None:
        if not self._going:  # who was not let go is not lost
            for reader in self._readers:
                reader.cancel()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if any(loader.lost for loader in self.loaders):
            self.why = next((one.error for one in self.loaders if one.error), "") or self._last_words()
        for errors in self._errors:
            errors.close()
