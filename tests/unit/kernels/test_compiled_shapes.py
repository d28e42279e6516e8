"""Compiled decode rows at sizes that fill no vector, and at those that they leave to the tensor operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.build import Compiled, compiled
from engine.layers.gdn import Gdn, GdnConfig
from engine.layers.kda import Kda, KdaConfig
from engine.layers.latent import LatentPool, LatentShape, LatentStep
from engine.layers.mamba2 import Mamba2, Mamba2Config
from engine.layers.mla import NOTHING, Mla, MlaConfig
from engine.layers.params import Params
from engine.layers.state import LinearStep
from engine.native import default_cache
from tests.unit.kernels.layers import decoding, filled, pages_of, relative, step_of, twins

HIDDEN, LAYERS, INDEX = 72, 2, 1
SLOTS = [4, 2, 0, 5, 1]
Config = KdaConfig | GdnConfig | Mamba2Config

ODD: list[Config] = [
    KdaConfig(HIDDEN, 1, 1, 2, 1e-5),
    KdaConfig(HIDDEN, 3, 7, 8, 1e-5, lower_bound=-5.0),
    KdaConfig(HIDDEN, 2, 17, 5, 1e-5),
    KdaConfig(HIDDEN, 2, 72, 17, 1e-5),
    GdnConfig(HIDDEN, 1, 5, 40, 9, 2, 1e-6, interleaved=True),
    GdnConfig(HIDDEN, 3, 3, 9, 40, 6, 1e-6, interleaved=True),
    GdnConfig(HIDDEN, 2, 4, 24, 33, 7, 1e-6, interleaved=False),
    Mamba2Config(HIDDEN, 3, 5, 3, 7, 3, 1e-5, (0.0, math.inf)),
    Mamba2Config(HIDDEN, 6, 9, 2, 33, 8, 1e-5, (0.01, 0.9), conv_bias=False),
    Mamba2Config(HIDDEN, 5, 24, 1, 17, 2, 1e-5, (0.0, math.inf)),
]
LEFT: list[Config] = [
    KdaConfig(HIDDEN, 2, 16, 1, 1e-5),
    GdnConfig(HIDDEN, 2, 4, 16, 16, 18, 1e-6, interleaved=True),
    Mamba2Config(HIDDEN, 4, 16, 2, 16, 40, 1e-5, (0.0, math.inf)),
]
LATENT = [
    MlaConfig(HIDDEN, heads=1, latent=5, plain=3, shared=1, value_dim=7),
    MlaConfig(HIDDEN, heads=9, latent=33, plain=17, shared=15, value_dim=1),
    MlaConfig(HIDDEN, heads=17, latent=72, plain=24, shared=24, value_dim=24, query_rank=7, output_gate=True),
]


@pytest.fixture(scope="module")
def library() -> Compiled:
    found = compiled(default_cache(), products=True)
    assert found is not None
    return found


def make(config: Config, params: Params) -> Kda | Gdn | Mamba2:
    if isinstance(config, KdaConfig):
        return Kda(config, params)
    return Gdn(config, params) if isinstance(config, GdnConfig) else Mamba2(config, params)


def inputs(rows: int, seed: int) -> Tensor:
    return torch.randn((rows, HIDDEN), generator=torch.Generator().manual_seed(seed))


def alike(config: Config, library: Compiled, ring: int) -> None:
    """Some steps of both over equal memory: equal outputs, states and windows."""
    plain, fast = twins(lambda params: make(config, params), torch.float32, library)
    pools = [filled(config.spec(LAYERS, torch.float32), 6, ring=ring) for _ in range(2)]
    held = [0] * len(SLOTS)
    for turn in range(4):
        x = inputs(len(SLOTS), turn)
        fold = [n == ring - 1 for n in held]
        step: LinearStep = decoding(SLOTS, (torch.tensor(held), torch.tensor(fold)) if ring > 1 else None)
        expected, found = (
            layer(x, torch.zeros_like(x), step_of(len(x), step), pool.layer(INDEX))
            for layer, pool in zip((plain, fast), pools, strict=True)
        )
        assert relative(found, expected) < 2e-5
        held = [0 if f or not s else n + 1 for n, f, s in zip(held, fold, SLOTS, strict=True)]
    for mine, reference in zip(pools[1].tensors, pools[0].tensors, strict=True):
        assert not mine.numel() or relative(mine, reference) < 1e-5


@pytest.mark.parametrize("ring", [1, 3])
@pytest.mark.parametrize("config", ODD, ids=repr)
def test_a_layer_of_odd_size_is_that_of_its_tensor_operations(config: Config, ring: int, library: Compiled) -> None:
    alike(config, library, ring)


@pytest.mark.parametrize("config", LEFT, ids=repr)
def test_a_convolution_that_is_none_or_very_wide_is_left_to_them(config: Config, library: Compiled) -> None:
    _, fast = twins(lambda params: make(config, params), torch.float32, library)
    assert fast._step is None
    alike(config, library, 1)


@pytest.mark.parametrize("config", LATENT, ids=repr)
def test_latent_attention_of_odd_size_is_that_of_its_tensor_operations(config: MlaConfig, library: Compiled) -> None:
    plain, fast = twins(lambda params: Mla(config, params), torch.float32, library)
    plan, pages = pages_of([1, 31, 64])
    generator = torch.Generator().manual_seed(9)
    memory = LatentPool(LatentShape(LAYERS, config.width, torch.float32), pages, torch.device("cpu")).pages
    memory[1:] = torch.randn(memory[1:].shape, generator=generator)
    x, pools = inputs(3, 1), (memory.clone(), memory.clone())
    expected, found = (
        layer(x, torch.zeros_like(x), step_of(3, latent=LatentStep(plan, NOTHING)), pool[:, INDEX])
        for layer, pool in zip((plain, fast), pools, strict=True)
    )
    assert relative(found, expected) < 2e-5
    assert relative(pools[1], pools[0]) < 1e-5
