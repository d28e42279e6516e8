"""Load generators on the nodes of a Ray cluster: the half of `pdserve bench serve --address` that talks to Ray.

    python -m deploy.ray_load    stdin: one JSON line {"address", "jobs": one for each loader}, then `go` and `stop`

stdout: what the loaders say, each line with its "loader"; {"failed"} when Ray does not do it. It ends when they have
all ended, or when its stdin does. The actors are its own (not detached): when it ends, however it ends, Ray ends them,
and each takes its loader along.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from signal import SIGKILL
from typing import Any, TextIO

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deploy import processes
from deploy.placement import child_env
from deploy.ray_ops import claim_stdout, connect

LOOK_S = 5.0
PLACE_S = 60.0
POLL_S = 0.2
ANSWER_S = 30.0


class LoaderActor:
    """Runs one loader on its node and keeps what it says until it is fetched."""

    def __init__(self, job: str) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._started = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        # a loader's life is tied to the thread that starts it
        threading.Thread(target=self._run, args=(job,), name="loader", daemon=True).start()
        self._started.wait()

    def _run(self, job: str) -> None:
        try:
            self._process = processes.spawn(
                [sys.executable, "-m", "bench.load.loader"],
                env=child_env(os.environ, {}) | {"OMP_NUM_THREADS": "1"},
                death_signal=SIGKILL,
                stdin=subprocess.PIPE,
                output=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        finally:
            self._started.set()
        assert self._process.stdout is not None
        self.say(job)
        for line in self._process.stdout:
            self._lines.put(line.decode())
        self._process.wait()
        self._ended.set()

    def say(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def said(self) -> tuple[list[str], bool]:
        """Everything new, and whether there will be no more."""
        ended = self._ended.is_set()
        return [self._lines.get() for _ in range(self._lines.qsize())], ended


class Crew:
    """The actors of one run. Raises ray's errors, but for an actor that is lost during the run."""

    def __init__(self, jobs: list[str], replies: TextIO) -> None:
        """One node after the other. They take no CPU from Ray's account: a fleet that fills its cluster can be asked
        from there, too."""
        self._replies = replies
        known: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        alive = [node for node in known if node["Alive"]]
        nodes = sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
        self._actors: dict[int, Any] = {}
        for number, job in enumerate(jobs):
            node = nodes[number % len(nodes)]
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            made = ray.remote(LoaderActor).options(num_cpus=0, max_restarts=0, scheduling_strategy=where)
            self._actors[number] = made.remote(job)
            self._say({"loader": number, "node": node["NodeManagerAddress"]})
        ray.get([actor.said.remote() for actor in self._actors.values()], timeout=PLACE_S)

    def run(self) -> None:
        """Until all have ended, or stdin does."""
        while self._actors:
            self._pass_on()
            readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
            if readable:
                words = os.read(sys.stdin.fileno(), 4096).decode()
                if not words:
                    return
                for word in words.split():
                    replies = [actor.say.remote(word) for actor in self._actors.values()]
                    ray.wait(replies, num_returns=len(replies), timeout=ANSWER_S)

    def _pass_on(self) -> None:
        replies = {number: actor.said.remote() for number, actor in self._actors.items()}
        for number, reply in replies.items():
            try:
                lines, ended = ray.get(reply, timeout=ANSWER_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                lines, ended = [], True
            for line in lines:
                self._say({"loader": number, **json.loads(line)})
            if ended:
                self._say({"loader": number, "lost": True})  # nothing to who has said that it ended
                del self._actors[number]

    def _say(self, line: dict[str, Any]) -> None:
        self._replies.write(json.dumps(line) + "\n")
        self._replies.flush()


def _check(address: str) -> None:
    """Raises OSError where nobody listens: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), LOOK_S).close()


def main() -> None:
    replies = claim_stdout()
    request = json.loads(sys.stdin.readline())
    try:
        _check(request["address"])
        connect(request)
        Crew(request["jobs"], replies).run()
    except (ray.exceptions.RayError, OSError, ValueError) as error:
        why = (str(error).strip().splitlines() or ["it gave no reason"])[-1]
        replies.write(json.dumps({"failed": f"Ray at {request['address']} starts no load generators: {why}"}) + "\n")


if __name__ == "__main__":
    main()
