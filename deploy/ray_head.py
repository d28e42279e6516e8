"""A Ray head of our own on this machine: its own folder, ports, token and loopback address. Imports no Ray.

Ray rewrites 127.0.0.1 to the network card's address and then hangs, hence 127.0.0.2. It binds widely whatever it is
told, so it gets a token. `ray stop` is never used: it would end every Ray process of the machine.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from signal import SIGTERM
from typing import IO

from deploy import processes
from deploy.ports import free_ports
from runtime.errors import InvalidRequest

HEAD_IP = "127.0.0.2"
OBJECT_STORE_BYTES = 80_000_000  # nothing of ours goes through it; this is about the least Ray takes
TOO_SLOW = "The current node timed out during startup"
"""How `ray start` ends when its node is not up within 30 s, which is fixed in Ray."""

_SOCKET_ROOM = 107 - len("/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")


def make_folder() -> Path:
    """A folder with the token in it, somewhere its sockets' paths (107 bytes) fit."""
    bases = (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp")
    base = next(
        (one for one in bases if one and len(one) + len("/pds-12345678") <= _SOCKET_ROOM and os.access(one, os.W_OK)),
        "",
    )
    if not base:
        raise InvalidRequest(
            f"no writable temporary folder with a path short enough for Ray's sockets ({_SOCKET_ROOM})"
        )
    folder = Path(tempfile.mkdtemp(prefix="pds-", dir=base))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return folder


def environment(base: dict[str, str], folder: Path) -> dict[str, str]:
    """What every process of this Ray cluster must have set, the workers included."""
    return base | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else it waits 30 s for actors that never end by themselves
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def start(
    folder: Path, env: dict[str, str], workers: int, gpus: int, output: IO[bytes]
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start `ray start --head --block`. Returns its address and the process, which ends Ray on SIGTERM."""
    names = (
        "port", "node-manager-port", "object-manager-port", "ray-client-server-port", "dashboard-port",
        "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port",
    )  # fmt: skip
    ports = dict(zip(names, free_ports(HEAD_IP, len(names)), strict=True))
    command = [
        os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--head", "--block",
        f"--node-ip-address={HEAD_IP}", f"--temp-dir={folder}", f"--num-cpus={workers}", f"--num-gpus={gpus}",
        f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-dashboard=false", "--include-log-monitor=false",
        "--no-monitor", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0",
        *(f"--{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    process = processes.spawn(command, env=env, death_signal=SIGTERM, output=output)
    return f"{HEAD_IP}:{ports['port']}", process
