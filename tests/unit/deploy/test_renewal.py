"""Routers are replaced one by one; what fails leaves the rest as it was."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from deploy.renewal import Renewal, Started

SERVES = "import os, time; os.write({word}, b'ready'); os.close({word}); time.sleep(60)"
ENDS = "raise SystemExit(2)"
SAYS_NOTHING = "import time; time.sleep(60)"
HOLDS_ON = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(60)"


class Fleet:
    """Routers that do as the test says."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.routers = [self.spawn(SAYS_NOTHING), self.spawn(SAYS_NOTHING)]
        self.code = SERVES

    def spawn(self, code: str, word: int = -1) -> subprocess.Popen[bytes]:
        keep = (word,) if word >= 0 else ()
        self.started.append(subprocess.Popen([sys.executable, "-c", code.format(word=word)], pass_fds=keep))
        return self.started[-1]

    def start(self, number: int) -> Started:
        reader, writer = os.pipe()
        process = self.spawn(self.code, writer)
        os.close(writer)
        return process, reader

    def running(self) -> int:
        return sum(one.poll() is None for one in self.started)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    for one in made.started:
        one.kill()
        one.wait()


def run(renewal: Renewal, fleet: Fleet) -> int:
    """To its end. The most routers that ran at once."""
    most, deadline = 0, time.monotonic() + 30
    while renewal.turn():
        most = max(most, fleet.running())
        assert time.monotonic() < deadline
        time.sleep(0.01)  # as the launcher does between two looks
    renewal.close()
    return most


def test_each_is_replaced_by_one_that_serves_before_it_ends(fleet: Fleet) -> None:
    old = list(fleet.routers)
    renewal = Renewal(fleet.routers, fleet.start, 10.0)
    assert run(renewal, fleet) == 3, "one more than there were, never two"
    assert renewal.error == ""
    assert [one.poll() for one in old] == [-15, -15]
    assert [one.poll() for one in fleet.routers] == [None, None]
    assert renewal.processes() == []


@pytest.mark.parametrize(("code", "why"), [(ENDS, "ended before it served"), (SAYS_NOTHING, "does not come to serve")])
def test_one_that_does_not_come_to_serve_ends_it_and_every_old_one_stays(
    fleet: Fleet, code: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.renewal.READY_S", 0.5 if code == SAYS_NOTHING else 30.0)
    fleet.code = code
    old = list(fleet.routers)
    renewal = Renewal(fleet.routers, fleet.start, 10.0)
    run(renewal, fleet)
    assert why in renewal.error
    assert renewal.error.startswith("router 0")
    assert fleet.routers == old
    assert fleet.running() == 2


def test_one_that_cannot_be_started_ends_it_and_nothing_else(fleet: Fleet) -> None:
    def no_room(number: int) -> Started:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    renewal = Renewal(fleet.routers, no_room, 10.0)
    run(renewal, fleet)
    assert renewal.error == f"router 0: it cannot be started ({os.strerror(errno.EAGAIN)})"
    assert (renewal.processes(), fleet.running()) == ([], 2)


def test_an_old_one_that_does_not_end_in_time_is_killed(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.renewal.GRACE_S", 0.2)
    slow = subprocess.Popen([sys.executable, "-c", HOLDS_ON], stdout=subprocess.PIPE)
    fleet.started.append(slow)
    assert slow.stdout is not None
    slow.stdout.readline()
    fleet.routers[:] = [slow]
    run(Renewal(fleet.routers, fleet.start, 0.2), fleet)
    assert slow.poll() == -9
    slow.stdout.close()
