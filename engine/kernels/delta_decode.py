"""Decode of linear-state layers: one token, T speculative rows, and the commit of those accepted. Plain torch.

All three read the state before changing it: with a = e^g,
    u = beta (v - S (a o k)) or beta v;   o = scale [ S (a o q) + (k . q) u ] (+ skip v);   S <- S diag(a) + u k^T
so a step reads S once and writes it once, and the same reads work through a replay ring (replay.py).
Layouts as in delta_chunk: state is one layer of the pool, [slot, HV, V, K] fp32. Slot 0 is null: zero, never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_BYTES = 2 << 20
"""Requests are read, then folded, in groups whose states stay in cache in between; the small operations of a group are
done at once. (A matmul with the state as its right operand is five times faster than one with it as its left.)"""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a commit needs of verified rows, fp32: k [B, T, HV, K] normalised, u [B, T, HV, V] corrected values,
    g [B, T, HV, K or 1]."""

    k: Tensor
    u: Tensor
    g: Tensor


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
    """One token a request, in place. q, k [B, H, K]; v [B, HV, V]; g [B, HV, K] or [B, HV] fp32; beta [B, HV];
    slots [B] int64. Returns [B, HV, V] in v's dtype; padding rows (slot 0) return what a zero state gives."""
    q, k, a = prepare(q, k, g, v.shape[1], scale, l2norm)
    values, beta = v.float(), beta.float().unsqueeze(-1)
    reads = torch.stack((k * a, q * a), dim=-2)  # [B, HV, 2, K]
    dots = (q * k).sum(-1, keepdim=True)
    seen = values.new_zeros(len(q), v.shape[1], 2, v.shape[2])
    us = beta * values
    # Views of every row at once: taken one by one they would cost as much as the arithmetic.
    views = list(zip(reads, seen, a.unsqueeze(-2), us.unsqueeze(-1), k.unsqueeze(-2), slots.tolist(), strict=True))
    per_group = max(1, GROUP_BYTES // (4 * state[0].numel()))
    for first in range(0, len(views), per_group):
        group = slice(first, first + per_group)
        held = [(state[view[-1]], *view[:-1]) for view in views[group] if view[-1]]
        for s, read, result, *_ in held:
            torch.bmm(read, s.transpose(1, 2), out=result)
        if delta:
            us[group] -= beta[group] * seen[group, :, 0]
        for s, _, _, fade, u, key in held:
            s.mul_(fade).addcmul_(u, key)
    return finish(torch.addcmul(seen[:, :, 1], dots, us), v, skip)


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
    """T rows a request as if decoded one after the other; the state is only read. Arguments as delta_decode with a
    row axis: q [B, T, H, K] and so on. Returns ([B, T, HV, V], rows for delta_commit)."""
    rows = q.shape[1]
    q, k, a = prepare(q, k, g, v.shape[2], scale, l2norm)
    values, beta = v.float(), beta.float().unsqueeze(-1)
    reads = torch.stack((k * a, q * a), dim=-2)
    dots = (q * k).sum(-1, keepdim=True)
    out, us = torch.empty_like(values), beta * values
    for b, slot in enumerate(slots.tolist()):
        s = state[slot].clone() if slot else torch.zeros_like(state[0])
        for t in range(rows):
            seen = torch.bmm(reads[b, t], s.transpose(1, 2))
            u = us[b, t]
            if delta:
                u -= beta[b, t] * seen[:, 0]
            torch.addcmul(seen[:, 1], dots[b, t], u, out=out[b, t])
            fold_(s, a[b, t], u, k[b, t])
    return finish(out, v, skip), Rows(k, us, g.float() if g.dim() == 4 else g.float().unsqueeze(-1))


def delta_commit(rows: Rows, counts: Tensor, state: Tensor, slots: Tensor, targets: Tensor | None = None) -> None:
    """Fold the first counts[b] verified rows into the state of slots[b], leaving it in targets[b] (default: in place).

    In decode's own order, so a committed row equals a decoded one bit for bit. counts [B] int64, 0..T."""
    targets = slots if targets is None else targets
    for b, (count, slot, target) in enumerate(zip(counts.tolist(), slots.tolist(), targets.tolist(), strict=True)):
        if not target:
            continue
        s = state[target]
        if target != slot:
            s.copy_(state[slot])
        a = rows.g[b].exp()
        for t in range(count):
            fold_(s, a[t], rows.u[b, t], rows.k[b, t])


def prepare(q: Tensor, k: Tensor, g: Tensor, heads: int, scale: float, l2norm: bool) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 q (scaled) and k (normalised when asked) with one head per value head, and a = e^g with a last axis."""
    q, k = q.float(), k.float()
    if l2norm:
        q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    group = heads // q.shape[-2]
    if group > 1:
        q, k = q.repeat_interleave(group, -2), k.repeat_interleave(group, -2)
    a = g.float().exp()
    return q * scale, k, a if g.dim() == q.dim() else a.unsqueeze(-1)


def fold_(s: Tensor, a: Tensor, u: Tensor, k: Tensor) -> None:
    """S <- S diag(a) + u k^T in place: s [HV, V, K], a [HV, K or 1], u [HV, V], k [HV, K]."""
    s.mul_(a.unsqueeze(-2)).addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))


def finish(out: Tensor, v: Tensor, skip: Tensor | None) -> Tensor:
    if skip is not None:
        out.addcmul_(v.float(), skip.float()[:, None])
    return out.to(v.dtype)
