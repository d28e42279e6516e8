"""Qwen3-Next and the text part of Qwen3.5: three layers of Gated DeltaNet to one of gated full attention.

    h = embed(tokens)
    for each layer:  h += mix(norm(h)), mix = Gated DeltaNet or attention;  h += feed_forward(norm(h))
    logits = head(norm(h))

Attention has normed q and k, turns a quarter of each head, and opens its output with a sigmoid gate. Norm weights are
stored less one. Feed-forward layers are dense or a mixture of experts with one gated shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from engine.layers.batch import StepBatch
from engine.layers.gdn import Gdn, GdnConfig
from engine.layers.gqa import Gqa, GqaConfig, RopeAt
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMlp, MoeConfig, SoftmaxMoe
from engine.layers.norm import ZeroCentredNorm
from engine.layers.params import Params, Progress, require
from engine.layers.pools import Groups, Pools
from engine.layers.rope import Rope, RopeConfig
from engine.weights import WeightSource
from runtime.errors import Unsupported

ALIASES = {"model.": ("model.language_model.", "language_model.model.")}


@dataclass(frozen=True, slots=True)
class Qwen3NextConfig:
    """linear[i]: layer i is Gated DeltaNet, else attention. sparse[i]: its feed-forward part has experts."""

    vocab_size: int
    hidden: int
    inner: int
    eps: float
    tied: bool
    max_len: int
    linear: tuple[bool, ...]
    sparse: tuple[bool, ...]
    gdn: GdnConfig
    attention: GqaConfig
    moe: MoeConfig | None
    rope: RopeConfig

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Qwen3-Next, Qwen3.5 and its mixture-of-experts form, each also as the text part of a multimodal config.
        Raises Unsupported for what this file does not compute."""
        outer, config = config, config.get("text_config") or config
        if config.get("hidden_act", "silu") != "silu":
            raise Unsupported(f"activation {config['hidden_act']!r} is not supported", field="hidden_act")
        if config.get("quantization_config") or outer.get("quantization_config"):
            raise Unsupported("quantised weights are not supported for this model", field="quantization_config")
        hidden, eps = int(config["hidden_size"]), float(config.get("rms_norm_eps", 1e-6))
        rope = RopeConfig.from_hf(config, int(config["head_dim"]), partial=True)
        sparse = _sparse_layers(config)
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            inner=int(config.get("intermediate_size") or 0),
            eps=eps,
            tied=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
            max_len=rope.max_len(int(config.get("max_position_embeddings") or 32768)),
            linear=_linear_layers(config),
            sparse=sparse,
            gdn=_gdn_config(config, hidden, eps),
            attention=_attention_config(config, hidden, eps),
            moe=_moe_config(config, hidden) if any(sparse) else None,
            rope=rope,
        )


def _linear_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    count = int(config["num_hidden_layers"])
    if config.get("layer_types"):
        found = tuple(kind == "linear_attention" for kind in config["layer_types"])
        require(len(found) == count, "layer_types must name every layer", "layer_types")
        return found
    every = int(config.get("full_attention_interval") or 4)
    return tuple((i + 1) % every != 0 for i in range(count))


def _sparse_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    dense, every = set(config.get("mlp_only_layers") or ()), int(config.get("decoder_sparse_step") or 1)
    experts = int(config.get("num_experts") or 0)
    return tuple(
        experts > 0 and i not in dense and (i + 1) % every == 0 for i in range(int(config["num_hidden_layers"]))
    )


def _gdn_config(config: Mapping[str, Any], hidden: int, eps: float) -> GdnConfig:
    key_heads, value_heads = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    require(value_heads % key_heads == 0, "value heads must be a multiple of key heads", "linear_num_value_heads")
    return GdnConfig(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=int(config["linear_key_head_dim"]),
        value_dim=int(config["linear_value_head_dim"]),
        width=int(config["linear_conv_kernel_dim"]),
        eps=eps,
        interleaved=config["model_type"] == "qwen3_next",
    )


def _attention_config(config: Mapping[str, Any], hidden: int, eps: float) -> GqaConfig:
    head_dim = int(config["head_dim"])
    return GqaConfig(
        hidden=hidden,
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        eps=eps,
        normed=True,
        gated=True,
        bias=bool(config.get("attention_bias", False)),
    )


def _moe_config(config: Mapping[str, Any], hidden: int) -> MoeConfig:
    return MoeConfig(
        hidden=hidden,
        inner=int(config["moe_intermediate_size"]),
        experts=int(config["num_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        shared=int(config.get("shared_expert_intermediate_size") or 0),
        renormalise=bool(config.get("norm_topk_prob", True)),
    )


class Layer:
    """index: among the layers of its kind, which is where its memory lies."""

    def __init__(self, config: Qwen3NextConfig, at: int, index: int, params: Params) -> None:
        c = config
        self._index = index
        self._norm = ZeroCentredNorm(params.get("input_layernorm.weight", c.hidden), c.eps)
        self._mlp_norm = ZeroCentredNorm(params.get("post_attention_layernorm.weight", c.hidden), c.eps)
        self._gdn = Gdn(c.gdn, params.under("linear_attn.")) if c.linear[at] else None
        self._attention = None if c.linear[at] else Gqa(c.attention, index, params.under("self_attn."))
        self._mlp: GatedMlp | SoftmaxMoe
        if c.sparse[at]:
            assert c.moe is not None
            self._mlp = SoftmaxMoe(c.moe, params.under("mlp."))
        else:
            self._mlp = GatedMlp(c.hidden, c.inner, params.under("mlp."))

    def __call__(self, h: torch.Tensor, step: StepBatch, pools: Pools, rope: RopeAt) -> torch.Tensor:
        x = self._norm(h)
        if self._gdn is not None:
            h = self._gdn(x, h, step, pools.state.layer(self._index))
        elif self._attention is not None:
            h = self._attention(x, h, step, pools.kv, rope)
        return self._mlp(self._mlp_norm(h), h, step)


class Qwen3NextModel:
    """Implements engine.models.registry.Model."""

    def __init__(
        self,
        config: Qwen3NextConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        progress: Progress = lambda _: None,
    ) -> None:
        c = config
        params = Params(source, dtype, device, "model.", ALIASES)
        kinds = c.linear
        require(not all(kinds), "a model without full attention has no pages to serve from", "layer_types")
        self.vocab_size = c.vocab_size
        self.groups = Groups(
            kv=c.attention.shape(kinds.count(False), dtype),
            query_heads=c.attention.heads,
            state=c.gdn.spec(kinds.count(True), dtype) if any(kinds) else None,
        )
        self._embed = params.get("embed_tokens.weight", c.vocab_size, c.hidden)
        self._layers = []
        for at, kind in enumerate(kinds):
            self._layers.append(Layer(c, at, kinds[:at].count(kind), params.under(f"layers.{at}.")))
            progress((at + 1) / (len(kinds) + 1))
        self._norm = ZeroCentredNorm(params.get("norm.weight", c.hidden), c.eps)
        top = Params(source, dtype, device, aliases={"lm_head.": ("language_model.lm_head.",)})
        self._head = Linear(self._embed if c.tied else top.get("lm_head.weight", c.vocab_size, c.hidden))
        self._rope = Rope(c.rope, max_len, dtype, device)
        progress(1.0)

    def forward(self, step: StepBatch, pools: Pools) -> torch.Tensor:
        h = F.embedding(step.tokens, self._embed)
        rope = self._rope.at(step.positions)
        for layer in self._layers:
            h = layer(h, step, pools, rope)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden))
