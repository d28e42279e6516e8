"""Granite 4 hybrids (granitemoehybrid): Mamba2 layers with a few of grouped-query attention, each with a feed-forward.

    h = embed(tokens) * embedding_multiplier
    for each layer:  h += mix(norm(h)) * residual_multiplier, mix = Mamba2 or attention
                     h += (experts(norm(h)) + shared(norm(h))) * residual_multiplier
    logits = head(norm(h)) / logits_scaling

Attention has rotary embedding or none, and a scale of its own. Without experts only the shared MLP is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from engine.kernels.ops import route_softmax
from engine.layers.batch import StepBatch
from engine.layers.experts import Experts, Mlp
from engine.layers.gqa import Gqa, GqaConfig, RopeAt
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2, Mamba2Config
from engine.layers.mlp import SILU, MoeConfig
from engine.layers.norm import RMSNorm
from engine.layers.params import Params, Progress, require
from engine.layers.pools import Groups, Pools
from engine.layers.rope import Rope, RopeConfig
from engine.weights import WeightSource
from runtime.errors import Unsupported

ALIASES = {
    ".experts.gate_up_proj": (".input_linear.weight",),
    ".experts.down_proj": (".output_linear.weight",),
    ".router.weight": (".router.layer.weight",),
}


@dataclass(frozen=True, slots=True)
class GraniteHybridConfig:
    """linear[i]: layer i is Mamba2, else attention. rope: None = no positional embedding. moe: None = no experts."""

    vocab_size: int
    hidden: int
    eps: float
    tied: bool
    max_len: int
    linear: tuple[bool, ...]
    mamba: Mamba2Config
    attention: GqaConfig
    shared: int
    moe: MoeConfig | None
    rope: RopeConfig | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> GraniteHybridConfig:
        """Raises Unsupported for what this file does not compute."""
        if config.get("hidden_act", "silu") != "silu":
            raise Unsupported(f"activation {config['hidden_act']!r} is not supported", field="hidden_act")
        if config.get("quantization_config"):
            raise Unsupported("quantised weights are not supported for this model", field="quantization_config")
        hidden, eps = int(config["hidden_size"]), float(config.get("rms_norm_eps", 1e-6))
        residual = float(config.get("residual_multiplier", 1.0))
        attention = _attention_config(config, hidden, residual)
        rotary = config.get("position_embedding_type") == "rope"
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            eps=eps,
            tied=bool(config.get("tie_word_embeddings", False)),
            max_len=int(config.get("max_position_embeddings") or 2048),
            linear=_linear_layers(config),
            mamba=_mamba_config(config, hidden, eps, residual),
            attention=attention,
            shared=int(config["shared_intermediate_size"]),
            moe=_moe_config(config, hidden),
            rope=RopeConfig.from_hf(config, attention.head_dim) if rotary else None,
            embedding_multiplier=float(config.get("embedding_multiplier", 1.0)),
            residual_multiplier=residual,
            logits_scaling=float(config.get("logits_scaling", 1.0)),
        )


def _linear_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    require(len(kinds) == int(config["num_hidden_layers"]), "layer_types must name every layer", "layer_types")
    return tuple(kind in ("mamba", "linear_attention") for kind in kinds)


def _mamba_config(config: Mapping[str, Any], hidden: int, eps: float, residual: float) -> Mamba2Config:
    heads = int(config["mamba_n_heads"])
    inner = int(config.get("mamba_expand", 2)) * hidden
    low, high = config.get("time_step_limit") or (0.0, float("inf"))
    return Mamba2Config(
        hidden=hidden,
        heads=heads,
        head_dim=inner // heads,
        groups=int(config["mamba_n_groups"]),
        state_dim=int(config["mamba_d_state"]),
        width=int(config["mamba_d_conv"]),
        eps=eps,
        dt_limits=(float(low), float(high)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias", False)),
        multiplier=residual,
    )


def _attention_config(config: Mapping[str, Any], hidden: int, residual: float) -> GqaConfig:
    heads = int(config["num_attention_heads"])
    return GqaConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        scale=float(config.get("attention_multiplier", 1.0)),
        bias=bool(config.get("attention_bias", False)),
        multiplier=residual,
    )


def _moe_config(config: Mapping[str, Any], hidden: int) -> MoeConfig | None:
    experts = int(config.get("num_local_experts") or 0)
    if not experts:
        return None
    inner, top_k = int(config["intermediate_size"]), int(config["num_experts_per_tok"])
    return MoeConfig(hidden=hidden, inner=inner, experts=experts, top_k=top_k)


class FeedForward:
    """Experts by softmax over the chosen ones, and a shared MLP whose gate and up are one parameter."""

    def __init__(self, config: GraniteHybridConfig, params: Params) -> None:
        c, shared = config, config.shared
        self._moe = c.moe
        self._shared = Mlp(
            Linear(params.get("shared_mlp.input_linear.weight", 2 * shared, c.hidden)),
            Linear(params.get("shared_mlp.output_linear.weight", c.hidden, shared)),
            SILU,
        )
        self._multiplier = c.residual_multiplier
        if c.moe is not None:
            at = params.under("block_sparse_moe.")
            self._router = Linear(at.get("router.weight", c.moe.experts, c.hidden))
            up = at.get("experts.gate_up_proj", c.moe.experts, 2 * c.moe.inner, c.hidden)
            down = at.get("experts.down_proj", c.moe.experts, c.hidden, c.moe.inner)
            self._experts = Experts(up, down, SILU, self._shared)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch) -> torch.Tensor:
        if self._moe is None:
            y = self._shared(x)
        else:
            y = self._experts(x, None, route_softmax(self._router(x), self._moe.top_k), step)
        return residual + y * self._multiplier


class Layer:
    """index: among the layers of its kind, which is where its memory lies."""

    def __init__(self, config: GraniteHybridConfig, at: int, index: int, params: Params) -> None:
        c = config
        self._index = index
        self._norm = RMSNorm(params.get("input_layernorm.weight", c.hidden), c.eps)
        self._mlp_norm = RMSNorm(params.get("post_attention_layernorm.weight", c.hidden), c.eps)
        self._mamba = Mamba2(c.mamba, params.under("mamba.")) if c.linear[at] else None
        self._attention = None if c.linear[at] else Gqa(c.attention, index, params.under("self_attn."))
        self._feed = FeedForward(c, params)

    def __call__(self, h: torch.Tensor, step: StepBatch, pools: Pools, rope: RopeAt | None) -> torch.Tensor:
        x = self._norm(h)
        if self._mamba is not None:
            h = self._mamba(x, h, step, pools.state.layer(self._index))
        elif self._attention is not None:
            h = self._attention(x, h, step, pools.kv, rope)
        return self._feed(self._mlp_norm(h), h, step)


class GraniteHybridModel:
    """Implements engine.models.registry.Model."""

    def __init__(
        self,
        config: GraniteHybridConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        progress: Progress = lambda _: None,
    ) -> None:
        c = config
        params = Params(source, dtype, device, "model.", ALIASES)
        kinds = c.linear
        require(not all(kinds), "a model without attention has no pages to serve from", "layer_types")
        self._config = config
        self.vocab_size = c.vocab_size
        self.groups = Groups(
            kv=c.attention.shape(kinds.count(False), dtype),
            query_heads=c.attention.heads,
            state=c.mamba.spec(kinds.count(True), dtype) if any(kinds) else None,
        )
        self._embed = params.get("embed_tokens.weight", c.vocab_size, c.hidden)
        self._layers = []
        for at, kind in enumerate(kinds):
            self._layers.append(Layer(c, at, kinds[:at].count(kind), params.under(f"layers.{at}.")))
            progress((at + 1) / (len(kinds) + 1))
        self._norm = RMSNorm(params.get("norm.weight", c.hidden), c.eps)
        top = Params(source, dtype, device)
        self._head = Linear(self._embed if c.tied else top.get("lm_head.weight", c.vocab_size, c.hidden))
        self._rope = Rope(c.rope, max_len, dtype, device) if c.rope else None
        progress(1.0)

    def forward(self, step: StepBatch, pools: Pools) -> torch.Tensor:
        h = F.embedding(step.tokens, self._embed) * self._config.embedding_multiplier
        rope = self._rope.at(step.positions) if self._rope else None
        for layer in self._layers:
            h = layer(h, step, pools, rope)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden)) / self._config.logits_scaling
