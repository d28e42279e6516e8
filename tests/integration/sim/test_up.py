"""`pdserve up --sim`: the command a person runs, with the real router over real sockets."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deploy import processes
from deploy.state import StateDir
from tests.cluster_tools import ForegroundCluster, listening, run_pdserve, until
from tests.unit.runtime.servers import RedisServer

FLAGS = ("--sim=sim-h100-8b", "--prefill=3", "--decode=3", "--model=oracle", "--http-listen=127.0.0.1:0")
NAMES = {f"{role}-{number}" for role in ("prefill", "decode") for number in range(3)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ForegroundCluster]:
    """3 prefill and 3 decode workers in two processes."""
    with up(tmp_path) as running:
        yield running


@contextmanager
def up(folder: Path, *more: str) -> Iterator[ForegroundCluster]:
    running = ForegroundCluster(folder, *FLAGS, *more)
    try:
        yield running.until_ready()
    finally:
        running.stop()


def ask(cluster: ForegroundCluster, number: int) -> dict[str, object]:
    body = {"model": "oracle", "prompt": f"{number} bottles of beer on the wall" * 20, "max_tokens": 30}
    request = urllib.request.Request(
        f"{cluster.http}/v1/completions",
        json.dumps({**body, "return_ledger": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def test_a_router_over_simulated_workers_answers_through_pairs_and_ends_on_ctrl_c(cluster: ForegroundCluster) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: ask(cluster, number), range(24)))
    ledgers = [answer["ledger"] for answer in answers]
    assert all(isinstance(ledger, dict) for ledger in ledgers)
    pairs = {(ledger["prefill_worker"], ledger["decode_worker"]) for ledger in ledgers}  # type: ignore[index]
    assert {name for pair in pairs for name in pair} == NAMES
    assert all(ledger["transport"] in ("sim", "") for ledger in ledgers)  # type: ignore[index]
    usage = [answer["usage"] for answer in answers]
    assert all(entry["completion_tokens"] == 30 for entry in usage)  # type: ignore[index]
    cluster.front.send_signal(signal.SIGINT)
    assert cluster.front.wait(30) == 0
    assert cluster.state.read() is None


def test_the_other_commands_find_it_with_keys_and_all(tmp_path: Path) -> None:
    """With API keys the registry wants a token, which only the record has."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{'ab' * 32}: {{tenant: acme}}\n")
    with up(tmp_path, f"--api-keys-file={keys}") as cluster:
        assert {one["worker"] for one in cluster.status()["workers"]} == NAMES
        chat = run_pdserve("chat", *cluster.flags, input="hello\n")
        assert "key" in chat.stderr, "it found the router, which wants a key"
        restart = run_pdserve("restart", *cluster.flags)
        assert (restart.returncode, "not replaced one by one" in restart.stderr) == (2, True)
        second = run_pdserve("up", *FLAGS, *cluster.flags)
        assert (second.returncode, "state_dir" in second.stderr) == (2, True)
        session, address = cluster.record.launcher_pid, cluster.record.http
        down = run_pdserve("down", *cluster.flags)
        assert set(down.stdout.strip().removeprefix("ended: ").split(", ")) == {"router", *NAMES}
        assert cluster.front.wait(30) == 0, "an end that somebody wished"
        assert processes.session_members(session) == []
        assert not listening(address)


def test_detached_it_outlives_its_command_and_ends_with_down(tmp_path: Path) -> None:
    state = f"--state-dir={tmp_path}/state"
    done = run_pdserve("up", "--detach", *FLAGS, state)
    assert done.returncode == 0, done.stdout + done.stderr
    record = StateDir(tmp_path / "state").read()
    assert record is not None
    assert run_pdserve("status", state).returncode == 0
    assert run_pdserve("down", state).returncode == 0
    assert processes.session_members(record.launcher_pid) == []
    assert run_pdserve("down", state).returncode == 2, "there is nothing any more"


