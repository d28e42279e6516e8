"""Gated DeltaNet (arXiv 2412.06464): a delta-rule state with one decay rate per head.

    q, k, v = silu(conv([Wq x | Wk x | Wv x]));  q, k normalised to length 1, q scaled by K^-1/2
    beta = sigmoid(Wb x);  g = -exp(A_log) softplus(Wa x + dt_bias)
    S <- e^g S;  u = beta (v - S k);  S <- S + u k^T;  o = S q
    out = Wo (rms_norm(o) * silu(Wz x))
Value heads are a multiple of q/k heads: value head i reads q/k head i // (value heads / q/k heads).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from engine.kernels.cpu.recurrent import Convolution, Recurrence, recurrent_step
from engine.kernels.ops import gated_rms_norm, softplus_gate
from engine.layers.batch import StepBatch
from engine.layers.linear import Linear
from engine.layers.params import Params
from engine.layers.state import ConvPart, Inputs, LayerState, LinearSpec, LinearStep


@dataclass(frozen=True, slots=True)
class GdnConfig:
    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    interleaved: bool  # the checkpoint's projections are two, interleaved by q/k head (Qwen3-Next), not four (Qwen3.5)

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def spec(self, layers: int, dtype: torch.dtype) -> LinearSpec:
        convs = (
            ConvPart("q", self.key_heads, self.key_dim),
            ConvPart("k", self.key_heads, self.key_dim),
            ConvPart("v", self.value_heads, self.value_dim),
        )
        return LinearSpec("gdn", layers, self.value_heads, self.key_dim, self.value_dim, convs, self.width, dtype)


class Gdn:
    def __init__(self, config: GdnConfig, params: Params) -> None:
        """params: named relative to the layer's linear_attn."""
        c = config
        self._config = config
        self._widths = [c.keys, c.keys, c.values, c.values, c.value_heads, c.value_heads]
        self._in = Linear(_projections(c, params))
        conv = params.get("conv1d.weight", 2 * c.keys + c.values, c.width)
        self._convs = torch.split(conv, self._widths[:3])
        self._a_log = params.fp32("A_log", c.value_heads)
        self._dt_bias = params.fp32("dt_bias", c.value_heads)
        self._norm = params.get("norm.weight", c.value_dim)
        self._step = recurrent_step(self._recurrence())
        self._out = Linear(params.get("out_proj.weight", c.hidden, c.values))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch, state: LayerState) -> torch.Tensor:
        """x [T, hidden] normed input -> residual + output."""
        assert step.linear is not None
        projected = self._in(x)
        z, b, a = torch.split(projected, self._widths, -1)[3:]
        y = step.linear.run(self._step, state, (projected, a, b, z), functools.partial(self._plain, state))
        return self._out.add_to(residual, y)

    def _plain(self, state: LayerState, inputs: Inputs, linear: LinearStep) -> torch.Tensor:
        c = self._config
        projected, a, b, z = inputs
        heads = (c.key_heads, c.key_heads, c.value_heads)
        parts = torch.split(projected, self._widths, -1)[:3]
        q, k, v = (
            linear.conv(part, weight, None, window).view(len(a), count, -1)
            for part, weight, window, count in zip(parts, self._convs, state.convs, heads, strict=True)
        )
        g = softplus_gate(a, self._a_log, self._dt_bias)
        o = linear.delta(q, k, v, g, b.float().sigmoid(), state, scale=c.key_dim**-0.5, l2norm=True)
        opened = z.reshape(len(a), c.value_heads, c.value_dim)
        return gated_rms_norm(o, opened, self._norm, c.eps, activation="silu").flatten(1)

    def _recurrence(self) -> Recurrence:
        c = self._config
        columns = (0, c.keys, 2 * c.keys)
        q, k, v = (Convolution(weight, None, at) for weight, at in zip(self._convs, columns, strict=True))
        return Recurrence(
            heads=c.value_heads,
            key_heads=c.key_heads,
            key_dim=c.key_dim,
            value_dim=c.value_dim,
            q=q,
            k=k,
            v=v,
            decay="softplus",
            a_log=self._a_log,
            dt_bias=self._dt_bias,
            norm=self._norm,
            eps=c.eps,
            scale=c.key_dim**-0.5,
        )


def _projections(c: GdnConfig, params: Params) -> torch.Tensor:
    """Rows q | k | v | z | b | a."""
    if c.interleaved:
        rows = 2 * (c.keys + c.values)
        group = c.value_heads // c.key_heads
        shares = [c.key_dim, c.key_dim, group * c.value_dim, group * c.value_dim]
        qkvz = params.get("in_proj_qkvz.weight", rows, c.hidden).view(c.key_heads, -1, c.hidden)
        ba = params.get("in_proj_ba.weight", 2 * c.value_heads, c.hidden).view(c.key_heads, -1, c.hidden)
        parts = [*torch.split(qkvz, shares, 1), *ba.chunk(2, 1)]
        return torch.cat([part.reshape(-1, c.hidden) for part in parts])
    names = ["in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"]
    return params.cat(names, [2 * c.keys + c.values, c.values, c.value_heads, c.value_heads], c.hidden)
