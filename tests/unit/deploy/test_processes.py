from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from deploy import processes
from deploy.supervisor import EXIT_REFUSED, Supervisor
from tests.cluster_tools import until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def start_of(pid: int) -> int:
    process = processes.look(pid)
    assert process is not None
    return process.start


def test_a_child_dies_with_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def run() -> None:
        started.append(processes.spawn(SLEEP, env=os.environ, death_signal=signal.SIGKILL))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert started[0].wait(5) == -signal.SIGKILL


def test_stop_is_kind_first_and_firm_after() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    child = processes.spawn(
        [sys.executable, "-c", deaf], env=os.environ, death_signal=signal.SIGKILL, output=subprocess.PIPE, stderr=2
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert processes.stop(child, 0.1) == -signal.SIGKILL
    child.stdout.close()
    assert processes.stop(child, 0.1) == -signal.SIGKILL  # again is fine

    kind = processes.spawn(SLEEP, env=os.environ, death_signal=signal.SIGKILL)
    assert processes.stop(kind, 5) == -signal.SIGTERM


def test_a_sweep_ends_a_whole_session_grandchildren_included() -> None:
    family = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    leader = processes.spawn(
        [sys.executable, "-c", family],
        env=os.environ,
        death_signal=signal.SIGKILL,
        output=subprocess.PIPE,
        stderr=2,
        new_session=True,
    )
    assert leader.stdout is not None
    grandchild = int(leader.stdout.readline())
    leader.stdout.close()
    start = start_of(grandchild)
    leader.kill()
    leader.wait()
    assert processes.alive(grandchild, start)
    assert processes.sweep(leader.pid) == []
    assert not processes.alive(grandchild, start)


def test_a_sweep_spares_whom_it_is_told_to() -> None:
    leader = processes.spawn(SLEEP, env=os.environ, death_signal=signal.SIGKILL, new_session=True)
    try:
        assert processes.sweep(leader.pid, keep=[leader.pid]) == []
        assert leader.poll() is None
    finally:
        leader.kill()
        leader.wait()


def test_a_pid_that_was_used_again_is_another_process() -> None:
    start = start_of(os.getpid())
    assert processes.alive(os.getpid(), start)
    assert not processes.alive(os.getpid(), start + 1)


def test_a_dead_child_is_reported_once_with_its_status(tmp_path: Path) -> None:
    deaths: list[int] = []
    Supervisor([sys.executable, "-c", "exit(7)"], os.environ, tmp_path / "log", deaths.append, pause_s=0.0)
    until(lambda: deaths == [7], 5, "the report of the death")


def test_a_killed_child_is_reported_and_a_stopped_one_is_not() -> None:
    deaths: list[int] = []
    killed = Supervisor(SLEEP, os.environ, None, deaths.append, pause_s=0.0)
    os.kill(killed.status().pid, signal.SIGKILL)
    until(lambda: deaths == [-signal.SIGKILL], 5, "the report of the kill")

    stopped = Supervisor(SLEEP, os.environ, None, deaths.append, pause_s=0.0)
    assert stopped.stop(5) == -signal.SIGTERM
    assert deaths == [-signal.SIGKILL]


def test_a_child_that_refuses_its_configuration_is_kept_for_the_report(tmp_path: Path) -> None:
    deaths: list[int] = []
    log = tmp_path / "log"
    code = f"print('why'); exit({EXIT_REFUSED})"
    child = Supervisor([sys.executable, "-c", code], os.environ, log, deaths.append, pause_s=0.0)
    until(lambda: child.status().refused, 5, "the refusal")
    assert log.read_text() == "why\n"
    assert deaths == []


def test_a_child_is_replaced_by_another_one_and_nobody_is_told_of_a_death(tmp_path: Path) -> None:
    deaths: list[int] = []
    child = Supervisor(SLEEP, os.environ, tmp_path / "log", deaths.append, pause_s=0.0)
    first = child.status().pid
    second = child.restart(5)
    assert second == child.status().pid != first
    assert processes.look(first) is None
    assert processes.look(second) is not None
    os.kill(second, signal.SIGKILL)
    until(lambda: deaths == [-signal.SIGKILL], 5, "the report of the second one's death, and of no other")


def test_a_child_that_refused_may_be_started_again(tmp_path: Path) -> None:
    wish = tmp_path / "wish"
    code = f"import os, time; time.sleep(600) if os.path.exists({str(wish)!r}) else exit({EXIT_REFUSED})"
    child = Supervisor([sys.executable, "-c", code], os.environ, None, lambda code: None, pause_s=0.0)
    until(lambda: child.status().refused, 5, "the refusal")
    wish.touch()
    child.restart(5)
    assert not child.status().refused
    assert child.stop(5) == -signal.SIGTERM
