"""Decay gates: see engine.kernels.gates."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.common import softplus


@triton.jit
def _gate_kernel(
    raw, a_log, dt_bias, g, dt, stride_t, channels, per_head, lower, dt_min, dt_max,
    BOUNDED: tl.constexpr, WRITE_DT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK channels of one token. per_head: channels of a head (1 for scalar gates)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    x = tl.load(raw + token * stride_t + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + at, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + at // per_head, mask=inside, other=0.0).to(tl.float32))
    if BOUNDED:
        y = lower * tl.sigmoid(rate * x)
    else:
        step = softplus(x)
        if WRITE_DT:
            step = tl.minimum(tl.maximum(step, dt_min), dt_max)
            tl.store(dt + token * channels + at, step, mask=inside)
        y = -rate * step
    tl.store(g + token * channels + at, y, mask=inside)


def softplus_gate(raw: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    return _run(raw, a_log, dt_bias)[0]


def bounded_gate(raw: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    return _run(raw, a_log, dt_bias, lower=lower_bound)[0]


def mamba2_gate(
    raw: Tensor, a_log: Tensor, dt_bias: Tensor, dt_min: float = 0.0, dt_max: float = math.inf
) -> tuple[Tensor, Tensor]:
    return _run(raw, a_log, dt_bias, limits=(dt_min, dt_max))


def _run(
    raw: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower: float | None = None,
    limits: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    flat = raw.flatten(1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    tokens, channels = flat.shape
    g = torch.empty(raw.shape, dtype=torch.float32, device=raw.device)
    dt = torch.empty_like(g) if limits is not None else g
    low, high = limits or (0.0, math.inf)
    size = min(1024, max(16, int(triton.next_power_of_2(channels))))
    if tokens:
        _gate_kernel[(tokens, triton.cdiv(channels, size))](
            flat, a_log, dt_bias.flatten().contiguous(), g, dt, flat.stride(0), channels, channels // len(a_log),
            lower or 0.0, low, high, BOUNDED=lower is not None, WRITE_DT=limits is not None, BLOCK=size,
        )  # fmt: skip
    return g, dt
