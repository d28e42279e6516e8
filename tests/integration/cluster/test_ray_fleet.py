"""What needs the real Ray: workers asked for and given back, and processes replaced under their actors."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy import processes
from pdserve import Client
from tests import readme
from tests.cluster_tools import ForegroundCluster, Traces, run_pdserve, until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]  # a start takes its time on a busy machine


@contextmanager
def asking(cluster: ForegroundCluster, clients: int, **body: Any) -> Iterator[tuple[list[int], list[str]]]:
    """So many clients ask over and over: (statuses of the answers, what went wrong). All are answered at the end."""
    over, good, bad = threading.Event(), [], []

    def client(number: int) -> None:
        while not over.is_set():
            prompt = [(7 * i + number) % 250 for i in range(body.get("tokens", 40))]
            data = json.dumps({"prompt": prompt, "temperature": 0, "max_tokens": body.get("answer", 20)}).encode()
            request = urllib.request.Request(
                f"{cluster.http}/v1/completions", data, {"content-type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    good.append(reply.status)
            except urllib.error.HTTPError as error:
                bad.append(error.read().decode())
            except OSError as error:
                bad.append(repr(error))
            number += clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield good, bad
    finally:
        over.set()
        for thread in threads:
            thread.join()


def words(info: str) -> list[str]:
    """A command of the README, without the program's name."""
    program, *rest = shlex.split(readme.block(info))
    assert program == "pdserve"
    return rest


def test_a_restart_says_what_it_cannot_do(cluster: ForegroundCluster) -> None:
    done = run_pdserve("restart", "--worker=decode-7", *cluster.flags)
    assert done.returncode == 2
    assert "there is no worker decode-7" in done.stderr


@pytest.mark.slow
def test_a_rolling_restart_under_load_fails_no_request(cluster: ForegroundCluster) -> None:
    before = {one["worker"]: one for one in cluster.status()["workers"]}
    with asking(cluster, 3) as (good, bad):
        until(lambda: len(good) > 3, 60, "the first answers")
        done = run_pdserve(*words("sh restart"), *cluster.flags)
        assert done.returncode == 0, done.stdout + done.stderr
        count = len(good)
        until(lambda: len(good) > count + 3, 60, "answers afterwards")
    assert bad == []
    assert done.stdout.splitlines()[-1] == "restarted: prefill-0, decode-0"
    after = {one["worker"]: one for one in cluster.status()["workers"]}
    for name, one in before.items():
        assert after[name]["role"] == one["role"]
        assert after[name]["pid"] != one["pid"]
        assert processes.look(one["pid"]) is None
    with Client(cluster.record.grpc) as client:
        answer = client.chat("What is the capital of France?", temperature=0, max_tokens=32)
    assert answer.text == "The capital of France is Paris."


@pytest.mark.slow
def test_an_elastic_fleet_grows_under_load_and_shrinks_after_it_and_survives_its_controller(tmp_path: Path) -> None:
    flags = [*words("sh elastic")[1:], "--threads=1", "--elastic-dwell-s=1", "--elastic-cooldown-s=1"]
    env = {**os.environ, "PDSERVE_FAULTS": "engine.step=delay:0.05"}
    cluster = ForegroundCluster(tmp_path, *flags, env=env)

    def roles() -> dict[str, str]:
        return {one["worker"]: one["role"] for one in cluster.status()["workers"] if one["state"] == "ready"}

    try:
        cluster.until_ready()
        traces = Traces(cluster)
        with asking(cluster, 16, tokens=2000, answer=1) as (good, bad):
            until(lambda: roles().get("decode-0") == "both", 60, "a hand from the decode worker")
            (controller,) = [pid for pid in commands(cluster.record.launcher_pid) if b"controller" in pid[1]]
            os.kill(controller[0], signal.SIGKILL)
            until(lambda: roles().get("prefill-1") == "prefill", 120, "one more worker, asked for by the next one")
        assert good
        assert bad == []
        until(lambda: roles() == {"prefill-0": "prefill", "decode-0": "decode"}, 120, "the fleet as it was")
    finally:
        cluster.stop()
    assert traces.left() == []


def commands(session: int) -> list[tuple[int, list[bytes]]]:
    """Processes of a session with their command lines."""
    return [
        (one.pid, Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0"))
        for one in processes.session_members(session)
    ]
