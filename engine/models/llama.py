"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 (dense).

    h = embed(tokens)
    for each layer:  h += o(attention(rope(norm_q(q)), rope(norm_k(k)), v));  h += down(silu(gate) * up)
    logits = head(norm(h))

What differs between them is data: biases, per-head q and k norms (Qwen3), a sliding window in some layers (Mistral,
Qwen2), tied embeddings, the RoPE scaling. Weight names are Hugging Face's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from engine.kernels.cpu.decode import DecodeLayer, DecodeModel, PackedLinear, require_supported
from engine.layers.attention import attend
from engine.layers.batch import StepBatch
from engine.layers.kv import Kv, KvShape
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.pools import Groups, Pools
from engine.layers.rope import Rope, RopeConfig, rotate
from engine.weights import WeightSource
from runtime.errors import Unsupported


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """windowed[i]: layer i attends to the last `window` tokens only (0 = no layer does)."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_len: int
    rope: RopeConfig
    window: int
    windowed: tuple[bool, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face config. Raises Unsupported for what this file does not compute."""
        kind = str(config["model_type"])
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise Unsupported(f"activation {config['hidden_act']!r} is not supported", field="hidden_act")
        if config.get("quantization_config"):
            raise Unsupported("quantised safetensors are not supported", field="quantization_config")
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads or head_dim % 4:
            raise Unsupported("query heads must be a multiple of KV heads, and head_dim of 4", field="head_dim")
        rope = RopeConfig.from_hf(config, head_dim)
        windowed = _windowed(kind, config, layers)
        bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=int(config["vocab_size"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias and kind != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            max_len=rope.max_len(int(config.get("max_position_embeddings") or 2048)),
            rope=rope,
            window=int(config["sliding_window"]) if any(windowed) else 0,
            windowed=windowed,
        )


def _windowed(kind: str, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if not config.get("sliding_window") or not (kind == "mistral" or config.get("use_sliding_window", False)):
        return (False,) * layers
    if config.get("layer_types"):
        return tuple(t == "sliding_attention" for t in config["layer_types"])
    if kind == "mistral":
        return (True,) * layers
    return tuple(i >= int(config.get("max_window_layers", layers)) for i in range(layers))


class Attention:
    def __init__(self, config: LlamaConfig, index: int, get: Callable[[str], torch.Tensor], compiled: bool) -> None:
        self._config = config
        self._index = index
        self._windowed = config.windowed[index]
        prefix = f"model.layers.{index}.self_attn."
        # a scale that is a power of two is exact wherever it is multiplied in, so the q weights can carry it
        scale = config.head_dim**-0.5
        fold = scale if math.log2(scale).is_integer() else 1.0
        self.scale = scale / fold
        q_scale = 1.0 if config.qk_norm else fold
        parts = [get(prefix + f"{n}_proj.weight") for n in "qkv"]
        biases = [get(prefix + f"{n}_proj.bias") for n in "qkv"] if config.qkv_bias else []
        for first in (parts[:1], biases[:1]):
            for t in first:
                t.mul_(q_scale)
        self.qkv = Linear(torch.cat(parts), torch.cat(biases) if biases else None, compiled=compiled)
        self.o = Linear(
            get(prefix + "o_proj.weight"), get(prefix + "o_proj.bias") if config.o_bias else None, compiled=compiled
        )
        self.norms = None
        if config.qk_norm:
            q_norm, k_norm = (get(prefix + f"{n}_norm.weight") for n in "qk")
            self.norms = (RMSNorm(q_norm * fold, config.eps), RMSNorm(k_norm, config.eps))

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch, rope: tuple[torch.Tensor, torch.Tensor], kv: Kv
    ) -> torch.Tensor:
        """x [T, hidden] normed input -> residual + attention output."""
        c = self._config
        rotated = c.heads + c.kv_heads
        qkv = self.qkv(x).view(-1, rotated + c.kv_heads, c.head_dim)
        qk = qkv[:, :rotated]
        if self.norms:
            qk = torch.cat((self.norms[0](qk[:, : c.heads]), self.norms[1](qk[:, c.heads :])), 1)
        qk = rotate(qk, *rope)
        kv.pool.write(self._index, step.cells, torch.cat((qk[:, c.heads :], qkv[:, rotated:]), 1))
        attended = attend(qk[:, : c.heads], step, kv, self._index, self.scale, windowed=self._windowed)
        return self.o.add_to(residual, attended)


class Mlp:
    def __init__(self, config: LlamaConfig, index: int, get: Callable[[str], torch.Tensor], compiled: bool) -> None:
        prefix = f"model.layers.{index}.mlp."
        names = ("gate", "up")
        bias = torch.cat([get(prefix + f"{n}_proj.bias") for n in names]) if config.mlp_bias else None
        self.gate_up = Linear(torch.cat([get(prefix + f"{n}_proj.weight") for n in names]), bias, compiled=compiled)
        self.down = Linear(
            get(prefix + "down_proj.weight"),
            get(prefix + "down_proj.bias") if config.mlp_bias else None,
            compiled=compiled,
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down.add_to(residual, F.silu(gate) * up)


class Layer:
    def __init__(self, config: LlamaConfig, index: int, get: Callable[[str], torch.Tensor], compiled: bool) -> None:
        prefix = f"model.layers.{index}."
        self.norm = RMSNorm(get(prefix + "input_layernorm.weight"), config.eps)
        self.attention = Attention(config, index, get, compiled)
        self.mlp_norm = RMSNorm(get(prefix + "post_attention_layernorm.weight"), config.eps)
        self.mlp = Mlp(config, index, get, compiled)

    def __call__(
        self, h: torch.Tensor, step: StepBatch, rope: tuple[torch.Tensor, torch.Tensor], kv: Kv
    ) -> torch.Tensor:
        h = self.attention(self.norm(h), h, step, rope, kv)
        return self.mlp(self.mlp_norm(h), h)


class LlamaModel:
    """forward: StepBatch -> final hidden states [T, hidden]; logits: rows of them -> [R, vocab]."""

    def __init__(
        self,
        config: LlamaConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        progress: Callable[[float], None] = lambda _: None,
        *,
        compiled: bool = False,
    ) -> None:
        """compiled: keep what decode_model() needs. Raises Unsupported where the compiled step cannot do it."""
        if compiled:
            widths = (config.hidden, config.intermediate)
            require_supported(dtype=dtype, device=device, head_dim=config.head_dim, widths=widths)

        def get(name: str) -> torch.Tensor:
            return source.get(name, shapes[name]).to(dtype=dtype, device=device, copy=True)

        shapes = parameter_shapes(config)
        self.config = config
        self.vocab_size = config.vocab_size
        self.groups = Groups(
            kv=KvShape(config.layers, config.kv_heads, config.head_dim, dtype),
            query_heads=config.heads,
            window=config.window,
        )
        self._embed = get("model.embed_tokens.weight")
        self._layers = []
        for i in range(config.layers):
            self._layers.append(Layer(config, i, get, compiled))
            progress((i + 1) / (config.layers + 1))
        self._norm = RMSNorm(get("model.norm.weight"), config.eps)
        self._head = Linear(self._embed if config.tied else get("lm_head.weight"), compiled=compiled)
        self._rope = Rope(config.rope, max_len, dtype, device, source.rope_divisors())
        progress(1.0)

    def forward(self, step: StepBatch, pools: Pools) -> torch.Tensor:
        h = F.embedding(step.tokens, self._embed)
        rope = self._rope.at(step.positions)
        for layer in self._layers:
            h = layer(h, step, rope, pools.kv)
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden))

    def decode_model(self) -> DecodeModel:
        """The weights as the compiled decode step wants them (made with compiled=True)."""
        c = self.config
        return DecodeModel(
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            inner=c.intermediate,
            eps=c.eps,
            scale=self._layers[0].attention.scale,
            embed=self._embed,
            cos=self._rope.cos,
            sin=self._rope.sin,
            norm=self._norm.weight,
            head=_for_decode(self._head),
            layers=tuple(self._decode_layer(layer, c.windowed[i]) for i, layer in enumerate(self._layers)),
        )

    def _decode_layer(self, layer: Layer, windowed: bool) -> DecodeLayer:
        norms = [n.weight for n in layer.attention.norms or ()]
        return DecodeLayer(
            qkv=_for_decode(layer.attention.qkv),
            o=_for_decode(layer.attention.o),
            gate_up=_for_decode(layer.mlp.gate_up),
            down=_for_decode(layer.mlp.down),
            norm=layer.norm.weight,
            mlp_norm=layer.mlp_norm.weight,
            q_norm=norms[0] if norms else None,
            k_norm=norms[1] if norms else None,
            window=self.config.window if windowed else 0,
        )


