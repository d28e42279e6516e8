"""`pdserve up --sim PROFILE --prefill N --decode M`: a router over simulated workers, on this machine, without Ray.

Simulated workers need neither a place nor a supervisor: all of one role share a process. Whatever ends, ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from signal import SIGTERM

from rich.console import Console

from bench.sim.profile import Profile
from deploy import processes
from deploy.fleet import Fleet
from deploy.placement import check, child_env, secured, settings_of
from deploy.ports import admin_addresses, settle
from pdserve.up import Stopped, until_signal
from runtime.config import Config
from runtime.errors import InvalidRequest, PdserveError

GRACE_S = 10.0
LOOK_S = 0.2


class _Ended(Exception):
    """A process that should run has ended; the message names it."""


class SimCluster:
    """start(), then wait(); stop() always."""

    def __init__(self, config: Config) -> None:
        """Raises InvalidRequest for what `up --sim` does not do."""
        check(config)
        for key in ("detach", "address"):
            if getattr(config, key):
                raise InvalidRequest("simulated workers run here, without Ray, and end with this command", field=key)
        self._profile = Profile.load(config.sim)
        http, grpc = settle(config.http_listen, "http_listen"), settle(config.grpc_listen, "grpc_listen")
        self._admins = admin_addresses(config)
        listens = {"http_listen": http, "grpc_listen": grpc, "admin_listen": self._admins[0]}
        self.config = secured(config).model_copy(update=listens)
        self.counts = {role: getattr(config, role) for role in ("prefill", "decode", "both") if getattr(config, role)}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Returns when every worker is ready and the router serves. Raises _Ended."""
        settings = settings_of(self.config.model_copy(update={"log_level": _quieter(self.config.log_level)}))
        for number, admin in enumerate(self._admins):
            self._spawn(f"router-{number}" if number else "router", {**settings, "admin_listen": admin})
        async with Fleet(self.config.grpc_listen, self.config) as fleet:
            await self._until(fleet, 0)
            for role, count in self.counts.items():
                own = {
                    "role": role,
                    "sim_count": str(count),
                    "registry": self.config.registry or self.config.grpc_listen,
                }
                self._spawn(role, {**settings, **own})
            await self._until(fleet, sum(self.counts.values()))
            while not await fleet.serving():
                self._check()
                await asyncio.sleep(LOOK_S)
        if self.config.elastic:
            self._spawn("controller", {**settings_of(self.config), "max_batch": str(self._profile.pool.max_batch)})

    async def wait(self) -> None:
        """Until a process ends. Raises _Ended."""
        while True:
            self._check()
            await asyncio.sleep(LOOK_S)

    def stop(self) -> None:
        """Workers first, so that they say goodbye."""
        for name in reversed(list(self._running)):
            process = self._running.pop(name)
            if process.poll() is None:
                processes.stop(process, GRACE_S)

    def _spawn(self, name: str, settings: dict[str, str]) -> None:
        command = [name.partition("-")[0] if name.startswith(("router", "controller")) else "worker"]
        if name == "controller":
            command += ["--router", self.config.grpc_listen]
            command += ["--metrics", ",".join(filter(None, self._admins)) or self.config.http_listen]
        self._running[name] = processes.spawn(
            [sys.executable, "-m", "pdserve", *command],
            env=child_env(os.environ, settings) | {"OMP_NUM_THREADS": "1"},
            death_signal=SIGTERM,
            new_session=True,  # Ctrl-C is ours to pass on
        )

    async def _until(self, fleet: Fleet, count: int) -> None:
        """The router answers and knows so many ready workers."""
        while True:
            self._check()
            with contextlib.suppress(PdserveError):
                if sum(record.ready for record in await fleet.workers()) >= count:
                    return
            await asyncio.sleep(LOOK_S)

    def _check(self) -> None:
        for name, process in self._running.items():
            code = process.poll()
            if code is not None:
                raise _Ended(f"{name} has ended with status {code}")


def _quieter(level: str) -> str:
    """Everybody's every "listening" would hide where the router is."""
    return "warning" if level == "info" else level


async def run(config: Config) -> int:
    """Exit status: 0 after a wished end, 1 when something failed."""
    console = Console()
    cluster = SimCluster(config)
    console.print("starting simulated workers ...", highlight=False)
    try:
        await until_signal(cluster.start())
        text = ", ".join(f"{count} {role}" for role, count in cluster.counts.items())
        for line in (
            f"HTTP  http://{cluster.config.http_listen}/v1",
            f"gRPC  {cluster.config.grpc_listen}",
            f"simulated: {text} ({config.sim}); for `pdserve chat` and `status`: --router {cluster.config.grpc_listen}",
            "Ctrl-C ends it",
        ):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        await until_signal(cluster.wait())
    except Stopped:
        console.print("stopping", highlight=False)
    except _Ended as error:
        Console(stderr=True).print(f"pdserve: {error}", markup=False, highlight=False, soft_wrap=True, style="red")
        return 1
    finally:
        cluster.stop()
    return 0
