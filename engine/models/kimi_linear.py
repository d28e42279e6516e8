"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention, no positional embedding anywhere.

    h = embed(tokens)
    for each layer:  h += mix(norm(h)), mix = KDA or MLA;  h += feed_forward(norm(h)), dense or a mixture of experts
    logits = head(norm(h))

Checkpoints come in two namings, both are read: the original (q_conv1d, block_sparse_moe, experts.N.w1, config under
linear_attn_config with layers counted from 1) and transformers' own (conv1d, forget_gate, mlp.experts.gate_up_proj).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from engine.layers.batch import StepBatch
from engine.layers.kda import Kda, KdaConfig
from engine.layers.latent import LatentShape
from engine.layers.linear import Linear
from engine.layers.mla import Mla, MlaConfig
from engine.layers.mlp import GatedMlp, MoeConfig, SigmoidMoe
from engine.layers.norm import RMSNorm
from engine.layers.params import Params, Progress, require
from engine.layers.pools import Groups, Pools
from engine.weights import WeightSource
from runtime.errors import Unsupported

ALIASES = {".forget_gate.": (".",), ".mlp.": (".block_sparse_moe.",)}


@dataclass(frozen=True, slots=True)
class KimiLinearConfig:
    """linear[i]: layer i is KDA, else MLA. sparse[i]: its feed-forward part is a mixture of experts."""

    vocab_size: int
    hidden: int
    inner: int
    eps: float
    tied: bool
    max_len: int
    linear: tuple[bool, ...]
    sparse: tuple[bool, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig | None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> KimiLinearConfig:
        """Raises Unsupported for what this file does not compute."""
        if config.get("hidden_act", "silu") != "silu":
            raise Unsupported(f"activation {config['hidden_act']!r} is not supported", field="hidden_act")
        if config.get("quantization_config"):
            raise Unsupported("quantised weights are not supported for this model", field="quantization_config")
        if config.get("mla_use_nope") is False:
            raise Unsupported("latent attention with rotary embedding is not supported", field="mla_use_nope")
        hidden, eps = int(config["hidden_size"]), float(config.get("rms_norm_eps", 1e-5))
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            eps=eps,
            tied=bool(config.get("tie_word_embeddings", False)),
            max_len=int(first(config, "model_max_length", "max_position_embeddings", default=1 << 20)),
            linear=linear_layers(config),
            sparse=sparse_layers(config),
            kda=kda_config(config, hidden, eps),
            mla=mla_config(config, hidden),
            moe=moe_config(config, hidden) if any(sparse_layers(config)) else None,
        )


