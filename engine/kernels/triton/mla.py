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
from engine.kernels.triton.common import block, operand, rows_of
from engine.kernels.triton.split import LEAST, VARYING, Split, leave, soften, span_of

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


@triton.jit(do_not_specialize=VARYING)
def _attention_kernel(
    q, cache, out, partial, stats, tables, firsts, ends, scale, heads, parts, held, all_rows,
    stride_qt, stride_qh, stride_p, stride_c, stride_tb, stride_tp,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr, CHANNELS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS query tokens of one sequence x HEADS heads. R latent and S shared channels a row. SPLIT: x
    one span of their keys. CHANNELS < BLOCK_R: scores are made of so many latent channels at a time, queries read anew
    for each block of keys, since they do not fit the registers."""
    sequence, part = tl.program_id(0), tl.program_id(1)
    group, split = tl.program_id(2) // held, tl.program_id(2) % held
    first = tl.load(firsts + sequence)
    count = tl.load(firsts + sequence + 1) - first
    if part * TOKENS < count:
        rows = tl.arange(0, TOKENS * HEADS)
        token, head = part * TOKENS + rows // HEADS, group * HEADS + rows % HEADS
        valid = (token < count) & (head < heads)
        total = tl.load(ends + sequence)
        position = total - count + token
        r, s = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
        in_r, in_s = (r < R)[None, :], (s < S)[None, :]
        source = q + (first + token).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh
        if CHANNELS == BLOCK_R:
            latent = operand(tl.load(source + r[None, :], mask=valid[:, None] & in_r, other=0.0))
        shared = operand(tl.load(source + R + s[None, :], mask=valid[:, None] & in_s, other=0.0))
        best = tl.full([TOKENS * HEADS], -float("inf"), tl.float32)
        norm = tl.zeros([TOKENS * HEADS], tl.float32)
        result = tl.zeros([TOKENS * HEADS, BLOCK_R], tl.float32)
        begin, last = 0, tl.minimum(total, total - count + (part + 1) * TOKENS)
        if SPLIT:
            begin, last = span_of(begin, last, split, parts, KEYS, LEAST, MOST)
        for low in range(begin, last, KEYS):
            key = low + tl.arange(0, KEYS)
            known = (key < last)[:, None]
            entry = tables + sequence * stride_tb + key // PAGE * stride_tp
            page = tl.load(entry, mask=key < last, other=0).to(tl.int64)
            place = cache + (page * stride_p + (key % PAGE) * stride_c)[:, None]
            values = operand(tl.load(place + r[None, :], mask=known & in_r, other=0.0))
            extra = operand(tl.load(place + R + s[None, :], mask=known & in_s, other=0.0))
            if CHANNELS == BLOCK_R:
                scores = tl.dot(latent, tl.trans(values), input_precision="tf32x3")
            else:
                scores = tl.zeros([TOKENS * HEADS, KEYS], tl.float32)
                for at in range(0, R, CHANNELS):
                    c = at + tl.arange(0, CHANNELS)
                    in_c = (c < R)[None, :]
                    some = operand(tl.load(source + c[None, :], mask=valid[:, None] & in_c, other=0.0))
                    ks = operand(tl.load(place + c[None, :], mask=known & in_c, other=0.0))
                    scores = tl.dot(some, tl.trans(ks), scores, input_precision="tf32x3")
            scores = tl.dot(shared, tl.trans(extra), scores, input_precision="tf32x3") * scale
            scores = tl.where(key[None, :] <= position[:, None], scores, -float("inf"))
            best, share, fade = soften(scores, best)
            norm = norm * fade + tl.sum(share, 1)
            result = result * fade[:, None] + tl.dot(share.to(values.dtype), values, input_precision="tf32x3")
        there = (first + token).to(tl.int64) * heads + head
        tile = valid[:, None] & in_r
        if SPLIT:
            leave(partial, stats, there, held, split, all_rows, R, result, best, norm, valid, r, tile, begin < last)
        else:
            result = result / norm[:, None]
            tl.store(out + there[:, None] * R + r[None, :], result.to(out.dtype.element_ty), mask=tile)


def mla_store(rows: Tensor, cache: Tensor, plan: PagedPlan) -> None:
    assert rows.stride(1) == cache.stride(2) == 1
    if len(rows):
        _store_kernel[(len(rows),)](
            rows, cache, plan.cells, rows.stride(0), cache.stride(0), cache.stride(1), rows.shape[1], PAGE=PAGE,
            BLOCK=block(rows.shape[1]),
        )  # fmt: skip


def mla_decode(q: Tensor, cache: Tensor, plan: PagedPlan, *, latent: int, scale: float) -> Tensor:
    heads, width = q.shape[1:]
    assert q.stride(2) == cache.stride(2) == 1
    out = rows_of(q, plan, latent)
    longest = max(plan.lengths, default=0)
    if longest:
        per_tile, keys, channels, warps, stages = _tile(longest == 1, block(latent), q.dtype == torch.float32)
        tiles, groups = triton.cdiv(longest, per_tile), triton.cdiv(heads, HEADS)
        split = Split.of(q, plan, latent, tiles=tiles, heads=groups)
        _attention_kernel[(len(plan.lengths), tiles, groups * split.held)](
            q, cache, out, split.partial, split.stats, plan.tables, plan.firsts, plan.ends, scale, heads, split.parts,
            split.held, split.rows, q.stride(0), q.stride(1), cache.stride(0), cache.stride(1), *plan.tables.stride(),
            TOKENS=per_tile, HEADS=HEADS, R=latent, S=width - latent, BLOCK_R=block(latent),
            BLOCK_S=block(width - latent), CHANNELS=channels, KEYS=keys, PAGE=PAGE, SPLIT=split.held > 1, LEAST=LEAST,
            MOST=split.most, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        split.merge(out, plan)
    return out


def _tile(decode: bool, latent: int, fp32: bool) -> tuple[int, int, int, int, int]:
    """Tokens, keys, channels, warps and stages of a tile: what fits a multiprocessor's shared memory and a thread's
    registers (fp32 operands take three registers each), as compiled for sm_90a."""
    wide = latent > 256
    if fp32:
        return (1, 16, 32, 8, 1) if wide else (1 if decode else 4, 16, latent, 8, 3)
    return 1 if decode else 4, 32 if wide else 64, latent, 4 if decode else 8, 3


def mla_prefill(q: Tensor, cache: Tensor, plan: PagedPlan, up_key: Tensor, up_value: Tensor, *, scale: float) -> Tensor:
    out = mla_decode(mla_absorb(q, up_key), cache, plan, latent=up_key.shape[2], scale=scale)
    return mla_expand(out, up_value)
