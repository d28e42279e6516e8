"""Nemotron-H: a stack of single mixers, each Mamba2, grouped-query attention, an MLP or a mixture of experts.

    h = embed(tokens);  for each layer: h += mixer(norm(h));  logits = head(norm(h))

Attention has no positional embedding; MLPs and experts have no gate half (squared ReLU). Experts may work in a latent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from engine.kernels.moe import Activation
from engine.layers.batch import StepBatch
from engine.layers.experts import Experts, Mlp
from engine.layers.gqa import Gqa, GqaConfig
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2, Mamba2Config
from engine.layers.mlp import MoeConfig, SigmoidRouter
from engine.layers.norm import RMSNorm
from engine.layers.params import Params, Progress, require
from engine.layers.pools import Groups, Pools
from engine.weights import WeightSource
from runtime.errors import Unsupported

RELU2 = Activation("relu2")
ALIASES = {"model.": ("backbone.",)}

KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "linear_attention": "mamba",
    "full_attention": "attention",
    "mamba": "mamba",
    "attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


@dataclass(frozen=True, slots=True)
class NemotronHConfig:
    """kinds[i]: what layer i is: mamba, attention, mlp or moe. latent: width experts work in, 0 = hidden."""

    vocab_size: int
    hidden: int
    inner: int
    eps: float
    tied: bool
    max_len: int
    kinds: tuple[str, ...]
    mlp_bias: bool
    mamba: Mamba2Config
    attention: GqaConfig
    moe: MoeConfig | None
    latent: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> NemotronHConfig:
        """Raises Unsupported for what this file does not compute."""
        for key, known in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if config.get(key, known) != known:
                raise Unsupported(f"activation {config[key]!r} is not supported", field=key)
        if config.get("quantization_config"):
            raise Unsupported("quantised weights are not supported for this model", field="quantization_config")
        if config.get("sliding_window"):
            raise Unsupported("a sliding window is not supported for this model", field="sliding_window")
        hidden, eps = int(config["hidden_size"]), float(config.get("layer_norm_epsilon", 1e-5))
        kinds = _kinds(config)
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            eps=eps,
            tied=bool(config.get("tie_word_embeddings", False)),
            max_len=int(config.get("max_position_embeddings") or 4096),
            kinds=kinds,
            mlp_bias=bool(config.get("mlp_bias", False)),
            mamba=_mamba_config(config, hidden, eps),
            attention=_attention_config(config, hidden),
            moe=_moe_config(config, hidden) if "moe" in kinds else None,
            latent=int(config.get("moe_latent_size") or 0),
        )


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A list of names, or the pattern of letters older configs have."""
    raw = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern") or ()
    unknown = sorted(set(raw) - set(KINDS))
    if unknown:
        raise Unsupported(f"layer kinds {unknown} are not supported", field="layers_block_type")
    require(len(raw) > 0, "layers_block_type must name every layer", "layers_block_type")
    return tuple(KINDS[kind] for kind in raw)


def _mamba_config(config: Mapping[str, Any], hidden: int, eps: float) -> Mamba2Config:
    return Mamba2Config(
        hidden=hidden,
        heads=int(config["mamba_num_heads"]),
        head_dim=int(config["mamba_head_dim"]),
        groups=int(config["n_groups"]),
        state_dim=int(config["ssm_state_size"]),
        width=int(config["conv_kernel"]),
        eps=eps,
        dt_limits=(float(config.get("time_step_min", 0.001)), float("inf")),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", False)),
    )


def _attention_config(config: Mapping[str, Any], hidden: int) -> GqaConfig:
    head_dim = int(config["head_dim"])
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    return GqaConfig(hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)


def _moe_config(config: Mapping[str, Any], hidden: int) -> MoeConfig:
    return MoeConfig(
        hidden=hidden,
        inner=int(config["moe_intermediate_size"]),
        experts=int(config["n_routed_experts"]),
        top_k=int(config["num_experts_per_tok"]),
        shared=int(config["moe_shared_expert_intermediate_size"]),
        groups=int(config.get("n_group") or 1),
        kept_groups=int(config.get("topk_group") or 1),
        renormalise=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor", 1.0)),
        activation=RELU2,
    )


def _mlp(hidden: int, inner: int, bias: bool, params: Params) -> Mlp:
    """down(relu(up x)^2)"""
    up = _linear(params, "up_proj", inner, hidden, bias)
    return Mlp(up, _linear(params, "down_proj", hidden, inner, bias), RELU2)


