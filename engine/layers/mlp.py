"""Feed-forward layers: a gated MLP, and a mixture of experts with shared ones beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.moe import MXFP4_GROUP, Activation, dequantise_mxfp4
from engine.kernels.ops import route_sigmoid, route_softmax
from engine.layers.batch import StepBatch
from engine.layers.experts import Experts, Mlp, Routed
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.params import Params

SILU = Activation()


class GatedMlp(Mlp):
    """down(act(gate x) * up x)."""

    def __init__(self, hidden: int, inner: int, params: Params, activation: Activation = SILU) -> None:
        gate_up = Linear(params.cat(["gate_proj.weight", "up_proj.weight"], [inner, inner], hidden))
        super().__init__(gate_up, Linear(params.get("down_proj.weight", hidden, inner)), activation)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """groups, kept_groups: experts compete within the best groups only. shared: width of the shared ones, 0 = none."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    shared: int = 0
    groups: int = 1
    kept_groups: int = 1
    renormalise: bool = True
    scaling: float = 1.0
    activation: Activation = SILU


class SigmoidRouter:
    """Experts by their sigmoid scores, with a learned correction of the choice (Kimi, DeepSeek, Nemotron-H). fp32."""

    def __init__(self, config: MoeConfig, params: Params) -> None:
        self._config = config
        self._scores = Linear(params.fp32("gate.weight", config.experts, config.hidden))
        self._bias = params.fp32("gate.e_score_correction_bias", config.experts)

    def __call__(self, x: torch.Tensor) -> Routed:
        """x [T, hidden]."""
        c = self._config
        return route_sigmoid(
            self._scores(x.float()),
            self._bias,
            c.top_k,
            groups=c.groups,
            kept_groups=c.kept_groups,
            renormalise=c.renormalise,
            scaling=c.scaling,
        )


class SigmoidMoe:
    """Sigmoid routing with a correction of the choice (Kimi, DeepSeek), shared experts added unweighted."""

    def __init__(self, config: MoeConfig, params: Params) -> None:
        c = config
        self._router = SigmoidRouter(c, params)
        shared = GatedMlp(c.hidden, c.shared, params.under("shared_experts."), c.activation) if c.shared else None
        self._experts = Experts(*expert_weights(params, c.experts, c.hidden, c.inner), c.activation, shared)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch) -> torch.Tensor:
        """x [T, hidden] normed input -> residual + output."""
        routed = self._router(x)
        return self._experts(x, residual, routed, step)


class LatentMoe:
    """Kimi K3: routed experts work in a narrower latent; the router and the shared experts see all of x.

    z = down x;  y = up rms_norm(sum_j w_j expert_j(z)) + shared(x)      (norm_eps None: without the norm)
    """

    def __init__(self, config: MoeConfig, latent: int, norm_eps: float | None, params: Params) -> None:
        c = config
        self._router = SigmoidRouter(c, params)
        self._narrow = Linear(params.get("routed_expert_down_proj.weight", latent, c.hidden))
        self._widen = Linear(params.get("routed_expert_up_proj.weight", c.hidden, latent))
        self._norm = None if norm_eps is None else RMSNorm(params.get("routed_expert_norm.weight", latent), norm_eps)
        self._experts = Experts(*expert_weights(params, c.experts, latent, c.inner), c.activation)
        self._shared = None
        if c.shared:
            self._shared = GatedMlp(c.hidden, c.shared, params.under("shared_experts."), c.activation)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch) -> torch.Tensor:
        """x [T, hidden] normed input -> residual + output."""
        routed = self._router(x)
        y = self._experts(self._narrow(x), None, routed, step)
        y = self._widen.add_to(residual, y if self._norm is None else self._norm(y))
        return y if self._shared is None else self._shared(x, y)


class SoftmaxMoe:
    """Softmax routing (Qwen); one shared expert, weighted by a gate of its own."""

    def __init__(self, config: MoeConfig, params: Params) -> None:
        c = config
        self._config = config
        self._router = Linear(params.get("gate.weight", c.experts, c.hidden))
        self._opener, shared = None, None
        if c.shared:
            self._opener = Linear(params.get("shared_expert_gate.weight", 1, c.hidden))
            shared = GatedMlp(c.hidden, c.shared, params.under("shared_expert."), c.activation)
        self._experts = Experts(*expert_weights(params, c.experts, c.hidden, c.inner), c.activation, shared)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch) -> torch.Tensor:
        """x [T, hidden] normed input -> residual + output."""
        c = self._config
        routed = route_softmax(self._router(x), c.top_k, renormalise=c.renormalise, scaling=c.scaling)
        opened = None if self._opener is None else torch.sigmoid(self._opener(x)).float().squeeze(1)
        return self._experts(x, residual, routed, step, opened)


def expert_weights(params: Params, experts: int, hidden: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """up [E, 2 I, hidden] (gate rows, then up rows) and down [E, hidden, I]: stacked (transformers' names), or one
    parameter each of w1 (gate), w3 (up) and w2 (down), or gate_proj, up_proj and down_proj; MXFP4 is dequantised."""
    if params.has("experts.gate_up_proj"):
        up = params.get("experts.gate_up_proj", experts, 2 * inner, hidden)
        return up, params.get("experts.down_proj", experts, hidden, inner)
    names = (
        ("w1", "w3", "w2")
        if params.has("experts.0.w1.weight") or params.has("experts.0.w1.weight_packed")
        else ("gate_proj", "up_proj", "down_proj")
    )
    ups = torch.empty(experts, 2 * inner, hidden, dtype=params.dtype, device=params.device)
    downs = torch.empty(experts, hidden, inner, dtype=params.dtype, device=params.device)
    for e in range(experts):
        ups[e, :inner] = _expert(params, f"experts.{e}.{names[0]}.weight", inner, hidden)
        ups[e, inner:] = _expert(params, f"experts.{e}.{names[1]}.weight", inner, hidden)
        downs[e] = _expert(params, f"experts.{e}.{names[2]}.weight", hidden, inner)
    return ups, downs


def _expert(params: Params, name: str, rows: int, columns: int) -> torch.Tensor:
    if not params.stored(f"{name}_packed"):
        return params.get(name, rows, columns)
    packed = params.raw(f"{name}_packed", rows, columns // 2)
    scales = params.raw(f"{name}_scale", rows, columns // MXFP4_GROUP)
    return dequantise_mxfp4(packed, scales, params.dtype).to(params.device)