@pytest.mark.parametrize("victim", ["front", "launcher"])
def test_a_kill_leaves_nothing(cluster: ForegroundCluster, victim: str) -> None:
    record = cluster.record
    os.kill(cluster.front.pid if victim == "front" else record.launcher_pid, signal.SIGKILL)
    until(lambda: not processes.session_members(record.launcher_pid), 20, "the end of the processes")
    until(lambda: cluster.state.read() is None, 20, "the end of the record")
    assert not listening(record.http)


def test_down_finds_what_has_only_begun_to_start(tmp_path: Path) -> None:
    cluster = ForegroundCluster(tmp_path, *FLAGS)
    try:
        record = until(cluster.state.read, 60, "the record, which is there before anything else is")
        done = run_pdserve("down", *cluster.flags)
        assert done.returncode == 0, done.stderr
        assert cluster.front.wait(30) == 1, "what was wished for did not come about"
        assert processes.session_members(record.launcher_pid) == []
        assert cluster.state.read() is None
    finally:
        cluster.stop()


def test_a_kill_of_everybody_while_it_starts_leaves_what_status_explains_and_down_removes(tmp_path: Path) -> None:
    cluster = ForegroundCluster(tmp_path, *FLAGS)
    try:
        record = until(cluster.state.read, 60, "the record")
        cluster.front.kill()
        os.kill(record.launcher_pid, signal.SIGKILL)
        until(lambda: not processes.session_members(record.launcher_pid), 30, "the end of the processes")
        status = run_pdserve("status", *cluster.flags)
        assert (status.returncode, "has died" in status.stderr) == (2, True)
        assert run_pdserve("down", *cluster.flags).returncode == 0
        assert cluster.state.read() is None
        with up(tmp_path) as again:
            assert ask(again, 1)
    finally:
        cluster.stop()


def test_workers_that_were_killed_are_started_again(cluster: ForegroundCluster) -> None:
    before = {one["worker"]: one["pid"] for one in cluster.status()["workers"]}
    os.kill(before["decode-0"], signal.SIGKILL)

    def back() -> bool:
        now = {one["worker"]: one["pid"] for one in cluster.status()["workers"] if one["state"] == "ready"}
        return now.keys() == before.keys() and now["decode-0"] != before["decode-0"]

    until(back, 30, "the return of the decode workers")
    assert ask(cluster, 1)["usage"]["completion_tokens"] == 30  # type: ignore[index]


@pytest.mark.parametrize(("flags", "key"), [(["--address=127.0.0.1:1"], "address"), (["--max-batch=7"], "max_batch")])
def test_what_it_cannot_do_is_refused_before_anything_starts(flags: list[str], key: str, tmp_path: Path) -> None:
    done = run_pdserve("up", *FLAGS, *flags, f"--state-dir={tmp_path}/state")
    assert done.returncode == 2
    assert key in done.stderr
    assert (done.stdout, list(tmp_path.iterdir())) == ("", [])


@pytest.mark.slow
def test_two_router_processes_are_one_door(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        with up(tmp_path, "--routers=2", f"--registry={redis.url}", "--policy=predicted") as cluster:
            with ThreadPoolExecutor(12) as pool:
                answers = list(pool.map(lambda number: ask(cluster, number), range(48)))
            assert all(answer["usage"]["completion_tokens"] == 30 for answer in answers)  # type: ignore[index]
            launcher = psutil.Process(cluster.record.launcher_pid)
            routers = [one for one in launcher.children() if one.cmdline()[-1] == "router"]
            assert len(routers) == 2
            assert all(busy(one) for one in routers), "both had connections"
            cluster.front.send_signal(signal.SIGINT)
            assert cluster.front.wait(60) == 0
    finally:
        redis.kill()


def busy(router: psutil.Process) -> bool:
    """Whether it has answered anything, by its own /metrics."""
    ports = [one.laddr.port for one in router.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    completed = rb'pdserve_requests_total{outcome="completed",reason=""} [1-9]'
    return any(re.search(completed, metrics(port)) for port in ports)


def metrics(port: int) -> bytes:
    """Nothing where something else is spoken."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return bytes(answer.read())
    except (OSError, http.client.HTTPException):
        return b""
