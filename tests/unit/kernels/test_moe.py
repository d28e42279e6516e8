"""Routing and grouped experts against loops over tokens in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.moe import Activation, dequantise_mxfp4, experts_mlp, route_sigmoid, route_softmax

from .naive import relative


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoid_routing_chooses_by_corrected_and_weighs_by_raw_scores(
    groups: int, kept: int, renormalise: bool
) -> None:
    logits, bias = draw(40, 16), draw(16, seed=1)
    weights, experts = route_sigmoid(
        logits, bias, 3, groups=groups, kept_groups=kept, renormalise=renormalise, scaling=2.446
    )
    for t in range(40):
        scores = torch.sigmoid(logits[t].double())
        choice = (scores + bias.double()).view(groups, -1)
        best = choice.topk(2, -1).values.sum(-1)
        keep = best.argsort(descending=True)[:kept].tolist()
        allowed = [g * (16 // groups) + i for g in keep for i in range(16 // groups)]
        want = sorted(allowed, key=lambda e: -float(choice.flatten()[e]))[:3]
        assert experts[t].tolist() == want
        share = scores[want]
        share = share / share.sum() if renormalise else share
        assert relative(weights[t], share * 2.446) <= 1e-6


def test_renormalised_softmax_routing_equals_a_softmax_over_the_chosen() -> None:
    logits = draw(20, 12)
    weights, experts = route_softmax(logits, 4)
    top = logits.double().topk(4)
    assert torch.equal(experts, top.indices)
    assert relative(weights, top.values.softmax(-1)) <= 1e-6
    plain, _ = route_softmax(logits, 4, renormalise=False)
    assert relative(plain, logits.double().softmax(-1).gather(1, experts)) <= 1e-6


ACTIVATIONS = [Activation("silu"), Activation("situ", 4.0, 25.0), Activation("situ", 4.0, None), Activation("relu2")]


def activate64(a: Activation, x: Tensor) -> Tensor:
    if a.kind == "relu2":
        return x.clamp(min=0) ** 2
    gate, up = x.chunk(2)
    if a.kind == "silu":
        return gate * torch.sigmoid(gate) * up
    lifted = up if a.linear_beta is None else a.linear_beta * torch.tanh(up / a.linear_beta)
    return a.beta * torch.tanh(gate / a.beta) * torch.sigmoid(gate) * lifted


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 23])
def test_grouped_experts_equal_a_loop_over_tokens(tokens: int, activation: Activation) -> None:
    E, K, hidden, inner = 6, 2, 8, 5
    x = draw(tokens, hidden)
    up = draw(E, inner * (2 if activation.gated else 1), hidden, seed=1)
    down = draw(E, hidden, inner, seed=2)
    weights, experts = route_softmax(draw(tokens, E, seed=3), K)
    got = experts_mlp(x, weights, experts, up, down, activation)
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for j in range(K):
            e = int(experts[t, j])
            y = down[e].double() @ activate64(activation, up[e].double() @ x[t].double())
            want[t] += weights[t, j].double() * y
    assert relative(got, want) <= 1e-5


def test_with_enough_rows_a_token_does_not_depend_on_who_else_chose_its_experts() -> None:
    E, hidden, inner = 4, 64, 32
    x, up, down = draw(30, hidden), draw(E, 2 * inner, hidden, seed=1), draw(E, hidden, inner, seed=2)
    weights, experts = route_softmax(draw(30, E, seed=3), 2)
    batch = experts_mlp(x, weights, experts, up, down, Activation(), min_rows=4)
    for t in range(30):
        one = slice(t, t + 1)
        alone = experts_mlp(x[one], weights[one], experts[one], up, down, Activation(), min_rows=4)
        assert torch.equal(alone, batch[one])


def test_mxfp4_follows_the_open_compute_tables() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(4)  # 64 values, two groups
    packed = (codes[0::2] | (codes[1::2] << 4)).unsqueeze(0)
    scales = torch.tensor([[127, 120]], dtype=torch.uint8)
    row = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    want = torch.tensor([row * 2 + [v / 128 for v in row] * 2])
    assert torch.equal(dequantise_mxfp4(packed, scales, torch.float32), want)
    assert torch.isnan(dequantise_mxfp4(packed, torch.full_like(scales, 255), torch.bfloat16)).all()
