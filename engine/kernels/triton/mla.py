"""Latent attention over paged latents: see engine.kernels.mla. Both forms attend to the latents themselves (absorbed
queries), so one kernel serves prompt chunks, decode and drafts."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.mla import mla_absorb, mla_expand
from engine.kernels.mla_plan import PAGE, PagedPlan
from engine.kernels.triton.common import block, operand

HEADS = 16
"""Query heads of a tile: the least a matmul takes."""


@triton.jit
def _store_kernel(rows, cache, cells, stride_t, stride_p, stride_c, width, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    cell = tl.load(cells + row)
    value = tl.load(rows + row.to(tl.int64) * stride_t + c, mask=c < width, other=0.0)
    place = cell // PAGE * stride_p + cell % PAGE * stride_c
    tl.store(cache + place + c, value.to(cache.dtype.element_ty), mask=c < width)


@triton.jit
def _attention_kernel(
    q, cache, out, tables, firsts, ends, scale, heads, table_width, stride_qt, stride_qh, stride_p, stride_c,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS query tokens of one sequence x HEADS heads. R latent and S shared channels a row."""
    sequence, part = tl.program_id(0), tl.program_id(1)
    first = tl.load(firsts + sequence)
    count = tl.load(firsts + sequence + 1) - first
    if part * TOKENS < count:
        rows = tl.arange(0, TOKENS * HEADS)
        token, head = part * TOKENS + rows // HEADS, tl.program_id(2) * HEADS + rows % HEADS
        valid = ((token < count) & (head < heads))[:, None]
        total = tl.load(ends + sequence)
        position = total - count + token
        r, s = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
        in_r, in_s = (r < R)[None, :], (s < S)[None, :]
        source = q + (first + token).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh
        latent = operand(tl.load(source + r[None, :], mask=valid & in_r, other=0.0))
        shared = operand(tl.load(source + R + s[None, :], mask=valid & in_s, other=0.0))
        best = tl.full([TOKENS * HEADS], -float("inf"), tl.float32)
        norm = tl.zeros([TOKENS * HEADS], tl.float32)
        result = tl.zeros([TOKENS * HEADS, BLOCK_R], tl.float32)
        last = tl.minimum(total, total - count + (part + 1) * TOKENS)
        for low in range(0, last, KEYS):
            key = low + tl.arange(0, KEYS)
            known = (key < last)[:, None]
            page = tl.load(tables + sequence * table_width + key // PAGE, mask=key < last, other=0).to(tl.int64)
            place = cache + (page * stride_p + (key % PAGE) * stride_c)[:, None]
            values = operand(tl.load(place + r[None, :], mask=known & in_r, other=0.0))
            extra = operand(tl.load(place + R + s[None, :], mask=known & in_s, other=0.0))
            scores = tl.dot(latent, tl.trans(values), input_precision="tf32x3")
            scores = tl.dot(shared, tl.trans(extra), scores, input_precision="tf32x3") * scale
            scores = tl.where(key[None, :] <= position[:, None], scores, -float("inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            share, fade = tl.exp(scores - top[:, None]), tl.exp(best - top)
            norm = norm * fade + tl.sum(share, 1)
            result = result * fade[:, None] + tl.dot(share.to(values.dtype), values, input_precision="tf32x3")
            best = top
        there = ((first + token).to(tl.int64)[:, None] * heads + head[:, None]) * R + r[None, :]
        tl.store(out + there, (result / norm[:, None]).to(out.dtype.element_ty), mask=valid & in_r)


def mla_store(rows: Tensor, cache: Tensor, plan: PagedPlan) -> None:
    assert rows.stride(1) == cache.stride(2) == 1
    if len(rows):
        _store_kernel[(len(rows),)](
            rows, cache, plan.cells, rows.stride(0), cache.stride(0), cache.stride(1), rows.shape[1], PAGE=PAGE,
            BLOCK=block(rows.shape[1]),
        )  # fmt: skip


def mla_decode(q: Tensor, cache: Tensor, plan: PagedPlan, *, latent: int, scale: float) -> Tensor:
    tokens, heads, width = q.shape
    assert q.stride(2) == cache.stride(2) == 1
    out = torch.zeros(tokens, heads, latent, dtype=q.dtype, device=q.device)
    longest = max(plan.lengths, default=0)
    if longest:
        wide, fp32 = latent > 256, q.dtype == torch.float32
        per_tile = 1 if longest == 1 or (wide and fp32) else 4  # fp32 operands take three registers each
        keys = 16 if wide or fp32 else 64
        _attention_kernel[(len(plan.lengths), triton.cdiv(longest, per_tile), triton.cdiv(heads, HEADS))](
            q, cache, out, plan.tables, plan.firsts, plan.ends, scale, heads, plan.tables.shape[1], q.stride(0),
            q.stride(1), cache.stride(0), cache.stride(1), TOKENS=per_tile, HEADS=HEADS, R=latent, S=width - latent,
            BLOCK_R=block(latent), BLOCK_S=block(width - latent), KEYS=keys, PAGE=PAGE,
            num_warps=8 if per_tile > 1 or fp32 else 4, num_stages=1 if wide and fp32 else 3,
        )  # fmt: skip
    return out


def mla_prefill(q: Tensor, cache: Tensor, plan: PagedPlan, up_key: Tensor, up_value: Tensor, *, scale: float) -> Tensor:
    out = mla_decode(mla_absorb(q, up_key), cache, plan, latent=up_key.shape[2], scale=scale)
    return mla_expand(out, up_value)
