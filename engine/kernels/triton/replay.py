"""ReplaySSM decode: see engine.kernels.replay, whose Ring and cursor rules apply."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.replay import Ring
from engine.kernels.triton.common import block, state_rows
from engine.kernels.triton.delta_decode import head_inputs


@triton.jit
def _decays(ring_g, place, stride_l, stride_k, held, j, c, K: tl.constexpr, PRE: tl.constexpr):
    """Cumulative gate G [K] over the `held` records, and each record's decay until then as a log [L, K] (0 for
    pre-decayed keys, which take e^G like the checkpoint)."""
    inside = (j < held)[:, None] & (c < K)[None, :]
    logs = tl.load(ring_g + place + j[:, None] * stride_l + c[None, :] * stride_k, mask=inside, other=0.0)
    if PRE:
        total = tl.sum(tl.where((j == held - 1)[:, None], logs, 0.0), 0)
        return total, tl.broadcast_to(total[None, :], logs.shape)
    else:
        total = tl.sum(logs, 0)
        # Sums of strictly later gates, added up rather than subtracted: nothing cancels.
        after = tl.dot((j[None, :] > j[:, None]).to(tl.float32), logs, input_precision="ieee")
        return total, after


@triton.jit
def _fold(s, ring_k, ring_u, ring_g, at_k, at_u, at_g, stride_kl, stride_ul, stride_gl, stride_gk, held, c, d,
          K: tl.constexpr, V: tl.constexpr, PRE: tl.constexpr):  # fmt: skip
    """s after `held` records, last record first so that decays are added up and never divided out."""
    after = tl.zeros_like(tl.sum(s, 0))
    total = after
    if PRE:
        some = (c < K) & (held > 0)
        total = tl.load(ring_g + at_g + (held - 1) * stride_gl + c * stride_gk, mask=some, other=0.0)
    fresh = tl.zeros_like(s)
    for n in range(held):
        r = held - 1 - n
        ks = tl.load(ring_k + at_k + r * stride_kl + c, mask=c < K, other=0.0)
        us = tl.load(ring_u + at_u + r * stride_ul + d, mask=d < V, other=0.0)
        if PRE:
            fresh += us[:, None] * (ks * tl.exp(total))[None, :]
        else:
            fresh += us[:, None] * (ks * tl.exp(after))[None, :]
            after += tl.load(ring_g + at_g + r * stride_gl + c * stride_gk, mask=c < K, other=0.0)
    if not PRE:
        total = after
    return s * tl.exp(total)[None, :] + fresh


@triton.jit
def _decode_kernel(
    q, k, v, g, beta, state, ring_k, ring_u, ring_g, slots, cursor, flush, skip, out, scale, heads, group,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh, stride_gb, stride_gh, stride_gk,
    stride_bb, stride_bh, stride_s, stride_u, stride_sv, stride_ks, stride_ku, stride_kl, stride_us, stride_uu,
    stride_ul, stride_gs, stride_gu, stride_gl, ring_gk,
    PRE: tl.constexpr, SCALAR: tl.constexpr, L2NORM: tl.constexpr, DELTA: tl.constexpr, HAS_SKIP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: one request's token, BLOCK_V rows of one head's state."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    tile_v = tl.program_id(2)
    c = tl.arange(0, BLOCK_K)
    d = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    j = tl.arange(0, BLOCK_L)
    slot = tl.load(slots + b).to(tl.int64)
    held = tl.where(slot > 0, tl.load(cursor + b), 0).to(tl.int32)
    tile = (d < V)[:, None] & (c < K)[None, :]
    place = state + slot * stride_s + head * stride_u + d[:, None] * stride_sv + c[None, :]
    at_k = slot * stride_ks + head * stride_ku
    at_u = slot * stride_us + head * stride_uu
    at_g = slot * stride_gs + head * stride_gu
    s = tl.load(place, mask=tile & (slot > 0), other=0.0)
    qs, ks = head_inputs(q, k, b * stride_qb + (head // group) * stride_qh, b * stride_kb + (head // group) * stride_kh,
                         c, K, scale, L2NORM)  # fmt: skip
    gs = tl.load(g + b * stride_gb + head * stride_gh + c * stride_gk, mask=c < K, other=0.0)
    a = tl.exp(gs)
    step = tl.load(beta + b * stride_bb + head * stride_bh).to(tl.float32)
    x = tl.load(v + b * stride_vb + head * stride_vh + d, mask=d < V, other=0.0).to(tl.float32)

    total, after = _decays(ring_g, at_g, stride_gl, ring_gk, held, j, c, K, PRE)
    there = (j < held)[:, None] & (c < K)[None, :]
    records = tl.load(ring_k + at_k + j[:, None] * stride_kl + c[None, :], mask=there, other=0.0) * tl.exp(after)
    us = tl.load(
        ring_u + at_u + j[:, None] * stride_ul + d[None, :], mask=(j < held)[:, None] & (d < V)[None, :], other=0.0
    )
    faded = tl.exp(total)
    u = step * x
    if DELTA:
        seen = tl.sum(s * (ks * a * faded)[None, :], 1)
        seen += tl.sum(us * tl.sum(records * (ks * a)[None, :], 1)[:, None], 0)
        u -= step * seen
    o = tl.sum(s * (qs * a * faded)[None, :], 1)
    o += tl.sum(us * tl.sum(records * (qs * a)[None, :], 1)[:, None], 0)
    o += tl.sum(qs * ks, 0) * u
    if HAS_SKIP:
        o += tl.load(skip + head).to(tl.float32) * x
    tl.store(out + (b * heads + head) * V + d, o.to(out.dtype.element_ty), mask=d < V)
    if slot > 0:
        if tl.load(flush + b) != 0:
            s = _fold(s, ring_k, ring_u, ring_g, at_k, at_u, at_g, stride_kl, stride_ul, stride_gl, ring_gk, held, c, d,
                      K, V, PRE)  # fmt: skip
            s = s * a[None, :] + u[:, None] * ks[None, :]
            tl.store(place, s, mask=tile)
        else:
            tl.store(ring_u + at_u + held * stride_ul + d, u, mask=d < V)
            if tile_v == 0:
                if PRE:
                    gs += total
                    ks = ks * tl.exp(-gs)
                tl.store(ring_k + at_k + held * stride_kl + c, ks, mask=c < K)
                width = 1 if SCALAR else K
                tl.store(ring_g + at_g + held * stride_gl + c * ring_gk, gs, mask=c < width)


@triton.jit
def _materialise_kernel(
    state, ring_k, ring_u, ring_g, sources, counts, targets, stride_s, stride_u, stride_sv, stride_ks, stride_ku,
    stride_kl, stride_us, stride_uu, stride_ul, stride_gs, stride_gu, stride_gl, ring_gk,
    PRE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BLOCK_K)
    d = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (d < V)[:, None] & (c < K)[None, :]
    slot, target = tl.load(sources + b).to(tl.int64), tl.load(targets + b).to(tl.int64)
    inner = head * stride_u + d[:, None] * stride_sv + c[None, :]
    s = tl.load(state + slot * stride_s + inner, mask=tile & (slot > 0), other=0.0)
    s = _fold(s, ring_k, ring_u, ring_g, slot * stride_ks + head * stride_ku, slot * stride_us + head * stride_uu,
              slot * stride_gs + head * stride_gu, stride_kl, stride_ul, stride_gl, ring_gk,
              tl.load(counts + b).to(tl.int32), c, d, K, V, PRE)  # fmt: skip
    tl.store(state + target * stride_s + inner, s, mask=tile & (target > 0))


def replay_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    ring: Ring,
    slots: Tensor,
    cursor: Tensor,
    flush: Tensor,
    *,
    scale: float,
    l2norm: bool = False,
    delta: bool = True,
    skip: Tensor | None = None,
) -> Tensor:
    batch, heads, width = v.shape
    keys = k.shape[-1]
    scalar = g.dim() == 2
    assert q.stride(2) == k.stride(2) == v.stride(2) == state.stride(3) == 1
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    block_v = state_rows(width, keys)
    _decode_kernel[(batch, heads, triton.cdiv(width, block_v))](
        q, k, v, g, beta, state, ring.k, ring.u, ring.g, slots, cursor, flush.to(torch.int32), skip, out, scale, heads,
        heads // q.shape[1], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *g.stride()[:2],
        0 if scalar else g.stride(2), *beta.stride(), *state.stride()[:3], *ring.k.stride()[:3], *ring.u.stride()[:3],
        *ring.g.stride()[:3], 0 if scalar else ring.g.stride(3), PRE=ring.pre_decayed, SCALAR=scalar, L2NORM=l2norm,
        DELTA=delta, HAS_SKIP=skip is not None, K=keys, V=width, BLOCK_L=block(ring.length), BLOCK_K=block(keys),
        BLOCK_V=block_v,
    )  # fmt: skip
    return out


def replay_materialise(state: Tensor, ring: Ring, sources: Tensor, counts: Tensor, targets: Tensor) -> None:
    heads, width, keys = state.shape[1:]
    block_v = state_rows(width, keys)
    scalar = ring.g.shape[-1] == 1
    _materialise_kernel[(len(sources), heads, triton.cdiv(width, block_v))](
        state, ring.k, ring.u, ring.g, sources, counts, targets, *state.stride()[:3], *ring.k.stride()[:3],
        *ring.u.stride()[:3], *ring.g.stride()[:3], 0 if scalar else ring.g.stride(3), PRE=ring.pre_decayed, K=keys,
        V=width, BLOCK_K=block(keys), BLOCK_V=block_v,
    )  # fmt: skip
