"""`pdserve up --sim`: the command a person runs, with the real router over real sockets."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def cluster() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """3 prefill and 3 decode workers in two processes; the HTTP address."""
    flags = ["--sim=sim-h100-8b", "--prefill=3", "--decode=3", "--model=oracle", "--http-listen=127.0.0.1:0"]
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
