"""Decode rows in compiled code or as tensor operations: the same model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.plan import StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from tests.unit.hybrid.models import Walk, config_of, tokens_of

NAMES = ["kimi_linear", "qwen3_next", "granitemoehybrid", "nemotron_h", "kimi_k3"]


def runner(name: str, *, fused: bool = True, deterministic: bool = False, cache: str = "") -> TorchRunner:
    options = RunnerOptions("float32", "cpu", 0, 1, deterministic, fused=fused, compile_cache=cache)
    found = TorchRunner(config_of(name), RandomWeights(0), options)
    found.allocate(64, 4)
    return found


def beside_a_prompt(one: TorchRunner) -> Walk:
    """Decode alone, then in one step with a chunk of another prompt, then alone again."""
    walk, other = Walk(one, tokens_of(20)), Walk(one, tokens_of(40, 1), slot=2, first_page=30)
    token = walk.run(20)
    walk.decode(2, token)
    walk.tokens.append(7)
    rows = (walk.row(walk.computed + 1), other.row(40))
    results = one.run(StepPlan(1, rows)).rows
    token = walk.take(rows[0], results[0])
    other.take(rows[1], results[1])
    walk.decode(2, token)
    walk.scores += other.scores
    return walk


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_the_tensor_operations(name: str) -> None:
    fast, plain = runner(name), runner(name, fused=False)
    assert fast.layers_compiled is not None
    assert plain.layers_compiled is None
    mine, reference = beside_a_prompt(fast), beside_a_prompt(plain)
    assert len(mine.scores) == len(reference.scores) == 7
    assert np.abs(np.stack(mine.scores) - np.stack(reference.scores)).max() < 1e-4
    assert mine.tokens == reference.tokens


def test_without_a_compiler_a_model_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = beside_a_prompt(runner("kimi_linear", fused=False))
    monkeypatch.setenv("PATH", str(tmp_path))
    bare = runner("kimi_linear", cache=str(tmp_path))
    assert bare.layers_compiled is None
    assert all(map(np.array_equal, beside_a_prompt(bare).scores, reference.scores))


def test_a_deterministic_run_takes_every_product_from_one_place() -> None:
    exact = runner("kimi_linear", deterministic=True)
    assert exact.layers_compiled is not None
    assert not exact.layers_compiled.products
    chosen = runner("kimi_linear").layers_compiled
    assert chosen is not None
    assert chosen.products


def test_more_threads_change_no_bit() -> None:
    one, before = runner("kimi_linear"), torch.get_num_threads()
    scores = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(1)
            walk = Walk(one, tokens_of(20))
            token = walk.run(20)
            torch.set_num_threads(threads)
            walk.decode(6, token)
            scores.append(np.stack(walk.scores[1:]))
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(scores[0], scores[1])
