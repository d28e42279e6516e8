"""Gates against their equations in float64."""

from __future__ import annotations

import torch

from engine.kernels.gates import bounded_gate, mamba2_gate, softplus_gate

from .naive import relative


def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * std


def softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def test_the_softplus_gate_follows_its_equation_for_vectors_and_scalars() -> None:
    raw, a_log, bias = draw(9, 3, 8, std=20.0), draw(3), draw(3, 8)
    want = -a_log.double().exp()[:, None] * softplus(raw.double() + bias.double())
    got = softplus_gate(raw, a_log, bias)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-9)  # torch drops log1p past 20: 2e-9
    scalar = softplus_gate(raw[..., 0], a_log, bias[:, 0])
    assert relative(scalar, want[..., 0]) <= 1e-6
    assert softplus_gate(raw.bfloat16(), a_log, bias).dtype == torch.float32


def test_the_bounded_gate_stays_in_its_range_and_is_not_a_clamp() -> None:
    raw, a_log, bias = draw(9, 3, 8, std=20.0), draw(3), draw(3, 8)
    want = -5.0 / (1.0 + torch.exp(-a_log.double().exp()[:, None] * (raw.double() + bias.double())))
    got = bounded_gate(raw, a_log, bias, -5.0)
    assert relative(got, want) <= 1e-6
    assert float(got.min()) >= -5.0
    assert float(got.max()) <= 0.0
    assert relative(softplus_gate(raw, a_log, bias).clamp(min=-5.0), want) > 0.1


def test_the_mamba2_gate_clamps_dt_before_it_becomes_a_decay() -> None:
    raw, a_log, bias = draw(9, 4, std=3.0), draw(4), draw(4)
    dt_want = softplus(raw.double() + bias.double()).clamp(0.01, 2.0)
    g, dt = mamba2_gate(raw, a_log, bias, 0.01, 2.0)
    assert relative(dt, dt_want) <= 1e-6
    assert relative(g, -a_log.double().exp() * dt_want) <= 1e-6
