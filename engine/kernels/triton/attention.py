"""Grouped-query attention over pages [page, kv_head, layer, 2, 16, head_dim], for prompt chunks, decode and drafts.

Flash attention (arXiv 2205.14135): online softmax over blocks of keys. The query heads of one KV head, for a few
neighbouring tokens, are the rows of one tile, so each key is loaded once for all of them. Where tiles are few their
keys are split over programs (engine.kernels.triton.split).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.mla_plan import PAGE, PagedPlan
from engine.kernels.triton.common import block, operand, rows_of
from engine.kernels.triton.split import LEAST, VARYING, Split, leave, soften, span_of


@triton.jit(do_not_specialize=VARYING)
def _attention_kernel(
    q, cache, out, partial, stats, tables, firsts, ends, scale, heads, group, slices, window, parts, held, all_rows,
    stride_qt, stride_qh, stride_p, stride_h, stride_kv, stride_c, stride_tb, stride_tp,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS query tokens of one sequence x GROUP query heads of one KV head, of whose `group` heads there
    are so many `slices`. SPLIT: x one span of their keys."""
    sequence, part = tl.program_id(0), tl.program_id(1)
    slice_of_heads, split = tl.program_id(2) // held, tl.program_id(2) % held
    kv_head = slice_of_heads // slices
    first = tl.load(firsts + sequence)
    count = tl.load(firsts + sequence + 1) - first
    if part * TOKENS < count:
        rows = tl.arange(0, TOKENS * GROUP)
        token, member = part * TOKENS + rows // GROUP, slice_of_heads % slices * GROUP + rows % GROUP
        valid = (token < count) & (member < group)
        total = tl.load(ends + sequence)
        position = total - count + token
        d = tl.arange(0, BLOCK_D)
        head = kv_head * group + member
        at = (first + token).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
        tile = valid[:, None] & (d < D)[None, :]
        qs = operand(tl.load(q + at, mask=tile, other=0.0))
        best = tl.full([TOKENS * GROUP], -float("inf"), tl.float32)
        norm = tl.zeros([TOKENS * GROUP], tl.float32)
        result = tl.zeros([TOKENS * GROUP, BLOCK_D], tl.float32)
        last = tl.minimum(total, total - count + (part + 1) * TOKENS)  # keys the last query sees
        begin = 0
        if window > 0:
            begin = tl.maximum(total - count + part * TOKENS - window + 1, 0) // KEYS * KEYS
        if SPLIT:
            begin, last = span_of(begin, last, split, parts, KEYS, LEAST, MOST)
        for low in range(begin, last, KEYS):
            key = low + tl.arange(0, KEYS)
            entry = tables + sequence * stride_tb + key // PAGE * stride_tp
            page = tl.load(entry, mask=key < last, other=0).to(tl.int64)
            place = page * stride_p + kv_head * stride_h + (key % PAGE) * stride_c
            known = (key < last)[:, None] & (d < D)[None, :]
            ks = operand(tl.load(cache + place[:, None] + d[None, :], mask=known, other=0.0))
            vs = operand(tl.load(cache + place[:, None] + stride_kv + d[None, :], mask=known, other=0.0))
            scores = tl.dot(qs, tl.trans(ks), input_precision="tf32x3") * scale
            seen = key[None, :] <= position[:, None]
            if window > 0:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
            best, share, fade = soften(scores, best)
            norm = norm * fade + tl.sum(share, 1)
            result = result * fade[:, None] + tl.dot(share.to(vs.dtype), vs, input_precision="tf32x3")
        there = (first + token).to(tl.int64) * heads + head
        if SPLIT:
            leave(partial, stats, there, held, split, all_rows, D, result, best, norm, valid, d, tile, begin < last)
        else:
            result = result / tl.where(norm > 0, norm, 1.0)[:, None]
            tl.store(out + there[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=tile)


def paged_attention(q: Tensor, cache: Tensor, plan: PagedPlan, *, scale: float, window: int = 0) -> Tensor:
    """Causal attention of q [T, heads, D] over one layer of the pool, [page, kv_head, 2, 16, D] (K, then V), the step's
    own keys stored already. window > 0: only the last `window` positions are seen. Returns [T, heads, D] in q's dtype;
    rows past the plan's tokens return zeros."""
    heads, width = q.shape[1:]
    kv_heads = cache.shape[1]
    group = heads // kv_heads
    assert q.stride(2) == cache.stride(4) == 1
    out = rows_of(q, plan, width)
    longest = max(plan.lengths, default=0)
    if longest:
        fits, keys, warps, stages = _tile(longest == 1, group, block(width), q.dtype == torch.float32)
        padded = min(int(triton.next_power_of_2(group)), fits)
        per_tile, slices = fits // padded, triton.cdiv(group, padded)
        tiles, reach = triton.cdiv(longest, per_tile), window + keys + per_tile if window else 0
        split = Split.of(q, plan, width, tiles=tiles, heads=kv_heads * slices, reach=reach)
        _attention_kernel[(len(plan.lengths), tiles, kv_heads * slices * split.held)](
            q, cache, out, split.partial, split.stats, plan.tables, plan.firsts, plan.ends, scale, heads, group, slices,
            window, split.parts, split.held, split.rows, q.stride(0), q.stride(1), *cache.stride()[:4],
            *plan.tables.stride(), TOKENS=per_tile, GROUP=padded, D=width, BLOCK_D=block(width), KEYS=keys, PAGE=PAGE,
            SPLIT=split.held > 1, LEAST=LEAST, MOST=split.most, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        split.merge(out, plan)
    return out


def _tile(decode: bool, group: int, width: int, fp32: bool) -> tuple[int, int, int, int]:
    """Query rows, keys, warps and stages of a tile: what fits a multiprocessor's shared memory and a thread's registers
    (fp32 operands take three registers each), as compiled for sm_90a."""
    rows = min(block(group), 64) if decode else 64
    if not fp32:
        return rows, 64, 8 if width > 128 else 4, 3
    if width > 128:
        return 16, 16, 8, 2
    if width > 64:
        return 16, 32, 8, 2
    return (16, 64, 4, 3) if decode else (32, 16, 8, 2)
