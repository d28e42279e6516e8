"""Kimi K3's text model against independent code: no reference of it runs here."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.hybrid.models import Walk, config_of, runner_of, tokens_of
from tests.unit.hybrid.naive_k3 import NaiveK3


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_of_the_equations_written_down_again(seed: int) -> None:
    """Prefill in chunks of 32, then ten greedy tokens."""
    walk = Walk(runner_of("kimi_k3", seed=seed), tokens_of(45, seed))
    tokens = walk.decode(10, walk.chunks(45))
    theirs = NaiveK3(config_of("kimi_k3"), seed).logits(tokens).log_softmax(-1).numpy()
    positions = [31, *range(44, 55)]
    assert np.abs(np.array(walk.scores) - theirs[positions]).max() <= 2e-4 * np.abs(theirs).max()
    assert [int(theirs[p].argmax()) for p in range(44, 54)] == tokens[45:]
