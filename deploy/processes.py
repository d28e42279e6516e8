"""Processes that cannot outlive their owner: spawn with a death signal, find by session, sweep to the last one.

A parent that is killed with -9 runs no clean-up, so the kernel has to know: every child asks for a signal on its
parent's death (PR_SET_PDEATHSIG). That fires when the forking *thread* ends, so spawn from a thread that lives as
long as the child should. What escapes (a grandchild that was re-parented) is still in the session, and is swept.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_libc = ctypes.CDLL(None, use_errno=True)


def set_death_signal(sig: int) -> None:
    """Ask for `sig` when the parent thread dies; 0 takes the wish back."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the new parent of its orphaned descendants, so that it can reap them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _tie(parent: int, sig: int) -> Callable[[], None]:
    def run() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and prctl
            os._exit(1)

    return run


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    death_signal: signal.Signals,
    output: IO[bytes] | int | None = None,
    stdin: int = subprocess.DEVNULL,
    stderr: IO[bytes] | int | None = None,
    new_session: bool = False,
    keep: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a child that gets `death_signal` when the calling thread (and so this process) ends. keep: open files it
    inherits."""
    return subprocess.Popen(
        list(argv),
        env=dict(env),
        stdin=stdin,
        stdout=output,
        stderr=output if stderr is None else stderr,
        start_new_session=new_session,
        pass_fds=keep,
        preexec_fn=_tie(os.getpid(), death_signal),
    )


def stop(process: subprocess.Popen[bytes], grace_s: float) -> int:
    """SIGTERM, then SIGKILL after `grace_s`. Returns the exit status. Fine on a dead process."""
    if process.poll() is None:
        process.terminate()
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/PID/stat. start: ticks since boot; (pid, start) names a process for good."""

    pid: int
    parent: int
    session: int
    state: str
    start: int


def look(pid: int) -> Process | None:
    """The process, or None when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold blanks and brackets
    return Process(pid, int(fields[1]), int(fields[3]), fields[0], int(fields[19]))


def alive(pid: int, start: int) -> bool:
    """Whether exactly that process still runs (a zombie does not)."""
    process = look(pid)
    return process is not None and process.start == start and process.state != "Z"


def wait_gone(pid: int, start: int, timeout_s: float) -> bool:
    """Wait for a process that is not our child to end. Returns whether it did."""
    deadline = time.monotonic() + timeout_s
    while alive(pid, start):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def all_processes() -> list[Process]:
    found = (look(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def session_members(session: int, zombies: bool = False) -> list[Process]:
    """Processes of the session, the caller left out; running ones only, unless `zombies`."""
    me = os.getpid()
    return [p for p in all_processes() if p.session == session and p.pid != me and (zombies or p.state != "Z")]


def descendants(pid: int) -> list[Process]:
    """Running children of `pid`, and theirs."""
    processes = all_processes()
    found: list[Process] = []
    parents = {pid}
    while True:
        new = [p for p in processes if p.parent in parents and p not in found]
        if not new:
            return [p for p in found if p.state != "Z"]
        found += new
        parents = {p.pid for p in new}


def sweep(session: int, timeout_s: float = 5.0, keep: Collection[int] = ()) -> list[int]:
    """Kill what is left of a session (not the caller, nor `keep`), until nothing is. Returns the pids that would not
    go.

    Zombies are waited for too: a process whose first thread is one may still be giving back memory and ports.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process for process in session_members(session, zombies=True) if process.pid not in keep]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            _reap(process.pid)
        if not left or time.monotonic() > deadline:
            return [process.pid for process in left if process.state != "Z"]
        time.sleep(0.02)


def _reap(pid: int) -> None:
    """Collect a dead orphan that was adopted. Not for a child whose end somebody waits for."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
