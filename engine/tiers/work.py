"""Where copies run: jobs on a thread of their own, their results taken by the engine thread.

A job is a function for the tier's thread and a function for the engine's. Nothing a job works on changes hands before
the second has run, so all books are kept by one thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

_log = logging.getLogger(__name__)


class Urgency(IntEnum):
    """Somebody waits for what comes up, and for the pages of a swap; what only makes room comes last."""

    LOAD = 0
    SWAP = 1
    STORE = 2


@dataclass(slots=True, eq=False)
class Job:
    """run() on the tier's thread; then done(its result, its error, seconds it took) on the engine's."""

    urgency: Urgency
    run: Callable[[], Any]
    done: Callable[[Any, Exception | None, float], None]
    result: Any = None
    error: Exception | None = None
    seconds: float = 0.0

    def execute(self, clock: Callable[[], float] = time.perf_counter) -> None:
        started = clock()
        try:
            self.result = self.run()
        except Exception as error:  # noqa: BLE001 - the supervisor: a copy that fails is a miss, never a dead thread
            _log.warning("a copy between tiers failed", extra={"error": type(error).__name__})
            self.error = error
        self.seconds = clock() - started


class Lane(Protocol):
    """Runs jobs one after the other."""

    def submit(self, job: Job) -> None: ...

    def take(self) -> list[Job]:
        """Jobs that have run since the last call. Engine thread."""
        ...

    def close(self) -> None:
        """Run what was submitted, then end. Idempotent."""
        ...


class Inline:
    """A lane without a thread: a job has run when submit() returns. For simulations and deterministic tests. clock: see
    Thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._over: list[Job] = []

    def submit(self, job: Job) -> None:
        job.execute(self._clock)
        self._over.append(job)

    def take(self) -> list[Job]:
        over, self._over = self._over, []
        return over

    def close(self) -> None:
        """Nothing is ever under way."""


@dataclass(slots=True, eq=False)
class Thread:
    """A lane with a thread of its own, started with the first job. news() is called there when a job has run. clock:
    in seconds, for how long they take."""

    name: str
    news: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    _heap: list[tuple[Urgency, int, Job]] = field(default_factory=list)
    _over: deque[Job] = field(default_factory=deque)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _thread: threading.Thread | None = None
    _closing: bool = False

    def submit(self, job: Job) -> None:
        with self._wake:
            assert not self._closing, "a job after the end"
            heapq.heappush(self._heap, (job.urgency, next(self._numbers), job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
                self._thread.start()
            self._wake.notify()

    def take(self) -> list[Job]:
        over: list[Job] = []
        while self._over:
            over.append(self._over.popleft())
        return over

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _main(self) -> None:
        while True:
            with self._wake:
                while not self._heap and not self._closing:
                    self._wake.wait()
                if not self._heap:
                    return
                _, _, job = heapq.heappop(self._heap)
            job.execute(self.clock)
            self._over.append(job)
            self.news()
