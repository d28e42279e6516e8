"""Chunked prefill of linear-state layers (KDA, Gated DeltaNet, Mamba2) in WY form, plain torch.

One token of one value head, S in R^[V, K]:  S <- S diag(e^g);  u = beta (v - S k) or beta v;  S <- S + u k^T;
o = scale S q (+ skip v). For a chunk of 16 tokens entering with S0, G the inclusive cumulative gate inside it:

    A_kk[i,j] = k_i e^{G_i - G_j} k_j (j < i)     A_qk[i,j] = q_i e^{G_i - G_j} k_j (j <= i)
    T = (I + strict_lower(diag(beta) A_kk))^-1 diag(beta)
    W = T (e^G o k)     U = T v - W S0^T
    O = scale [ (e^G o q) S0^T + A_qk U ]         S = S0 diag(e^{G_16}) + U^T (e^{G_16 - G} o k)

Every decay between two rows is a product of factors <= 1: blocks of 1, 2, 4 and 8 rows are merged pairwise, the rows of
the later block carrying the decay since that block's beginning, those of the earlier one the decay until its end. So
nothing overflows for any gate, nothing is lost to cancellation, and e^g is the only exponential. T is inverted by the
same merging ([[T1, 0], [-T2 L T1, T2]]), which stays exact for correlated keys where powers of L would not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.delta_chunk_plan import CHUNK, ChunkPlan, Scratch

SLAB_ROWS = 2048
"""Chunk rows times value heads worked on at once: bounds temporaries and keeps them in cache."""


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
    """Run the plan's tokens and leave every sequence's state in its final slot (and checkpoints in theirs).

    q, k [T, H, K]; v [T, HV, V]; HV a multiple of H (value head i reads q/k head i // (HV / H)).
    g: log decay <= 0, fp32, [T, HV, K] or [T, HV]; beta [T, HV] (Mamba2: dt). skip [HV]: adds skip * v to the output.
    state: one layer of the pool, [slot, HV, V, K] fp32 with K contiguous. T may exceed the plan's tokens (padding):
    those rows return zeros and touch nothing. l2norm: normalise q and k over K, eps 1e-6 inside the root.
    Returns [T, HV, V] in v's dtype.
    """
    heads, width = v.shape[1:]
    out = v.new_zeros(v.shape) if len(v) > plan.tokens else torch.empty_like(v, memory_format=torch.contiguous_format)
    carried = _initial_states(state, plan, heads, width, k.shape[-1])
    rows = out if plan.dense else plan.scratch.take("rows", len(plan.rows), heads, width)
    for first, last in _slabs(plan, heads):
        begin, end = plan.steps[first][0], sum(plan.steps[last - 1])
        take = _Take(plan, begin, end)
        chunk = _prepare(take, plan.scratch, q, k, v, g, beta, scale, l2norm, delta)
        chunk.walk(carried, state, plan, first, last)
        y = torch.unflatten(chunk.x[:, -CHUNK:], 0, (-1, heads)).transpose(1, 2)
        if skip is not None:
            y.addcmul_(take(v).float(), skip.float()[:, None])
        torch.unflatten(rows[begin * CHUNK : end * CHUNK], 0, (-1, CHUNK)).copy_(y)
    if not plan.dense:
        out[: plan.tokens] = rows.index_select(0, plan.places)
    for rank, sequence in enumerate(plan.order):
        if plan.final[sequence]:
            state[plan.final[sequence]] = carried[rank]
    return out


def _initial_states(state: Tensor, plan: ChunkPlan, heads: int, width: int, keys: int) -> Tensor:
    carried = plan.scratch.take("carried", len(plan.order), heads, width, keys)
    for rank, sequence in enumerate(plan.order):
        if plan.initial[sequence]:
            carried[rank] = state[plan.initial[sequence]]
        else:
            carried[rank] = 0.0
    return carried


def _slabs(plan: ChunkPlan, heads: int) -> list[tuple[int, int]]:
    """Runs of steps whose chunks fit a slab, at least one step each."""
    slabs: list[tuple[int, int]] = []
    first = size = 0
    for step, (_, count) in enumerate(plan.steps):
        work = count * CHUNK * heads
        if step > first and size + work > SLAB_ROWS:
            slabs.append((first, step))
            first, size = step, 0
        size += work
    if plan.steps:
        slabs.append((first, len(plan.steps)))
    return slabs


class _Take:
    """Token tensors as chunk rows [chunks, 16, ...] of one slab."""

    def __init__(self, plan: ChunkPlan, begin: int, end: int) -> None:
        self.begin, self.end = begin * CHUNK, end * CHUNK
        self.index = None if plan.dense else plan.rows[self.begin : self.end]
        inside = (plan.padding >= self.begin) & (plan.padding < self.end)
        self.padding = plan.padding[inside] - self.begin

    def __call__(self, x: Tensor) -> Tensor:
        rows = x[self.begin : self.end] if self.index is None else x.index_select(0, self.index)
        return torch.unflatten(rows, 0, (-1, CHUNK))

    def filled(self, x: Tensor, value: float) -> Tensor:
        """A fp32 copy in which padding rows hold `value`."""
        rows = self(x).float()
        if len(self.padding):
            rows = rows.clone() if self.index is None else rows
            rows.flatten(0, 1)[self.padding] = value
        return rows


@dataclass(slots=True)
class _Chunks:
    """A slab ready to be walked, first axis = chunk x value head. With the delta rule x [m, 32, V] holds U over O
    and w [m, 32, K] what to multiply the entering state with; without it U is known and x, w hold O's 16 rows only.
    updates [m, 16, V] = U; keys [m, 16, K] = e^{G_16 - G} o k; decay [m, 1, K or 1] = e^{G_16}."""

    x: Tensor
    w: Tensor
    updates: Tensor
    keys: Tensor
    decay: Tensor

    def walk(self, carried: Tensor, state: Tensor, plan: ChunkPlan, first: int, last: int) -> None:
        """The only sequential part: three matmul-sized operations a step for all running sequences."""
        base, heads = plan.steps[first][0], carried.shape[1]
        for step in range(first, last):
            offset, count = plan.steps[step]
            here = slice((offset - base) * heads, (offset - base + count) * heads)
            s = carried[:count].flatten(0, 1)
            self.x[here].baddbmm_(self.w[here], s.transpose(1, 2))
            s.mul_(self.decay[here]).baddbmm_(self.updates[here].transpose(1, 2), self.keys[here])
            for rank, slot in plan.step_checkpoints.get(step, ()):
                state[slot] = carried[rank]


def _prepare(
    take: _Take,
    scratch: Scratch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    l2norm: bool,
    delta: bool,
) -> _Chunks:
    """Everything that does not need the entering state, for all chunks of a slab at once."""
    logs = take.filled(g, 0.0).transpose(1, 2)
    a = torch.exp(logs, out=scratch.take("a", *logs.shape))
    b = take.filled(beta, 0.0).transpose(1, 2)  # [n, HV, 16]
    qs = _scaled(take(q), scratch.take("q", len(b), q.shape[1], CHUNK, q.shape[2]), scale, l2norm)
    ks = _scaled(take(k), scratch.take("k", *qs.shape), 1.0, l2norm)
    intra = _vector_gate if g.dim() == 3 else _scalar_gate
    qk, keys, decay, a_qk, t = intra(scratch, qs, ks, a, b, delta)
    values = scratch.take("values", *b.shape, v.shape[-1]).copy_(take(v).transpose(1, 2)).flatten(0, 1)
    keys, decay = keys.flatten(0, 1), decay.flatten(0, 1)
    if not delta:
        updates = values.mul_(b.reshape(-1, CHUNK, 1))
        return _Chunks(torch.bmm(a_qk, updates), qk[:, :, 0].contiguous(), updates, keys, decay)
    # Results of batched matmuls must be contiguous: others fall to a loop over single matmuls.
    both = torch.cat((t, torch.bmm(a_qk, t)), dim=1)
    x = torch.bmm(both, values, out=scratch.take("x", len(both), 2 * CHUNK, v.shape[-1]))
    w = torch.bmm(both.neg_(), qk[:, :, 1], out=scratch.take("w", len(both), 2 * CHUNK, k.shape[-1]))
    w[:, CHUNK:] += qk[:, :, 0]
    return _Chunks(x, w, x[:, :CHUNK], keys, decay)


def _scaled(x: Tensor, out: Tensor, scale: float, l2norm: bool) -> Tensor:
    """[n, 16, H, K] -> fp32 [n, H, 16, K] in `out`, normalised and scaled."""
    out.copy_(x.transpose(1, 2))
    if l2norm:
        return out.mul_(torch.linalg.vector_norm(out, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_().mul_(scale))
    return out if scale == 1.0 else out.mul_(scale)


def _vector_gate(
    scratch: Scratch, q: Tensor, k: Tensor, a: Tensor, b: Tensor, delta: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """a = e^g [n, HV, 16, K]. Returns qk [n*HV, 16, 2, K] = e^G o (q, k), keys, decay, A_qk and T [n*HV, 16, 16]."""
    n, heads, _, width = a.shape
    group = heads // q.shape[1]
    keys = scratch.take("keys", n, heads, CHUNK, width)
    torch.unflatten(keys, 1, (-1, group)).copy_(k.unsqueeze(2))
    # q_i and k_i are neighbours, so a block's rows are one contiguous [2b, K] matrix.
    qk = scratch.take("qk", n, heads, CHUNK, 2, width)
    queries = torch.unflatten(qk[..., 0, :], 1, (-1, group))
    torch.mul(q.unsqueeze(2), torch.unflatten(a, 1, (-1, group)), out=queries)
    torch.mul(keys, a, out=qk[..., 1, :])
    a_qk = _row_dots(q, k).unsqueeze(2).expand(-1, -1, group, -1).reshape(-1, 1, 1)
    t = b.reshape(-1, 1, 1)
    total = a.reshape(-1, width)
    size = 1
    while size < CHUNK:
        later = qk.view(-1, 2, 2 * size, width)[:, 1]
        earlier = keys.view(-1, 2, size, width)[:, 0]
        cross = torch.bmm(later, earlier.transpose(1, 2)).view(-1, size, 2, size)
        a_qk = _merge(a_qk, cross[:, :, 0])
        t = _merge_inverse(t, cross[:, :, 1]) if delta else t
        pair = total.view(-1, 2, 1, width)
        later *= pair[:, 0]
        earlier *= pair[:, 1]
        total = pair[:, 0, 0] * pair[:, 1, 0]
        size *= 2
    return qk.flatten(0, 1), keys, total.view(n, heads, 1, width), a_qk, t


def _scalar_gate(
    scratch: Scratch, q: Tensor, k: Tensor, a: Tensor, b: Tensor, delta: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As _vector_gate with one gate a head, a = e^g [n, HV, 16]: the decay leaves the channel sum, and inner products
    are shared by the value heads of a q/k head."""
    n, heads, _ = a.shape
    group = heads // q.shape[1]
    width = q.shape[-1]
    both = torch.cat((q, k), dim=2).flatten(0, 1)
    dots = torch.bmm(both, k.flatten(0, 1).transpose(1, 2))
    dots = dots.view(n, -1, 1, 2, CHUNK, CHUNK).expand(-1, -1, group, -1, -1, -1)
    between, since, until = _decays(a.view(-1, CHUNK))
    between = between.view(n, -1, group, 1, CHUNK, CHUNK)
    a_both = (dots * between).view(-1, 2, CHUNK, CHUNK)
    since_rows = since.view(n, -1, group, CHUNK, 1, 1)
    qk = scratch.take("qk", n, heads // group, group, CHUNK, 2, width)
    torch.mul(torch.stack((q, k), dim=3).unsqueeze(2), since_rows, out=qk)
    keys = scratch.take("keys", n, heads // group, group, CHUNK, width)
    torch.mul(k.unsqueeze(2), until.view(n, -1, group, CHUNK, 1), out=keys)
    t = _inverse(a_both[:, 1], b.reshape(-1, CHUNK)) if delta else b
    return (
        qk.view(-1, CHUNK, 2, width),
        keys.view(n, heads, CHUNK, width),
        since[:, -1].reshape(n, heads, 1, 1),
        a_both[:, 0],
        t,
    )


def _decays(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a [m, 16] -> e^{G_i - G_j} for j <= i (else 0) [m, 16, 16], e^{G_i} and e^{G_16 - G_j} [m, 16]."""
    since, until = a.clone(), torch.ones_like(a)
    between = a.new_ones(a.numel(), 1, 1)
    total = a.reshape(-1)
    size = 1
    while size < CHUNK:
        later, earlier = since.view(-1, 2, size)[:, 1], until.view(-1, 2, size)[:, 0]
        between = _merge(between, later.unsqueeze(2) * earlier.unsqueeze(1))
        pair = total.view(-1, 2)
        later *= pair[:, :1]
        earlier *= pair[:, 1:]
        total = pair[:, 0] * pair[:, 1]
        size *= 2
    return between, since, until


def _inverse(a_kk: Tensor, b: Tensor) -> Tensor:
    """(I + strict_lower(diag(b) a_kk))^-1 diag(b), [m, 16, 16]."""
    t = b.reshape(-1, 1, 1)
    size = 1
    while size < CHUNK:
        blocks = torch.unflatten(torch.unflatten(a_kk, 2, (-1, 2, size)), 1, (-1, 2, size))
        cross = blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        t = _merge_inverse(t, cross.reshape(-1, size, size))
        size *= 2
    return t


def _row_dots(q: Tensor, k: Tensor) -> Tensor:
    return (q * k).sum(-1)


def _merge(blocks: Tensor, cross: Tensor) -> Tensor:
    """Pairs of [b, b] diagonal blocks and their lower-left blocks -> [2b, 2b] blocks, upper right zero."""
    pair = blocks.view(-1, 2, *blocks.shape[1:])
    size = blocks.shape[-1]
    merged = blocks.new_zeros(len(pair), 2 * size, 2 * size)
    merged[:, :size, :size] = pair[:, 0]
    merged[:, size:, size:] = pair[:, 1]
    merged[:, size:, :size] = cross
    return merged


def _merge_inverse(t: Tensor, cross: Tensor) -> Tensor:
    """t blocks are (I + L)^-1 diag(b); cross is A_kk between the pair's blocks, so L between them is diag(b) cross and
    the lower-left block of the merged T is -T2 cross T1 (T2 holds diag(b) already)."""
    pair = t.view(-1, 2, *t.shape[1:])
    return _merge(t, -torch.bmm(pair[:, 1], torch.bmm(cross, pair[:, 0])))
