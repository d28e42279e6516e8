"""The unit maps between two ranks in two processes, over torch.distributed's gloo, with a fake runner on each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_two_ranks_hand_pages_and_state_over_and_both_confirm() -> None:
    pytest.importorskip("torch.distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.integration.transfer.gloo_rank", str(port)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    for output in outputs:
        assert output.split("\n")[:-1] == [f"tp {pair} confirmed by all" for pair in ("1 to 2", "2 to 1", "2 to 2")]
