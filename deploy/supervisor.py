"""One child process under supervision, from one long-lived thread. Ray-free: the actor is a thin face over this.

The child gets SIGKILL when the supervising thread dies, whatever killed it. When the child dies first, `on_death` is
called once; the actor then leaves with a failure, so that Ray starts it (and a child with a new epoch) again. A child
that refuses its configuration would refuse it for ever, so that is kept and reported instead.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL

from deploy import processes

EXIT_REFUSED = 2
"""Exit status of a process that cannot work with its configuration: trying again would not help."""

QUICK_DEATH_S = 5.0
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class ChildStatus:
    pid: int
    exit_status: int | None
    refused: bool  # will not be restarted
    uptime_s: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Supervisor:
    """Starts the child at once. stop() ends it without `on_death`."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path | None,
        on_death: Callable[[int], None],
        pause_s: float = PAUSE_S,
    ) -> None:
        self._argv, self._env, self._log = list(argv), dict(env), log
        self._on_death, self._pause_s = on_death, pause_s
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._again = threading.Event()
        self._born = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()
        self._started.wait()

    def status(self) -> ChildStatus:
        if self._process is None:
            return ChildStatus(0, EXIT_REFUSED, True, 0.0)
        code = self._process.poll()
        return ChildStatus(self._process.pid, code, code == EXIT_REFUSED, time.monotonic() - self._born)

    def stop(self, grace_s: float) -> int:
        """End the child, kindly first. Returns its exit status."""
        self._stopping.set()
        code = 0 if self._process is None else processes.stop(self._process, grace_s)
        self._thread.join()
        return code

    def restart(self, grace_s: float) -> int:
        """End the child, kindly first, and start another one in its place, without `on_death`. Returns the new pid.
        Raises RuntimeError when it cannot be started."""
        old = self._process
        self._started.clear()
        if self._thread.is_alive() and old is not None:
            self._again.set()
            processes.stop(old, grace_s)
            self._started.wait()
        else:  # it has refused its configuration, and may not any more
            self._begin()
        if self._process is None or self._process is old:
            raise RuntimeError("the process cannot be started")
        return self._process.pid

    def _run(self) -> None:
        while True:
            self._born = time.monotonic()
            try:
                self._process = self._spawn()
            finally:
                self._started.set()
            code = self._process.wait()
            if not self._again.is_set():
                break
            self._again.clear()
        if self._stopping.is_set() or code == EXIT_REFUSED:
            return
        if time.monotonic() - self._born < QUICK_DEATH_S:  # do not burn the machine with restarts
            self._stopping.wait(self._pause_s)
        if not self._stopping.is_set():
            self._on_death(code)

    def _spawn(self) -> subprocess.Popen[bytes]:
        if self._log is None:
            return processes.spawn(self._argv, env=self._env, death_signal=SIGKILL)
        with self._log.open("ab") as output:
            return processes.spawn(self._argv, env=self._env, death_signal=SIGKILL, output=output)
