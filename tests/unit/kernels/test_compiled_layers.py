"""Decode rows in compiled code against the layer's own tensor operations, on the pools' real layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from engine.layers.state import LinearSpec, StatePool
from engine.native import default_cache
from tests.unit.kernels.layers import decoding, filled, pages_of, relative, step_of, twins

HIDDEN, LAYERS, INDEX = 48, 3, 1


@pytest.fixture(scope="module")
def library() -> Compiled:
    found = compiled(default_cache(), products=True)
    assert found is not None
    return found


@dataclass(frozen=True)
class Case:
    spec: Callable[[torch.dtype], LinearSpec]
    make: Callable[[Params], Any]


def kda(head_dim: int, **options: Any) -> Case:
    config = KdaConfig(HIDDEN, 3, head_dim, 4, 1e-5, **options)
    return Case(lambda dtype: config.spec(LAYERS, dtype), lambda params: Kda(config, params))


def gdn(size: int, width: int = 4) -> Case:
    config = GdnConfig(HIDDEN, 2, 6, size, size, width, 1e-6, interleaved=True)
    return Case(lambda dtype: config.spec(LAYERS, dtype), lambda params: Gdn(config, params))


def mamba2(head_dim: int, state_dim: int, *, groups: int = 2, conv_bias: bool = True) -> Case:
    limits = (0.01, 0.9) if conv_bias else (0.0, math.inf)
    config = Mamba2Config(HIDDEN, 4, head_dim, groups, state_dim, 4, 1e-5, limits, conv_bias)
    return Case(lambda dtype: config.spec(LAYERS, dtype), lambda params: Mamba2(config, params))


CASES = {
    "kda-64": kda(64),
    "kda-128": kda(128),
    "kda-bounded-64": kda(64, lower_bound=-5.0, full_rank_gate=True),
    "kda-24": kda(24),
    "gdn-64": gdn(64),
    "gdn-128": gdn(128),
    "gdn-24-width-3": gdn(24, 3),
    "mamba2-64": mamba2(64, 128),
    "mamba2-128": mamba2(128, 64, groups=1),
    "mamba2-24": mamba2(24, 40, groups=4, conv_bias=False),
}


def run(layer: Any, pool: StatePool, slots: list[int], x: Tensor) -> Tensor:
    step = step_of(len(x), decoding(slots))
    result: Tensor = layer(x, torch.zeros_like(x), step, pool.layer(INDEX))
    return result


def inputs(rows: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    return torch.randn((rows, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(dtype)


def slots_of(batch: int) -> list[int]:
    """In no order, with a padded row among several."""
    order: list[int] = (1 + torch.randperm(batch + 2, generator=torch.Generator().manual_seed(8))).tolist()[:batch]
    if batch > 2:
        order[batch // 2] = 0
    return order


@pytest.mark.parametrize("batch", [1, 8, 33])
@pytest.mark.parametrize("name", CASES)
def test_a_recurrent_layer_is_that_of_its_tensor_operations(name: str, batch: int, library: Compiled) -> None:
    case, slots = CASES[name], slots_of(batch)
    plain, fast = twins(case.make, torch.float32, library)
    pools = [filled(case.spec(torch.float32), batch + 3) for _ in range(2)]
    before = [tensor.clone() for tensor in pools[1].tensors]
    for turn in range(3):
        x = inputs(batch, torch.float32, turn)
        expected, found = run(plain, pools[0], slots, x), run(fast, pools[1], slots, x)
        assert relative(found, expected) < 2e-5
    for mine, reference, old in zip(pools[1].tensors, pools[0].tensors, before, strict=True):
        assert relative(mine, reference) < 1e-5
        free = [s for s in range(batch + 3) if s not in slots or not s]
        assert torch.equal(mine[free], old[free]), "slots of others, and the null one"
        others = [i for i in range(LAYERS) if i != INDEX]
        assert torch.equal(mine[:, :, others], old[:, :, others]), "other layers"
        assert not torch.equal(mine[slots][:, :, INDEX], old[slots][:, :, INDEX])


@pytest.mark.parametrize("name", ["kda-64", "gdn-64", "mamba2-64", "kda-24"])
def test_in_bf16_it_is_as_near_to_fp32_as_the_tensor_operations_are(name: str, library: Compiled) -> None:
    case, slots = CASES[name], slots_of(8)
    exact, _ = twins(case.make, torch.float32, library)
    plain, fast = twins(case.make, torch.bfloat16, library)
    pools = [filled(case.spec(dtype), 11) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)]
    errors = []
    for turn in range(3):
        x = inputs(8, torch.bfloat16, turn)
        expected = run(exact, pools[0], slots, x.float())
        errors.append(
            [relative(run(layer, pool, slots, x), expected) for layer, pool in ((plain, pools[1]), (fast, pools[2]))]
        )
    reference, mine = (max(column) for column in zip(*errors, strict=True))
    assert mine < max(2 * reference, 0.02)
    assert relative(pools[2].recurrent, pools[1].recurrent) < 0.02


@pytest.mark.parametrize("fault", ["conv row rolled", "slot off by one", "state of another head", "layer off by one"])
@pytest.mark.parametrize("name", ["kda-64", "gdn-64", "mamba2-64"])
def test_a_fault_shows(name: str, fault: str, library: Compiled) -> None:
    case, slots, x = CASES[name], [3, 1, 4], inputs(3, torch.float32)
    plain, fast = twins(case.make, torch.float32, library)
    expected = run(plain, filled(case.spec(torch.float32), 6), slots, x)
    assert relative(run(fast, filled(case.spec(torch.float32), 6), slots, x), expected) < 2e-5
    pool, step = filled(case.spec(torch.float32), 6), slots
    if fault == "conv row rolled":
        for conv in pool.convs:
            conv[:] = conv.roll(1, -1)
    elif fault == "slot off by one":
        step = [s + 1 for s in slots]
    elif fault == "state of another head":
        pool.recurrent[:] = pool.recurrent.roll(1, 1)
    else:
        for tensor in pool.tensors:
            tensor[:] = tensor.roll(1, 2)
    assert relative(run(fast, pool, step, x), expected) > 1e-2


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("name", CASES)
def test_with_records_it_is_that_of_its_tensor_operations(name: str, length: int, library: Compiled) -> None:
    case, slots = CASES[name], [3, 1, 0, 5, 2]
    plain, fast = twins(case.make, torch.float32, library)
    pools = [filled(case.spec(torch.float32), 7, ring=length) for _ in range(2)]
    held = [0] * len(slots)
    for turn in range(2 * length + 1):
        fold = [n == length - 1 or (turn + slot) % 4 == 3 for n, slot in zip(held, slots, strict=True)]
        step = decoding(slots, (torch.tensor(held), torch.tensor(fold)))
        x = inputs(len(slots), torch.float32, turn)
        layers = ((plain, pools[0]), (fast, pools[1]))
        expected, found = (la(x, torch.zeros_like(x), step_of(len(x), step), p.layer(INDEX)) for la, p in layers)
        assert relative(found, expected) < 2e-5
        held = [0 if f or not s else n + 1 for n, f, s in zip(held, fold, slots, strict=True)]
    assert relative(pools[1].recurrent, pools[0].recurrent) < 1e-5
    rings = [p.layer(INDEX).ring for p in pools]
    assert rings[0] is not None
    assert rings[1] is not None
    for mine, reference in ((rings[1].k, rings[0].k), (rings[1].u, rings[0].u), (rings[1].g, rings[0].g)):
        assert relative(mine, reference) < 1e-4
    rings[1].u[1:] = rings[1].u[1:].roll(1, 0)
    held = [length - 1] * len(slots)
    step = decoding(slots, (torch.tensor(held), torch.tensor([True] * len(slots))))
    expected, found = (la(x, torch.zeros_like(x), step_of(len(x), step), p.layer(INDEX)) for la, p in layers)
    assert relative(found, expected) > 1e-3, "records of another slot"


def test_a_row_does_not_depend_on_the_batch_around_it(library: Compiled) -> None:
    for case in (CASES["kda-64"], CASES["gdn-64"], CASES["mamba2-64"]):
        _, fast = twins(case.make, torch.float32, library)
        together, alone = (filled(case.spec(torch.float32), 12) for _ in range(2))
        x, slots = inputs(9, torch.float32), [5, 2, 9, 1, 11, 3, 8, 4, 7]
        whole = run(fast, together, slots, x)
        for row, slot in enumerate(slots):
            assert torch.equal(run(fast, alone, [slot], x[row : row + 1]), whole[row : row + 1])
        for a, b in zip(together.tensors, alone.tensors, strict=True):
            assert torch.equal(a, b)


# --- latent attention ----------------------------------------------------------------------------------------------

LATENT = {
    "four-heads": MlaConfig(HIDDEN, heads=4, latent=24, plain=16, shared=8, value_dim=16),
    "twelve-heads": MlaConfig(HIDDEN, heads=12, latent=128, plain=64, shared=32, value_dim=64),
    "128-wide": MlaConfig(HIDDEN, heads=8, latent=512, plain=128, shared=64, value_dim=128),
    "query-rank": MlaConfig(
        HIDDEN, heads=4, latent=40, plain=16, shared=4, value_dim=20, query_rank=20, output_gate=True
    ),
}


def attend(layer: Mla, cache: Tensor, step: LatentStep, x: Tensor) -> Tensor:
    return layer(x, torch.zeros_like(x), step_of(len(x), latent=step), cache)


def latent_pool(config: MlaConfig, pages: int, dtype: torch.dtype) -> Tensor:
    pool = LatentPool(LatentShape(LAYERS, config.width, dtype), pages, torch.device("cpu"))
    pool.pages[1:] = torch.randn(pool.pages[1:].shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    return pool.pages


@pytest.mark.parametrize("batch", [1, 8, 33])
@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_that_of_its_tensor_operations(name: str, batch: int, library: Compiled) -> None:
    config = LATENT[name]
    plain, fast = twins(lambda params: Mla(config, params), torch.float32, library)
    lengths = [(1, 2, 15, 16, 17, 33, 64, 255)[i % 8] for i in range(batch)]
    plan, pages = pages_of(lengths)
    mine, reference = (latent_pool(config, pages, torch.float32) for _ in range(2))
    old = mine.clone()
    x = inputs(batch, torch.float32)
    step = LatentStep(plan, NOTHING)
    expected, found = (attend(la, p[:, INDEX], step, x) for la, p in ((plain, reference), (fast, mine)))
    assert relative(found, expected) < 2e-5
    assert relative(mine, reference) < 1e-5
    changed = (mine != old).flatten(3).any(-1).nonzero().tolist()
    cells = plan.cells.tolist()
    assert sorted(changed) == sorted([cell // 16, INDEX, cell % 16] for cell in cells), "one row of the cache each"


def test_rows_past_the_decoding_ones_are_the_prompts(library: Compiled) -> None:
    """A chunk of a prompt and padding behind the decode rows."""
    config = LATENT["four-heads"]
    plain, fast = twins(lambda params: Mla(config, params), torch.float32, library)
    plan, pages = pages_of([20, 3])
    prompt = type(plan).build([5], [12], [(pages, pages + 1)], padding=2)
    step, x = LatentStep(plan, prompt), inputs(2 + 5 + 2, torch.float32)
    pools = [latent_pool(config, pages + 2, torch.float32) for _ in range(2)]
    expected, found = (attend(la, p[:, INDEX], step, x) for la, p in zip((plain, fast), pools, strict=True))
    assert relative(found, expected) < 2e-5
    assert relative(pools[1][1:], pools[0][1:]) < 1e-5


def test_latent_attention_in_bf16(library: Compiled) -> None:
    config = LATENT["twelve-heads"]
    exact, _ = twins(lambda params: Mla(config, params), torch.float32, library)
    plain, fast = twins(lambda params: Mla(config, params), torch.bfloat16, library)
    plan, pages = pages_of([40, 7, 130])
    step, x = LatentStep(plan, NOTHING), inputs(3, torch.bfloat16)
    narrow = latent_pool(config, pages, torch.bfloat16)
    expected = attend(exact, narrow.float()[:, INDEX], step, x.float())
    reference, found = (attend(la, narrow.clone()[:, INDEX], step, x) for la in (plain, fast))
    assert relative(found, expected) < max(2 * relative(reference, expected), 0.01)


@pytest.mark.parametrize("fault", ["page swapped", "token dropped", "row rolled"])
def test_a_fault_in_the_pages_shows(fault: str, library: Compiled) -> None:
    config = LATENT["twelve-heads"]
    _, fast = twins(lambda params: Mla(config, params), torch.float32, library)
    plan, pages = pages_of([40, 50])
    pool, x, step = latent_pool(config, pages, torch.float32), inputs(2, torch.float32), LatentStep(plan, NOTHING)
    expected = attend(fast, pool.clone()[:, INDEX], step, x)
    if fault == "page swapped":
        pool = pool.flip(0)
    elif fault == "token dropped":
        shorter = type(plan).build([1, 1], [38, 48], [list(p) for p in plan.pages])
        step = LatentStep(shorter, NOTHING)
    else:
        pool = pool.roll(1, -1)
    assert relative(attend(fast, pool.clone()[:, INDEX], step, x), expected) > 1e-3
