"""The owner of a cluster's processes: router, Ray (when started here), and the wish for workers. Ray-free itself.

    python -m deploy.launcher STATE_DIR [keep]     configuration in PDSERVE_*; stdout: JSON lines; stdin: "ready"

It leads a session of its own and gets SIGTERM when the front that started it dies, so a kill -9 of the front still
ends everything: the launcher stops what it knows and then kills whatever is left of the session. With --detach it
takes that death signal back once the front says "ready", and `pdserve down` is what ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from bench.sim.profile import Profile
from deploy import processes, ray_head
from deploy.placement import WorkerSpec, child_env, local_gpus, most_workers, namespace, plan, settings_of
from deploy.ports import admin_addresses, settle
from deploy.renewal import Renewal, Started
from deploy.simulated import Simulated
from deploy.state import ClusterRecord, StateDir
from deploy.supervisor import EXIT_REFUSED
from runtime.config import Config
from runtime.errors import InvalidRequest, PdserveError
from runtime.lifecycle import READY_FD

ROUTER_GRACE_S = 5.0
SIMULATED_GRACE_S = 5.0
RAY_GRACE_S = 3.0
REFUSED_PAUSE_S = 1.0
CONTROLLER_PAUSE_S = 5.0


class Failed(Exception):
    """The cluster cannot start; the message is for the user."""


class RayTooSlow(Failed):
    """Ray gave its own start up."""


class Launcher:
    def __init__(self, config: Config, state: StateDir) -> None:
        self._config, self._state = config, state
        self._stop = threading.Event()
        self._front_ready = threading.Event()
        self._talking = True
        self._routers: list[subprocess.Popen[bytes]] = []
        self._ray: subprocess.Popen[bytes] | None = None
        self._placer: subprocess.Popen[bytes] | None = None
        self._controller: subprocess.Popen[bytes] | None = None
        self._controller_at = 0.0  # when to start it again
        self._ray_folder: Path | None = None
        self._simulated = Simulated(config, "", state.logs)
        self._renew = threading.Event()  # by SIGUSR1
        self._renewal: Renewal | None = None
        self._record: ClusterRecord | None = None
        self._written: ClusterRecord | None = None

    def run(self) -> int:
        """Start everything, keep the router alive, return the exit status after a clean end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop.set())
        signal.signal(signal.SIGUSR1, lambda *_: self._renew.set())
        try:
            self._start()
            self._supervise()
            self._say(event="failed", message="it was stopped while it started")
        except (Failed, PdserveError) as error:
            self._say(event="failed", message=error.line if isinstance(error, PdserveError) else str(error))
            return 1
        finally:
            self._end()
        return 0

    # --- start

    def _start(self) -> None:
        config = self._config
        self._http = settle(config.http_listen, "http_listen")
        self._grpc = settle(config.grpc_listen, "grpc_listen")
        self._admins = admin_addresses(config)
        registry = config.registry or self._grpc
        specs = plan(config, registry, cores=len(os.sched_getaffinity(0)), gpus=local_gpus())
        listens = {"http_listen": self._http, "grpc_listen": self._grpc, "reuse_port": "true"}
        self._router_settings = settings_of(config) | listens
        self._own_ray = not (config.address or config.sim)
        self._ray_folder = ray_head.make_folder() if self._own_ray else None
        self._write_record(config.address, specs)  # so that `status` and `down` find it from here on
        self._routers = [self._start_router(number) for number in range(config.routers)]
        self._say(event="router", http=self._http, grpc=self._grpc, workers=[spec.name for spec in specs])
        if config.sim:
            self._simulate(registry)
        else:
            self._start_workers(specs)
        threading.Thread(target=self._hear_front, daemon=True).start()

    def _start_router(self, number: int, word: int | None = None) -> subprocess.Popen[bytes]:
        """word: the end of a pipe it writes to when it serves."""
        env = child_env(os.environ, self._router_settings | {"admin_listen": self._admins[number]})
        with (self._state.logs / f"{_router(number)}.log").open("ab") as output:
            return processes.spawn(
                [sys.executable, "-m", "pdserve", "router"],
                env=env if word is None else env | {READY_FD: str(word)},
                death_signal=signal.SIGTERM,
                output=output,
                keep=() if word is None else (word,),
            )

    def _start_successor(self, number: int) -> Started:
        reader, writer = os.pipe()
        try:
            return self._start_router(number, writer), reader
        finally:
            os.close(writer)

    def _simulate(self, registry: str) -> None:
        self._simulated = Simulated(self._config, registry, self._state.logs)
        for role in self._simulated.roles:
            self._simulated.start(role)

    def _start_workers(self, specs: list[WorkerSpec]) -> None:
        address = self._config.address
        self._env = child_env(os.environ, {})
        if self._own_ray:
            address = self._start_ray(most_workers(self._config))
            self._write_record(address, specs)
        self._place(address, specs)

    def _start_ray(self, workers: int) -> str:
        assert self._ray_folder is not None
        self._env = ray_head.environment(self._env, self._ray_folder)
        try:
            return self._try_ray(self._ray_folder, workers)
        except RayTooSlow:  # a busy machine; what else may be wrong is not better the second time
            self._say(event="ray_again")
            print("Ray was not up within its own 30 s: it is started once more", file=sys.stderr)
        processes.sweep(os.getpid(), keep=[router.pid for router in self._routers])
        return self._try_ray(self._ray_folder, workers)

    def _try_ray(self, folder: Path, workers: int) -> str:
        with (self._state.logs / "ray.log").open("ab") as output:
            address, self._ray = ray_head.start(folder, self._env, workers, local_gpus(), output)
        self._await_ray(address)
        return address

    def _await_ray(self, address: str) -> None:
        assert self._ray is not None
        host, _, port = address.rpartition(":")
        while "Ray runtime started" not in self._state.tail("ray", 60):
            if self._stop.wait(0.1):
                raise Failed("stopped while Ray was starting")
            if self._ray.poll() is not None:
                end = self._state.tail("ray")
                raise (RayTooSlow if ray_head.TOO_SLOW in end else Failed)(f"Ray did not start:\n{end}")
            self._check_router()
        self._say(event="ray", address=f"{host}:{port}")

    def _write_record(self, address: str, specs: list[WorkerSpec]) -> None:
        me = processes.look(os.getpid())
        assert me is not None
        self._note(
            ClusterRecord(
                launcher_pid=me.pid,
                launcher_start=me.start,
                http=self._http,
                grpc=self._grpc,
                ray_address=address,
                ray_folder=str(self._ray_folder or ""),
                namespace=namespace(self._config),
                workers=tuple(spec.name for spec in specs),
                model=self._config.model,
                detached=self._config.detach,
                registry_token=self._config.registry_token,
                metrics=",".join(filter(None, self._admins)) or self._http,
                sim=self._config.sim,
            )
        )

    def _note(self, record: ClusterRecord) -> None:
        """A cluster that runs does not end over a full disk: the record is written when there is room again."""
        self._record = record
        if record == self._written:
            return
        try:
            self._state.write(record)
            self._written = record
        except InvalidRequest:
            if self._talking:
                raise

    def _place(self, address: str, specs: list[WorkerSpec]) -> None:
        local = self._own_ray
        request = {
            "address": address,
            "namespace": namespace(self._config),
            "node_ip": ray_head.HEAD_IP if local else "",
            "logs": str(self._state.logs) if local else "",
            "specs": [asdict(spec) for spec in specs],
        }
        with (self._state.logs / "place.log").open("ab") as errors:
            self._placer = processes.spawn(
                [sys.executable, "-m", "deploy.ray_ops", "place"],
                env=self._env,
                death_signal=signal.SIGKILL,
                stdin=subprocess.PIPE,
                output=subprocess.PIPE,
                stderr=errors,
            )
        assert self._placer.stdin is not None
        self._placer.stdin.write(json.dumps(request).encode() + b"\n")
        self._placer.stdin.flush()
        self._relaying = threading.Thread(target=self._relay, args=(self._placer.stdout,), daemon=True)
        self._relaying.start()

    def _relay(self, lines: IO[bytes]) -> None:
        """What the placer says about the actors, on to the front."""
        for line in lines:
            self._say(event="actor", **json.loads(line))

    def _hear_front(self) -> None:
        """The front's "ready" ends the start-up."""
        if sys.stdin.readline().strip() == "ready":
            self._front_ready.set()

    # --- run

    def _supervise(self) -> None:
        while not self._stop.wait(0.3):
            if self._front_ready.is_set():
                self._front_ready.clear()
                self._settle_down()
            self._check_placer()
            self._check_ray()
            self._check_simulated()
            self._check_router()
            self._check_renewal()
            self._check_controller()

    def _settle_down(self) -> None:
        """The start is over: no more talk. Detached, the front may go (it waits for `alone`)."""
        if self._config.detach:
            processes.set_death_signal(0)
        self._say(event="alone")
        self._talking = False
        self._end_placer()

    def _check_placer(self) -> None:
        if self._placer is not None and not (self._placer.poll() is None and self._relaying.is_alive()):
            raise Failed(f"the workers could not be placed:\n{self._state.tail('place')}")

    def _check_ray(self) -> None:
        if self._ray is not None and self._ray.poll() is not None:
            raise Failed("Ray has ended")

    def _check_simulated(self) -> None:
        for role, code in self._simulated.ended():
            if self._talking:
                raise Failed(f"the simulated {role} workers have ended ({code}):\n{self._state.tail(role)}")
            self._stop.wait(REFUSED_PAUSE_S)
            self._simulated.start(role)

    def _check_router(self) -> None:
        for number, router in enumerate(self._routers):
            code = router.poll()
            if code is None:
                continue
            if self._talking:
                raise Failed(f"the router has ended ({code}):\n{self._state.tail(_router(number))}")
            # What was accepted once may be refused for a while: its port is taken, a file of keys is being edited.
            self._stop.wait(REFUSED_PAUSE_S if code == EXIT_REFUSED else 0.2)
            self._routers[number] = self._start_router(number)

    def _check_renewal(self) -> None:
        """`pdserve restart --part routers` asks by a signal and reads in the record how far it is."""
        assert self._record is not None
        record = replace(self._record, routers=tuple(router.pid for router in self._routers))
        if self._renewal is None and self._renew.is_set() and not self._talking:
            self._renew.clear()
            self._renewal = Renewal(self._routers, self._start_successor, self._config.drain_timeout_s)
        if self._renewal is not None and not self._renewal.turn():
            record = replace(record, renewals=record.renewals + 1, renewal_error=self._renewal.error)
            self._renewal.close()
            self._renewal = None
        self._note(record)

    def _check_controller(self) -> None:
        """It runs from the end of the start on. The fleet can do without it, so whatever it ends with, it is only
        started again, after a pause."""
        if not self._config.elastic or self._talking:
            return
        now = time.monotonic()
        if self._controller is not None and self._controller.poll() is not None:
            self._controller, self._controller_at = None, now + CONTROLLER_PAUSE_S
        if self._controller is None and now >= self._controller_at:
            self._start_controller()

    def _start_controller(self) -> None:
        own = {"state_dir": str(self._state.folder)}
        if self._config.sim:  # what its workers have from their profile
            own["max_batch"] = str(Profile.load(self._config.sim).pool.max_batch)
        env = child_env(os.environ, self._router_settings | own)
        with (self._state.logs / "controller.log").open("ab") as output:
            self._controller = processes.spawn(
                [sys.executable, "-m", "pdserve", "controller"], env=env, death_signal=signal.SIGTERM, output=output
            )

    # --- end

    def _end_placer(self) -> None:
        if self._placer is not None:
            assert self._placer.stdin is not None
            self._placer.stdin.close()
            processes.stop(self._placer, 3.0)
            self._placer = None

    def _end(self) -> None:
        """Everything in order, then whatever is left of the session. The record goes last."""
        simulated = self._simulated.processes()
        routers = [*self._routers, *(self._renewal.processes() if self._renewal is not None else ())]
        for process in (self._controller, *simulated, *routers, self._ray, self._placer):
            if process is not None and process.poll() is None:
                process.terminate()
        for process, grace in (
            (self._controller, 1.0),
            *((one, SIMULATED_GRACE_S) for one in simulated),
            *((router, ROUTER_GRACE_S) for router in routers),
            (self._ray, RAY_GRACE_S),
            (self._placer, 1.0),
        ):
            if process is not None:
                processes.stop(process, grace)
        processes.sweep(os.getpid())
        if self._ray_folder is not None:
            shutil.rmtree(self._ray_folder, ignore_errors=True)
        self._state.clear()

    def _say(self, **event: Any) -> None:
        if not self._talking:
            return
        try:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            self._stop.set()


def _router(number: int) -> str:
    """Its name, and that of its log."""
    return f"router-{number}" if number else "router"


def main() -> None:
    processes.set_death_signal(signal.SIGTERM)
    processes.adopt_orphans()
    state = StateDir(sys.argv[1])
    state.given = sys.argv[2:] == ["keep"]
    sys.exit(Launcher(Config.load({}), state).run())


if __name__ == "__main__":
    main()
