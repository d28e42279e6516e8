"""Feed-forward layers from their matrices: one MLP, and experts with an MLP beside them."""

from __future__ import annotations

import torch

from engine.kernels.cpu.products import MAX_ROWS, FeedForward
from engine.kernels.moe import Activation
from engine.kernels.ops import experts_mlp, uses_triton
from engine.layers.batch import StepBatch
from engine.layers.linear import Linear, packs

Routed = tuple[torch.Tensor, torch.Tensor]
"""Weights (fp32) and experts (int64) of each token, both [T, top_k]."""


class Mlp:
    """down(act(up x)); up has the gate's rows first where the activation is gated."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        self.up, self.down, self.activation = up, down, activation
        self._compiled = _compiled([], [], self, activation)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, step: StepBatch | None = None
    ) -> torch.Tensor:
        """x [T, hidden] -> residual + output. step: taken as by the other feed-forward layers, and not needed."""
        if self._compiled is not None and len(x) <= MAX_ROWS:
            return self._compiled(x, add=residual)
        y = self.activation(self.up(x))
        return self.down(y) if residual is None else self.down.add_to(residual, y)


class Experts:
    """Routed experts, and one that takes every token (or none)."""

    def __init__(self, up: torch.Tensor, down: torch.Tensor, activation: Activation, shared: Mlp | None = None) -> None:
        """up [E, 2 I, hidden] (gate rows, then up rows; [E, I, hidden] when not gated), down [E, hidden, I]."""
        self._activation = activation
        self._shared = shared
        self._up: torch.Tensor | list[Linear] = up
        self._down: torch.Tensor | list[Linear] = down
        self._compiled: FeedForward | None = None
        if packs(up) and not uses_triton(up.device):
            self._up, self._down = [Linear(w) for w in up], [Linear(w) for w in down]
            self._compiled = _compiled(self._up, self._down, shared, activation)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        routed: Routed,
        step: StepBatch,
        shared_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden] -> residual (None = nothing) + weighted experts + the shared one, weighted by shared_weights
        [T] fp32 where there are any."""
        if self._compiled is not None and len(x) <= MAX_ROWS:
            return self._compiled(x, routed=routed, add=residual, shared_weights=shared_weights)
        y = experts_mlp(x, *routed, self._up, self._down, self._activation, min_rows=step.min_rows)
        y = y if residual is None else residual + y
        if self._shared is None:
            return y
        if shared_weights is None:
            return self._shared(x, y)
        return y + shared_weights.unsqueeze(1).to(y.dtype) * self._shared(x)


def _compiled(ups: list[Linear], downs: list[Linear], shared: Mlp | None, act: Activation) -> FeedForward | None:
    """None unless all matrices have their form for few rows."""
    up, down = [one.few for one in ups], [one.few for one in downs]
    beside = (shared.up.few, shared.down.few) if shared else ()
    found = [one for one in (*up, *down, *beside) if one is not None]
    if len(found) < len(up) + len(down) + len(beside):
        return None
    count = len(up)
    pair = (found[2 * count], found[2 * count + 1]) if shared else None
    return FeedForward(found[:count], found[count : 2 * count], pair, act)
