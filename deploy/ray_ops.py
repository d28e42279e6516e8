"""What is asked of Ray; only this and `ray_load` import it. Run as short-lived processes:

    python -m deploy.ray_ops place    stdin: one JSON request; stdout: JSON lines; ends when stdin does
    python -m deploy.ray_ops stop     stdin: one JSON request; ends the workers of a namespace
    python -m deploy.ray_ops add      one worker more, named by its role and the next free number
    python -m deploy.ray_ops remove   one worker less
    python -m deploy.ray_ops restart  another process in place of one worker's, under the same actor

The launcher and the front stay free of Ray, so its death never takes them along and they can clean up after it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.util import list_named_actors

from deploy.placement import WorkerSpec, worker_env
from deploy.supervisor import Supervisor

STOP_GRACE_S = 5.0
RESTART_GRACE_S = 10.0
"""A drained worker ends at once; what one still runs after this goes on elsewhere."""


class WorkerActor:
    """Supervises one worker process on the node where Ray puts it."""

    def __init__(self, spec: WorkerSpec, threads: int, logs: str) -> None:
        self._wish = spec.to_json()
        log = Path(logs) / f"{spec.name}.log" if logs else None
        env = worker_env(os.environ, spec, threads, _node_address())
        # os._exit: Ray must see a failure (and restart the actor), not an orderly end
        self._child = Supervisor([sys.executable, "-m", "pdserve", "worker"], env, log, lambda code: os._exit(1))

    def status(self) -> dict[str, Any]:
        return {**self._child.status().as_dict(), "actor_pid": os.getpid(), "wish": self._wish}

    def stop(self) -> int:
        return self._child.stop(STOP_GRACE_S)

    def restart(self) -> int:
        return self._child.restart(RESTART_GRACE_S)


def _node_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def connect(request: Mapping[str, Any]) -> None:
    """Join the cluster at "address"; "node_ip" and "namespace" as they are given."""
    node_ip = request.get("node_ip")
    options: dict[str, Any] = {"_node_ip_address": node_ip} if node_ip else {}
    ray.init(
        address=request["address"],
        namespace=request.get("namespace"),
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        **options,
    )


def _threads(spec: WorkerSpec, workers: int) -> int:
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return spec.threads or max(1, int(total.get("CPU", 1)) // workers)


def _actor(spec: WorkerSpec, workers: int, logs: str) -> Any:
    remote = ray.remote(WorkerActor).options(
        name=spec.name,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=spec.cpus,
        num_gpus=spec.gpus,
    )
    return remote.remote(spec, _threads(spec, workers), logs)


def place(request: dict[str, Any]) -> None:
    """Create the actors (or find them), then print how they do, once a second, until stdin ends."""
    specs = [WorkerSpec(**raw) for raw in request["specs"]]
    actors = {spec.name: (spec, _actor(spec, len(specs), request["logs"])) for spec in specs}
    while True:
        for name, (spec, actor) in actors.items():
            _say({"worker": name, **_ask(spec, actor)})
        if _stdin_ended(1.0):
            return


def _ask(spec: WorkerSpec, actor: Any) -> dict[str, Any]:
    reply = actor.status.remote()
    ready, _ = ray.wait([reply], timeout=1.0)
    if not ready:
        return {"state": "waiting"}  # for resources, or for the actor's restart
    try:
        status = ray.get(reply)
    except ray.exceptions.RayActorError:
        return {"state": "restarting"}
    except ray.exceptions.RayError as error:
        return {"state": "broken", "why": str(error).strip().splitlines()[-1]}
    other = status.pop("wish") != spec.to_json()
    return {"state": "other" if other else "refused" if status["refused"] else "placed", **status}


def stop(request: dict[str, Any]) -> None:
    """End every worker actor of the namespace, and its process."""
    names = _names(request["namespace"])
    _end(names, request["namespace"])
    _say({"stopped": names})


def add(request: dict[str, Any]) -> None:
    """Wish for one more actor like `spec`, and do not wait for its place."""
    spec = WorkerSpec(**request["spec"])
    taken = {*request["taken"], *_names(request["namespace"])}
    name = next(name for number in itertools.count() if (name := f"{spec.role}-{number}") not in taken)
    spec = replace(spec, name=name, settings={**spec.settings, "worker_id": name})
    _actor(spec, request["workers"], request["logs"])
    _say({"added": name})


def remove(request: dict[str, Any]) -> None:
    names = [name for name in _names(request["namespace"]) if name == request["worker"]]
    _end(names, request["namespace"])
    _say({"stopped": names})


def restart(request: dict[str, Any]) -> None:
    actor = ray.get_actor(request["worker"])
    _say({"pid": ray.get(actor.restart.remote(), timeout=RESTART_GRACE_S + 20)})


def _names(namespace: str) -> list[str]:
    return [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == namespace]


def _end(names: list[str], namespace: str) -> None:
    actors = {name: ray.get_actor(name) for name in names}
    replies: list[Any] = [actor.stop.remote() for actor in actors.values()]
    if replies:
        ray.wait(replies, num_returns=len(replies), timeout=STOP_GRACE_S + 5)
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and set(names) & set(_names(namespace)):
        time.sleep(0.1)


def _stdin_ended(timeout_s: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(ready) and not sys.stdin.readline()


def claim_stdout() -> TextIO:
    """Keep stdout for our lines alone: Ray's threads write to it too when actors die. They get stderr instead."""
    mine = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return mine


_replies: TextIO = sys.stdout


def _say(line: dict[str, Any]) -> None:
    _replies.write(json.dumps(line) + "\n")
    _replies.flush()


def main() -> None:
    global _replies
    _replies = claim_stdout()
    request = json.loads(sys.stdin.readline())
    connect(request)
    {"place": place, "stop": stop, "add": add, "remove": remove, "restart": restart}[sys.argv[1]](request)


if __name__ == "__main__":
    main()
