"""A fleet's workers in Ray, from a process that stays free of it: every wish is a short-lived `deploy.ray_ops`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deploy import ray_head
from deploy.placement import WorkerSpec, child_env
from deploy.state import ClusterRecord, StateDir
from runtime.errors import InvalidRequest

TIMEOUT_S = 90.0
KNOCK_S = 3.0


class RayFailed(Exception):
    """Ray did not do it; the message says why."""


def answers(address: str) -> bool:
    """Whether somebody listens where Ray should; Ray itself would try for a minute and more. Raises InvalidRequest when
    that is no address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest("the address of a Ray cluster is host:port", field="address", limit="host:port")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), KNOCK_S):
            return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Actors:
    """The actors of one namespace. node_ip: of a Ray started here; logs: the folder their processes write to, here."""

    address: str
    namespace: str
    node_ip: str = ""
    logs: str = ""
    env: Mapping[str, str] = field(default_factory=lambda: child_env(os.environ, {}))

    @classmethod
    def of(cls, record: ClusterRecord, state: StateDir) -> Actors:
        """Those of a cluster that was started in this state folder."""
        env = child_env(os.environ, {})
        if not record.ray_folder:
            return cls(record.ray_address, record.namespace, env=env)
        env = ray_head.environment(env, Path(record.ray_folder))
        return cls(record.ray_address, record.namespace, ray_head.HEAD_IP, str(state.logs), env)

    def stop(self) -> list[str]:
        """End all of them. Returns their names. Raises RayFailed, as everything here."""
        return list(self._call("stop")["stopped"])

    def add(self, spec: WorkerSpec, workers: int, taken: list[str]) -> str:
        """Ask for one more like `spec`, of `workers` in all; its name, which is none of `taken`."""
        return str(self._call("add", spec=asdict(spec), workers=workers, taken=taken)["added"])

    def remove(self, worker: str) -> None:
        """End one, come or not."""
        if not self._call("remove", worker=worker)["stopped"]:
            raise RayFailed(f"Ray knows no worker {worker}")

    def restart(self, worker: str) -> int:
        """Another process in its place. Returns the new pid."""
        return int(self._call("restart", worker=worker)["pid"])

    def _call(self, operation: str, **more: Any) -> dict[str, Any]:
        if not answers(self.address):
            raise RayFailed(f"Ray at {self.address} does not answer")
        request = {
            "address": self.address, "namespace": self.namespace, "node_ip": self.node_ip, "logs": self.logs, **more
        }  # fmt: skip
        try:
            done = subprocess.run(
                [sys.executable, "-m", "deploy.ray_ops", operation],
                input=json.dumps(request) + "\n",
                env=dict(self.env),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RayFailed(f"Ray at {self.address} does not answer") from None
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise RayFailed(f"Ray at {self.address} did not {operation}: {why}")
        return dict(json.loads(done.stdout.splitlines()[-1]))