def first(config: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The value under the first of several names that has one."""
    return next((config[n] for n in names if config.get(n) is not None), default)


def linear_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """transformers' layer_types, or the original's lists of layers counted from 1."""
    count = int(config["num_hidden_layers"])
    if config.get("layer_types"):
        found = tuple(kind == "linear_attention" for kind in config["layer_types"])
        require(len(found) == count, "layer_types must name every layer", "layer_types")
        return found
    lists = config.get("linear_attn_config") or {}
    kda, full = (set(lists.get(name) or ()) for name in ("kda_layers", "full_attn_layers"))
    whole = kda | full == set(range(1, count + 1)) and not kda & full
    require(whole, "kda_layers and full_attn_layers must name every layer once", "linear_attn_config")
    return tuple(i + 1 in kda for i in range(count))


def sparse_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    count = int(config["num_hidden_layers"])
    if config.get("mlp_layer_types"):
        return tuple(kind == "sparse" for kind in config["mlp_layer_types"])
    if not first(config, "num_experts", "num_local_experts", default=0):
        return (False,) * count
    dense, every = int(config.get("first_k_dense_replace", 1)), int(config.get("moe_layer_freq", 1))
    return tuple(i >= dense and i % every == 0 for i in range(count))


def kda_config(config: Mapping[str, Any], hidden: int, eps: float) -> KdaConfig:
    nested = config.get("linear_attn_config") or {}
    bound = nested.get("gate_lower_bound")
    return KdaConfig(
        hidden=hidden,
        heads=int(nested.get("num_heads") or config["linear_num_heads"]),
        head_dim=int(nested.get("head_dim") or config["linear_head_dim"]),
        width=int(nested.get("short_conv_kernel_size") or config["linear_conv_kernel_dim"]),
        eps=eps,
        lower_bound=None if bound is None else float(bound),
        full_rank_gate=bool(nested.get("use_full_rank_gate", False)),
    )


def mla_config(config: Mapping[str, Any], hidden: int) -> MlaConfig:
    return MlaConfig(
        hidden=hidden,
        heads=int(config["num_attention_heads"]),
        latent=int(config["kv_lora_rank"]),
        plain=int(config["qk_nope_head_dim"]),
        shared=int(config["qk_rope_head_dim"]),
        value_dim=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
        output_gate=bool(config.get("mla_use_output_gate", False)),
        bias=bool(config.get("attention_bias", False)),
    )


def moe_config(config: Mapping[str, Any], hidden: int) -> MoeConfig:
    router = str(config.get("moe_router_activation_func", "sigmoid"))
    if router != "sigmoid":
        raise Unsupported(f"router activation {router!r} is not supported", field="moe_router_activation_func")
    inner = int(config["moe_intermediate_size"])
    return MoeConfig(
        hidden=hidden,
        inner=inner,
        experts=int(first(config, "num_experts", "num_local_experts", "n_routed_experts")),
        top_k=int(first(config, "num_experts_per_token", "num_experts_per_tok")),
        shared=inner * int(first(config, "num_shared_experts", "n_shared_experts", default=0)),
        groups=int(first(config, "num_expert_group", "n_group", default=1)),
        kept_groups=int(config.get("topk_group") or 1),
        renormalise=bool(first(config, "moe_renormalize", "norm_topk_prob", default=True)),
        scaling=float(config.get("routed_scaling_factor", 1.0)),
    )


class Layer:
    """index: among the layers of its kind, which is where its memory lies."""

    def __init__(self, config: KimiLinearConfig, at: int, index: int, params: Params) -> None:
        c = config
        self._index = index
        self._norm = RMSNorm(params.get("input_layernorm.weight", c.hidden), c.eps)
        self._mlp_norm = RMSNorm(params.get("post_attention_layernorm.weight", c.hidden), c.eps)
        attention = params.under("self_attn.")
        self._kda = Kda(c.kda, attention) if c.linear[at] else None
        self._mla = None if c.linear[at] else Mla(c.mla, attention)
        feed = params.under("mlp.")
        self._mlp: GatedMlp | SigmoidMoe
        if c.sparse[at]:
            assert c.moe is not None
            self._mlp = SigmoidMoe(c.moe, feed)
        else:
            self._mlp = GatedMlp(c.hidden, c.inner, feed)

    def __call__(self, h: torch.Tensor, step: StepBatch, pools: Pools) -> torch.Tensor:
        x = self._norm(h)
        if self._kda is not None:
            h = self._kda(x, h, step, pools.state.layer(self._index))
        elif self._mla is not None:
            h = self._mla(x, h, step, pools.latent.layer(self._index))
        return self._mlp(self._mlp_norm(h), h, step)


class KimiLinearModel:
    """Implements engine.models.registry.Model."""

    def __init__(
        self,
        config: KimiLinearConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        progress: Progress = lambda _: None,
    ) -> None:
        c = config
        params = Params(source, dtype, device, "model.", ALIASES)
        kinds = c.linear
        self.vocab_size = c.vocab_size
        self.groups = groups_of(c.kda, c.mla, kinds, dtype)
        self._embed = params.get("embed_tokens.weight", c.vocab_size, c.hidden)
        self._layers = []
        for at, kind in enumerate(kinds):
            self._layers.append(Layer(c, at, kinds[:at].count(kind), params.under(f"layers.{at}.")))
            progress((at + 1) / (len(kinds) + 1))
        self._norm = RMSNorm(params.get("norm.weight", c.hidden), c.eps)
        top = Params(source, dtype, device)
        # transformers has no tied form of this model: a head the checkpoint has is used, whatever the config says
        tied = c.tied and not top.has("lm_head.weight")
        self._head = Linear(self._embed if tied else top.get("lm_head.weight", c.vocab_size, c.hidden))
        progress(1.0)

    def forward(self, step: StepBatch, pools: Pools) -> torch.Tensor:
        h = F.embedding(step.tokens, self._embed)
        for layer in self._layers:
            h = layer(h, step, pools)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden))


def groups_of(kda: KdaConfig, mla: MlaConfig, linear: tuple[bool, ...], dtype: torch.dtype) -> Groups:
    full = linear.count(False)
    require(full > 0, "a model without full attention has no pages to serve from", "layer_types")
    latent = LatentShape(full, mla.width, dtype)
    return Groups(latent=latent, state=kda.spec(linear.count(True), dtype) if any(linear) else None)
