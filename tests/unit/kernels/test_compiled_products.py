"""Matrix products and feed-forward parts in compiled code against those of torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine import native
from engine.kernels.cpu import products
from engine.kernels.cpu.build import Compiled, compiled, using
from engine.kernels.moe import Activation, experts_mlp
from engine.layers.experts import Experts, Mlp
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm, ZeroCentredNorm
from tests.unit.kernels.layers import step_of


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    found = compiled(native.default_cache(), products=True)
    assert found is not None
    return found


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(weight: Tensor, bias: Tensor | None, library: Compiled | None) -> Linear:
    with using(library):
        return Linear(weight, bias)


SHAPES = [(64, 16), (1536, 512), (97, 96), (2, 48), (8, 512), (50, 70), (130, 33), (136, 1000)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_that_of_the_packed_weight(shape: tuple[int, int], rows: int, library: Compiled) -> None:
    weight, bias = normal(*shape), normal(shape[0], seed=1)
    mine, plain = linear(weight, bias, library), linear(weight, bias, None)
    assert mine.few is not None
    x, add = normal(rows, shape[1], seed=2), normal(rows, shape[0], seed=3)
    assert torch.allclose(mine(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert torch.allclose(mine.add_to(add, x), add + F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    if shape[1] <= 512 and rows > 1:
        assert torch.equal(mine(x), plain(x)), "sums are made in the same order"
        assert torch.equal(mine.add_to(add, x), plain.add_to(add, x))


def test_a_row_does_not_depend_on_how_many_there_are(library: Compiled) -> None:
    one = linear(normal(200, 1100), None, library)
    x = normal(32, 1100, seed=1)
    whole = one(x)
    for count in (1, 2, 3, 4, 5, 9, 31):
        assert torch.equal(one(x[:count]), whole[:count])


def test_rows_may_be_columns_of_something_wider(library: Compiled) -> None:
    one = linear(normal(70, 96), None, library)
    wide, sums = normal(5, 200, seed=1), normal(5, 300, seed=2)
    assert torch.equal(one(wide[:, 8:104]), one(wide[:, 8:104].contiguous()))
    assert torch.equal(one.add_to(sums[:, 10:80], wide[:, 8:104]), sums[:, 10:80] + one(wide[:, 8:104].contiguous()))


def test_a_wrong_layout_is_seen(library: Compiled) -> None:
    weight = normal(192, 64)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
    assert products._is_in_panels(packed, weight)
    assert not products._is_in_panels(packed, weight.roll(1, 0))
    assert not products._is_in_panels(packed, normal(192, 80))


def test_nothing_is_learned_of_a_layout_from_a_weight_that_is_one_number(
    library: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_checked", {})
    rolled = torch.ops.mkldnn._reorder_linear_weight(normal(192, 64).roll(1, 0), 4)
    blank = torch.zeros(192, 64)
    assert not products.in_panels(torch.ops.mkldnn._reorder_linear_weight(blank, 4), blank)
    assert not products.in_panels(rolled, normal(192, 64)), "another layout, as it were"


def test_other_types_and_a_runner_that_forbids_it_have_no_product(library: Compiled) -> None:
    weight = normal(64, 64)
    assert linear(weight, None, library).few is not None, "its shape is known from here on"
    assert linear(weight.bfloat16(), None, library).few is None
    assert linear(weight, None, None).few is None
    forbidden = compiled(native.default_cache(), products=False)
    assert forbidden is not None
    assert linear(weight, None, forbidden).few is None


ACTIVATIONS = {
    "silu": Activation(),
    "situ": Activation("situ", beta=4.0),
    "situ-linear": Activation("situ", beta=4.0, linear_beta=2.0),
    "relu2": Activation("relu2"),
}
HIDDEN, INNER, COUNT, TOP = 96, 48, 6, 3


def feed_forward(
    act: Activation, *, shared: bool, library: Compiled | None
) -> tuple[Experts, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The layer, its experts' matrices, and those of the shared part."""
    rows = 2 if act.gated else 1
    up, down = normal(COUNT, rows * INNER, HIDDEN), normal(COUNT, HIDDEN, INNER, seed=1)
    all_up, all_down = normal(rows * 40, HIDDEN, seed=2), normal(HIDDEN, 40, seed=3)
    with using(library):
        beside = Mlp(Linear(all_up), Linear(all_down), act) if shared else None
        return Experts(up, down, act, beside), (up, down), (all_up, all_down)


