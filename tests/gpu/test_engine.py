"""The checks of tests/gpu/engine.py, where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import engine, tiers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_scores_are_those_of_the_cpu() -> None:
    engine.check_scores()


def test_noise_is_that_of_the_cpu() -> None:
    engine.check_noise()


def test_sampled_tokens_are_those_of_the_cpu() -> None:
    engine.check_sampling()


def test_pages_go_to_the_host_and_come_back() -> None:
    tiers.check_copies()