class Moe:
    """Sigmoid routing over all of x; experts in a latent where the model has one; a shared MLP beside them."""

    def __init__(self, config: MoeConfig, latent: int, bias: bool, params: Params) -> None:
        c, width = config, latent or config.hidden
        self._router = SigmoidRouter(c, params)
        up = _experts(params, "up_proj", c.experts, c.inner, width)
        down = _experts(params, "down_proj", c.experts, width, c.inner)
        self._shared = _mlp(c.hidden, c.shared, bias, params.under("shared_experts."))
        self._experts = Experts(up, down, c.activation, None if latent else self._shared)
        self._latent = None
        if latent:
            narrow = _linear(params, "fc1_latent_proj", latent, c.hidden, bias)
            self._latent = (narrow, _linear(params, "fc2_latent_proj", c.hidden, latent, bias))

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch) -> torch.Tensor:
        routed = self._router(x)
        if self._latent is None:
            return self._experts(x, residual, routed, step)
        narrow, widen = self._latent
        return self._shared(x, widen.add_to(residual, self._experts(narrow(x), None, routed, step)))


def _linear(params: Params, name: str, rows: int, columns: int, bias: bool) -> Linear:
    return Linear(params.get(f"{name}.weight", rows, columns), params.get(f"{name}.bias", rows) if bias else None)


def _experts(params: Params, name: str, experts: int, rows: int, columns: int) -> torch.Tensor:
    """[E, rows, columns]: stacked (transformers' names) or one parameter each."""
    if params.has(f"experts.{name}"):
        return params.get(f"experts.{name}", experts, rows, columns)
    return torch.stack([params.get(f"experts.{e}.{name}.weight", rows, columns) for e in range(experts)])


class Layer:
    """index: among the layers of its kind, which is where its memory lies."""

    def __init__(self, config: NemotronHConfig, kind: str, index: int, params: Params) -> None:
        c = config
        self._index = index
        self._norm = RMSNorm(params.get("norm.weight", c.hidden), c.eps)
        mixer = params.under("mixer.")
        self._mixer: Mamba2 | Gqa | Mlp | Moe
        if kind == "mamba":
            self._mixer = Mamba2(c.mamba, mixer)
        elif kind == "attention":
            self._mixer = Gqa(c.attention, index, mixer)
        elif kind == "mlp":
            self._mixer = _mlp(c.hidden, c.inner, c.mlp_bias, mixer)
        else:
            assert c.moe is not None
            self._mixer = Moe(c.moe, c.latent, c.mlp_bias, mixer)

    def __call__(self, h: torch.Tensor, step: StepBatch, pools: Pools) -> torch.Tensor:
        x, mixer = self._norm(h), self._mixer
        if isinstance(mixer, Mamba2):
            return mixer(x, h, step, pools.state.layer(self._index))
        if isinstance(mixer, Gqa):
            return mixer(x, h, step, pools.kv)
        return mixer(x, h) if isinstance(mixer, Mlp) else mixer(x, h, step)


class NemotronHModel:
    """Implements engine.models.registry.Model."""

    def __init__(
        self,
        config: NemotronHConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        progress: Progress = lambda _: None,
    ) -> None:
        c = config
        params = Params(source, dtype, device, "model.", ALIASES)
        kinds = c.kinds
        require("attention" in kinds, "a model without attention has no pages to serve from", "layers_block_type")
        mambas = kinds.count("mamba")
        self.vocab_size = c.vocab_size
        self.groups = Groups(
            kv=c.attention.shape(kinds.count("attention"), dtype),
            query_heads=c.attention.heads,
            state=c.mamba.spec(mambas, dtype) if mambas else None,
        )
        self._embed = params.get("embeddings.weight", c.vocab_size, c.hidden)
        self._layers = []
        for at, kind in enumerate(kinds):
            self._layers.append(Layer(c, kind, kinds[:at].count(kind), params.under(f"layers.{at}.")))
            progress((at + 1) / (len(kinds) + 1))
        self._norm = RMSNorm(params.get("norm_f.weight", c.hidden), c.eps)
        top = Params(source, dtype, device)
        self._head = Linear(self._embed if c.tied else top.get("lm_head.weight", c.vocab_size, c.hidden))
        progress(1.0)

    def forward(self, step: StepBatch, pools: Pools) -> torch.Tensor:
        h = F.embedding(step.tokens, self._embed)
        for layer in self._layers:
            h = layer(h, step, pools)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden))
