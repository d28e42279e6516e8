"""Each family computes what transformers computes, in one go, in chunks, and token by token."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.models.registry import model_config
from runtime.errors import Unsupported
from tests.unit.engine_torch.families import (
    FAMILIES,
    Request,
    config_of,
    generate,
    page_memory,
    pages_for,
    prompt,
    reference,
    runner_of,
    step,
)

NEW = 12
Scores = npt.NDArray[np.float64]


@cache
def expected(family: str, length: int) -> tuple[list[int], Scores, float]:
    """Greedy tokens, log-probabilities [length + NEW - 1, vocab] and the largest logit of transformers, uncached."""
    model, tokens = reference(family), list(prompt(length))
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return tokens, torch.log_softmax(logits.double(), -1).numpy(), float(logits.abs().max())


@pytest.mark.parametrize("chunk", [256, 16, 23])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_greedy_tokens_equal_transformers(family: str, chunk: int) -> None:
    tokens, scores, size = expected(family, 45)
    got = generate(runner_of(family), Request(1, list(prompt(45)), pages_for(64), chunk), NEW)
    assert got.tokens == tokens
    assert got.matrix().shape == scores.shape
    assert np.abs(got.matrix() - scores).max() <= 2e-4 * size


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_pages_may_lie_anywhere_in_any_order(family: str) -> None:
    scattered = (41, 3, 27, 12)
    near = generate(runner_of(family), Request(1, list(prompt(45)), pages_for(64), 16), NEW)
    far = generate(runner_of(family), Request(1, list(prompt(45)), scattered, 16), NEW)
    assert np.array_equal(near.matrix(), far.matrix())


def test_a_prompt_of_one_token_is_computed() -> None:
    tokens, scores, size = expected("llama", 1)
    got = generate(runner_of("llama"), Request(1, list(prompt(1)), pages_for(16), 16), NEW)
    assert got.tokens == tokens
    assert np.abs(got.matrix() - scores).max() <= 2e-4 * size


def test_nothing_but_the_sequences_own_cells_is_written() -> None:
    runner = runner_of("llama")
    generate(runner, Request(1, list(prompt(37)), (5, 9, 2, 7), 16), 4)
    used = {int(p) for p in np.flatnonzero(page_memory(runner).any(axis=(1, 2, 3, 4, 5)))}
    assert used - {0} == {5, 9, 2}
    assert not page_memory(runner)[2][:, :, :, 40 - 32 :].any()  # 40 tokens known to the state


def _swap_keys_and_values(memory: Any) -> None:
    memory[2] = memory[2][:, :, ::-1].copy()


def _roll_values(memory: Any) -> None:
    """Keys against their neighbours' values (rolling both would be the same attention)."""
    memory[2][:, :, 1] = np.roll(memory[2][:, :, 1], 1, axis=2)


def _next_page(memory: Any) -> None:
    memory[1:3] = memory[2:4].copy()


def _swap_heads(memory: Any) -> None:
    memory[2] = memory[2][::-1].copy()


def _swap_layers(memory: Any) -> None:
    memory[2] = memory[2][:, ::-1].copy()


FAULTS = [_swap_keys_and_values, _roll_values, _next_page, _swap_heads, _swap_layers]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_fault_in_the_pages_shows(family: str, fault: Any) -> None:
    """The checks above can fail: each of these faults moves the scores far beyond their tolerance."""
    _, scores, size = expected(family, 45)
    runner, request = runner_of(family), Request(1, list(prompt(45)), pages_for(64), 16)
    generate(runner, request, 1)
    fault(page_memory(runner))
    generate(runner, request, 2)
    assert np.abs(request.matrix()[-1] - scores[45]).max() > 1e-2 * size


def test_a_stale_number_in_the_rest_of_a_page_is_not_seen() -> None:
    clean = generate(runner_of("llama"), Request(1, list(prompt(40)), pages_for(64), 16), 4)
    runner, request = runner_of("llama"), Request(1, list(prompt(40)), pages_for(64), 16)
    other = Request(2, list(prompt(90, 3)), pages_for(112, 10), 16)
    page_memory(runner)[1:20].view(np.float32)[...] = np.nan
    generate(runner, request, 1)
    generate(runner, other, 1)
    for _ in range(3):  # in a padded batch, where lengths differ
        step(runner, [request, other])
    assert request.tokens == clean.tokens
    assert np.abs(request.matrix() - clean.matrix()).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gemma"}, "model"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported) as refused:
        model_config({**config_of("llama"), **change})
    assert refused.value.field == field


def test_dynamic_scaling_ends_where_its_frequencies_would_change() -> None:
    config = model_config({**config_of("llama-dynamic"), "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})
    assert config.max_len == 256
