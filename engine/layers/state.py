"""State slots of linear-attention layers: what a slot holds, where it lies, and how a step runs through it.

A slot is one request's recurrent state in all such layers, as components that each have their own tensor and unit:
  recurrent  [slot, value head, layer, V, K] fp32, K contiguous
  conv_*     [slot, unit, layer, channels of the unit, W - 1 rows] in the model's type, rows oldest first, inputs before
             the convolution; unit = q/k head for q and k, value head for v and x, group for B and C
A unit's share is contiguous, so any tensor-parallel share of a slot is one byte range per component. Slot 0 is null.
The state of a slot holds (tokens known - 1) tokens: the newest token is in no state until it is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from engine.kernels.delta_chunk_plan import ChunkPlan
from engine.kernels.ops import conv_decode, conv_prefill, delta_chunk, delta_decode
from kvtransfer.types import Component

STEADY_ROWS = 32
"""Elementwise functions run in vectors over a flattened tensor and differently on what is left over at its end. With a
multiple of so many rows nothing is left over, so a row's bits do not depend on how many rows there are."""

Kind = Literal["kda", "gdn", "mamba2"]


@dataclass(frozen=True, slots=True)
class ConvPart:
    """One sub-projection with a convolution: `units` shares of `channels` channels each."""

    name: str
    units: int
    channels: int


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The linear layers of a model. heads: value heads; width: of the convolution."""

    kind: Kind
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    convs: tuple[ConvPart, ...]
    width: int
    dtype: torch.dtype

    def components(self) -> tuple[Component, ...]:
        recurrent = Component(
            name="recurrent",
            paged=False,
            units=self.heads,
            layers=self.layers,
            rows=1,
            tokens=1,
            token_bytes=self.key_dim * self.value_dim * torch.float32.itemsize,
            dtype="float32",
        )
        return (recurrent, *(self._conv(part) for part in self.convs))

    def _conv(self, part: ConvPart) -> Component:
        return Component(
            name=f"conv_{part.name}",
            paged=False,
            units=part.units,
            layers=self.layers,
            rows=1,
            tokens=1,
            token_bytes=part.channels * (self.width - 1) * self.dtype.itemsize,
            dtype=str(self.dtype).removeprefix("torch."),
        )


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's views of the pool: recurrent [slot, HV, V, K], convs [slot, unit, channels, rows] in spec order."""

    recurrent: torch.Tensor
    convs: tuple[torch.Tensor, ...]


class StatePool:
    """Owns the slots' memory: one tensor per component, in the order of the spec's components."""

    def __init__(self, spec: LinearSpec, num_slots: int, device: torch.device) -> None:
        assert num_slots > 1, "slot 0 is null"
        shape = (num_slots, spec.heads, spec.layers, spec.value_dim, spec.key_dim)
        self.spec = spec
        self.recurrent = torch.zeros(shape, dtype=torch.float32, device=device)
        self.convs = tuple(
            torch.zeros(
                (num_slots, part.units, spec.layers, part.channels, spec.width - 1), dtype=spec.dtype, device=device
            )
            for part in spec.convs
        )
        self._layers = [
            LayerState(self.recurrent[:, :, i], tuple(conv[:, :, i] for conv in self.convs)) for i in range(spec.layers)
        ]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.recurrent, *self.convs)

    def layer(self, index: int) -> LayerState:
        """Of the index-th linear layer."""
        return self._layers[index]

    def copy_slot(self, source: int, target: int) -> None:
        assert target > 0, "the null slot is never written"
        for tensor in self.tensors:
            tensor[target].copy_(tensor[source])


@dataclass(frozen=True, slots=True)
class LinearStep:
    """How a step's tokens go through the state: rows [0, len(slots)) decode, the rest are the chunk plan's, then
    padding, which touches nothing. Made once per step for all layers.

    null_rows: rows on the null slot added to the decode rows, so that their number is a multiple of STEADY_ROWS.
    """

    slots: torch.Tensor
    plan: ChunkPlan
    null_rows: int = 0

    def conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor
    ) -> torch.Tensor:
        """Causal convolution and SiLU of x [T, C]; weight [C, W], state one component of a layer."""
        at = len(self.slots)
        parts = []
        if at:
            parts.append(conv_decode(self._full(x), weight, bias, state, self._full(self.slots))[:at])
        if at < len(x):
            parts.append(conv_prefill(x[at:], weight, bias, state, self.plan))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        *,
        scale: float,
        l2norm: bool = False,
        delta: bool = True,
        skip: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The recurrence over all tokens [T, ...], as engine.kernels.delta_chunk and delta_decode have it."""
        at = len(self.slots)
        options = _Options(scale=scale, l2norm=l2norm, delta=delta, skip=skip)
        parts = []
        if at:
            qs, ks, vs, gs, betas, slots = (self._full(x) for x in (q, k, v, g, beta, self.slots))
            parts.append(delta_decode(qs, ks, vs, gs, betas, state, slots, **options)[:at])
        if at < len(v):
            parts.append(delta_chunk(q[at:], k[at:], v[at:], g[at:], beta[at:], state, self.plan, **options))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _full(self, x: torch.Tensor) -> torch.Tensor:
        """The decode rows of x and the null ones."""
        rows = x[: len(self.slots)]
        return torch.cat((rows, rows.new_zeros(self.null_rows, *rows.shape[1:]))) if self.null_rows else rows


class _Options(TypedDict):
    scale: float
    l2norm: bool
    delta: bool
    skip: torch.Tensor | None
