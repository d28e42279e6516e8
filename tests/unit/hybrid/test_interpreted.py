"""The GPU's path on the real pool layouts: every model's step through the Triton kernels equals the torch path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.hybrid import interpreted


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_triton_kernels_give_every_model_the_same_scores(tmp_path: Path) -> None:
    expected = tmp_path / "scores.json"
    expected.write_text(json.dumps({name: interpreted.scores(name) for name in interpreted.MODELS}))
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unit.hybrid.interpreted", str(expected)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.split("\n")) > len(interpreted.MODELS)
