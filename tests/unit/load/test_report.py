"""What a run comes to, from the results of several processes."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.load import show
from bench.load.crew import LOST, Loader
from bench.load.report import Objective, figures, spread
from bench.load.results import COMPLETED, CUT, FAILED, PARTS, REFUSED, Result, pack, unpack

PNG = b"\x89PNG"


def result(number: int, **changes: object) -> Result:
    """Due at `number`, answered within a second: 100 tokens, 20 of them cached, and 11 back, 30 ms apart."""
    at = float(number)
    made = Result(number, COMPLETED, "", at, at + 0.01, at + 0.2, at + 0.5, at + 0.6, 0.01, 0.0, 100, 11, 100, 20, 11)
    made.gaps = np.full(10, 0.03, np.float32)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def loader(*results: Result, **fields: object) -> Loader:
    made = Loader("here", ended=True, begun=len(results), results=list(results))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_results_come_through_json_bit_for_bit() -> None:
    draws = np.random.default_rng(3)
    sent = [
        result(n, due=float(draws.random()), gaps=draws.random(n).astype(np.float32), parts=tuple(draws.random(5)))
        for n in range(5)
    ]
    for one, back in zip(sent, unpack(json.loads(json.dumps(pack(sent)))), strict=True):
        assert back.gaps.tobytes() == one.gaps.tobytes()
        assert replace(back, gaps=one.gaps) == one


def test_what_several_processes_measured_comes_to_the_same_as_if_one_had() -> None:
    draws = np.random.default_rng(5)
    all_of_them = [result(n, first=n + float(draws.exponential()), end=n + 9.0, last=n + 8.0) for n in range(300)]
    alone = figures([loader(*all_of_them)], Objective())
    for cuts in ((1, 299), (150, 150), (10, 200, 90)):
        edges = np.cumsum((0, *cuts))
        parts = [loader(*all_of_them[low:high]) for low, high in itertools.pairwise(edges)]
        together = figures(parts, Objective())
        del together["load"]["loaders"]
        assert together == {**alone, "load": {k: v for k, v in alone["load"].items() if k != "loaders"}}
    assert alone["ttft_s"]["p99"] == pytest.approx(np.percentile([one.ttft for one in all_of_them], 99))


def test_every_kind_of_end_is_counted_once_and_only_answers_have_times() -> None:
    found = figures(
        [
            loader(result(0), result(1, state=REFUSED, reason="503 saturated", first=0.0, prompt=0, output=0)),
            loader(
                result(2, state=REFUSED, reason="429 tenant_limit"),
                result(3, state=REFUSED, reason="503 saturated"),
                result(4, state=FAILED, reason="connection_lost"),
                result(5, state=CUT, reason="stopped"),
            ),
        ],
        Objective(),
    )
    assert found["requests"] == {"sum": 6, "completed": 1, "refused": 3, "failed": 1, "cut_short": 1}
    assert found["reasons"] == {
        "refused": {"503 saturated": 2, "429 tenant_limit": 1},
        "failed": {"connection_lost": 1},
        "cut_short": {"stopped": 1},
    }
    assert found["ttft_s"]["max"] == pytest.approx(0.2)
    assert found["latency_s"]["mean"] == pytest.approx(0.6)
    assert found["tpot_s"]["p50"] == pytest.approx(0.03)
    assert found["itl_s"]["p99"] == pytest.approx(0.03)
    assert (found["prompt_tokens"], found["output_tokens"]) == (100, 11)
    assert found["goodput"] == 1 / 5, "of those that ended by themselves"


def test_a_refused_or_slow_request_is_no_good_one() -> None:
    slow = result(1, first=4.0, last=4.2, end=4.3)  # 3 s for 100 tokens
    long_prompt = result(2, first=5.0, last=5.2, end=5.3, prompt=16_384)  # 3 s for 16K
    stuttering = result(3, last=3.9, end=4.0)
    found = figures([loader(result(0), slow, long_prompt, stuttering)], Objective())
    assert found["goodput"] == 0.5
    assert figures([loader(slow)], Objective(ttft_s=10.0))["goodput"] == 1.0


def test_the_hit_rate_is_what_the_server_says_and_nothing_where_it_does_not() -> None:
    told, untold = result(0), result(1, cached=-1)
    assert figures([loader(told, result(1, cached=0))], Objective())["hit_rate"] == 0.1
    assert figures([loader(told, untold)], Objective())["hit_rate"] == 0.2
    assert figures([loader(untold)], Objective())["hit_rate"] is None


def test_answers_that_are_not_what_was_asked_for_are_told() -> None:
    found = figures([loader(result(0), result(1, output=5), result(2, prompt=101))], Objective())
    assert (found["short_answers"], found["prompts_of_other_length"]) == (1, 1)


def test_the_parts_of_the_ledger_are_those_of_the_requests_that_have_one() -> None:
    found = figures([loader(result(0, parts=(1.0, 2.0, 3.0, 4.0, 5.0)), result(1))], Objective())
    assert [found["parts_s"][name.removesuffix("_s")]["mean"] for name in PARTS] == [1, 2, 3, 4, 5]
    assert figures([loader(result(0))], Objective())["parts_s"] is None


def test_a_process_that_is_lost_costs_what_was_under_way_there_and_no_more() -> None:
    lost = Loader("there")
    lost.take({"ready": {"pid": 7}})
    lost.take({"begun": 3, "results": pack([result(0)])})
    lost.gone()
    lost.gone()
    found = figures([lost, loader(result(5))], Objective())
    assert found["requests"] == {"sum": 4, "completed": 2, "refused": 0, "failed": 2, "cut_short": 0}
    assert found["reasons"]["failed"] == {LOST: 2}
    assert found["load"]["lost"] == 1
    assert [one["lost"] for one in found["load"]["loaders"]] == [True, False]


def test_who_limits_is_seen_node_by_node() -> None:
    late = [result(n, late=0.5) for n in range(3)]
    load = figures([loader(result(9), own_share=0.2), loader(*late, node="far", own_share=0.97)], Objective())["load"]
    assert load["own_share"] == 0.97
    assert [(one["node"], one["late_s"]["p50"]) for one in load["loaders"]] == [("here", 0.01), ("far", 0.5)]
    idle = loader(own_share=0.99)  # it ended as it began
    assert figures([loader(result(0), own_share=0.2), idle], Objective())["load"]["own_share"] == 0.2


def test_a_table_and_a_plot_are_made_of_any_run(tmp_path: Path) -> None:
    nothing = [loader()]
    refused = [loader(*(result(n, state=REFUSED, reason="503 saturated", first=0.0) for n in range(3)))]
    whole = [loader(*(result(n, parts=(0.1,) * 5) for n in range(40)), own_share=0.9)]
    for number, run in enumerate((nothing, refused, whole)):
        out = io.StringIO()
        found = figures(run, Objective()) | {"stopped": run is nothing}
        Console(file=out, width=140).print(show.shown("a run", found))
        assert ("stopped before its end" in out.getvalue()) == (run is nothing)
        assert f"{len(run[0].results)} requests" in out.getvalue()
        assert ("503 saturated" in out.getvalue()) == (run is refused)
        assert ("more --loaders" in out.getvalue()) == (run is whole)
        file = tmp_path / f"{number}.png"
        show.plot(file, run[0].results)
        assert file.read_bytes()[:4] == PNG


def test_nothing_has_no_percentiles() -> None:
    assert spread([]) is None
    assert spread([2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.0, "p99": 2.0, "max": 2.0}
