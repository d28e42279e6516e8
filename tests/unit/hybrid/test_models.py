"""Hybrid models on the engine's runner against transformers, and against themselves cut differently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models.families import FAMILIES
from engine.models.registry import model_config
from engine.plan import StepPlan
from runtime.errors import Unsupported
from tests.unit.hybrid.models import CONFIGS, Walk, config_of, reference, runner_of, slot_bytes, tokens_of

LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 100, 255)
MODELS = list(CONFIGS)
REFERENCED = [name for name in CONFIGS if name != "kimi_k3"]  # that one is in test_kimi_k3


@pytest.mark.parametrize("name", REFERENCED)
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_and_greedy_tokens_are_those_of_transformers(name: str, seed: int) -> None:
    """Prefill in chunks of 32, then 64 greedy tokens, each scored by transformers over the whole sequence at once."""
    walk = Walk(runner_of(name, seed=seed), tokens_of(75, seed))
    first = walk.chunks(75)
    tokens = walk.decode(64, first)
    with torch.no_grad():
        theirs = reference(name, seed)(torch.tensor([tokens])).logits[0].log_softmax(-1).double().numpy()
    ours = np.array(walk.scores)
    positions = [31, 63, *range(74, 74 + 65)]
    assert len(ours) == len(positions)
    scale = np.abs(theirs).max()
    assert np.abs(ours - theirs[positions]).max() <= 2e-4 * scale
    assert [int(theirs[p].argmax()) for p in range(74, 74 + 64)] == tokens[75:]


@pytest.mark.parametrize("name", MODELS)
def test_prefill_then_decode_ends_where_prefill_of_all_of_it_does(name: str) -> None:
    """State within 1e-5, scores within 1e-4, for split points on, before and after every grid."""
    runner = runner_of(name, pages=64)
    tokens = tokens_of(300)
    for split in LENGTHS:
        whole, parts = Walk(runner, tokens, 1, 1), Walk(runner, tokens, 2, 30)
        whole.run(split + 9)
        parts.run(split)
        for end in range(split + 1, split + 10):
            parts.run(end)
        assert np.abs(whole.scores[-1] - parts.scores[-1]).max() <= 1e-4 * np.abs(whole.scores[-1]).max()
        for component, found in whole.state.items():
            mine, theirs = (np.frombuffer(b, np.float32) for b in (found, parts.state[component]))
            assert np.abs(mine - theirs).max() <= 1e-5 * max(1.0, np.abs(mine).max()), (split, component)


@pytest.mark.parametrize("name", MODELS)
def test_an_interior_checkpoint_is_the_state_of_a_prefill_stopped_there(name: str) -> None:
    """Bitwise: one forward over 95 tokens exports states at 16, 48 and 80, as forwards over so many leave them."""
    runner = runner_of(name, deterministic=True)
    tokens = tokens_of(95)
    whole = Walk(runner, tokens, 1)
    points = ((16, 3), (48, 4), (80, 5))
    whole.run(95, points)
    for length, slot in points:
        stopped = Walk(runner, tokens, 2, 30)
        stopped.run(length)
        assert stopped.state == slot_bytes(runner, slot), length


@pytest.mark.parametrize("name", MODELS)
def test_a_row_does_not_depend_on_the_batch_around_it(name: str) -> None:
    """Bitwise with deterministic on: three prompts prefilled and decoded alone, and in shared steps."""
    together, alone = runner_of(name, deterministic=True), runner_of(name, deterministic=True)
    prompts = [tokens_of(n, seed) for seed, n in enumerate((40, 7, 129))]
    walks = [[Walk(r, p, i + 1, 1 + 12 * i) for i, p in enumerate(prompts)] for r in (together, alone)]
    for shared, single in zip(*walks, strict=True):
        single.decode(5, single.run(len(single.tokens)))
        shared.pages = single.pages
    batch = walks[0]
    sampled = _step(batch)
    for _ in range(5):
        for walk, token in zip(batch, sampled, strict=True):
            walk.tokens.append(token)
        sampled = _step(batch)
    for shared, single in zip(*walks, strict=True):
        assert shared.tokens == single.tokens
        assert np.array_equal(shared.scores, single.scores)
        assert shared.state == single.state


def _step(walks: list[Walk]) -> list[int]:
    rows = [walk.row(len(walk.tokens)) for walk in walks]
    results = walks[0].runner.run(StepPlan(1, tuple(rows))).rows
    return [walk.take(row, result) for walk, row, result in zip(walks, rows, results, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_padded_rows_touch_no_state_and_a_fresh_prompt_ignores_what_its_slot_held(name: str) -> None:
    """Deterministic mode pads a lone decode row to four; the null slot stays zero and other slots stay as they were."""
    runner = runner_of(name, deterministic=True)
    first, other = Walk(runner, tokens_of(21), 1, 1), Walk(runner, tokens_of(40, 1), 2, 30)
    first.run(20)
    other.run(40)
    before = other.state
    first.run(21)
    assert other.state == before
    assert not any(any(b) for b in slot_bytes(runner, 0).values())
    reused = Walk(runner, tokens_of(21), 2, 30)
    reused.run(20)
    reused.run(21)
    assert reused.state == first.state


@pytest.mark.parametrize("name", MODELS)
def test_bf16_runs_and_stays_near_fp32(name: str) -> None:
    exact, rough = (Walk(runner_of(name, dtype=d), tokens_of(40)) for d in ("float32", "bfloat16"))
    for walk in (exact, rough):
        walk.run(40)
    assert np.corrcoef(exact.scores[0], rough.scores[0])[0, 1] > 0.98


def test_an_unsupported_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(Unsupported) as refused:
        model_config({**config_of("kimi_linear"), "model_type": "mamba"})
    assert all(name in refused.value.message for name in FAMILIES)
    assert "kimi_linear" in FAMILIES
