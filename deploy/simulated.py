"""The simulated workers of `up --sim`: processes of the launcher, all workers of one role in one of them, without Ray.

They need neither a place nor a machine of their own, so nobody but the launcher has to keep them alive.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from signal import SIGTERM

from deploy import processes
from deploy.placement import child_env, roles, worker_settings
from runtime.config import Config


class Simulated:
    """Not started yet. start() them from a thread that lives as long as they should; none without `config.sim`."""

    def __init__(self, config: Config, registry: str, logs: Path) -> None:
        self._logs = logs
        self._settings: dict[str, dict[str, str]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        names = [role for _, role in roles(config)] if config.sim else []
        for role in dict.fromkeys(names):
            own = worker_settings(config, registry, f"{role}-0", role)  # the others count on from there
            self._settings[role] = own | {"sim_count": str(names.count(role))}

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._settings)

    def start(self, role: str) -> None:
        env = child_env(os.environ, self._settings[role]) | {"OMP_NUM_THREADS": "1"}
        with (self._logs / f"{role}.log").open("ab") as output:
            self._running[role] = processes.spawn(
                [sys.executable, "-m", "pdserve", "worker"], env=env, death_signal=SIGTERM, output=output
            )

    def ended(self) -> list[tuple[str, int]]:
        """(role, exit status) of the processes that run no more."""
        codes = ((role, process.poll()) for role, process in self._running.items())
        return [(role, code) for role, code in codes if code is not None]

    def processes(self) -> list[subprocess.Popen[bytes]]:
        return list(self._running.values())