def _for_decode(linear: Linear) -> PackedLinear:
    assert linear.for_decode is not None, "the model was not made for the compiled step"
    return linear.for_decode


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter by its Hugging Face name: what a checkpoint must hold, and what `random` weights are made of."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden)}
    for i in range(c.layers):
        p = f"model.layers.{i}."
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (c.hidden,)
        widths = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        for n, heads in widths.items():
            shapes[p + f"self_attn.{n}_proj.weight"] = (heads * c.head_dim, c.hidden)
            if c.qkv_bias:
                shapes[p + f"self_attn.{n}_proj.bias"] = (heads * c.head_dim,)
        shapes[p + "self_attn.o_proj.weight"] = (c.hidden, c.heads * c.head_dim)
        if c.o_bias:
            shapes[p + "self_attn.o_proj.bias"] = (c.hidden,)
        if c.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (c.head_dim,)
        for n, (rows, columns) in {
            "gate": (c.intermediate, c.hidden),
            "up": (c.intermediate, c.hidden),
            "down": (c.hidden, c.intermediate),
        }.items():
            shapes[p + f"mlp.{n}_proj.weight"] = (rows, columns)
            if c.mlp_bias:
                shapes[p + f"mlp.{n}_proj.bias"] = (rows,)
    shapes["model.norm.weight"] = (c.hidden,)
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden)
    return shapes
