"""State slots of linear-attention layers: what a slot holds, where it lies, and how a step runs through it.

A slot is one request's recurrent state in all such layers, as components that each have their own tensor and unit:
  recurrent  [slot, value head, layer, V, K] fp32, K contiguous
  conv_*     [slot, unit, layer, channels of the unit, W - 1 rows] in the model's type, rows oldest first, inputs before
             the convolution; unit = q/k head for q and k, value head for v and x, group for B and C
A unit's share is contiguous, so any tensor-parallel share of a slot is one byte range per component. Slot 0 is null.
The state of a slot holds (tokens known - 1) tokens: the newest token is in no state until it is run.

With replay (engine.kernels.replay) a slot also has a ring of records, in memory that is no component: it never moves.
How many records count is no memory of its own either, it follows from lengths the plan tells (records_of), so a slot
that was written by somebody else in between (a transfer, a prefill) has none whatever its ring holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict

import torch

from engine.kernels.cpu.recurrent import RecurrentStep
from engine.kernels.delta_chunk_plan import ChunkPlan
from engine.kernels.ops import conv_decode, conv_prefill, delta_chunk, delta_decode, replay_decode, replay_materialise
from engine.kernels.replay import Ring, pre_decay_fits
from kvtransfer.types import Component

STEADY_ROWS = 32
"""Elementwise functions run in vectors over a flattened tensor and differently on what is left over at its end. With a
multiple of so many rows nothing is left over, so a row's bits do not depend on how many rows there are."""

Kind = Literal["kda", "gdn", "mamba2"]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""What the recurrence of a layer reads: q, k and v before their convolutions, decay, beta and output gate."""

Plain = Callable[[Inputs, "LinearStep"], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ConvPart:
    """One sub-projection with a convolution: `units` shares of `channels` channels each."""

    name: str
    units: int
    channels: int


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The linear layers of a model. heads: value heads; width: of the convolution; lower_bound: of the decay's
    logarithm, None = it has none."""

    kind: Kind
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    convs: tuple[ConvPart, ...]
    width: int
    dtype: torch.dtype
    lower_bound: float | None = None

    @property
    def gate_dim(self) -> int:
        """Decay rates per head."""
        return self.key_dim if self.kind == "kda" else 1

    def ring_bytes(self, length: int) -> int:
        """Of one slot's records; none are ever held with a length of 1."""
        floats = self.key_dim + self.value_dim + self.gate_dim
        return self.layers * self.heads * length * floats * torch.float32.itemsize if length > 1 else 0

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
    """One layer's views of the pool: recurrent [slot, HV, V, K], convs [slot, unit, channels, rows] in spec order;
    ring: with replay."""

    recurrent: torch.Tensor
    convs: tuple[torch.Tensor, ...]
    ring: Ring | None = None


def records_of(slot: int, length: int, whole: int, ring: int) -> int:
    """Records a slot holds when its state has `length` tokens and was last written whole at `whole`. A ring of `ring`
    records is folded whenever (length + slot) is a multiple of it: often enough, and spread over a batch's steps."""
    assert whole <= length, "a slot that is ahead of its sequence"
    return min(length - whole, (length + slot) % ring)


def folds(slot: int, start: int, whole: int, ring: int) -> bool:
    """Whether the decode row at `start` folds its slot's ring (see records_of): its own token goes into the state."""
    return whole < 0 or (start + 1 + slot) % ring == 0


class StatePool:
    """Owns the slots' memory: one tensor per component, in the order of the spec's components.

    ring: records per slot, 1 = every decode step rewrites the state."""

    def __init__(self, spec: LinearSpec, num_slots: int, device: torch.device, ring: int = 1) -> None:
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
        self._ring = ring
        rings = self._rings(num_slots, device) if ring > 1 else [None] * spec.layers
        self._layers = [
            LayerState(self.recurrent[:, :, i], tuple(conv[:, :, i] for conv in self.convs), rings[i])
            for i in range(spec.layers)
        ]

    def _rings(self, num_slots: int, device: torch.device) -> list[Ring | None]:
        s = self.spec
        k, u, g = (
            torch.zeros((s.layers, num_slots, s.heads, self._ring, size), dtype=torch.float32, device=device)
            for size in (s.key_dim, s.value_dim, s.gate_dim)
        )
        fits = pre_decay_fits(self._ring, s.lower_bound)
        return [Ring(k[i], u[i], g[i], fits) for i in range(s.layers)]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.recurrent, *self.convs)

    def layer(self, index: int) -> LayerState:
        """Of the index-th linear layer."""
        return self._layers[index]

    def copy_slot(self, source: int, target: int, length: int, whole: int) -> None:
        """The state after `length` tokens, whole, to `target`; `whole`: see records_of. source = target is allowed."""
        assert target > 0, "the null slot is never written"
        if target != source:
            for tensor in self.tensors:
                tensor[target].copy_(tensor[source])
        records = records_of(source, length, whole, self._ring)
        if not records:
            return
        at, count, to = (torch.tensor([n], device=self.recurrent.device) for n in (source, records, target))
        for layer in self._layers:
            assert layer.ring is not None
            replay_materialise(layer.recurrent, layer.ring, at, count, to)


@dataclass(frozen=True, slots=True)
class LinearStep:
    """How a step's tokens go through the state: rows [0, len(slots)) decode, the rest are the chunk plan's, then
    padding, which touches nothing. Made once per step for all layers.

    null_rows: rows on the null slot added to the decode rows, so that their number is a multiple of STEADY_ROWS.
    replay: with rings, the decode rows' records before this token and whether they are folded now.
    """

    slots: torch.Tensor
    plan: ChunkPlan
    null_rows: int = 0
    replay: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, compiled: RecurrentStep | None, state: LayerState, inputs: Inputs, plain: Plain) -> torch.Tensor:
        """A layer's rows: those that decode by its compiled step where there is one, the others by `plain`. inputs: as
        RecurrentStep takes them, [T, ...]; plain gets them with the step that goes through its rows."""
        at = len(self.slots)
        if compiled is None or not at:
            return plain(inputs, self)
        windows = [state.convs[i] for i in compiled.windows]
        x, raw, beta, gate = (each[:at] for each in inputs)
        done = compiled(state.recurrent, windows, self.slots, x, raw, beta, gate, state.ring, self.replay)
        if at == len(inputs[0]):
            return done
        if not self.plan.tokens:
            return torch.cat((done, done.new_zeros(len(inputs[0]) - at, done.shape[1])))
        x, raw, beta, gate = (each[at:] for each in inputs)
        return torch.cat((done, plain((x, raw, beta, gate), LinearStep(self.slots[:0], self.plan))))

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
        state: LayerState,
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
        if at and self.replay is not None:
            assert state.ring is not None
            assert not self.null_rows
            qs, ks, vs, gs, betas = q[:at], k[:at], v[:at], g[:at], beta[:at]
            held, fold = self.replay
            places = (state.recurrent, state.ring, self.slots, held, fold)
            parts.append(replay_decode(qs, ks, vs, gs, betas, *places, **options))
        elif at:
            qs, ks, vs, gs, betas, slots = (self._full(x) for x in (q, k, v, g, beta, self.slots))
            parts.append(delta_decode(qs, ks, vs, gs, betas, state.recurrent, slots, **options)[:at])
        if at < len(v):
            qs, ks, vs, gs, betas = q[at:], k[at:], v[at:], g[at:], beta[at:]
            parts.append(delta_chunk(qs, ks, vs, gs, betas, state.recurrent, self.plan, **options))
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
