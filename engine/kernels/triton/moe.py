"""Mixture of experts: see engine.kernels.moe. Nothing here waits for the device: the tile schedule is made on it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import moe as reference
from engine.kernels.moe import Activation
from engine.kernels.triton.common import block, operand, tanh

ROWS = 32
"""Rows of a matmul tile: experts get few tokens each at decode."""


@triton.jit
def _route_kernel(
    logits, bias, weights, experts, stride_t, count, scaling,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: one token; the best TOP_K experts one after the other."""
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    j = tl.arange(0, BLOCK_K)
    inside = e < count
    x = tl.load(logits + token * stride_t + e, mask=inside, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(x)
        choice = tl.where(inside, scores + tl.load(bias + e, mask=inside, other=0.0).to(tl.float32), -float("inf"))
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
        choice = tl.where(inside, scores, -float("inf"))
    picked = tl.zeros([BLOCK_K], tl.int32)
    shares = tl.zeros([BLOCK_K], tl.float32)
    for n in tl.static_range(TOP_K):
        at = tl.argmax(choice, 0)
        picked = tl.where(j == n, at, picked)
        shares = tl.where(j == n, tl.sum(tl.where(e == at, scores, 0.0), 0), shares)
        choice = tl.where(e == at, -float("inf"), choice)
    if RENORMALISE:
        shares = shares / (tl.sum(shares, 0) + 1e-20)
    tl.store(weights + token * TOP_K + j, shares * scaling, mask=j < TOP_K)
    tl.store(experts + token * TOP_K + j, picked.to(tl.int64), mask=j < TOP_K)


@triton.jit
def _grouped_kernel(
    x, matrices, out, sources, bounds, tile_ends, experts, columns, inner, stride_x, stride_e, stride_n,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: ROWS sorted rows of one expert x BLOCK_N output columns. bounds [E]: end of each expert's rows,
    tile_ends [E]: end of its tiles; sources: row of x for each sorted row."""
    tile = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(tile_ends + e, mask=e < experts, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < experts:
        before = tl.load(bounds + expert - 1, mask=expert > 0, other=0)
        tiles_before = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
        row = before + (tile - tiles_before) * ROWS + tl.arange(0, ROWS)
        valid = row < tl.load(bounds + expert)
        source = tl.load(sources + row, mask=valid, other=0).to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        weight = matrices + expert.to(tl.int64) * stride_e + n[None, :] * stride_n
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for low in range(0, inner, BLOCK_K):
            c = low + tl.arange(0, BLOCK_K)
            a = tl.load(
                x + source[:, None] * stride_x + c[None, :], mask=valid[:, None] & (c < inner)[None, :], other=0.0
            )
            b = tl.load(weight + c[:, None], mask=(c < inner)[:, None] & (n < columns)[None, :], other=0.0)
            total = tl.dot(operand(a), operand(b), total, input_precision="tf32x3")
        there = out + row.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(there, total.to(out.dtype.element_ty), mask=valid[:, None] & (n < columns)[None, :])


@triton.jit
def _activation_kernel(x, out, width, beta, linear_beta, KIND: tl.constexpr, LIFT: tl.constexpr, BLOCK: tl.constexpr):
    """KIND 0 silu, 1 situ, 2 relu2. LIFT: situ has its second tanh."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    if KIND == 2:
        y = tl.maximum(tl.load(x + row * width + c, mask=inside, other=0.0).to(tl.float32), 0.0)
        y = y * y
    else:
        gate = tl.load(x + row * 2 * width + c, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + c, mask=inside, other=0.0).to(tl.float32)
        y = tl.sigmoid(gate)
        if KIND == 0:
            y = y * gate * up
        else:
            if LIFT:
                up = linear_beta * tanh(up / linear_beta)
            y = y * beta * tanh(gate / beta) * up
    tl.store(out + row * width + c, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_kernel(rows, weights, places, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK channels of one token, summed over its experts in a fixed order."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + j).to(tl.int64)
        value = tl.load(rows + place * width + c, mask=c < width, other=0.0).to(tl.float32)
        total += tl.load(weights + token * TOP_K + j).to(tl.float32) * value
    tl.store(out + token * width + c, total.to(out.dtype.element_ty), mask=c < width)


def route_sigmoid(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    if groups > 1:  # a handful of small device operations; no model in use has groups
        return reference.route_sigmoid(
            logits, bias, top_k, groups=groups, kept_groups=kept_groups, renormalise=renormalise, scaling=scaling
        )
    return _route(logits, bias, top_k, renormalise, scaling)


def route_softmax(
    logits: Tensor, top_k: int, *, renormalise: bool = True, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    return _route(logits, None, top_k, renormalise, scaling)


def _route(logits: Tensor, bias: Tensor | None, top_k: int, renormalise: bool, scaling: float) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    assert logits.stride(1) == 1
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits, bias, weights, experts, logits.stride(0), count, scaling, TOP_K=top_k, SIGMOID=bias is not None,
            RENORMALISE=renormalise, BLOCK=block(count), BLOCK_K=block(top_k, 2),
        )  # fmt: skip
    return weights, experts


def experts_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    up: Tensor,
    down: Tensor,
    activation: Activation,
    *,
    min_rows: int = 1,
) -> Tensor:
    """min_rows has no effect: tiles are padded to a fixed size, so a row's bits never depend on other rows."""
    tokens, top_k = experts.shape
    chosen = experts.flatten()
    order = torch.argsort(chosen, stable=True)
    bounds = torch.searchsorted(chosen[order], torch.arange(len(up), device=x.device), right=True)
    rows = _grouped(x, up, order // top_k, bounds)
    inner = _activate(rows, activation)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    result = _grouped(inner, down, torch.arange(len(order), device=order.device), bounds)
    out = torch.empty(tokens, x.shape[1], dtype=x.dtype, device=x.device)
    size = min(block(x.shape[1]), 1024)
    if tokens:
        _combine_kernel[(tokens, triton.cdiv(x.shape[1], size))](
            result, weights, places, out, x.shape[1], TOP_K=top_k, BLOCK=size
        )
    return out


def _grouped(x: Tensor, matrices: Tensor, sources: Tensor, bounds: Tensor) -> Tensor:
    """Sorted row r = matrices[expert of r] @ x[sources[r]]."""
    count, columns, inner = matrices.shape
    assert x.stride(1) == matrices.stride(2) == 1
    out = torch.empty(len(sources), columns, dtype=x.dtype, device=x.device)
    if len(sources):
        held = torch.diff(bounds, prepend=bounds.new_zeros(1))
        tile_ends = ((held + ROWS - 1) // ROWS).cumsum(0)
        tiles = min(len(sources), triton.cdiv(len(sources), ROWS) + count)
        wide = 64 if x.dtype.itemsize < 4 else 32  # fp32 operands take three registers each
        block_n, block_k = min(block(columns), 64), min(block(inner), wide)
        _grouped_kernel[(tiles, triton.cdiv(columns, block_n))](
            x, matrices, out, sources, bounds, tile_ends, count, columns, inner, x.stride(0), matrices.stride(0),
            matrices.stride(1), ROWS=ROWS, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_E=block(count),
        )  # fmt: skip
    return out


def _activate(x: Tensor, activation: Activation) -> Tensor:
    width = x.shape[1] // 2 if activation.gated else x.shape[1]
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    size = min(block(width), 1024)
    if len(x):
        _activation_kernel[(len(x), triton.cdiv(width, size))](
            x, out, width, activation.beta, activation.linear_beta or 1.0,
            KIND=("silu", "situ", "relu2").index(activation.kind), LIFT=activation.linear_beta is not None, BLOCK=size,
        )  # fmt: skip
    return out
