from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.__main__ import FOLDER, benchmarks, main
from bench._options import positive, whole


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


@pytest.mark.parametrize("arguments", [["policy"], []], ids=["one", "all"])
def test_a_benchmark_ends_with_the_command_that_runs_it(arguments: list[str]) -> None:
    """One was found an hour later, still computing."""
    command = subprocess.Popen(
        [sys.executable, "-m", "pdserve", "bench", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    shown = psutil.Process(command.pid)
    while not (found := [p for p in (shown, *shown.children()) if _benchmark(p)]):
        assert command.poll() is None, "it ended by itself"
        time.sleep(0.02)
    command.terminate()
    command.wait(30)
    assert not [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def _benchmark(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(re.fullmatch(r"bench\.\w+", part) for part in process.cmdline())
    return False


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "x", ""])
def test_a_number_that_nothing_can_be_measured_with_is_refused(text: str) -> None:
    for kind in (whole, positive):
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            kind(text)
    assert (whole("3"), positive("0.5")) == (3, 0.5)


@pytest.mark.parametrize("name", benchmarks())
def test_every_number_of_a_benchmark_is_checked_before_it_starts(name: str) -> None:
    """A seed may be any number."""
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    taken = [line for line in source.splitlines() if re.search(r"add_argument\(.*type=(int|float)\b", line)]
    assert [line for line in taken if '"--seed"' not in line] == []
