"""Running `pdserve` clusters from tests, and looking for what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from deploy import processes
from deploy.state import ClusterRecord, StateDir

ROOT = Path(__file__).resolve().parent.parent
PDSERVE = [sys.executable, "-m", "pdserve"]
START_TIMEOUT_S = 200.0


def run_pdserve(*arguments: str, timeout: float = 250.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of pdserve to its end."""
    return subprocess.run(
        [*PDSERVE, *arguments], cwd=ROOT, text=True, capture_output=True, timeout=timeout, check=False, **options
    )


class ForegroundCluster:
    """`pdserve up` as a user's shell would run it. Starts in the constructor; ends with stop()."""

    def __init__(self, folder: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self.state = StateDir(folder / "state")
        self.flags = [f"--state-dir={self.state.folder}"]
        flags = ("--http-listen=127.0.0.1:0", *flags)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        self.front = subprocess.Popen(
            [*PDSERVE, "up", *flags, *self.flags],  # of a flag given twice the last one counts
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.front.stdout is not None
        for line in self.front.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def until_ready(self) -> ForegroundCluster:
        """Wait for the last line of the announcement. An early end fails with everything that was printed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.output or " ends " not in self.output[-1]:
            line = self._lines.get(timeout=max(0.1, deadline - time.monotonic()))
            assert line is not None, "pdserve up ended early:\n" + "\n".join(self.output)
            self.output.append(line)
        return self

    @property
    def record(self) -> ClusterRecord:
        record = self.state.read()
        assert record is not None, "no cluster record"
        return record

    @property
    def http(self) -> str:
        return f"http://{self.record.http}"

    def status(self) -> dict[str, Any]:
        """What `pdserve status --json` prints."""
        done = run_pdserve("status", "--json", *self.flags)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def worker(self, name: str) -> dict[str, Any]:
        return next((one for one in self.status()["workers"] if one["worker"] == name), {})

    def stop(self) -> None:
        if self.front.poll() is None:
            self.front.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.front.wait(30)
        if self.front.poll() is None:
            self.front.kill()
        self.front.wait()
        if self.front.stdout is not None:
            self.front.stdout.close()


def until(condition: Callable[[], Any], timeout_s: float, what: str = "the condition") -> Any:
    """Wait until the condition is truthy and return its value; fails naming it."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.02)


def listening(address: str) -> bool:
    """Whether somebody accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((host, int(port))) == 0


class Traces:
    """Everything a running cluster has on the machine, taken while it runs, to be looked for afterwards."""

    def __init__(self, cluster: ForegroundCluster) -> None:
        record = cluster.record
        self.session = record.launcher_pid
        self.ray_folder = Path(record.ray_folder)
        members = processes.session_members(self.session)
        self.pids = {(one.pid, one.start) for one in members}
        self.ports = {address for one in members for address in ports_of(one.pid)}
        self.shm_before = shm_files()
        assert len(self.pids) >= 5, "launcher, router, Ray and workers are expected in the session"
        assert self.ports
        assert self.ray_folder.is_dir()

    def left(self) -> list[str]:
        """What is still there, in words."""
        found = [f"process {pid}" for pid, start in self.pids if processes.alive(pid, start)]
        found += [f"process {one.pid} in the session" for one in processes.session_members(self.session)]
        found += [f"port {address}" for address in self.ports if listening(address)]
        found += [f"folder {self.ray_folder}"] if self.ray_folder.exists() else []
        return found + [f"shared memory {name}" for name in orphaned_shm()]


def ports_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(pid).net_connections("tcp4"):
            if one.status == psutil.CONN_LISTEN and one.laddr:
                host = "127.0.0.1" if one.laddr.ip == "0.0.0.0" else one.laddr.ip
                yield f"{host}:{one.laddr.port}"


def shm_files() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def orphaned_shm(before: frozenset[str] = frozenset()) -> set[str]:
    """Files in /dev/shm that no running process has open or mapped: they will stay for ever."""
    suspects = {name for name in shm_files() - before if _mine(name)}
    if not suspects:
        return set()
    for process in processes.all_processes():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            suspects = {name for name in suspects if f"/dev/shm/{name}" not in maps}
        with contextlib.suppress(OSError):
            links = {os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
            suspects = {name for name in suspects if f"/dev/shm/{name}" not in links}
    return {name for name in suspects if _mine(name)}  # without those that went with their process meanwhile


def _mine(name: str) -> bool:
    try:
        return Path("/dev/shm", name).stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False
