"""Norms, output gates, rotary embedding and attention residuals against float64 definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.attnres import attn_res
from engine.kernels.norms import gated_rms_norm, l2_norm, rms_norm, rotary

from .naive import relative

EPS = 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def norm64(x: Tensor, eps: float = EPS) -> Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()


def test_rms_norm_follows_its_definition() -> None:
    x, weight = draw(7, 24), draw(24, seed=1)
    assert relative(rms_norm(x, weight, EPS), norm64(x) * weight.double()) <= 1e-5
    assert relative(rms_norm(x, weight, EPS, plus_one=True), norm64(x) * (1 + weight.double())) <= 1e-5
    assert rms_norm(x.bfloat16(), weight, EPS).dtype == torch.bfloat16


def test_the_output_norms_of_kda_and_gated_deltanet() -> None:
    x, gate, weight = draw(5, 3, 16), draw(5, 3, 16, seed=1) * 30, draw(16, seed=2)
    base, z = norm64(x) * weight.double(), gate.double()
    kda = gated_rms_norm(x, gate, weight, EPS, activation="sigmoid")
    assert relative(kda, base * torch.sigmoid(z)) <= 1e-5
    gdn = gated_rms_norm(x, gate, weight, EPS, activation="silu")
    assert relative(gdn, base * z * torch.sigmoid(z)) <= 1e-5


@pytest.mark.parametrize("group", [None, 8])
def test_the_mamba2_norm_gates_first_and_normalises_groups(group: int | None) -> None:
    x, gate, weight = draw(5, 24), draw(5, 24, seed=1) * 30, draw(24, seed=2)
    z = gate.double()
    y = (x.double() * z * torch.sigmoid(z)).view(5, -1, group or 24)
    want = norm64(y).reshape(5, 24) * weight.double()
    kept = gate.clone()
    got = gated_rms_norm(x, gate, weight, EPS, activation="silu", gate_first=True, group=group)
    assert relative(got, want) <= 1e-5
    assert torch.equal(gate, kept)


def test_the_l2_norm_has_eps_inside_the_root() -> None:
    x = draw(4, 8)
    x[0] *= 1e-4
    want = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert relative(l2_norm(x), want) <= 1e-6
    assert float(l2_norm(x)[0].norm()) < 0.5


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_as_complex_numbers_and_leaves_the_rest(interleaved: bool) -> None:
    x, angle = draw(6, 2, 12), draw(6, 4, seed=1).double() * 30
    head = x[..., :8].double()
    first, second = (head[..., 0::2], head[..., 1::2]) if interleaved else (head[..., :4], head[..., 4:])
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    parts = (turned.real, turned.imag)
    want = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    got = rotary(x, angle.cos().float(), angle.sin().float(), interleaved=interleaved)
    assert relative(got[..., :8], want) <= 1e-5
    assert torch.equal(got[..., 8:], x[..., 8:])


def test_attention_residuals_mix_the_raw_sources() -> None:
    sources, query, weight = draw(5, 7, 16), draw(16, seed=1) * 20, draw(16, seed=2) * 10
    scores = (norm64(sources) * weight.double()) @ query.double()
    want = (torch.softmax(scores, 0).unsqueeze(-1) * sources.double()).sum(0)
    assert relative(attn_res(sources, query, weight, EPS), want) <= 1e-5
    assert relative(attn_res(sources[:1], query, None, EPS), sources[0]) <= 1e-6
