from __future__ import annotations

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
