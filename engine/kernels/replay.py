"""ReplaySSM decode: a state checkpoint plus a ring of the records since, instead of rewriting the state each token.

With h records since the checkpoint S0 (G_j the cumulative gate from it), a read in direction x is
    rd(x) = S0 (e^{G_h} o x) + sum_{j<=h} u_j [(e^{G_h - G_j} o k_j) . x]
A step reads S0 and the ring and appends (k, u, g), u already corrected; every `length` steps it also folds the ring
into S0 ("flush"). The records of a request live in its slot beside the state.

Two forms. Bounded gate, (length - 1) |lower bound| <= 80: keys are stored pre-decayed, k_j o e^{-G_j}, and `g` holds
the cumulative G_j, so one vector e^{G_h} o x serves checkpoint and ring. Any other gate: raw keys and each token's own
g; the suffix decays are summed when read, so nothing overflows or cancels.

The cursor (records held) is one int per request for all layers: kernels read it, the runner moves it once per step
after the last layer (advance). length = 1 is plain decode bit for bit. Slot 0 is null, never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.delta_decode import finish, fold_, prepare


@dataclass(frozen=True, slots=True)
class Ring:
    """One layer of the record components, fp32: k [slot, HV, L, K], u [slot, HV, L, V], g [slot, HV, L, K or 1].
    pre_decayed: which of the two forms, fixed by the model's gate."""

    k: Tensor
    u: Tensor
    g: Tensor
    pre_decayed: bool

    @property
    def length(self) -> int:
        return self.k.shape[2]


def pre_decay_fits(length: int, lower_bound: float | None) -> bool:
    """Whether keys may be stored divided by their decay: e^{80} is within fp32, a gate without a bound is not."""
    return lower_bound is not None and (length - 1) * abs(lower_bound) <= 80.0


def flush_due(cursor: Tensor, slots: Tensor, positions: Tensor, length: int) -> Tensor:
    """Which requests fold their ring in this step: when it is full, and once earlier where that brings the request on
    a phase given by its slot, so that flushes of a batch spread over the steps. All [B]; returns bool."""
    return (cursor == length - 1) | ((positions + slots) % length == length - 1)


def advance(cursor: Tensor, flushed: Tensor, slots: Tensor) -> Tensor:
    """The cursors [B] after the step: 0 where flushed, one more elsewhere; padding stays 0."""
    return torch.where(flushed | (slots == 0), 0, cursor + 1)


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
    """delta_decode through the ring. cursor [B]: records held before this token, 0..L-1; flush [B] bool: fold now
    (must be true where cursor = L - 1). The state is written only for flushing requests, the ring for the others."""
    assert bool((flush | (cursor < ring.length - 1)).all()), "a full ring must be flushed"
    q, k, a = prepare(q, k, g, v.shape[1], scale, l2norm)
    logs = (g if g.dim() == q.dim() else g.unsqueeze(-1)).float()
    values, beta = v.float(), beta.float().unsqueeze(-1)
    reads = torch.stack((k * a, q * a), dim=-2)  # [B, HV, 2, K]
    dots = (q * k).sum(-1, keepdim=True)
    total = torch.zeros_like(logs)  # cumulative gate of the records, pre-decayed form only
    if ring.pre_decayed:
        last = ring.g[slots, :, (cursor - 1).clamp(min=0)]
        total = torch.where((cursor > 0)[:, None, None], last, total)
        reads = reads * total.exp().unsqueeze(-2)
    seen = values.new_zeros(len(q), v.shape[1], 2, v.shape[2])
    rows = [(b, slot, h) for b, (slot, h) in enumerate(zip(slots.tolist(), cursor.tolist(), strict=True)) if slot]
    for b, slot, held in rows:
        _read(state[slot], ring, slot, held, reads[b], seen[b])
    us = beta * values
    if delta:
        us -= beta * seen[:, :, 0]
    for b, slot, held in rows:
        if flush[b]:
            _fold_ring(state[slot], ring, slot, held)
            fold_(state[slot], a[b], us[b], k[b])
    _append(ring, slots, cursor, ~flush & (slots > 0), k, us, logs + total)
    return finish(torch.addcmul(seen[:, :, 1], dots, us), v, skip)


def replay_materialise(state: Tensor, ring: Ring, sources: Tensor, counts: Tensor, targets: Tensor) -> None:
    """The exact state after counts[b] records of slot sources[b], written to targets[b]; source and ring stay.

    target = source folds in place (the caller then resets the cursor). Used before a state is cached, handed over or
    swapped out: no record ever leaves the worker."""
    for slot, count, target in zip(sources.tolist(), counts.tolist(), targets.tolist(), strict=True):
        if not target:
            continue
        if target != slot:
            state[target] = state[slot]
        _fold_ring(state[target], ring, slot, count)


def _read(s: Tensor, ring: Ring, slot: int, held: int, x: Tensor, out: Tensor) -> None:
    """rd(x) for x [HV, n, K] into out [HV, n, V]; in the pre-decayed form x carries e^{G_h} already."""
    if not held:
        torch.bmm(x, s.transpose(1, 2), out=out)
        return
    keys, values = ring.k[slot, :, :held], ring.u[slot, :, :held]
    if ring.pre_decayed:
        torch.bmm(x, s.transpose(1, 2), out=out)
    else:
        total, later = _decays(ring.g[slot, :, :held])
        torch.bmm(x * total.unsqueeze(1), s.transpose(1, 2), out=out)
        keys = keys * later
    out.baddbmm_(torch.bmm(x, keys.transpose(1, 2)), values)


def _append(ring: Ring, slots: Tensor, cursor: Tensor, kept: Tensor, k: Tensor, u: Tensor, g: Tensor) -> None:
    """Store the records of the rows that keep theirs, at their cursors."""
    rows = kept.nonzero().squeeze(1)
    if not len(rows):
        return
    at, places = slots[rows], cursor[rows]
    k, u, g = k[rows], u[rows], g[rows]
    ring.k[at, :, places] = k * (-g).exp() if ring.pre_decayed else k
    ring.u[at, :, places] = u
    ring.g[at, :, places] = g


def _fold_ring(s: Tensor, ring: Ring, slot: int, count: int) -> None:
    """s <- s diag(e^{G}) + sum_j u_j (e^{G - G_j} o k_j)^T over the first `count` records, in place."""
    if not count:
        return
    keys, values, logs = ring.k[slot, :, :count], ring.u[slot, :, :count], ring.g[slot, :, :count]
    if ring.pre_decayed:
        total = logs[:, -1].exp()
        keys = keys * total.unsqueeze(1)
    else:
        total, later = _decays(logs)
        keys = keys * later
    s.mul_(total.unsqueeze(1)).baddbmm_(values.transpose(1, 2), keys)


def _decays(logs: Tensor) -> tuple[Tensor, Tensor]:
    """[HV, h, K] -> e^{G_h} [HV, K] and each record's decay since, e^{G_h - G_j} [HV, h, K]: sums of later gates, never
    differences of cumulative ones, so nothing cancels."""
    held = logs.shape[1]
    later = torch.ones(held, held, device=logs.device).triu_(1) @ logs
    return (later[:, 0] + logs[:, 0]).exp(), later.exp()
