from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.launcher import Failed, Launcher
from deploy.state import ClusterRecord, StateDir
from deploy.supervisor import EXIT_REFUSED
from runtime.config import Config
from runtime.errors import InvalidRequest


class Scripted(Launcher):
    """Its routers end as the test says; the last one stays."""

    def __init__(self, folder: Path, *statuses: int) -> None:
        state = StateDir(folder)
        state.create()
        super().__init__(Config(), state)
        self._statuses = list(statuses)
        self.started = 0
        self._routers = [self._start_router(0)]

    def _start_router(self, number: int, word: int | None = None) -> subprocess.Popen[bytes]:
        code = f"raise SystemExit({self._statuses.pop(0)})" if self._statuses else "import time; time.sleep(60)"
        self.started += 1
        return subprocess.Popen([sys.executable, "-c", code])

    def check(self, *, settled: bool) -> subprocess.Popen[bytes]:
        """One look at a router that has ended."""
        self._routers[0].wait()
        self._talking = not settled
        self._check_router()
        return self._routers[0]


@pytest.mark.parametrize("status", [1, EXIT_REFUSED])
def test_a_router_that_served_is_started_again_whatever_it_ended_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("deploy.launcher.REFUSED_PAUSE_S", 0.01)
    launcher = Scripted(tmp_path / "s", status, EXIT_REFUSED)
    launcher.check(settled=True)
    router = launcher.check(settled=True)
    assert launcher.started == 3
    assert router.poll() is None
    router.kill()
    router.wait()


def test_of_several_routers_only_the_one_that_ended_is_started_again(tmp_path: Path) -> None:
    launcher = Scripted(tmp_path / "s")
    launcher._routers.append(launcher._start_router(1))
    other = launcher._routers[1]
    launcher._routers[0].kill()
    launcher.check(settled=True)
    assert launcher._routers[1] is other
    assert [router.poll() for router in launcher._routers] == [None, None]
    for router in launcher._routers:
        router.kill()
        router.wait()


def test_a_record_that_cannot_be_written_ends_a_start_and_no_cluster_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Scripted(tmp_path / "s")
    first = ClusterRecord(1, 1, "h:1", "h:2", "", "", "pdserve", (), "oracle", False)
    full = True

    def write(record: ClusterRecord) -> None:
        if full:
            raise InvalidRequest("the disk is full", field="state_dir")
        StateDir.write(launcher._state, record)

    monkeypatch.setattr(launcher._state, "write", write)
    with pytest.raises(InvalidRequest):
        launcher._note(first)
    launcher._talking = False
    second = replace(first, routers=(7,))
    launcher._note(second)
    full = False
    launcher._note(second)
    assert launcher._state.read() == second, "as soon as there is room"
    launcher._routers[0].kill()
    launcher._routers[0].wait()


def test_a_router_that_never_served_ends_the_start(tmp_path: Path) -> None:
    launcher = Scripted(tmp_path / "s", EXIT_REFUSED)
    with pytest.raises(Failed, match="has ended"):
        launcher.check(settled=False)


def test_the_controller_runs_where_it_is_wanted_and_is_started_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Scripted(tmp_path / "s", 0)
    launcher._routers[0].wait()
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        launcher._controller = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
        started.append(launcher._controller)

    monkeypatch.setattr(launcher, "_start_controller", start)
    launcher._talking = False
    launcher._check_controller()
    assert started == [], "it is not elastic"
    launcher._config = Config(elastic=True)
    launcher._talking = True
    launcher._check_controller()
    assert started == [], "the start is not over"
    launcher._talking = False
    launcher._check_controller()
    started[0].wait()
    launcher._check_controller()
    assert len(started) == 1, "not at once"
    launcher._controller_at = 0.0
    launcher._check_controller()
    assert len(started) == 2
    started[1].wait()
