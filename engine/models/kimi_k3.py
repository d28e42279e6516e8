"""Kimi K3, the text model: Kimi-Linear's layers with residuals that are mixed instead of summed.

    sources = [embed(tokens)] and the sum of each finished block of layers; partial = the sum of the current block
    for each layer:  x = mixture(sources, partial);  at a block's first layer partial moves into sources
                     partial += mix(norm(x)), mix = KDA or MLA
                     partial += feed_forward(norm(mixture(sources, partial)))
    logits = head(norm(mixture(sources, partial)))

A mixture weighs its sources by softmax(query . rms_norm(source)), one learned query per sub-layer. KDA has a bounded
decay and a full-rank output gate, MLA an output gate; feed-forward layers use SiTU, their experts work in a latent and
come as MXFP4. Nothing of a mixture outlives the token, so it needs no cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from engine.kernels.moe import Activation
from engine.kernels.ops import attn_res
from engine.layers.batch import StepBatch
from engine.layers.kda import Kda, KdaConfig
from engine.layers.linear import Linear
from engine.layers.mla import Mla, MlaConfig
from engine.layers.mlp import GatedMlp, LatentMoe, MoeConfig
from engine.layers.norm import RMSNorm
from engine.layers.params import Params, Progress, require
from engine.layers.pools import Pools
from engine.models.kimi_linear import (
    ALIASES,
    groups_of,
    kda_config,
    linear_layers,
    mla_config,
    moe_config,
    sparse_layers,
)
from engine.weights import WeightSource
from runtime.errors import Unsupported

MXFP4 = "mxfp4-pack-quantized"


@dataclass(frozen=True, slots=True)
class KimiK3Config:
    """block: layers of a residual block; latent: width the experts work in, with a norm of their sum or without."""

    vocab_size: int
    hidden: int
    inner: int
    eps: float
    max_len: int
    linear: tuple[bool, ...]
    sparse: tuple[bool, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    block: int
    latent: int
    latent_norm: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> KimiK3Config:
        """Of the whole config or its text part. Raises Unsupported for what this file does not compute."""
        outer, config = config, config.get("text_config") or config
        if config.get("hidden_act", "situ") != "situ":
            raise Unsupported(f"activation {config['hidden_act']!r} is not supported", field="hidden_act")
        quantised = config.get("quantization_config") or outer.get("quantization_config") or {}
        if quantised and quantised.get("format") != MXFP4:
            raise Unsupported(f"only experts in {MXFP4} are supported", field="quantization_config")
        if config.get("mla_use_nope") is False:
            raise Unsupported("latent attention with rotary embedding is not supported", field="mla_use_nope")
        hidden, eps = int(config["hidden_size"]), float(config.get("rms_norm_eps", 1e-5))
        situ = Activation(
            "situ", float(config["activation_situ_beta"]), _optional_float(config.get("activation_situ_linear_beta"))
        )
        require(
            int(config.get("attn_res_block_size") or 0) > 0, "attn_res_block_size is missing", "attn_res_block_size"
        )
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            eps=eps,
            max_len=int(config.get("max_position_embeddings") or config.get("model_max_length") or 1 << 20),
            linear=linear_layers(config),
            sparse=sparse_layers(config),
            kda=kda_config(config, hidden, eps),
            mla=mla_config(config, hidden),
            moe=dataclasses.replace(moe_config(config, hidden), activation=situ),
            block=int(config["attn_res_block_size"]),
            latent=int(config["routed_expert_hidden_size"]),
            latent_norm=bool(config.get("latent_moe_use_norm", False)),
        )


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


class Mixture:
    """One sub-layer's learned query over the residual sources, and the norm its scores see them through."""

    def __init__(self, hidden: int, eps: float, params: Params, name: str) -> None:
        self._query = params.fp32(f"{name}_proj.weight", 1, hidden).view(hidden)
        self._weight = params.fp32(f"{name}_norm.weight", hidden)
        self._eps = eps

    def __call__(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """Sources of [T, hidden] each -> [T, hidden]."""
        return attn_res(torch.stack(sources), self._query, self._weight, self._eps)


class Layer:
    """index: among the layers of its kind, which is where its memory lies."""

    def __init__(self, config: KimiK3Config, at: int, index: int, params: Params) -> None:
        c = config
        self._index = index
        self._opens_block = at % c.block == 0
        self._attention_mixture = Mixture(c.hidden, c.eps, params, "self_attention_res")
        self._mlp_mixture = Mixture(c.hidden, c.eps, params, "mlp_res")
        self._norm = RMSNorm(params.get("input_layernorm.weight", c.hidden), c.eps)
        self._mlp_norm = RMSNorm(params.get("post_attention_layernorm.weight", c.hidden), c.eps)
        attention, feed = params.under("self_attn."), params.under("mlp.")
        self._kda = Kda(c.kda, attention) if c.linear[at] else None
        self._mla = None if c.linear[at] else Mla(c.mla, attention)
        self._mlp: GatedMlp | LatentMoe
        if c.sparse[at]:
            self._mlp = LatentMoe(c.moe, c.latent, c.eps if c.latent_norm else None, feed)
        else:
            self._mlp = GatedMlp(c.hidden, c.inner, feed, c.moe.activation)

    def __call__(
        self, sources: list[torch.Tensor], partial: torch.Tensor, step: StepBatch, pools: Pools
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The finished blocks and the sum of the current one, before -> after."""
        x = self._attention_mixture([*sources, partial]) if sources else partial
        before: torch.Tensor | None = partial
        if self._opens_block:
            sources, before = [*sources, partial], None
        partial = self._attend(self._norm(x), before, step, pools)
        x = self._mlp_mixture([*sources, partial])
        return sources, self._mlp(self._mlp_norm(x), partial, step)

    def _attend(self, x: torch.Tensor, residual: torch.Tensor | None, step: StepBatch, pools: Pools) -> torch.Tensor:
        if self._kda is not None:
            return self._kda(x, residual, step, pools.state.layer(self._index))
        assert self._mla is not None
        return self._mla(x, residual, step, pools.latent.layer(self._index))


class KimiK3Model:
    """Implements engine.models.registry.Model."""

    def __init__(
        self,
        config: KimiK3Config,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        progress: Progress = lambda _: None,
    ) -> None:
        c = config
        aliases = {**ALIASES, "model.": ("language_model.model.",)}
        params = Params(source, dtype, device, "model.", aliases)
        kinds = c.linear
        self.vocab_size = c.vocab_size
        self.groups = groups_of(c.kda, c.mla, kinds, dtype)
        self._embed = params.get("embed_tokens.weight", c.vocab_size, c.hidden)
        self._layers = []
        for at, kind in enumerate(kinds):
            self._layers.append(Layer(c, at, kinds[:at].count(kind), params.under(f"layers.{at}.")))
            progress((at + 1) / (len(kinds) + 1))
        self._mixture = Mixture(c.hidden, c.eps, params, "output_attn_res")
        self._norm = RMSNorm(params.get("norm.weight", c.hidden), c.eps)
        top = Params(source, dtype, device, aliases={"lm_head.": ("language_model.lm_head.",)})
        self._head = Linear(top.get("lm_head.weight", c.vocab_size, c.hidden))
        progress(1.0)

    def forward(self, step: StepBatch, pools: Pools) -> torch.Tensor:
        sources: list[torch.Tensor] = []
        partial = F.embedding(step.tokens, self._embed)
        for layer in self._layers:
            sources, partial = layer(sources, partial, step, pools)
        return self._mixture([*sources, partial])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden))
