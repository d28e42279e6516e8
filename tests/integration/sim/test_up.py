"""`pdserve up --sim`: the command a person runs, with the real router over real sockets."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.unit.runtime.servers import RedisServer


@pytest.fixture
def cluster() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """3 prefill and 3 decode workers in two processes; the HTTP address."""
    with up() as running:
        yield running


@contextmanager
def up(*more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    flags = ["--sim=sim-h100-8b", "--prefill=3", "--decode=3", "--model=oracle", "--http-listen=127.0.0.1:0", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve", "up", *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen, url = "", ""
    for line in process.stdout:
        seen += line
        found = re.search(r"http://\S+", line)
        url = found.group(0) if found else url
        if "Ctrl-C ends it" in line:
            break
    try:
        assert url, seen
        yield process, url
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, number: int) -> dict[str, object]:
    body = {"model": "oracle", "prompt": f"{number} bottles of beer on the wall" * 20, "max_tokens": 30}
    request = urllib.request.Request(
        f"{url}/completions",
        json.dumps({**body, "return_ledger": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def test_a_router_over_simulated_workers_answers_through_pairs_and_ends_on_ctrl_c(
    cluster: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = cluster
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda number: ask(url, number), range(24)))
    ledgers = [answer["ledger"] for answer in answers]
    assert all(isinstance(ledger, dict) for ledger in ledgers)
    pairs = {(ledger["prefill_worker"], ledger["decode_worker"]) for ledger in ledgers}  # type: ignore[index]
    assert len({prefill for prefill, _ in pairs}) == 3
    assert len({decode for _, decode in pairs}) == 3
    assert all(ledger["transport"] in ("sim", "") for ledger in ledgers)  # type: ignore[index]
    usage = [answer["usage"] for answer in answers]
    assert all(entry["completion_tokens"] == 30 for entry in usage)  # type: ignore[index]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


@pytest.mark.slow
def test_two_router_processes_are_one_door(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        with up("--routers=2", f"--registry={redis.url}", "--policy=predicted") as (process, url):
            with ThreadPoolExecutor(12) as pool:
                answers = list(pool.map(lambda number: ask(url, number), range(48)))
            assert all(answer["usage"]["completion_tokens"] == 30 for answer in answers)  # type: ignore[index]
            routers = [one for one in psutil.Process(process.pid).children() if one.cmdline()[-1] == "router"]
            assert len(routers) == 2
            assert all(busy(one) for one in routers), "both had connections"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
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
