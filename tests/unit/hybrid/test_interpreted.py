"""The GPU's path on the real pool layouts: every model's step through the Triton kernels equals the torch path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.hybrid import interpreted


def compared(folder: Path, names: list[str], modes: list[str]) -> list[str]:
    expected = folder / "scores.json"
    expected.write_text(json.dumps({name: interpreted.scores(name) for name in names}))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.hybrid.interpreted", str(expected), *modes]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(300)
def test_a_step_in_the_buffers_of_a_graph_equals_the_torch_path(tmp_path: Path) -> None:
    assert len(compared(tmp_path, ["llama"], ["4,0"])) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", interpreted.MODELS)
def test_triton_kernels_give_every_model_the_same_scores(tmp_path: Path, name: str) -> None:
    """With steps made anew, with a graph's buffers, and with both, and records of states."""
    assert len(compared(tmp_path, [name], ["0,0", "4,0", "4,4"])) == (2 if name == "llama" else 3)
