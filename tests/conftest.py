"""What all tests share: one cluster for the session, the skip policy, and the proof that nothing is left behind."""

from __future__ import annotations

import fnmatch
import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.ports import free_ports
from tests import readme
from tests.cluster_tools import ForegroundCluster, orphaned_shm, shm_files

os.environ.setdefault("UCX_MODULES", "^efa")  # before anything imports nixl
os.environ.setdefault("OMP_NUM_THREADS", "1")

MARK = "TEST_SESSION_MARK"
"""An environment variable every process of this test session inherits; what still has it at the end was left."""

ALLOWED_SKIPS: dict[str, str] = {
    "tests/gpu/*": "needs an NVIDIA GPU",
}
"""Tests that may be skipped, by a pattern of their id, and why. Any other skip fails: a test that does not run proves
nothing, and nobody reads the number of skips."""


ORDER = ("unit", "integration", "faults", "perf", "gpu")
"""The quick ones first."""


def pytest_configure() -> None:
    """Whoever starts this in the background of a shell has SIGINT ignored, and every child would inherit that: the
    tests of Ctrl-C would wait for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: next((place for place, name in enumerate(ORDER) if name in item.path.parts), len(ORDER))
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    del call
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and not hasattr(report, "wasxfail") and not _may_skip(item.nodeid):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped and is not on the list in tests/conftest.py"


def _may_skip(nodeid: str) -> bool:
    return any(fnmatch.fnmatch(nodeid, pattern) for pattern in ALLOWED_SKIPS)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails the session when a process it started still runs at its end, or shared memory nobody uses is left."""
    mark = secrets.token_hex(8)
    os.environ[MARK] = mark
    shm = frozenset(shm_files())
    yield
    deadline = time.monotonic() + 5
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left by the tests: {left}"
    assert not orphaned_shm(shm), f"shared memory left by the tests: {orphaned_shm(shm)}"


def _marked(mark: str) -> list[str]:
    """Our descendants, wherever they were re-parented to: children by kinship, others by the inherited variable."""
    found = {one.pid: one for one in psutil.Process().children(recursive=True)}
    for one in psutil.process_iter():
        try:
            if one.pid != os.getpid() and one.environ().get(MARK) == mark:
                found[one.pid] = one
        except psutil.Error:
            continue
    return [text for one in found.values() if (text := _describe(one))]


def _describe(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        words = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    resource_tracker = "multiprocessing.resource_tracker" in words  # ends with the interpreter, not before
    return "" if resource_tracker else f"{process.pid} {words[:120]}"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForegroundCluster]:
    """The session's one shared cluster: SmolLM2, one prefill and one decode worker. Tests leave it as it was."""
    command = shlex.split(readme.block("sh up"))  # as the README tells a stranger to, on ports of our own
    assert command[:2] == [".venv/bin/pdserve", "up"]
    flags = [*command[2:], "--grpc-listen=127.0.0.1:0", "--threads=1"]
    running = ForegroundCluster(tmp_path_factory.mktemp("cluster"), *flags)
    try:
        yield running.until_ready()
    finally:
        running.stop()


@pytest.fixture
def free_port() -> int:
    """A loopback port that is free now."""
    return free_ports("127.0.0.1", 1)[0]


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A temporary folder with a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)
