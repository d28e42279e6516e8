from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import benchmarks, main


def test_every_benchmark_is_listed_with_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    known = benchmarks()
    assert "transfer" in known
    assert "__main__" not in known
    assert all(known.values()), "each says in its first line what it measures"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in known)


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such"]) == 2
    assert "transfer" in capsys.readouterr().err


def test_a_folder_of_the_same_name_where_the_user_is_changes_nothing(tmp_path: Path) -> None:
    """`python -m bench.replay` looks into the current folder first, and so does every process that a command starts."""
    for name in ("bench", "router", "runtime", "protos", "pdserve"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not this one')")
    command = [sys.executable, "-P", "-m", "pdserve", "bench", "replay", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--speedup" in done.stdout
