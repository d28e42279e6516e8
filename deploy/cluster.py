"""The front: starts a launcher, follows it until the cluster serves, and sweeps up behind it.

Thin and Ray-free on purpose. Whoever dies first, the other cleans up: a front that is killed takes the launcher along
by its death signal, and a launcher that is killed is noticed here, where its session is swept. Use it from the main
thread: the launcher's life is tied to the thread that starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from signal import SIGTERM
from typing import Any

from deploy import processes
from deploy.actors import Actors, RayFailed
from deploy.fleet import Fleet
from deploy.placement import check, child_env, namespace, secured, settings_of
from deploy.state import ClusterRecord, StateDir
from runtime.config import Config
from runtime.errors import InvalidRequest, PdserveError

STOP_TIMEOUT_S = 20.0
MAX_STARTS = 3
"""Starts of one worker during the cluster's start-up before it counts as unable to start."""


class StartFailed(Exception):
    """The cluster did not come up; the message says which process and why."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What to show while a cluster starts. workers: name -> what it is doing."""

    stage: str
    workers: dict[str, str] = field(default_factory=dict)
    ready: int = 0


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running cluster answers."""

    http: str
    grpc: str
    ray: str
    workers: tuple[str, ...]


class Cluster:
    """One cluster. start(), then wait() or leave(); stop() always, unless left."""

    def __init__(self, config: Config, report: Report) -> None:
        check(config)
        self._config, self._report = secured(config), report
        self._state = StateDir(config.state_dir)
        self._stack = contextlib.ExitStack()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._progress = Progress("starting")
        self._endpoints = Endpoints("", "", "", ())
        self._actors: dict[str, set[int]] = {}
        self._placed = asyncio.Event()
        self._alone = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    @property
    def config(self) -> Config:
        """What its processes are configured with, secrets that were made up included."""
        return self._config

    async def start(self) -> Endpoints:
        """Bring everything up. Raises StartFailed or InvalidRequest; nothing is left behind then."""
        self._stack.enter_context(self._state.locked())
        try:
            self._refuse_second()
            self._spawn()
            await self._follow()
        except BaseException:
            self.stop()
            raise
        return self._endpoints

    async def wait(self) -> None:
        """Until somebody ends the launcher as `pdserve down` does. Raises StartFailed when it ends by anything else."""
        assert self._following is not None
        assert self._launcher is not None
        await self._following
        if await asyncio.to_thread(self._launcher.wait) == 0:
            return
        raise StartFailed(f"the cluster has ended:\n{self._state.tail('launcher')}")

    def leave(self) -> None:
        """Let a detached cluster go on without this process."""
        self._stack.close()

    def stop(self) -> None:
        """End every process, folder and port of the cluster (not actors in a Ray that was joined). Idempotent."""
        if self._following is not None:
            self._following.cancel()
        if self._launcher is not None:
            processes.stop(self._launcher, STOP_TIMEOUT_S)
            _finish(self._state, self._state.read(), self._launcher.pid)
            self._launcher = None
        self._stack.close()

    # --- start-up

    def _refuse_second(self) -> None:
        record = self._state.read()
        if record is None:
            return
        if record.running:
            raise InvalidRequest(
                f"a cluster runs already (process {record.launcher_pid}); `pdserve down` ends it", field="state_dir"
            )
        _finish(self._state, record, record.launcher_pid if not processes.look(record.launcher_pid) else 0)
        self._state.create()

    def _spawn(self) -> None:
        keep = ["keep"] if self._state.given else []
        with (self._state.logs / "launcher.log").open("ab") as errors:
            self._launcher = processes.spawn(
                [sys.executable, "-m", "deploy.launcher", str(self._state.folder.absolute()), *keep],
                env=child_env(os.environ, settings_of(self._config)),
                death_signal=SIGTERM,
                stdin=subprocess.PIPE,
                output=subprocess.PIPE,
                stderr=errors,
                new_session=True,
            )

    async def _follow(self) -> None:
        """Read the launcher's events and the registry until everything serves."""
        self._following = asyncio.create_task(self._events())
        ready = asyncio.create_task(self._ready())
        try:
            await asyncio.wait({self._following, ready}, return_when=asyncio.FIRST_COMPLETED)
            if self._following.done():
                self._following.result()
                raise StartFailed(f"the launcher has ended:\n{self._state.tail('launcher')}")
            ready.result()
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        await self._settle_down()

    async def _settle_down(self) -> None:
        """Tell the launcher that the start is over, and wait until it can do without this process."""
        assert self._launcher is not None
        assert self._launcher.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._launcher.stdin.write(b"ready\n")
            self._launcher.stdin.close()
        alone = asyncio.create_task(self._alone.wait())
        assert self._following is not None
        await asyncio.wait({alone, self._following}, return_when=asyncio.FIRST_COMPLETED)
        alone.cancel()
        if self._following.done():
            self._following.result()
            raise StartFailed(f"the launcher has ended:\n{self._state.tail('launcher')}")

    async def _events(self) -> None:
        assert self._launcher is not None
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._launcher.stdout)
        while line := await reader.readline():
            self._on_event(json.loads(line))

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "failed":
            raise StartFailed(event["message"])
        if kind == "router":
            names = tuple(event["workers"])
            self._endpoints = replace(self._endpoints, http=event["http"], grpc=event["grpc"], workers=names)
            self._show(self._beginning(), dict.fromkeys(names, "") if not self._config.sim else {})
            self._placed.set()
        elif kind == "ray_again":
            self._show("starting Ray once more (it was not up within its own 30 s)", self._progress.workers)
        elif kind == "ray":
            self._endpoints = replace(self._endpoints, ray=event["address"])
            self._show("placing workers", self._progress.workers)
        elif kind == "alone":
            self._alone.set()
        elif kind == "actor":
            self._on_actor(event)

    def _beginning(self) -> str:
        if self._config.sim:
            return "starting simulated workers"
        return "joining Ray" if self._config.address else "starting Ray"

    def _on_actor(self, event: dict[str, Any]) -> None:
        name, state = event["worker"], event["state"]
        if state == "other":
            raise StartFailed(f"{name} runs already with other settings; `pdserve down --address` ends it first")
        if state == "broken":
            raise StartFailed(f"{name} cannot be placed: {event['why']}")
        if state == "refused":
            raise StartFailed(f"{name} refuses to start:\n{self._state.tail(name)}")
        if "actor_pid" in event:
            starts = self._actors.setdefault(name, set())
            starts.add(event["actor_pid"])
            if len(starts) > MAX_STARTS:
                raise StartFailed(f"{name} keeps dying:\n{self._state.tail(name)}")
        doing = {"waiting": "waiting for a place", "restarting": "restarting", "placed": "starting"}[state]
        if not self._progress.workers.get(name):
            self._show(self._progress.stage, {**self._progress.workers, name: doing})

    async def _ready(self) -> None:
        await self._placed.wait()
        async with Fleet(self._endpoints.grpc, self._config) as fleet:
            while True:
                if await self._all_ready(fleet):
                    break
                await asyncio.sleep(0.2)
            await fleet.until_serving()

    async def _all_ready(self, fleet: Fleet) -> bool:
        try:
            records = {record.worker_id: record for record in await fleet.workers()}
        except PdserveError:  # the router is not up yet; its end is the launcher's to tell
            return False
        wanted = self._endpoints.workers
        doing = {
            name: ("ready" if records[name].ready else records[name].progress or "starting")
            for name in wanted
            if name in records
        }
        ready = sum(text == "ready" for text in doing.values())
        if not self._config.sim:  # they may be hundreds, and are ready at once
            self._show(self._progress.stage, {**self._progress.workers, **doing}, ready)
        return ready == len(wanted)

    def _show(self, stage: str, workers: dict[str, str], ready: int = 0) -> None:
        new = Progress(stage, workers, ready)
        if new != self._progress:
            self._progress = new
            self._report(new)


