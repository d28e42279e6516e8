"""Chunked prefill of linear-state layers: see engine.kernels.delta_chunk for the equations.

Two kernels: one over (chunk, value head) makes everything that does not need the entering state; one over (sequence,
value head, tile of V) walks the chunks with its tile of the state in registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.delta_chunk_plan import CHUNK, ChunkPlan
from engine.kernels.triton.common import block, dot32, state_rows


@triton.jit
def _intra_kernel(
    q, k, g, beta, tokens, counts, w, keys, decay, mix, scale, heads, group,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_gt, stride_gh, stride_gk, stride_bt, stride_bh,
    L2NORM: tl.constexpr, DELTA: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one value head, PART channels at a time (a whole row of fp32 operands in three parts
    does not fit the registers). w [N, HV, 2C, K], keys [N, HV, C, K], decay [N, HV, K], mix [N, HV, 2C, C] = T over
    A_qk T. A scalar gate has channel stride 0; padding rows load gate 0 and beta 0."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, C)
    token = tl.load(tokens + chunk).to(tl.int64) + i
    real = i < tl.load(counts + chunk)
    q += token * stride_qt + (head // group) * stride_qh
    k += token * stride_kt + (head // group) * stride_kh
    g += token * stride_gt + head * stride_gh
    b = tl.load(beta + token * stride_bt + head * stride_bh, mask=real, other=0.0).to(tl.float32)
    q_scale, k_scale = tl.full([C], 1.0, tl.float32) * scale, tl.full([C], 1.0, tl.float32)
    if L2NORM:
        q_scale, k_scale = q_scale * _inverse_norm(q, real, K, PART, C), _inverse_norm(k, real, K, PART, C)

    row, col = i[:, None], i[None, :]
    a_kk = tl.zeros([C, C], tl.float32)
    a_qk = tl.zeros([C, C], tl.float32)
    for low in range(0, K, PART):
        qs, ks, gs = _part(q, k, g, real, q_scale, k_scale, stride_gk, low, K, PART)
        a_qk += tl.where(row == col, tl.sum(qs * ks, 1)[:, None], 0.0)
        for level in range(4):
            since, until = _decays(gs, row, col, level)
            earlier = tl.trans(ks * until)
            pair = (row >> level == (col >> level) + 1) & ((row >> level) % 2 == 1)
            a_kk += tl.where(pair, dot32(ks * since, earlier), 0.0)
            a_qk += tl.where(pair, dot32(qs * since, earlier), 0.0)
    if DELTA:
        t = _unit_inverse(a_kk * b[:, None], i, C) * b[None, :]
    else:
        t = tl.where(row == col, b[None, :], 0.0)
    reads = dot32(a_qk, t)
    unit = chunk * heads + head
    place = (unit * 2 * C + row) * C + col
    tl.store(mix + place, t)
    tl.store(mix + place + C * C, reads)
    for low in range(0, K, PART):
        qs, ks, gs = _part(q, k, g, real, q_scale, k_scale, stride_gk, low, K, PART)
        since, until = _decays(gs, row, col, 4)
        c = low + tl.arange(0, PART)
        channel = (c < K)[None, :]
        wide = (unit * 2 * C + row) * K + c[None, :]
        entering = qs * since
        if DELTA:
            decayed = ks * since
            tl.store(w + wide, -dot32(t, decayed), mask=channel)
            entering -= dot32(reads, decayed)
        tl.store(w + wide + C * K, entering, mask=channel)
        tl.store(keys + (unit * C + row) * K + c[None, :], ks * until, mask=channel)
        tl.store(decay + unit * K + c, tl.exp(tl.sum(gs, 0)), mask=c < K)


@triton.jit
def _inverse_norm(x, real, K: tl.constexpr, PART: tl.constexpr, C: tl.constexpr):
    total = tl.zeros([C], tl.float32)
    for low in range(0, K, PART):
        c = low + tl.arange(0, PART)
        part = tl.load(x[:, None] + c[None, :], mask=real[:, None] & (c < K)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(part * part, 1)
    return tl.rsqrt(total + 1e-6)


@triton.jit
def _part(q, k, g, real, q_scale, k_scale, stride_gk, low, K: tl.constexpr, PART: tl.constexpr):
    c = low + tl.arange(0, PART)
    tile = real[:, None] & (c < K)[None, :]
    qs = tl.load(q[:, None] + c[None, :], mask=tile, other=0.0).to(tl.float32) * q_scale[:, None]
    ks = tl.load(k[:, None] + c[None, :], mask=tile, other=0.0).to(tl.float32) * k_scale[:, None]
    return qs, ks, tl.load(g[:, None] + c[None, :] * stride_gk, mask=tile, other=0.0)


@triton.jit
def _decays(gs, row, col, level):
    """e to the sum of gates since the row's block of 2^level rows began (itself included), and until the block's end
    (itself excluded): sums of numbers of one sign, so neither overflow nor cancellation. Neighbouring blocks of which
    the later one is odd meet at that boundary."""
    same = row >> level == col >> level
    since = tl.dot((same & (col <= row)).to(tl.float32), gs, input_precision="ieee")
    until = tl.dot((same & (col > row)).to(tl.float32), gs, input_precision="ieee")
    return tl.exp(since), tl.exp(until)


@triton.jit
def _unit_inverse(lower, i, C: tl.constexpr):
    """(I + strict lower part)^-1 by forward substitution, row by row."""
    strict = tl.where(i[:, None] > i[None, :], -lower, 0.0)
    inverse = strict
    for r in range(1, C):
        line = tl.sum(tl.where((i == r)[:, None], strict, 0.0), 0)
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where((i == r)[:, None], line[None, :], inverse)
    return inverse + tl.where(i[:, None] == i[None, :], 1.0, 0.0)


@triton.jit
def _walk_kernel(
    v, out, state, w, keys, decay, mix, skip, initial, final, chunk_totals, ranks, step_firsts, tokens, counts,
    point_firsts, point_steps, point_slots, heads, stride_vt, stride_vh, stride_s, stride_u, stride_sv,
    DELTA: tl.constexpr, HAS_SKIP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_V rows of one value head's state through all chunks of one sequence."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)
    c = tl.arange(0, BLOCK_K)
    d = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (d < V)[:, None] & (c < K)[None, :]
    inner = head.to(tl.int64) * stride_u + d[:, None] * stride_sv + c[None, :]
    slot = tl.load(initial + sequence).to(tl.int64)
    s = tl.load(state + slot * stride_s + inner, mask=tile & (slot > 0), other=0.0)
    rank = tl.load(ranks + sequence)
    point = tl.load(point_firsts + sequence)
    points = tl.load(point_firsts + sequence + 1)
    if HAS_SKIP:
        weight = tl.load(skip + head).to(tl.float32)
    for step in range(tl.load(chunk_totals + sequence)):
        chunk = (tl.load(step_firsts + step) + rank).to(tl.int64)
        unit = chunk * heads + head
        token = tl.load(tokens + chunk).to(tl.int64) + i
        rows = (i < tl.load(counts + chunk))[:, None] & (d < V)[None, :]
        values = tl.load(v + token[:, None] * stride_vt + head * stride_vh + d[None, :], mask=rows, other=0.0)
        values = values.to(tl.float32)
        square = (unit * 2 * C + i[:, None]) * C + i[None, :]
        wide = (unit * 2 * C + i[:, None]) * K + c[None, :]
        across = (c < K)[None, :]
        entering = tl.trans(s)
        u = dot32(tl.load(mix + square), values)
        o = dot32(tl.load(mix + square + C * C), values)
        if DELTA:
            u += dot32(tl.load(w + wide, mask=across, other=0.0), entering)
        o += dot32(tl.load(w + wide + C * K, mask=across, other=0.0), entering)
        if HAS_SKIP:
            o += weight * values
        there = out + (token[:, None] * heads + head) * V + d[None, :]
        tl.store(there, o.to(out.dtype.element_ty), mask=rows)
        fade = tl.load(decay + unit * K + c, mask=c < K, other=0.0)
        kept = tl.load(keys + (unit * C + i[:, None]) * K + c[None, :], mask=across, other=0.0)
        s = s * fade[None, :] + dot32(tl.trans(u), kept)
        due = tl.load(point_steps + point, mask=point < points, other=-1)
        if due == step:
            target = tl.load(point_slots + point).to(tl.int64)
            tl.store(state + target * stride_s + inner, s, mask=tile)
            point += 1
    target = tl.load(final + sequence).to(tl.int64)
    tl.store(state + target * stride_s + inner, s, mask=tile & (target > 0))


def delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    plan: ChunkPlan,
    *,
    scale: float,
    l2norm: bool = False,
    delta: bool = True,
    skip: Tensor | None = None,
) -> Tensor:
    heads, width = v.shape[1:]
    keys_dim = k.shape[2]
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    if not plan.chunks:
        return out
    assert q.stride(2) == k.stride(2) == v.stride(2) == state.stride(3) == 1
    tables, scratch = plan.tables, plan.scratch
    w = scratch.take("w", plan.chunks, heads, 2 * CHUNK, keys_dim)
    keys = scratch.take("keys", plan.chunks, heads, CHUNK, keys_dim)
    decay = scratch.take("decay", plan.chunks, heads, keys_dim)
    mix = scratch.take("mix", plan.chunks, heads, 2 * CHUNK, CHUNK)
    block_k, block_v = block(keys_dim), state_rows(width, keys_dim)
    _intra_kernel[(plan.chunks, heads)](
        q, k, g, beta, tables.chunk_tokens, tables.chunk_counts, w, keys, decay, mix, scale, heads,
        heads // q.shape[1], *q.stride()[:2], *k.stride()[:2], *g.stride()[:2], g.stride(2) if g.dim() == 3 else 0,
        *beta.stride(), L2NORM=l2norm, DELTA=delta, K=keys_dim, PART=min(block_k, 32), C=CHUNK, num_warps=2,
    )  # fmt: skip
    _walk_kernel[(len(plan.lengths), heads, triton.cdiv(width, block_v))](
        v, out, state, w, keys, decay, mix, skip, tables.initial, tables.final, tables.counts, tables.ranks,
        tables.step_firsts, tables.chunk_tokens, tables.chunk_counts, tables.point_firsts, tables.point_steps,
        tables.point_slots, heads, *v.stride()[:2], *state.stride()[:3], DELTA=delta, HAS_SKIP=skip is not None,
        K=keys_dim, V=width, BLOCK_K=block_k, BLOCK_V=block_v, C=CHUNK, num_warps=4 if block_k <= 128 else 8,
    )  # fmt: skip
    return out
