"""Mixture of experts, plain torch: routing, activations, grouped experts, MXFP4 weights.

Tokens are sorted by expert, so each expert is one matmul over its rows and everything else is one operation over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

MXFP4_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Activation:
    """silu: silu(gate) * up. situ (Kimi K3): b tanh(gate / b) sigmoid(gate) * c tanh(up / c) with b = beta and c =
    linear_beta (None: up as it is). relu2 (Nemotron-H): relu(x)^2, without a gate half."""

    kind: Literal["silu", "situ", "relu2"] = "silu"
    beta: float = 4.0
    linear_beta: float | None = None

    @property
    def gated(self) -> bool:
        return self.kind != "relu2"

    def __call__(self, x: Tensor) -> Tensor:
        """[n, 2 I] (gate half, then up half) -> [n, I]; not gated: [n, I] -> [n, I]."""
        if self.kind == "relu2":
            return torch.relu(x).square()
        gate, up = x.chunk(2, dim=-1)
        if self.kind == "silu":
            return torch.nn.functional.silu(gate) * up
        return situ(gate, up, self.beta, self.linear_beta)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The sigmoid-tanh unit in fp32."""
    wide, lifted = gate.float(), up.float()
    y = beta * torch.tanh(wide / beta) * torch.sigmoid(wide)
    y = y * (lifted if linear_beta is None else linear_beta * torch.tanh(lifted / linear_beta))
    return y.to(gate.dtype)


class Matrix(Protocol):
    """Of one expert, in a form of its own."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out_features]."""
        ...


Matrices = Tensor | Sequence[Matrix]


def route_sigmoid(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    groups: int = 1,
    kept_groups: int = 1,
    renormalise: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sigmoid routing without auxiliary loss: `bias` [E] corrects the choice of experts, not their weights.

    With groups, only experts of the `kept_groups` groups with the largest sum of two best scores compete. logits [T, E]
    fp32. Returns (weights [T, top_k] fp32, experts [T, top_k] int64).
    """
    scores = torch.sigmoid(logits.float())
    choice = scores + bias.float()
    if groups > 1:
        grouped = choice.view(len(choice), groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(-1)
        dropped = torch.ones_like(best, dtype=torch.bool)
        dropped.scatter_(1, best.topk(kept_groups, dim=-1).indices, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, experts


def route_softmax(
    logits: Tensor, top_k: int, *, renormalise: bool = True, scaling: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in fp32, then the best top_k. With renormalise it equals a softmax over those alone."""
    weights, experts = torch.softmax(logits.float(), dim=-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scaling, experts


def experts_mlp(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    up: Matrices,
    down: Matrices,
    activation: Activation,
    *,
    min_rows: int = 1,
) -> Tensor:
    """sum_j weights[t, j] * down[e] act(up[e] x[t]) with e = experts[t, j].

    x [T, hidden]; weights, experts [T, k]; up [E, 2 I, hidden] (gate rows, then up rows; [E, I, hidden] when not
    gated), down [E, hidden, I], or one matrix an expert. min_rows: run an expert's
    matmul with at least so many rows (4 makes a row's bits independent of how many others chose the expert). Returns
    [T, hidden] in x's dtype.
    """
    chosen = experts.flatten()
    order = torch.argsort(chosen, stable=True)
    bounds = torch.bincount(chosen, minlength=len(up)).cumsum(0).tolist()
    rows = x.index_select(0, order // experts.shape[1])
    inner = activation(_grouped(rows, up, bounds, min_rows))
    result = _grouped(inner, down, bounds, min_rows)
    placed = torch.empty_like(result)
    placed[order] = result
    return torch.einsum("tkh,tk->th", placed.view(*experts.shape, x.shape[1]).float(), weights.float()).to(x.dtype)


def _grouped(rows: Tensor, matrices: Matrices, bounds: list[int], min_rows: int) -> Tensor:
    if not isinstance(matrices, Tensor):
        return _each(rows, matrices, bounds, min_rows)
    out = rows.new_empty(len(rows), matrices.shape[1])
    begin = 0
    for expert, end in enumerate(bounds):
        if end - begin >= min_rows:
            torch.mm(rows[begin:end], matrices[expert].t(), out=out[begin:end])
        elif end > begin:
            padded = torch.nn.functional.pad(rows[begin:end], (0, 0, 0, min_rows - (end - begin)))
            out[begin:end] = (padded @ matrices[expert].t())[: end - begin]
        begin = end
    return out


def _each(rows: Tensor, matrices: Sequence[Matrix], bounds: list[int], min_rows: int) -> Tensor:
    out = rows.new_empty(len(rows), matrices[0].out_features)
    begin = 0
    for matrix, end in zip(matrices, bounds, strict=True):
        if end > begin:
            missing = max(0, min_rows - (end - begin))
            part = torch.nn.functional.pad(rows[begin:end], (0, 0, 0, missing)) if missing else rows[begin:end]
            out[begin:end] = matrix(part)[: end - begin]
        begin = end
    return out


def dequantise_mxfp4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Open Compute MX: packed [..., n / 2] uint8 holds two E2M1 values a byte, the even one in the low half; scales
    [..., n / 32] uint8 are powers of two with bias 127 (255 = NaN). Returns [..., n]."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device=packed.device)
    pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    values = table[pairs.int()]
    exponents = torch.where(scales == 255, torch.nan, torch.exp2(scales.float() - 127.0))
    grouped = torch.unflatten(values, -1, (-1, MXFP4_GROUP)) * exponents.unsqueeze(-1)
    return grouped.flatten(-2).to(dtype)
