from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.replay import SHIPPED
from bench.sim import study
from bench.sim.experiment import Setting
from bench.sim.study import Case, Results

POLICIES = ("least_load", "predicted", "predicted_pairs")


def case(seeds: int = 2) -> Case:
    return Case("small", Setting(str(SHIPPED), "sim-h100-8b", 2, 2, 30, 1), (0.8,), seeds, POLICIES)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Capacities, found once."""
    return tmp_path_factory.mktemp("capacities")


def test_a_study_that_is_broken_off_goes_on_where_it_was(tmp_path: Path, known: Path) -> None:
    file = tmp_path / "runs.jsonl"
    said: list[str] = []
    study.run([case(1)], Results(file), known, lambda text, share: said.append(text))
    assert len(said) == 1 + len(POLICIES) + 1
    file.write_text(file.read_text() + '{"source": "broken o')
    said.clear()
    results = Results(file)
    study.run([case(2)], results, known, lambda text, share: said.append(text))
    assert all("seed 2" in text for text in said[:-1]), "seed 1 was there"
    assert len(study.figures(case(2), results, 0.8, "predicted", "ttft_mean")) == 2


def test_runs_of_other_sources_are_not_used(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    setting = case().setting
    Results(file, source="then").put(study.key_of(setting, 0.8, "predicted"), {"ttft_mean": 1.0})
    assert Results(file, source="now").get(study.key_of(setting, 0.8, "predicted")) is None
    assert Results(file, source="then").get(study.key_of(setting, 0.8, "predicted")) == {"ttft_mean": 1.0}


def test_prefill_on_decode_workers_can_be_left_out(tmp_path: Path, known: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    study.run([case(1)], results, known, lambda text, share: None)
    assert study.figures(case(1), results, 0.8, "predicted", "local")[0] > 0
    assert study.figures(case(1), results, 0.8, "predicted_pairs", "local") == [0.0]


def test_an_interval_is_students() -> None:
    made = study.mean([1.0, 2.0, 3.0, 4.0, 5.0])
    assert made.value == 3.0
    assert made.half == pytest.approx(2.78 * (2.5 / 5) ** 0.5)
    assert study.mean([4.0]).text(2) == "4.00"


def test_a_loss_is_told_when_it_is_more_than_scatter(tmp_path: Path) -> None:
    results, shape = Results(tmp_path / "runs.jsonl"), case(3)
    values = {"predicted": (1.0, 1.1, 1.2), "least_load": (0.9, 1.0, 1.1), "predicted_pairs": (0.5, 1.1, 1.6)}
    for policy, times in values.items():
        for setting, time in zip(study.settings(shape), times, strict=True):
            row = dict.fromkeys(study.BETTER, 1.0) | {"ttft_mean": time}
            results.put(study.key_of(setting, 0.8, policy), row)
    found = study.losses(shape, results, "predicted", ["least_load", "predicted_pairs"])
    assert found == ["80 %, ttft_mean: predicted 1.1; least_load 1"]
    assert study.ratio(shape, results, 0.8, "least_load", "predicted", "ttft_mean").value == pytest.approx(
        0.909, abs=1e-3
    )


def test_keys_of_runs_do_not_depend_on_where_the_trace_lies(tmp_path: Path) -> None:
    elsewhere = tmp_path / SHIPPED.name
    here, there = (Setting(str(path), "p", 1, 1, 1, 1) for path in (SHIPPED, elsewhere))
    assert study.key_of(here, 0.8, "x") == study.key_of(there, 0.8, "x")
    assert json.loads(study.key_of(here, 0.8, "x"))["load"] == 0.8
