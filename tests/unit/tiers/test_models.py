"""The same with real models: pages and states that went down and came up are what they were, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights, open_weights
from runtime.modelfiles import ModelFiles
from tests.unit.engine_core.lab import request
from tests.unit.engine_torch.families import config_of, prompt
from tests.unit.tiers.lab import TierLab
from tests.unit.tiers.test_swap import swap

OPTIONS = RunnerOptions(dtype="float32", device="cpu", threads=1, deterministic=True)
SEEDED: dict[str, object] = {"temperature": 0.9, "seed": 3}


def lab(model: str, pages: int = 24) -> TierLab:
    if model == "tiny-kimi":
        files = ModelFiles.open("tiny-kimi")
        weights = open_weights(Path(files.path), files.kind, files.config, "auto", 0)
        runner = TorchRunner(files.config, weights, OPTIONS)
    else:
        runner = TorchRunner(config_of(model), RandomWeights(0), OPTIONS)
    changes: dict[str, object] = {"host_pool_tokens": 1024}
    return TierLab(pages=pages, runner=runner, state=model == "tiny-kimi", max_model_len=256, changes=changes)


@lru_cache
def alone(model: str, seeded: bool) -> list[int]:
    made = lab(model)
    key = made.submit(request("a", prompt(50), max_tokens=42, **(SEEDED if seeded else {})))  # type: ignore[arg-type]
    made.run()
    return made.tokens(key)


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("model", ["llama", "tiny-kimi"])
def test_a_real_request_swapped_at_any_step_says_the_same(model: str, seeded: bool) -> None:
    made = lab(model)
    steps = range(1, 41) if model == "llama" else (1, 2, 3, 16, 40)
    for step in steps:
        more = SEEDED if seeded else {}
        key = made.submit(request(f"r{step}", prompt(50), max_tokens=42, **more))  # type: ignore[arg-type]
        made.engine.cache.clear()
        made.turns(step)
        swap(made, f"r{step}")
        made.run()
        assert made.tokens(key) == alone(model, seeded), f"swapped at step {step}"
    assert made.tiers.counts.swapped_in == len(steps)
    made.baseline()


def test_a_prefix_that_came_back_from_the_host_gives_the_tokens_of_a_computed_one() -> None:
    made = lab("llama", pages=14)
    first = made.submit(request("first", prompt(150), max_tokens=10))
    made.run()
    made.submit(request("other", prompt(170, seed=1), max_tokens=10))
    made.run()
    again = made.submit(request("again", prompt(150), max_tokens=10))
    made.run()

    assert made.tiers.counts.hit_pages >= 7
    assert made.tokens(again) == made.tokens(first)
    made.baseline()


@pytest.mark.parametrize("ring", [0, 16], ids=["plain", "records"])
def test_a_turn_that_went_down_with_its_state_goes_on_as_if_it_had_stayed(ring: int) -> None:
    """Nine answer tokens leave records in the slot, where there are any: the state is whole when it goes down."""
    turn, answers = prompt(60), []
    for pressed in (False, True):
        options = replace(OPTIONS, replay_len=ring, deterministic=not ring)
        files = ModelFiles.open("tiny-kimi")
        runner = TorchRunner(files.config, open_weights(Path(files.path), files.kind, files.config, "auto", 0), options)
        changes: dict[str, object] = {"host_pool_tokens": 1024, "max_batch": 2}
        made = TierLab(pages=14, runner=runner, state=True, max_model_len=256, changes=changes)
        first = made.submit(request("first", turn, max_tokens=9))
        made.run()
        made.settle()
        if pressed:
            made.submit(request("other", prompt(190, seed=1), max_tokens=4))
            made.run()
            made.settle()
        longer = (*turn, *made.tokens(first), 5, 6, 7)
        second = made.submit(request("second", longer, max_tokens=9))
        for _ in range(3):
            made.run()
            made.settle()
        assert made.of(second)[-1].cached_tokens == 68  # type: ignore[union-attr]
        assert made.tiers.counts.hit_states == pressed
        answers.append(made.tokens(second))
        made.baseline()
    assert len(answers[0]) == 9
    assert answers[0] == answers[1]
