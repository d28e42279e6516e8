"""Decode, verify and commit of linear-state layers: see engine.kernels.delta_decode."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.delta_decode import Rows
from engine.kernels.triton.common import block, state_rows


@triton.jit
def head_inputs(q, k, at_q, at_k, c, K: tl.constexpr, scale, L2NORM: tl.constexpr):
    """One token's q (scaled) and k of one head, fp32, normalised when asked."""
    qs = tl.load(q + at_q + c, mask=c < K, other=0.0).to(tl.float32)
    ks = tl.load(k + at_k + c, mask=c < K, other=0.0).to(tl.float32)
    if L2NORM:
        qs = qs * tl.rsqrt(tl.sum(qs * qs, 0) + 1e-6)
        ks = ks * tl.rsqrt(tl.sum(ks * ks, 0) + 1e-6)
    return qs * scale, ks


@triton.jit
def _rows_kernel(
    q, k, v, g, beta, state, slots, skip, out, kept_k, kept_u, kept_g, scale, heads, group,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, stride_gk, stride_bb, stride_bt, stride_bh, stride_s, stride_u, stride_sv,
    T: tl.constexpr, RECORD: tl.constexpr, SCALAR: tl.constexpr, L2NORM: tl.constexpr, DELTA: tl.constexpr,
    HAS_SKIP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: T rows of one request, BLOCK_V rows of one head's state in registers. RECORD: leave the state as it
    is and store (k, u, g) of each row; else store the state."""
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tile_v = tl.program_id(2)
    c = tl.arange(0, BLOCK_K)
    d = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (d < V)[:, None] & (c < K)[None, :]
    slot = tl.load(slots + b).to(tl.int64)
    place = state + slot * stride_s + head.to(tl.int64) * stride_u + d[:, None] * stride_sv + c[None, :]
    s = tl.load(place, mask=tile & (slot > 0), other=0.0)
    kh = head // group
    for t in range(T):
        at_q = b * stride_qb + t * stride_qt + kh * stride_qh
        at_k = b * stride_kb + t * stride_kt + kh * stride_kh
        qs, ks = head_inputs(q, k, at_q, at_k, c, K, scale, L2NORM)
        gs = tl.load(g + b * stride_gb + t * stride_gt + head * stride_gh + c * stride_gk, mask=c < K, other=0.0)
        a = tl.exp(gs)
        step = tl.load(beta + b * stride_bb + t * stride_bt + head * stride_bh).to(tl.float32)
        x = tl.load(v + b * stride_vb + t * stride_vt + head * stride_vh + d, mask=d < V, other=0.0).to(tl.float32)
        u = step * x
        if DELTA:
            u -= step * tl.sum(s * (ks * a)[None, :], 1)
        o = tl.sum(s * (qs * a)[None, :], 1) + tl.sum(qs * ks, 0) * u
        s = s * a[None, :] + u[:, None] * ks[None, :]
        row = (b * T + t) * heads + head
        if HAS_SKIP:
            o += tl.load(skip + head).to(tl.float32) * x
        tl.store(out + row * V + d, o.to(out.dtype.element_ty), mask=d < V)
        if RECORD:
            tl.store(kept_u + row * V + d, u, mask=d < V)
            if tile_v == 0:
                tl.store(kept_k + row * K + c, ks, mask=c < K)
                if SCALAR:
                    tl.store(kept_g + row, tl.sum(tl.where(c == 0, gs, 0.0), 0))
                else:
                    tl.store(kept_g + row * K + c, gs, mask=c < K)
    if not RECORD:
        tl.store(place, s, mask=tile & (slot > 0))


@triton.jit
def _commit_kernel(
    k, u, g, counts, state, slots, targets, heads, rows, stride_gk, stride_s, stride_u, stride_sv,
    SCALAR: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK_K)
    d = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    tile = (d < V)[:, None] & (c < K)[None, :]
    source, target = tl.load(slots + b).to(tl.int64), tl.load(targets + b).to(tl.int64)
    inner = head.to(tl.int64) * stride_u + d[:, None] * stride_sv + c[None, :]
    s = tl.load(state + source * stride_s + inner, mask=tile & (source > 0), other=0.0)
    for t in range(tl.load(counts + b)):
        row = (b * rows + t) * heads + head
        a = tl.exp(tl.load(g + row * (1 if SCALAR else K) + c * stride_gk, mask=c < K, other=0.0))
        ks = tl.load(k + row * K + c, mask=c < K, other=0.0)
        us = tl.load(u + row * V + d, mask=d < V, other=0.0)
        s = s * a[None, :] + us[:, None] * ks[None, :]
    tl.store(state + target * stride_s + inner, s, mask=tile & (target > 0))


def delta_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    scale: float,
    l2norm: bool = False,
    delta: bool = True,
    skip: Tensor | None = None,
) -> Tensor:
    q, k, v, g, beta = (x.unsqueeze(1) for x in (q, k, v, g, beta))
    return _run(q, k, v, g, beta, state, slots, scale, l2norm, delta, skip, record=False)[0].squeeze(1)


def delta_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    *,
    scale: float,
    l2norm: bool = False,
    delta: bool = True,
    skip: Tensor | None = None,
) -> tuple[Tensor, Rows]:
    return _run(q, k, v, g, beta, state, slots, scale, l2norm, delta, skip, record=True)


def delta_commit(rows: Rows, counts: Tensor, state: Tensor, slots: Tensor, targets: Tensor | None = None) -> None:
    batch, tokens, heads, keys = rows.k.shape
    width = rows.u.shape[-1]
    scalar = rows.g.shape[-1] == 1
    block_v = state_rows(width, keys)
    _commit_kernel[(batch, heads, triton.cdiv(width, block_v))](
        rows.k, rows.u, rows.g, counts, state, slots, slots if targets is None else targets, heads, tokens,
        0 if scalar else 1, *state.stride()[:3], SCALAR=scalar, K=keys, V=width, BLOCK_K=block(keys), BLOCK_V=block_v,
    )  # fmt: skip


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    scale: float,
    l2norm: bool,
    delta: bool,
    skip: Tensor | None,
    *,
    record: bool,
) -> tuple[Tensor, Rows]:
    batch, tokens, heads, width = v.shape
    keys = k.shape[-1]
    scalar = g.dim() == 3
    assert q.stride(3) == k.stride(3) == v.stride(3) == state.stride(3) == 1
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = (batch, tokens, heads) if record else (0, 0, 0)
    kept = Rows(
        *(torch.empty(*shape, n, dtype=torch.float32, device=v.device) for n in (keys, width, 1 if scalar else keys))
    )
    block_v = state_rows(width, keys)
    _rows_kernel[(batch, heads, triton.cdiv(width, block_v))](
        q, k, v, g, beta, state, slots, skip, out, kept.k, kept.u, kept.g, scale, heads, heads // q.shape[2],
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *g.stride()[:3], 0 if scalar else g.stride(3),
        *beta.stride(), *state.stride()[:3], T=tokens, RECORD=record, SCALAR=scalar, L2NORM=l2norm, DELTA=delta,
        HAS_SKIP=skip is not None, K=keys, V=width, BLOCK_K=block(keys), BLOCK_V=block_v,
    )  # fmt: skip
    return out, kept
