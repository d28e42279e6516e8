"""The Triton kernels without a GPU: compared with their torch namesakes in the interpreter, and compiled for sm_90a.

The interpreter is chosen when triton is imported, and compiling replaces triton's driver, so each has its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from .triton_cases import CASES, COMPILE_ONLY, RUN_ONLY

Report = dict[str, dict[str, Any]]

pytestmark = pytest.mark.timeout(300)  # the interpreter takes 15 s of a quiet core, many times that on a busy one


def reports(mode: str, *cases: str, seconds: float = 280, **env: str) -> Report:
    command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.triton_cases", mode, *cases]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def interpreted() -> Report:
    return reports("run", TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> Report:
    return reports("compile", TRITON_INTERPRET="0")


@pytest.mark.parametrize("name", CASES)
def test_in_the_interpreter_a_kernel_equals_its_torch_namesake(interpreted: Report, name: str) -> None:
    assert not interpreted[name]["error"], interpreted[name]["error"]


@pytest.mark.parametrize("name", RUN_ONLY)
def test_a_kernel_reaches_what_lies_beyond_31_bits(interpreted: Report, name: str) -> None:
    assert not interpreted[name]["error"], interpreted[name]["error"]


@pytest.mark.parametrize("name", CASES | COMPILE_ONLY)
def test_every_launch_compiles_for_sm_90a_within_shared_memory_and_registers(compiled: Report, name: str) -> None:
    assert not compiled[name]["error"], compiled[name]["error"]
    assert compiled[name]["kernels"], "nothing was launched"
    for kernel, facts in compiled[name]["kernels"].items():
        assert facts["shared"] <= 227 * 1024, kernel
        assert facts["registers"] <= 64 * 1024, kernel
        assert facts["stack"] == 0, f"{kernel} spills registers"


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", ["every_head_size", "every_head_size_fp32"])
def test_every_head_size_fits_shared_memory_and_registers(name: str) -> None:
    """bf16, as models are served, and fp32, for comparisons with a CPU: nothing spills."""
    (found,) = reports("compile", name, seconds=900, TRITON_INTERPRET="0").values()
    assert not found["error"], found["error"]
    for kernel, facts in found["kernels"].items():
        assert facts["shared"] <= 227 * 1024, kernel
        assert facts["registers"] <= 64 * 1024, kernel
        assert facts["stack"] == 0, f"{kernel} spills registers"


def test_a_wrong_kernel_is_noticed() -> None:
    """Given a case whose torch side is off by one part in a thousand, when it is compared, then it fails."""
    code = (
        "import sys; sys.argv = ['x', 'run']\n"
        f"from {__package__} import triton_cases as t\n"
        "import engine.kernels.norms as n\n"
        "right = n.l2_norm\n"
        "n.l2_norm = lambda x: right(x) * 1.001\n"
        "t.CASES['norms_and_output_gates']()\n"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert "AssertionError: error" in done.stderr, done.stderr
