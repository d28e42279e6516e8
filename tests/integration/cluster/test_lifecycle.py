"""However a cluster ends, nothing of it stays: no process, port, shared memory or folder."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from deploy import processes
from pdserve import Client
from tests.cluster_tools import ForegroundCluster, Traces, listening, run_pdserve, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]  # a start takes its time on a busy machine


@pytest.fixture
def running(tmp_path: Path) -> ForegroundCluster:
    """A cluster of the test's own that has moved pages over NIXL already."""
    cluster = ForegroundCluster(tmp_path, "--model=oracle", "--threads=1").until_ready()
    with Client(cluster.record.grpc) as client:
        answer = client.generate("a prompt of more than one page", max_tokens=4, return_ledger=True)
    assert answer.ledger is not None
    assert answer.ledger.transport == "nixl"
    return cluster


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_a_foreground_up_ends_everything(running: ForegroundCluster, number: signal.Signals) -> None:
    traces = Traces(running)
    running.front.send_signal(number)
    assert running.front.wait(15) == 0
    assert traces.left() == []
    assert running.state.read() is None
    running.stop()


def test_a_kill_of_the_front_ends_everything(running: ForegroundCluster) -> None:
    traces = Traces(running)
    running.front.kill()
    until(lambda: not traces.left(), 15, "the end of everything")
    assert running.state.read() is None
    running.stop()


def test_a_kill_of_the_launcher_ends_everything(running: ForegroundCluster) -> None:
    traces = Traces(running)
    os.kill(running.record.launcher_pid, signal.SIGKILL)
    assert running.front.wait(15) == 1
    assert traces.left() == []
    assert running.state.read() is None
    running.stop()


@pytest.mark.slow
def test_a_kill_of_both_at_once_leaves_no_process(running: ForegroundCluster) -> None:
    traces = Traces(running)
    running.front.kill()
    os.kill(running.record.launcher_pid, signal.SIGKILL)
    until(lambda: not [one for one in traces.left() if not one.startswith("folder")], 20, "the end of the processes")
    done = run_pdserve("down", *running.flags)  # only files are left, and down removes those
    assert done.returncode == 0, done.stderr
    assert traces.left() == []
    running.stop()


SLOW_MACHINE = """
import os, subprocess, sys, time, types

if not os.path.exists(os.environ["FIRST_START"]) and any(one.endswith("/ray") for one in sys.orig_argv[:2]):
    open(os.environ["FIRST_START"], "w").close()
    subprocess.Popen(["sleep", "600"])  # agents that had begun outlive the rest
    from ray._private import node, services

    def nowhere(*_):
        raise RuntimeError("not yet")

    services.get_node = nowhere
    node.time = types.SimpleNamespace(sleep=time.sleep, time=time.time, monotonic=lambda: 20 * time.monotonic())
"""
"""For Ray's first start its node is never up, and its 30 s are over soon. What it starts is real."""


@pytest.mark.slow
def test_a_ray_that_gave_up_its_own_start_is_started_once_more(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_MACHINE)
    env = {"PYTHONPATH": str(tmp_path), "FIRST_START": str(tmp_path / "first")}
    cluster = ForegroundCluster(tmp_path, "--model=oracle", "--threads=1", env=env)
    try:
        cluster.until_ready()
        assert any("starting Ray once more" in line for line in cluster.output)
        assert "started once more" in cluster.state.tail("launcher")
        members = processes.session_members(cluster.record.launcher_pid)
        programs = [Path(f"/proc/{one.pid}/cmdline").read_text().split("\0")[0] for one in members]
        assert sum(one.endswith("gcs_server") for one in programs) == 1
        assert "sleep" not in programs, "something of the first is left"
        traces = Traces(cluster)
        cluster.front.send_signal(signal.SIGINT)
        assert cluster.front.wait(15) == 0
        assert traces.left() == []
    finally:
        cluster.stop()


@pytest.mark.slow
def test_a_kill_of_both_while_ray_starts_leaves_what_down_removes(tmp_path: Path) -> None:
    cluster = ForegroundCluster(tmp_path, "--model=oracle", "--threads=1")
    try:
        record = until(cluster.state.read, 60, "the record")
        until(lambda: any(Path(record.ray_folder).glob("session_*")), 60, "the first of Ray")
        cluster.front.kill()
        os.kill(record.launcher_pid, signal.SIGKILL)
        until(lambda: not processes.session_members(record.launcher_pid), 30, "the end of the processes")
        assert run_pdserve("down", *cluster.flags).returncode == 0
        assert not Path(record.ray_folder).exists()
        assert cluster.state.read() is None
    finally:
        cluster.stop()


def test_a_detached_cluster_outlives_its_command_and_ends_with_down(tmp_path: Path) -> None:
    flags = ["--model=oracle", f"--state-dir={tmp_path}/state", "--http-listen=127.0.0.1:0"]
    done = run_pdserve("up", "--detach", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    status = json.loads(run_pdserve("status", "--json", flags[1]).stdout)
    assert status["serving"]
    second = run_pdserve("up", *flags)
    assert second.returncode == 2
    assert "a cluster runs already" in second.stderr

    record = json.loads((tmp_path / "state" / "cluster.json").read_text())
    session = record["launcher_pid"]
    ended = run_pdserve("down", flags[1])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "ended: router, prefill-0, decode-0"
    assert processes.session_members(session) == []
    assert not listening(record["http"])
    assert not Path(record["ray_folder"]).exists()
    assert run_pdserve("down", flags[1]).returncode == 2


def test_a_worker_that_refuses_its_configuration_says_why_and_nothing_stays(tmp_path: Path) -> None:
    """What only a worker finds out, on its machine: what is known before is refused before anything starts."""
    pool = ["--host-pool-bytes=10000000", "--disk-pool-bytes=10000000", "--disk-pool-dir=/dev/null/pages"]
    flags = ["--model=oracle", *pool, f"--state-dir={tmp_path}/state", "--http-listen=127.0.0.1:0"]
    done = run_pdserve("up", *flags)
    assert done.returncode == 1
    assert "disk_pool_dir: the folder cannot be used: Not a directory" in done.stderr
    assert not (tmp_path / "state" / "cluster.json").exists()


def test_a_worker_that_keeps_dying_ends_the_start(tmp_path: Path) -> None:
    code = "import os, sys\nif sys.orig_argv[-1] == 'worker':\n    print('no luck', flush=True)\n    os._exit(9)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    flags = ["--model=oracle", f"--state-dir={tmp_path}/state", "--http-listen=127.0.0.1:0"]
    done = run_pdserve("up", *flags, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "keeps dying" in done.stderr
    assert "no luck" in done.stderr
    assert not (tmp_path / "state" / "cluster.json").exists()


def test_an_unknown_model_is_refused_by_its_key(tmp_path: Path) -> None:
    done = run_pdserve("up", "--model=no-such-model", f"--state-dir={tmp_path}/state")
    assert done.returncode == 2
    assert done.stderr.startswith("pdserve: model: ")
    assert done.stdout == "", "nothing was started"
    assert not (tmp_path / "state" / "cluster.json").exists()


def test_a_taken_port_is_refused_by_its_key(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run_pdserve("up", "--model=oracle", f"--state-dir={tmp_path}/state", f"--http-listen={address}")
    assert done.returncode == 1
    assert "pdserve: http_listen: cannot listen on" in done.stderr
