"""The GPU check itself: it runs on a CPU, and no part can stop the others."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import check

ENV = {**os.environ}


def said(code: str, seconds: float = 60.0) -> dict[str, Any]:
    return check.ran([sys.executable, "-c", code], ENV, seconds)


def test_a_parts_last_line_is_what_it_found() -> None:
    found = said('print(\'noise\'); print(\'{"ok": true, "figures": {"a": 1}}\')')
    assert found["ok"]
    assert found["figures"] == {"a": 1}


def test_a_part_that_crashes_has_failed_with_what_it_printed() -> None:
    found = said("import os; print('an illegal memory access', flush=True); os._exit(134)")
    assert not found["ok"]
    assert "134" in found["error"]
    assert "illegal memory access" in found["output"]


def test_a_part_that_hangs_is_ended_with_its_children() -> None:
    code = (
        "import subprocess, sys, time; print('begun', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    began = time.monotonic()
    found = said(code, 3.0)  # its grandchild holds the pipe: only the whole group's end lets go of it
    assert not found["ok"]
    assert "not over" in found["error"]
    assert time.monotonic() - began < 60


def test_a_part_that_raises_says_where(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = importlib.import_module("tests.gpu.parts")

    def wrong(device: str) -> None:
        raise AssertionError("other tokens")

    monkeypatch.setattr(parts, "limits", wrong)
    assert check.run_part("limits", "cpu") == 1
    found = check.result(capsys.readouterr().out, 1)
    assert not found["ok"]
    assert "other tokens" in found["error"]


def test_a_failure_is_reported_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a part that fails, when the check runs, then the parts after it run, the file has all of them, and the
    check has not passed. With no time left a part is not begun."""
    begun: list[str] = []

    def child(name: str, device: str, seconds: float) -> dict[str, Any]:
        begun.append(name)
        return {"ok": False, "error": "wrong"} if name == "kernels" else {"ok": True, "figures": {}, "seconds": 1.0}

    monkeypatch.setattr(check, "child", child)
    report = check.check("cpu", ["limits", "kernels", "decode"], 400, tmp_path)
    assert begun == ["limits", "kernels", "decode"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    assert not report["passed"]
    assert [part["ok"] for part in report["parts"].values()] == [True, False, True]
    assert check.check("cpu", ["limits", "decode"], 400, tmp_path)["passed"]
    late = check.check("cpu", ["limits"], 1, tmp_path)
    assert late["parts"]["limits"]["error"] == "no time was left"


def test_parts_that_measure_run_alone() -> None:
    found = check.rounds(list(check.PARTS))
    assert sorted(name for some in found for name in some) == sorted(check.PARTS)
    assert found[:2] == [["limits"], list(check.TOGETHER)]
    assert all(len(some) == 1 for some in found[2:])
    assert check.SECONDS < 480


def test_every_part_is_a_function_of_its_module() -> None:
    for name, (module, _) in check.PARTS.items():
        assert callable(getattr(importlib.import_module(f"tests.gpu.{module}"), name)), name


def test_the_hybrid_configs_are_those_of_the_tests() -> None:
    """They are written out because transformers, which fills in what they leave out, is not on every machine."""
    from tests.gpu.parts import hybrids
    from tests.unit.hybrid.models import CONFIGS, config_of

    assert hybrids() == {name: json.loads(json.dumps(config_of(name))) for name in CONFIGS if "-" not in name}


@pytest.mark.timeout(300)
def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    assert check.main(["--device", "cpu", "--only", "limits,scores", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["passed"]
    assert report["parts"]["limits"]["figures"]["memory_bytes_per_s"] > 0
    assert "records" in report["parts"]["scores"]["figures"]["kimi_linear"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    assert check.main(["--device", "cpu", "--seconds", "800", "--out", str(tmp_path)]) == 0
