"""Binds recurrent.cpp: the decode rows of one layer with a state, from its projections to its normed output."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.cpu.build import Compiled, current
from engine.kernels.replay import Ring

WIDTHS = range(2, 18)
"""Of a convolution: a window of one row at least, and of as many as recurrent.cpp has room for (kRows) at most."""

Decay = Literal["softplus", "bounded", "step"]
_DECAYS: dict[Decay, int] = {"softplus": 0, "bounded": 1, "step": 2}


class _Part(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("window", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("unit_stride", ctypes.c_int64),
        ("units", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("column", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("q", _Part),
        ("k", _Part),
        ("v", _Part),
        ("state", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("decay", ctypes.c_int64),
        ("gate_dim", ctypes.c_int64),
        ("rate", ctypes.c_void_p),
        ("dt_bias", ctypes.c_void_p),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("normalised", ctypes.c_int64),
        ("corrected", ctypes.c_int64),
        ("skip", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("sigmoid_gate", ctypes.c_int64),
        ("gate_first", ctypes.c_int64),
        ("ring_k", ctypes.c_void_p),
        ("ring_u", ctypes.c_void_p),
        ("ring_g", ctypes.c_void_p),
        ("ring", ctypes.c_int64),
        ("pre_decayed", ctypes.c_int64),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("raw", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("raw_stride", ctypes.c_int64),
        ("beta_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("held", ctypes.c_void_p),
        ("fold", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Convolution:
    """Of one sub-projection: weight [C, W], bias [C] or None; column of its first channel in the layer's input."""

    weight: Tensor
    bias: Tensor | None
    column: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a layer is made of. q, k, v: in Mamba2's terms C, B and x.

    decay: softplus (a_log [heads], dt_bias [heads, K] or [heads]), bounded (low: the bound), or step (Mamba2; low and
    high limit the step size). normalised: q and k to length 1. corrected: the delta rule. skip [heads] or None. norm
    [V], or [heads * V] with gate_first: over the channels of a q/k head's group. windows: which of the layer's
    convolution components are q's, k's and v's.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    q: Convolution
    k: Convolution
    v: Convolution
    decay: Decay
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    low: float = 0.0
    high: float = 0.0
    scale: float = 1.0
    normalised: bool = True
    corrected: bool = True
    skip: Tensor | None = None
    sigmoid_gate: bool = False
    gate_first: bool = False
    windows: tuple[int, int, int] = (0, 1, 2)


def recurrent_step(made_of: Recurrence) -> RecurrentStep | None:
    """None where the layer that is being built may use nothing compiled, or has a convolution it is not made for."""
    compiled = current()
    if compiled is None or made_of.q.weight.shape[1] not in WIDTHS:
        return None
    return RecurrentStep(compiled, made_of)


class RecurrentStep:
    """Runs one token of each row through the layer. Keeps fp32 copies of its small parameters."""

    def __init__(self, compiled: Compiled, made_of: Recurrence) -> None:
        m = made_of
        self._kept: list[Tensor] = []
        self._run = compiled.recurrent_library.pdserve_recurrent
        self._run.restype = None
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [pointer, number, number, pointer, pointer, number]
        self._made_of = m
        self.windows = m.windows
        self._width = m.q.weight.shape[1]
        self._bound = _Layer(
            heads=m.heads,
            key_heads=m.key_heads,
            key_dim=m.key_dim,
            value_dim=m.value_dim,
            width=self._width,
            decay=_DECAYS[m.decay],
            gate_dim=m.dt_bias.numel() // m.heads,
            rate=self._own(m.a_log.float().exp()),
            dt_bias=self._own(m.dt_bias),
            low=m.low,
            high=m.high,
            scale=m.scale,
            normalised=m.normalised,
            corrected=m.corrected,
            skip=None if m.skip is None else self._own(m.skip),
            norm=self._own(m.norm),
            eps=m.eps,
            sigmoid_gate=m.sigmoid_gate,
            gate_first=m.gate_first,
        )
        self._bind_weights()
        self._state: tuple[Tensor, ...] = ()

    def _own(self, x: Tensor) -> int:
        """The address of a copy in fp32."""
        self._kept.append(x.detach().float().contiguous().clone())
        return self._kept[-1].data_ptr()

    def _parts(self) -> Sequence[tuple[_Part, Convolution]]:
        b, m = self._bound, self._made_of
        return ((b.q, m.q), (b.k, m.k), (b.v, m.v))

    def _bind_weights(self) -> None:
        for part, conv in self._parts():
            part.weight = self._own(conv.weight.t())
            part.bias = None if conv.bias is None else self._own(conv.bias)
            part.column = conv.column

    def _bind(self, state: Tensor, windows: Sequence[Tensor], ring: Ring | None) -> None:
        """One layer of the pool: state [slot, HV, V, K], windows of q, k and v [slot, unit, channels, rows]."""
        assert state.stride()[2:] == (state.shape[3], 1), "a head's state must be contiguous"
        self._state = (state, *windows)
        if ring is not None:
            assert all(t.is_contiguous() for t in (ring.k, ring.u, ring.g))
            self._state = (*self._state, ring.k, ring.u, ring.g)
            self._bound.ring_k, self._bound.ring_u, self._bound.ring_g = (t.data_ptr() for t in self._state[-3:])
            self._bound.ring, self._bound.pre_decayed = ring.length, ring.pre_decayed
        self._bound.state = state.data_ptr()
        self._bound.slot_stride, self._bound.head_stride = state.stride()[:2]
        for (part, _), window in zip(self._parts(), windows, strict=True):
            assert window.stride()[2:] == (self._width - 1, 1), "a unit's window must be contiguous"
            part.window = window.data_ptr()
            part.slot_stride, part.unit_stride = window.stride()[:2]
            part.units, part.channels = window.shape[1:3]

    def __call__(
        self,
        state: Tensor,
        windows: Sequence[Tensor],
        slots: Tensor,
        x: Tensor,
        raw: Tensor,
        beta: Tensor,
        gate: Tensor,
        ring: Ring | None = None,
        records: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """x [B, columns] with q, k and v at theirs, raw [B, heads * gate_dim], beta [B, heads] before its sigmoid (not
        read with decay step), gate [B, heads * V], all of one type and rows of any stride; slots [B] int64.
        ring: the layer's, where it has one; records: of each row, held [B] int64 and fold [B] bool as replay_decode has
        them (None: no row has any or keeps one).
        -> [B, heads * V] in that type; state and windows move on by one token."""
        if not self._state or self._state[0] is not state:
            self._bind(state, windows, ring)
        held, fold = (None, None) if records is None else (t.data_ptr() for t in records)
        assert records is None or ring is not None
        y = x.new_empty((len(slots), self._made_of.heads * self._made_of.value_dim))
        rows = _Rows(
            x.data_ptr(), raw.data_ptr(), beta.data_ptr(), gate.data_ptr(),
            x.stride(0), raw.stride(0), beta.stride(0), gate.stride(0), y.data_ptr(), y.stride(0), held, fold,
        )  # fmt: skip
        self._run(
            ctypes.addressof(self._bound),
            x.dtype == torch.bfloat16,
            len(slots),
            slots.data_ptr(),
            ctypes.addressof(rows),
            torch.get_num_threads(),
        )
        return y
