"""Kimi Delta Attention (arXiv 2510.26692): a delta-rule state whose decay is a vector, one rate per key channel.

q, k, v = silu(conv(Wq x)), silu(conv(Wk x)), silu(conv(Wv x));  q, k normalised to length 1, q scaled by K^-1/2
beta = sigmoid(Wb x);  r = Wf2 Wf1 x
g = -exp(A_log) softplus(r + dt_bias)  (Kimi-Linear)  or  lower_bound sigmoid(exp(A_log) (r + dt_bias))  (Kimi K3)
S <- S diag(e^g);  u = beta (v - S k);  S <- S + u k^T;  o = S q
out = Wo (rms_norm(o) * sigmoid(gate));  gate = Wg2 Wg1 x, or one full-rank matrix (Kimi K3)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from engine.kernels.cpu.recurrent import Convolution, Recurrence, recurrent_step
from engine.kernels.ops import bounded_gate, gated_rms_norm, softplus_gate
from engine.layers.batch import StepBatch
from engine.layers.linear import Linear
from engine.layers.params import Params
from engine.layers.state import ConvPart, Inputs, LayerState, LinearSpec, LinearStep


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """lower_bound: of the decay's logarithm (Kimi K3), None = the softplus gate, which has none. full_rank_gate: the
    output gate is one matrix."""

    hidden: int
    heads: int
    head_dim: int
    width: int
    eps: float
    lower_bound: float | None = None
    full_rank_gate: bool = False

    def spec(self, layers: int, dtype: torch.dtype) -> LinearSpec:
        convs = tuple(ConvPart(name, self.heads, self.head_dim) for name in "qkv")
        return LinearSpec(
            "kda", layers, self.heads, self.head_dim, self.head_dim, convs, self.width, dtype, self.lower_bound
        )


class Kda:
    def __init__(self, config: KdaConfig, params: Params) -> None:
        """params: named relative to the layer's self_attn."""
        c = config
        size = c.heads * c.head_dim
        self._config = config
        self._qkv = Linear(params.cat([f"{n}_proj.weight" for n in "qkv"], [size] * 3, c.hidden))
        self._convs = _convolutions(params, size, c.width)
        names = ["forget_gate.f_a_proj.weight", "b_proj.weight", "g_a_proj.weight"]
        self._low_widths = [c.head_dim, c.heads] if c.full_rank_gate else [c.head_dim, c.heads, c.head_dim]
        self._low = Linear(params.cat(names[: len(self._low_widths)], self._low_widths, c.hidden))
        self._forget = Linear(params.get("forget_gate.f_b_proj.weight", size, c.head_dim))
        gate = ("g_proj.weight", c.hidden) if c.full_rank_gate else ("g_b_proj.weight", c.head_dim)
        bias = params.get("g_b_proj.bias", size) if params.stored("g_b_proj.bias") else None
        self._gate = Linear(params.get(gate[0], size, gate[1]), bias)
        self._a_log = _decay_rates(params, c.heads)
        self._dt_bias = params.fp32("forget_gate.dt_bias", size).view(c.heads, c.head_dim)
        self._norm = params.get("o_norm.weight", c.head_dim)
        self._step = recurrent_step(self._recurrence())
        self._out = Linear(params.get("o_proj.weight", c.hidden, size))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: StepBatch, state: LayerState
    ) -> torch.Tensor:
        """x [T, hidden] normed input -> residual + output (None = none)."""
        y = self.mixed(x, step, state)
        return self._out(y) if residual is None else self._out.add_to(residual, y)

    def mixed(self, x: torch.Tensor, step: StepBatch, state: LayerState) -> torch.Tensor:
        """The layer without its output projection: [T, heads * head_dim]."""
        assert step.linear is not None
        forget, beta, *gate = torch.split(self._low(x), self._low_widths, -1)
        opened = self._gate(x if self._config.full_rank_gate else gate[0].contiguous())
        inputs = (self._qkv(x), self._forget(forget.contiguous()), beta, opened)
        return step.linear.run(self._step, state, inputs, functools.partial(self._plain, state))

    def _plain(self, state: LayerState, inputs: Inputs, linear: LinearStep) -> torch.Tensor:
        c = self._config
        qkv, raw, beta, gate = inputs
        q, k, v = (
            linear.conv(part, weight, None, window).view(len(qkv), c.heads, c.head_dim)
            for part, weight, window in zip(qkv.chunk(3, -1), self._convs, state.convs, strict=True)
        )
        decay = self._decay(raw.view(-1, c.heads, c.head_dim))
        o = linear.delta(q, k, v, decay, beta.float().sigmoid(), state, scale=c.head_dim**-0.5, l2norm=True)
        return gated_rms_norm(o, gate.view_as(o), self._norm, c.eps, activation="sigmoid").flatten(1)

    def _recurrence(self) -> Recurrence:
        c = self._config
        size = c.heads * c.head_dim
        q, k, v = (Convolution(weight, None, i * size) for i, weight in enumerate(self._convs))
        return Recurrence(
            heads=c.heads,
            key_heads=c.heads,
            key_dim=c.head_dim,
            value_dim=c.head_dim,
            q=q,
            k=k,
            v=v,
            decay="softplus" if c.lower_bound is None else "bounded",
            a_log=self._a_log,
            dt_bias=self._dt_bias,
            norm=self._norm,
            eps=c.eps,
            low=c.lower_bound or 0.0,
            scale=c.head_dim**-0.5,
            sigmoid_gate=True,
        )

    def _decay(self, raw: torch.Tensor) -> torch.Tensor:
        """raw [T, heads, head_dim] -> log decay."""
        c = self._config
        if c.lower_bound is None:
            return softplus_gate(raw, self._a_log, self._dt_bias)
        return bounded_gate(raw, self._a_log, self._dt_bias, c.lower_bound)


def _decay_rates(params: Params, heads: int) -> torch.Tensor:
    """One per head. Kimi K3's checkpoint has more entries than heads; the first ones count."""
    count = params.size("forget_gate.A_log")
    return params.fp32("forget_gate.A_log", max(count or heads, heads))[:heads]


def _convolutions(params: Params, size: int, width: int) -> tuple[torch.Tensor, ...]:
    """q, k, v weights [size, width]: three parameters (original checkpoints), or one (transformers')."""
    if params.has("conv1d.weight"):
        return params.get("conv1d.weight", 3 * size, width).chunk(3)
    return tuple(params.get(f"{n}_conv1d.weight", size, width) for n in "qkv")
