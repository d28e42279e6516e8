"""Normalisations, gated output norms and rotary embedding, plain torch. Arithmetic in fp32, result in x's dtype."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GateActivation = Literal["sigmoid", "silu"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, plus_one: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; plus_one: the weight is stored less one (Qwen3-Next)."""
    scale = weight.float() + 1.0 if plus_one else weight.float()
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], scale, eps).to(x.dtype)


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
    """The output norm of a linear-state layer, x and gate [..., D] with D = len(weight) or a multiple of it per head.

    KDA: rms_norm(x) * sigmoid(gate); Gated DeltaNet: rms_norm(x) * silu(gate); Mamba2 (gate_first): rms_norm(x *
    silu(gate)) over groups of `group` channels, weight [D] over all of them.
    """
    gated = torch.sigmoid(gate.float()) if activation == "sigmoid" else torch.nn.functional.silu(gate.float())
    y = gated.mul_(x) if gate_first else x.float()
    width = group or y.shape[-1]
    grouped = torch.unflatten(y, -1, (-1, width))
    y = torch.nn.functional.rms_norm(grouped, (width,), None, eps).flatten(-2) * weight.float()
    return (y if gate_first else y.mul_(gated)).to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last axis: eps inside the root, unlike torch's normalize."""
    y = x.float()
    return (y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first 2R channels of x [T, heads, D]; cos and sin [T, R] fp32. Pairs are (i, i + R), or neighbours
    (2i, 2i + 1) when interleaved. Channels past 2R pass through (partial rotary)."""
    rotated = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    head = x[..., :rotated].float()
    pairs = torch.unflatten(head, -1, (-1, 2)).unbind(-1) if interleaved else head.chunk(2, dim=-1)
    first, second = pairs
    turned = (first * cos - second * sin, second * cos + first * sin)
    y = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    y = y.to(x.dtype)
    return y if rotated == x.shape[-1] else torch.cat((y, x[..., rotated:]), dim=-1)
