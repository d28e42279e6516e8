"""Mamba2 (arXiv 2405.21060): a state that is decayed and added to, without correction; one decay rate per head.

    [z | x | B | C | dt] = Win h;  x, B, C = silu(conv(x)), silu(conv(B)), silu(conv(C))
    dt = clamp(softplus(dt + dt_bias));  g = -exp(A_log) dt
    S <- e^g S + (dt x) B^T;  y = S C + D x
    out = Wout rms_norm(y * silu(z)), the norm over groups of channels
B and C are shared by the heads of a group. In the terms of engine.layers.state: B is the key, C the query, x the value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from engine.kernels.cpu.recurrent import Convolution, Recurrence, recurrent_step
from engine.kernels.ops import gated_rms_norm, mamba2_gate
from engine.layers.batch import StepBatch
from engine.layers.linear import Linear
from engine.layers.params import Params
from engine.layers.state import ConvPart, Inputs, LayerState, LinearSpec, LinearStep


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """state_dim: N; dt_limits: of the time step; multiplier: of the output, before it is added to the residual."""

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    width: int
    eps: float
    dt_limits: tuple[float, float]
    conv_bias: bool = True
    bias: bool = False
    multiplier: float = 1.0

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Channels of B, and of C."""
        return self.groups * self.state_dim

    def spec(self, layers: int, dtype: torch.dtype) -> LinearSpec:
        convs = (
            ConvPart("x", self.heads, self.head_dim),
            ConvPart("B", self.groups, self.state_dim),
            ConvPart("C", self.groups, self.state_dim),
        )
        return LinearSpec("mamba2", layers, self.heads, self.state_dim, self.head_dim, convs, self.width, dtype)


class Mamba2:
    def __init__(self, config: Mamba2Config, params: Params) -> None:
        """params: named relative to the layer's mixer."""
        c = config
        self._config = config
        parts = [c.inner, c.shared, c.shared]
        self._widths = [c.inner, *parts, c.heads]
        rows = sum(self._widths)
        self._in = Linear(
            params.get("in_proj.weight", rows, c.hidden), params.get("in_proj.bias", rows) if c.bias else None
        )
        self._convs = torch.split(params.get("conv1d.weight", sum(parts), c.width), parts)
        biases = torch.split(params.get("conv1d.bias", sum(parts)), parts) if c.conv_bias else None
        self._conv_biases = biases or (None, None, None)
        self._a_log = params.fp32("A_log", c.heads)
        self._dt_bias = params.fp32("dt_bias", c.heads)
        self._skip = params.fp32("D", c.heads)
        self._norm = params.get("norm.weight", c.inner)
        self._step = recurrent_step(self._recurrence())
        self._out = Linear(
            params.get("out_proj.weight", c.hidden, c.inner), params.get("out_proj.bias", c.hidden) if c.bias else None
        )

    def __call__(self, h: torch.Tensor, residual: torch.Tensor, step: StepBatch, state: LayerState) -> torch.Tensor:
        """h [T, hidden] normed input -> residual + output."""
        c = self._config
        assert step.linear is not None
        projected = self._in(h)
        z, raw = projected[:, : c.inner], projected[:, -c.heads :]
        y = step.linear.run(self._step, state, (projected, raw, raw, z), functools.partial(self._plain, state))
        if c.multiplier == 1.0:
            return self._out.add_to(residual, y)
        return residual + self._out(y) * c.multiplier

    def _plain(self, state: LayerState, inputs: Inputs, linear: LinearStep) -> torch.Tensor:
        c = self._config
        projected, raw, _, z = inputs
        count = len(projected)
        parts = torch.split(projected, self._widths, -1)[1:-1]
        x, b, q = (
            linear.conv(part, weight, bias, window)
            for part, weight, bias, window in zip(parts, self._convs, self._conv_biases, state.convs, strict=True)
        )
        g, dt = mamba2_gate(raw, self._a_log, self._dt_bias, *c.dt_limits)
        y = linear.delta(
            q.view(count, c.groups, c.state_dim),
            b.view(count, c.groups, c.state_dim),
            x.view(count, c.heads, c.head_dim),
            g,
            dt,
            state,
            scale=1.0,
            delta=False,
            skip=self._skip,
        )
        group = c.inner // c.groups
        return gated_rms_norm(y.flatten(1), z, self._norm, c.eps, activation="silu", gate_first=True, group=group)

    def _recurrence(self) -> Recurrence:
        c = self._config
        columns = (c.inner, 2 * c.inner, 2 * c.inner + c.shared)
        x, b, q = (
            Convolution(weight, bias, at)
            for weight, bias, at in zip(self._convs, self._conv_biases, columns, strict=True)
        )
        return Recurrence(
            heads=c.heads,
            key_heads=c.groups,
            key_dim=c.state_dim,
            value_dim=c.head_dim,
            q=q,
            k=b,
            v=x,
            decay="step",
            a_log=self._a_log,
            dt_bias=self._dt_bias,
            norm=self._norm,
            eps=c.eps,
            low=c.dt_limits[0],
            high=c.dt_limits[1],
            normalised=False,
            corrected=False,
            skip=self._skip,
            gate_first=True,
            windows=(2, 1, 0),
        )
