"""Token-by-token float64 recurrences: what every linear-state kernel is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""(q, k, v, g, beta), to be starred into a kernel call."""


@dataclass
class Case:
    """One sequence's inputs; call naive(case, state) for outputs and the state after each token."""

    q: Tensor  # [T, H, K]
    k: Tensor
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV, K] or [T, HV]
    beta: Tensor  # [T, HV]
    scale: float
    l2norm: bool = True
    delta: bool = True
    skip: Tensor | None = None

    def part(self, start: int, end: int) -> Case:
        names = ("q", "k", "v", "g", "beta")
        return replace(self, **{name: getattr(self, name)[start:end] for name in names})

    @property
    def flags(self) -> dict[str, Any]:
        return {"scale": self.scale, "l2norm": self.l2norm, "delta": self.delta, "skip": self.skip}

    @property
    def tensors(self) -> Inputs:
        return self.q, self.k, self.v, self.g, self.beta

    def row(self, t: int, batch: int = 1) -> Inputs:
        """Token t as a decode batch of equal rows."""
        q, k, v, g, beta = (x[t : t + 1].expand(batch, *x.shape[1:]) for x in self.tensors)
        return q, k, v, g, beta


def joined(cases: list[Case], stack: bool = False) -> Inputs:
    """The tensors of several sequences packed one after the other, or stacked on a new first axis."""
    join: Any = torch.stack if stack else torch.cat
    q, k, v, g, beta = (join(parts) for parts in zip(*(c.tensors for c in cases), strict=True))
    return q, k, v, g, beta


def make_case(seed: int, length: int, kind: str, *, heads: int = 2, group: int = 1, K: int = 16, V: int = 16) -> Case:
    """kind: kda (softplus gate), bounded (K3), extreme (gates from 0 to -1000), gdn, mamba2. Inputs have std 0.1."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.1) -> Tensor:
        return torch.randn(*shape, generator=draw) * std

    HV = heads * group
    q, k, v = normal(length, heads, K), normal(length, heads, K), normal(length, HV, V)
    beta = torch.sigmoid(normal(length, HV, std=1.0))
    scale = K**-0.5
    if kind == "gdn":
        g = -torch.nn.functional.softplus(normal(length, HV, std=1.0))
        return Case(q, k, v, g, beta, scale)
    if kind == "mamba2":
        dt = torch.nn.functional.softplus(normal(length, HV, std=1.0))
        return Case(q, k, v, -2.0 * dt, dt, 1.0, l2norm=False, delta=False, skip=normal(HV, std=1.0))
    if kind == "bounded":
        g = -5.0 * torch.sigmoid(3.0 * normal(length, HV, K, std=1.0))
    elif kind == "extreme":
        exponent = torch.rand(length, HV, K, generator=draw) * 12 - 9
        g = -(10.0**exponent)
    else:
        g = -torch.nn.functional.softplus(normal(length, HV, K, std=1.0))
    return Case(q, k, v, g, beta, scale)


def naive(case: Case, state: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Outputs [T, HV, V] and the states [HV, V, K] before the first and after every token, all float64."""
    q, k, v, g, beta = (x.double() for x in case.tensors)
    if case.l2norm:
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    HV, V = v.shape[1:]
    group = HV // q.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    s = torch.zeros(HV, V, k.shape[-1], dtype=torch.float64) if state is None else state.double().clone()
    outs, states = [], [s]
    for t in range(len(q)):
        decay = g[t].exp()
        s = s * (decay[:, None, :] if g.dim() == 3 else decay[:, None, None])
        seen = torch.einsum("hvk,hk->hv", s, k[t])
        u = beta[t][:, None] * (v[t] - seen if case.delta else v[t])
        s = s + u[:, :, None] * k[t][:, None, :]
        o = case.scale * torch.einsum("hvk,hk->hv", s, q[t])
        outs.append(o if case.skip is None else o + case.skip.double()[:, None] * v[t])
        states.append(s)
    return (torch.stack(outs) if outs else v.new_zeros(0, HV, V)), states


def pool(slots: int, heads: int, V: int, K: int, layers: int = 3, layer: int = 1) -> tuple[Tensor, Tensor]:
    """A recurrent-state pool [slot, unit, layer, V, K] as laid out in a worker, and one layer's strided view.

    Filled with a sentinel except slot 0, so a read of a wrong place shows."""
    whole = torch.full((slots, heads, layers, V, K), 7.0)
    whole[0] = 0.0
    return whole, whole.select(2, layer)


def relative(got: Tensor, want: Tensor) -> float:
    """Largest error relative to the largest magnitude wanted."""
    if want.numel() == 0:
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-12))


def draw(*shape: int, seed: int = 0, std: float = 0.1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def slot_pool(slots: int, *unit: int, layers: int = 2) -> Tensor:
    """One layer of [slot, unit, layer, ...], random but for the null slot."""
    whole = draw(slots, unit[0], layers, *unit[1:], seed=11)
    whole[0] = 0
    return whole.select(2, 1)


def copy_of(state: Tensor) -> Tensor:
    """The same layer view of a second pool with equal content and strides."""
    twin = torch.empty_strided(state.shape, state.stride(), dtype=state.dtype)
    return twin.copy_(state)
