"""What a state is worth: the work of a prefill, from the model's shapes."""

from __future__ import annotations

import pytest

from tests.unit.engine_core.lab import Lab, prompt
from tests.unit.hybrid.models import CONFIGS, runner_of
from tests.unit.hybrid.test_cache_rules import ask, lengths


def test_flops_of_a_prefill_are_those_of_its_matrices_its_states_and_its_attention() -> None:
    spec = runner_of("kimi_linear").spec()
    kda = 3 * 96 * 64 + 3 * 64 * 4 + 96 * 16 + 96 * 4 + 96 * 16 + 64 * 16 + 64 * 16 + 64 * 96
    mla = 96 * 4 * 24 + 96 * 32 + 24 * 4 * 32 + 64 * 96
    dense = 3 * 96 * 80
    moe = 96 * 8 + 3 * 3 * 96 * 48 + 3 * 96 * 2 * 48
    state = 7 * 3 * 4 * 16 * 16
    assert spec.token_flops == 2 * (3 * kda + 2 * mla + dense + 4 * moe) + state
    assert spec.pair_flops == 2 * 2 * 4 * (16 + 8 + 16)
    assert spec.flops(100, 300) == 200 * spec.token_flops + spec.pair_flops * (300**2 - 100**2) / 2


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "kimi_linear"])
def test_every_model_says_what_a_token_costs(name: str) -> None:
    spec = runner_of(name).spec()
    assert 1e4 < spec.token_flops < 1e7
    assert 0 < spec.pair_flops < 1e4


def test_experts_count_as_often_as_a_token_meets_them() -> None:
    spec = runner_of("kimi_linear").spec()
    more = {**CONFIGS["kimi_linear"], "num_experts_per_token": 6}
    CONFIGS["kimi_linear-more"] = more
    try:
        grown = runner_of("kimi_linear-more").spec().token_flops - spec.token_flops
    finally:
        del CONFIGS["kimi_linear-more"]
    assert grown == 2 * 3 * 3 * 96 * 48 * 4, "three experts more, three matrices each, in four layers"


@pytest.mark.parametrize(("pair", "kept"), [(0.0, [128, 256]), (1.0, [256, 288])])
def test_a_state_stays_for_the_work_it_saves_not_for_the_tokens(pair: float, kept: list[int]) -> None:
    """States at 128, 256 and 288 of one age, and room for two of them: the deepest saves 32 tokens, with attention that
    are more FLOPs than the first 128."""
    world = Lab(pages=128, state=True, changes={"max_batch": 2, "state_interval_tokens": 128, "state_ends": False})
    object.__setattr__(world.engine.model, "pair_flops", pair)
    ask(world, "one", prompt(300))
    assert lengths(world, prompt(300)) == [128, 256, 288]
    ask(world, "two", prompt(40, 5))
    assert lengths(world, prompt(300)) == kept
