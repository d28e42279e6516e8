"""Normalisations, gated output norms and rotary embedding: see engine.kernels.norms."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.norms import GateActivation
from engine.kernels.triton.common import block


@triton.jit
def _norm_kernel(
    x, gate, weight, out, stride_x, stride_gate, width, weights, eps, offset,
    MEAN: tl.constexpr, GATE: tl.constexpr, GATE_FIRST: tl.constexpr, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one group of `width` channels of one row; the weight repeats every `weights` channels.
    GATE: 0 none, 1 sigmoid, 2 silu."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < width
    at = group * width + c
    y = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    if GATE > 0:
        z = tl.load(gate + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.sigmoid(z)
        if GATE == 2:
            factor = factor * z
    if GATE_FIRST:
        y = y * factor
    square = tl.sum(y * y, 0)
    if MEAN:
        square = square / width
    y = y * tl.rsqrt(square + eps)
    if HAS_WEIGHT:
        y = y * (tl.load(weight + at % weights, mask=inside, other=0.0).to(tl.float32) + offset)
    if GATE > 0 and not GATE_FIRST:
        y = y * factor
    tl.store(out + row * tl.num_programs(1) * width + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_kernel(
    x, cos, sin, out, stride_t, stride_h, heads, pairs, width, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    inside = c < width
    rotated = c < 2 * pairs
    if INTERLEAVED:
        pair, second = c // 2, c % 2 == 1
        other = tl.where(second, c - 1, c + 1)
    else:
        pair, second = c % pairs, c >= pairs
        other = tl.where(second, c - pairs, c + pairs)
    source = x + token * stride_t + head * stride_h
    own = tl.load(source + c, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + other, mask=rotated, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * pairs + pair, mask=rotated, other=1.0)
    sine = tl.load(sin + token * pairs + pair, mask=rotated, other=0.0)
    y = own * cosine + tl.where(second, partner, -partner) * sine
    tl.store(out + (token * heads + head) * width + c, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    return _run(x, None, weight, eps, offset=1.0 if plus_one else 0.0)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: GateActivation,
    gate_first: bool = False,
    group: int | None = None,
) -> Tensor:
    kind = 1 if activation == "sigmoid" else 2
    return _run(x, gate, weight, eps, kind=kind, gate_first=gate_first, group=group)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return _run(x, None, None, eps, mean=False)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    tokens, heads, width = x.shape
    assert x.stride(2) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _rotary_kernel[(tokens, heads)](
            x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), heads, cos.shape[-1], width,
            INTERLEAVED=interleaved, BLOCK=block(width),
        )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """[rows, width] without a copy where the layout allows."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _run(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    mean: bool = True,
    kind: int = 0,
    gate_first: bool = False,
    group: int | None = None,
    offset: float = 0.0,
) -> Tensor:
    flat = _rows(x)
    gates = _rows(gate) if gate is not None else flat
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = group or x.shape[-1]
    if len(flat):
        _norm_kernel[(len(flat), x.shape[-1] // width)](
            flat, gates, weight, out, flat.stride(0), gates.stride(0), width,
            len(weight) if weight is not None else 1, eps, offset, MEAN=mean, GATE=kind, GATE_FIRST=gate_first,
            HAS_WEIGHT=weight is not None, BLOCK=block(width),
        )  # fmt: skip
    return out
