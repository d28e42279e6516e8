"""Decay gates of linear-state layers: raw projections -> log decay g <= 0, always computed and returned in fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softplus_gate(raw: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) softplus(raw + dt_bias): Kimi-Linear (raw [T, HV, K], dt_bias [HV, K]) and Gated DeltaNet
    (raw [T, HV], dt_bias [HV]). a_log [HV]. Unbounded below."""
    return torch.nn.functional.softplus(raw.float() + dt_bias.float()).mul_(-_per_head(a_log, raw))


def bounded_gate(raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """g = lower_bound sigmoid(exp(A_log) (raw + dt_bias)): Kimi K3, lower_bound -5, so g in (-5, 0). Another activation
    than softplus_gate, not a clamp of it. raw [T, HV, K], a_log [HV], dt_bias [HV, K]."""
    assert lower_bound < 0
    return (raw.float() + dt_bias.float()).mul_(_per_head(a_log, raw)).sigmoid_().mul_(lower_bound)


def mamba2_gate(
    raw: Tensor, a_log: Tensor, dt_bias: Tensor, dt_min: float = 0.0, dt_max: float = math.inf
) -> tuple[Tensor, Tensor]:
    """dt = clamp(softplus(raw + dt_bias)), g = -exp(A_log) dt. raw [T, HV], a_log and dt_bias [HV]. Returns (g, dt);
    dt takes the place of beta in the chunk and decode kernels."""
    dt = torch.nn.functional.softplus(raw.float() + dt_bias.float()).clamp_(dt_min, dt_max)
    return dt * -a_log.float().exp(), dt


def _per_head(a_log: Tensor, raw: Tensor) -> Tensor:
    rate = a_log.float().exp()
    return rate.unsqueeze(-1) if raw.dim() == 3 else rate
