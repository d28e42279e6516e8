from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.replay import SHIPPED, main
from bench.sim.experiment import GOOD_ENOUGH, Experiment, Setting
from runtime.errors import InvalidRequest


def replay(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "replay", *arguments, "--cache-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_json_is_one_object_and_nothing_else_on_either_stream(tmp_path: Path) -> None:
    options = "--sim sim-h100-8b --virtual-clock --prefill 2 --decode 2 --requests 40 --load 0.8 --seed 1 --json"
    policies = "round_robin,predicted,dynamo,sgl"
    done = replay(str(SHIPPED), *options.split(), "--policies", policies, folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert list(answer) == ["policies", "config"]
    assert list(answer["policies"]) == policies.split(",")
    wanted = {"ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean", "goodput", "hit_rate", "failed"}
    assert all(wanted <= set(figures) for figures in answer["policies"].values())
    assert answer["config"]["load"] == 0.8
    assert answer["config"]["requests"] == 40
    again = replay(str(SHIPPED), *options.split(), "--policies", policies, folder=tmp_path)
    assert again.stdout == done.stdout, "and the capacity came from the cache"


def test_without_json_there_is_a_table_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    options = f"--prefill 2 --decode 2 --requests 20 --rate 2 --policies round_robin,predicted --plot {picture}"
    done = replay(str(SHIPPED), *options.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "round_robin" in done.stdout
    assert "goodput" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_nobody_named_is_in_the_cache_folder_and_its_path_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in whatever folder the user happens to be."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = ["--prefill=1", "--decode=1", "--requests=5", "--rate=1", "--policies=round_robin"]
    done = CliRunner().invoke(main, small)
    assert done.exit_code == 0, done.output
    said = Path(done.output.strip().splitlines()[-1].removeprefix("plots: "))
    assert said == tmp_path / "cache" / "pdserve" / "bench" / "replay.png"
    assert said.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [["--policies", "best"], ["--load", "0"], ["--load", "0.5,0.8", "--json"], ["--sim", "no-such"], ["--wall-clock"]],
)
def test_what_cannot_be_done_is_refused_with_status_2(wrong: list[str], tmp_path: Path) -> None:
    done = replay(str(SHIPPED), "--requests", "5", *wrong, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr


def test_capacity_is_where_goodput_under_least_load_ends_and_is_remembered(tmp_path: Path) -> None:
    experiment = Experiment(Setting(str(SHIPPED), "sim-h100-8b", 8, 8, 60, 1))
    said: list[str] = []
    capacity = experiment.capacity(tmp_path, lambda text, share: said.append(text))
    rate = capacity.requests_per_s
    assert capacity.goodput == GOOD_ENOUGH
    assert experiment.goodput(rate) >= GOOD_ENOUGH > experiment.goodput(1.1 * rate)
    said.clear()
    assert experiment.capacity(tmp_path, lambda text, share: said.append(text)) == capacity
    assert not said
    other = Experiment(Setting(str(SHIPPED), "sim-h100-8b", 8, 8, 60, 2))
    assert other._key() != experiment._key()


def test_bursts_that_miss_the_goal_at_any_speed_lower_it_instead_of_failing() -> None:
    experiment = Experiment(Setting(str(SHIPPED), "sim-h100-8b", 1, 1, 60, 1))
    capacity = experiment.capacity(None, lambda text, share: None)
    assert 0 < capacity.goodput < GOOD_ENOUGH
    assert capacity.requests_per_s > 0


def test_a_fleet_that_a_few_requests_cannot_fill_has_no_capacity() -> None:
    experiment = Experiment(Setting(str(SHIPPED), "sim-h100-8b", 8, 8, 5, 1))
    with pytest.raises(InvalidRequest) as caught:
        experiment.capacity(None, lambda text, share: None)
    assert caught.value.field == "requests"


@pytest.mark.parametrize("requests", [1, 5])
def test_requests_too_few_to_have_a_capacity_are_played_as_a_share_of_the_traces_own_rate(requests: int) -> None:
    command = [str(SHIPPED), "--prefill", "8", "--decode", "8", "--policies", "predicted", "--load", "0.5"]
    result = CliRunner().invoke(main, [*command, "--requests", str(requests), "--no-cache", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["config"]["capacity_requests_per_s"] is None
    assert answer["config"]["load"] == answer["config"]["speedup"] == 0.5
    assert answer["policies"]["predicted"]["failed"] == 0