def _finish(state: StateDir, record: ClusterRecord | None, session: int) -> None:
    """Remove what a launcher (now gone) may have left: its session's processes, Ray's folder, the record."""
    if session:
        processes.sweep(session)
    if record is not None and record.ray_folder:
        shutil.rmtree(record.ray_folder, ignore_errors=True)
    state.clear()


def down(config: Config) -> list[str]:
    """End the cluster of this state folder, or the workers in the Ray at `address`. Returns what was ended.

    Raises InvalidRequest when there is nothing to end, StartFailed for workers that could not be: the router is ended
    all the same.
    """
    state = StateDir(config.state_dir)
    record = state.read()
    if record is None and not config.address:
        raise InvalidRequest("no cluster was started here", field="state_dir")
    ended: list[str] = []
    failed = ""
    if record is None or record.joined:
        try:
            address = config.address or (record.ray_address if record else "")
            ended += Actors(address, _namespace(config, record)).stop()
        except RayFailed as error:
            failed = str(error)
    if record is not None:
        _stop_launcher(record)
        _finish(state, record, record.launcher_pid if not processes.look(record.launcher_pid) else 0)
        ended += ["router", *(() if record.joined else record.workers)]
    if failed:
        done = f"ended: {', '.join(ended)}; " if ended else ""
        left = "they end with Ray on their nodes, or with `pdserve down --address` when it is back"
        raise StartFailed(f"{done}the workers could not be ended: {failed}; {left}")
    return ended


def _stop_launcher(record: ClusterRecord) -> None:
    """SIGTERM, and SIGKILL for one that does not listen."""
    for sig, patience_s in ((SIGTERM, STOP_TIMEOUT_S), (9, 5.0)):
        if record.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.launcher_pid, sig)
            processes.wait_gone(record.launcher_pid, record.launcher_start, patience_s)


def _namespace(config: Config, record: ClusterRecord | None) -> str:
    """Of the fleet that was named, else of the one that was started here."""
    return record.namespace if record is not None and "fleet" not in config.overrides() else namespace(config)
