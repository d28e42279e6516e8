"""Two machines of a Ray cluster, here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import processes
from deploy.ports import free_ports
from tests import readme
from tests.cluster_tools import until

HEAD, NODE = "127.0.0.3", "127.0.0.4"


@pytest.fixture
def ray_machines(tmp_path: Path, short_tmp: Path) -> Iterator[dict[str, str]]:
    """Two Ray nodes on loopback addresses, started by the README's own lines; yields the variables of its commands."""
    (short_tmp / "token").write_text("0" * 64)
    port, *others = free_ports("127.0.0.1", 18)
    variables = {"HEAD": HEAD, "NODE": NODE, "PORT": str(port)}
    env = {
        **os.environ,
        **variables,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(short_tmp / "token"),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    started: list[subprocess.Popen[bytes]] = []
    try:
        for line in readme.block("sh ray").strip().splitlines():
            quiet = "--num-cpus=2 --object-store-memory=80000000 --disable-usage-stats --include-log-monitor=false"
            extra = f"--temp-dir={short_tmp} --include-dashboard=false {quiet}" if "--head" in line else quiet
            names = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
                     "metrics-export-port", *(("ray-client-server-port",) if "--head" in line else ()))  # fmt: skip
            ports = " ".join(f"--{name}={others.pop()}" for name in names)
            command = ["bash", "-c", f"exec {line} {extra} {ports}"]
            log = (tmp_path / f"ray{len(started)}.log").open("wb")
            with log:
                started.append(
                    processes.spawn(command, env=env, death_signal=signal.SIGTERM, output=log, new_session=True)
                )
            said = tmp_path / f"ray{len(started) - 1}.log"
            until(lambda said=said: "Ray runtime started" in said.read_text(), 40, f"{line}\n{said.read_text()}")  # type: ignore[misc]
        yield env
    finally:
        for process in reversed(started):
            processes.stop(process, 5)
            processes.sweep(process.pid)
