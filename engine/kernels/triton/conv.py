"""Causal depthwise convolution with state in slots: see engine.kernels.conv."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.delta_chunk_plan import ChunkPlan
from engine.kernels.triton.common import block

TOKENS = 32


@triton.jit
def _input(x, stride_t, first, t, at, inside, state, slot, place, stride_r, W: tl.constexpr):
    """Input number t of a sequence as fp32: from x, or for t < 0 from the window its slot holds."""
    fresh = tl.load(x + (first + t) * stride_t + at, mask=inside & (t >= 0), other=0.0).to(tl.float32)
    held = tl.load(state + place + (t + W - 1) * stride_r, mask=inside & (t < 0) & (slot > 0), other=0.0)
    return fresh + held.to(tl.float32)


@triton.jit
def _place(slot, at, per_unit, stride_s, stride_u, stride_c):
    """Offset of the first row of channel `at` in a slot."""
    return slot.to(tl.int64) * stride_s + (at // per_unit).to(tl.int64) * stride_u + (at % per_unit) * stride_c


@triton.jit
def _prefill_kernel(
    x, weight, bias, y, state, firsts, initial, channels, per_unit, stride_t, stride_s, stride_u, stride_c, stride_r,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens of one sequence, BLOCK channels."""
    sequence, part = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    first = tl.load(firsts + sequence).to(tl.int64)
    length = tl.load(firsts + sequence + 1) - first
    slot = tl.load(initial + sequence)
    place = _place(slot, at, per_unit, stride_s, stride_u, stride_c)
    for i in range(TOKENS):
        t = part * TOKENS + i
        if t < length:
            total = tl.zeros([BLOCK], tl.float32)
            if HAS_BIAS:
                total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
            for j in tl.static_range(W):
                value = _input(x, stride_t, first, t - (W - 1) + j, at, inside, state, slot, place, stride_r, W)
                total += value * tl.load(weight + at * W + j, mask=inside, other=0.0).to(tl.float32)
            if SILU:
                total = total * tl.sigmoid(total)
            tl.store(y + (first + t) * channels + at, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _keep_kernel(
    x, state, firsts, initial, final, point_firsts, point_offsets, point_slots, channels, per_unit, stride_t,
    stride_s, stride_u, stride_c, stride_r, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the windows one sequence leaves behind, the final one last. It may overwrite the initial window:
    rows are written rising, each from one further on, by the thread that owns the channel."""
    sequence = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    first = tl.load(firsts + sequence).to(tl.int64)
    length = (tl.load(firsts + sequence + 1) - first).to(tl.int32)
    slot = tl.load(initial + sequence)
    place = _place(slot, at, per_unit, stride_s, stride_u, stride_c)
    begin = tl.load(point_firsts + sequence)
    end = tl.load(point_firsts + sequence + 1)
    for point in range(begin, end + 1):
        is_point = point < end
        offset = tl.load(point_offsets + point, mask=is_point, other=0)
        target = tl.load(point_slots + point, mask=is_point, other=0)
        if point == end:
            offset = length
            target = tl.load(final + sequence)
        there = _place(target, at, per_unit, stride_s, stride_u, stride_c)
        for r in tl.static_range(W - 1):
            t = offset - (W - 1) + r
            value = _input(x, stride_t, first, t, at, inside, state, slot, place, stride_r, W)
            wanted = inside & (target > 0) & (length > 0)
            tl.store(state + there + r * stride_r, value.to(state.dtype.element_ty), mask=wanted)


@triton.jit
def _rows_kernel(
    x, weight, bias, y, state, slots, channels, per_unit, stride_b, stride_t, stride_s, stride_u, stride_c, stride_r,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, W: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: T rows of one request; then the window moves on by one row, later rows behind it."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    slot = tl.load(slots + row)
    place = _place(slot, at, per_unit, stride_s, stride_u, stride_c)
    source = x + row * stride_b
    for t in tl.static_range(T):
        total = tl.zeros([BLOCK], tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(W):
            value = _input(source, stride_t, 0, t - (W - 1) + j, at, inside, state, slot, place, stride_r, W)
            total += value * tl.load(weight + at * W + j, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(y + (row * T + t) * channels + at, total.to(y.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # every thread has read the old window
    for r in tl.static_range(W - 1 + T - 1):
        # Rising rows: what is stored here was loaded as a later row's source never again.
        value = _input(source, stride_t, 0, r + 1 - (W - 1), at, inside, state, slot, place, stride_r, W)
        tl.store(state + place + r * stride_r, value.to(state.dtype.element_ty), mask=inside & (slot > 0))


@triton.jit
def _commit_kernel(
    state, slots, counts, channels, per_unit, stride_s, stride_u, stride_c, stride_r,
    W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    inside = (at < channels) & (slot > 0)
    place = _place(slot, at, per_unit, stride_s, stride_u, stride_c)
    skipped = tl.load(counts + row) - 1
    for r in tl.static_range(W - 1):
        value = tl.load(state + place + (r + skipped) * stride_r, mask=inside)
        tl.store(state + place + r * stride_r, value, mask=inside)


def conv_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, plan: ChunkPlan, *, silu: bool = True
) -> Tensor:
    channels, width = weight.shape
    assert x.stride(1) == 1
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if not plan.tokens:
        return y
    size = block(channels) if channels < 256 else 256
    blocks, tables = triton.cdiv(channels, size), plan.tables
    strides = (x.stride(0), *state.stride())
    _prefill_kernel[(len(plan.lengths), triton.cdiv(max(plan.lengths), TOKENS), blocks)](
        x, weight, bias, y, state, tables.firsts, tables.initial, channels, state.shape[2], *strides,
        HAS_BIAS=bias is not None, SILU=silu, W=width, TOKENS=TOKENS, BLOCK=size,
    )  # fmt: skip
    _keep_kernel[(len(plan.lengths), blocks)](
        x, state, tables.firsts, tables.initial, tables.final, tables.point_firsts, tables.point_offsets,
        tables.point_slots, channels, state.shape[2], *strides, W=width, BLOCK=size,
    )  # fmt: skip
    return y


def conv_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, *, silu: bool = True
) -> Tensor:
    return conv_verify(x.unsqueeze(1), weight, bias, state, slots, silu=silu).squeeze(1)


def conv_verify(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, *, silu: bool = True
) -> Tensor:
    channels, width = weight.shape
    batch, tokens, _ = x.shape
    assert x.stride(2) == 1
    assert state.shape[-1] >= width - 1 + tokens - 1, "state component has too few draft rows"
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = block(channels) if channels < 256 else 256
    _rows_kernel[(batch, triton.cdiv(channels, size))](
        x, weight, bias, y, state, slots, channels, state.shape[2], x.stride(0), x.stride(1), *state.stride(),
        HAS_BIAS=bias is not None, SILU=silu, W=width, T=tokens, BLOCK=size,
    )  # fmt: skip
    return y


def conv_commit(state: Tensor, slots: Tensor, counts: Tensor, *, width: int) -> None:
    channels = state.shape[1] * state.shape[2]
    size = block(channels) if channels < 256 else 256
    _commit_kernel[(len(slots), triton.cdiv(channels, size))](
        state, slots, counts, channels, state.shape[2], *state.stride(), W=width, BLOCK=size
    )