def routed(rows: int) -> tuple[Tensor, Tensor]:
    scores = normal(rows, COUNT - 1, seed=5).topk(TOP)  # the last expert is nobody's
    return scores.values.softmax(-1), scores.indices


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shared", ["none", "plain", "weighted"])
def test_experts_are_those_of_the_reference(kind: str, shared: str, rows: int, library: Compiled) -> None:
    act = ACTIVATIONS[kind]
    layer, (up, down), (all_up, all_down) = feed_forward(act, shared=shared != "none", library=library)
    assert layer._compiled is not None
    x, residual, chosen = normal(rows, HIDDEN, seed=6), normal(rows, HIDDEN, seed=7), routed(rows)
    expected = residual + experts_mlp(x, *chosen, up, down, act)
    opened = torch.rand(rows, generator=torch.Generator().manual_seed(8)) if shared == "weighted" else None
    if shared != "none":
        beside = act(x @ all_up.t()) @ all_down.t()
        expected = expected + (beside if opened is None else opened[:, None] * beside)
    found = layer(x, residual, chosen, step_of(rows), opened)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    wrong = layer(x, residual, (chosen[0], (chosen[1] + 1) % COUNT), step_of(rows), opened)
    assert (wrong - expected).abs().max() > 1e-2 * expected.abs().max()


def test_experts_without_a_residual_and_an_mlp_alone(library: Compiled) -> None:
    layer, (up, down), (all_up, all_down) = feed_forward(Activation(), shared=True, library=library)
    x, chosen = normal(4, HIDDEN, seed=6), routed(4)
    beside = Activation()(x @ all_up.t()) @ all_down.t()
    expected = experts_mlp(x, *chosen, up, down, Activation()) + beside
    assert torch.allclose(layer(x, None, chosen, step_of(4)), expected, rtol=1e-4, atol=1e-3)
    assert layer._shared is not None
    assert layer._shared._compiled is not None
    assert torch.allclose(layer._shared(x), beside, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_packed_experts_of_many_rows_are_those_of_the_reference(rows: int) -> None:
    layer, (up, down), (all_up, all_down) = feed_forward(Activation(), shared=True, library=None)
    x, residual, chosen = normal(rows, HIDDEN, seed=6), normal(rows, HIDDEN, seed=7), routed(rows)
    expected = residual + experts_mlp(x, *chosen, up, down, Activation())
    expected = expected + Activation()(x @ all_up.t()) @ all_down.t()
    found = layer(x, residual, chosen, step_of(rows))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100, 7])
def test_norms_are_those_of_torch(width: int, dtype: torch.dtype, library: Compiled) -> None:
    weight, x = normal(width, seed=1, dtype=dtype), normal(5, 3, 2 * width, seed=2, dtype=dtype)[..., :width]
    for kind in (RMSNorm, ZeroCentredNorm):
        with using(library):
            mine = kind(weight, 1e-5)
        plain = kind(weight, 1e-5)
        for rows in (x, x[:, 0], x[0]):
            found, expected = mine(rows), plain(rows)
            assert found.shape == expected.shape
            assert found.dtype == dtype
            assert torch.allclose(found.float(), expected.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        assert torch.equal(mine(x[:, 0])[:1], mine(x[:1, 0]))


def test_without_a_compiler_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiled(tmp_path, products=True) is None


def test_a_header_that_changes_makes_another_library(tmp_path: Path) -> None:
    source, header, cache = tmp_path / "some.cpp", tmp_path / "value.h", tmp_path / "cache"
    source.write_text('#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    found = []
    for value in (3, 4):
        header.write_text(f"#define VALUE {value}\n")
        found.append(native.library(source, cache).value())
    assert found == [3, 4]
