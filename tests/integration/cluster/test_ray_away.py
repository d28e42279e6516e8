"""The Ray that workers were placed in goes away: what serves goes on serving, and everybody says what is the matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import processes, ray_head
from deploy.ports import free_ports
from pdserve import Client
from tests.cluster_tools import ForegroundCluster, listening, run_pdserve, until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

NODE = "127.0.0.3"
Ray = tuple[str, dict[str, str], list["subprocess.Popen[bytes]"]]


def runs(log: Path, process: subprocess.Popen[bytes]) -> None:
    until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, 90, log.name)
    assert process.poll() is None, log.read_text()


@pytest.fixture
def ray(tmp_path: Path, short_tmp: Path) -> Iterator[Ray]:
    """A head without room for workers and a node that has it: the address, the environment, the processes."""
    (short_tmp / "token").write_text("0" * 64)
    env = ray_head.environment(dict(os.environ), short_tmp)
    started: list[subprocess.Popen[bytes]] = []
    try:
        with (tmp_path / "head.log").open("wb") as log:
            address, head = ray_head.start(short_tmp, env, 0, 0, log)
            started.append(head)
        runs(tmp_path / "head.log", head)
        names = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
                 "metrics-export-port")  # fmt: skip
        ports = zip(names, free_ports(NODE, len(names)), strict=True)
        command = [
            os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--block", f"--address={address}",
            f"--node-ip-address={NODE}", "--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats",
            "--include-log-monitor=false", *(f"--{name}={port}" for name, port in ports),
        ]  # fmt: skip
        with (tmp_path / "node.log").open("wb") as log:
            started.append(processes.spawn(command, env=env, death_signal=signal.SIGTERM, output=log, new_session=True))
        runs(tmp_path / "node.log", started[-1])
        yield address, env, started
    finally:
        for process in reversed(started):
            below = processes.descendants(process.pid)
            processes.stop(process, 5)
            processes.sweep(process.pid)
            for one in below:
                until(lambda one=one: not processes.alive(one.pid, one.start), 30, f"the end of {one}")  # type: ignore[misc]


def test_serving_goes_on_and_status_and_down_say_that_ray_is_away(ray: Ray, tmp_path: Path) -> None:
    address, env, (head, node) = ray
    (grpc,) = free_ports("127.0.0.1", 1)
    flags = [f"--address={address}", f"--grpc-listen=127.0.0.1:{grpc}", "--model=oracle", "--threads=1"]
    cluster = ForegroundCluster(tmp_path, *flags, env=env)
    try:
        cluster.until_ready()
        assert cluster.status()["ray"] == {"address": address, "answers": True}
        workers = [one["pid"] for one in cluster.status()["workers"]]
        processes.stop(head, 5)
        until(lambda: not listening(address), 30, "the end of the head")

        with Client(f"127.0.0.1:{grpc}") as client:
            for number in range(5):
                assert client.generate(f"{number} and on it goes", max_tokens=4).usage.completion_tokens == 4
        status = run_pdserve("status", *cluster.flags)
        assert f"Ray {address}: away" in status.stdout
        assert "serving" in status.stdout
        assert {one["state"] for one in cluster.status()["workers"]} == {"ready"}

        restart = run_pdserve("restart", *cluster.flags, env=env)
        assert (restart.returncode, f"Ray at {address} does not answer" in restart.stderr) == (1, True)
        down = run_pdserve("down", *cluster.flags, env=env)
        assert down.returncode == 1
        assert "ended: router" in down.stderr
        assert f"Ray at {address} does not answer" in down.stderr
        assert cluster.front.wait(30) == 0
        assert not listening(f"127.0.0.1:{grpc}")
        assert cluster.state.read() is None

        processes.stop(node, 5)
        until(lambda: not any(processes.look(pid) for pid in workers), 30, "workers end with Ray on their node")
    finally:
        cluster.stop()
