"""Floating-point operations of a model per token, from its shapes and the parameters it loads.

Used to weigh what a cached state saves; a multiplication and an addition count as two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from engine.layers.pools import Groups
from engine.weights import Shape, WeightSource

STATE_FLOPS = 7
"""Per number of a recurrent state and token: decay 1, read by the key 2, write 2, read by the query 2."""


class CountedWeights:
    """A WeightSource that remembers the shape of every parameter it has given out."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._given: dict[str, Shape] = {}

    def get(self, name: str, shape: Shape) -> torch.Tensor:
        self._given[name] = tuple(shape)
        return self._source.get(name, shape)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def shape(self, name: str) -> Shape | None:
        return self._source.shape(name)

    def dtype(self) -> torch.dtype:
        return self._source.dtype()

    def rope_divisors(self) -> torch.Tensor | None:
        return self._source.rope_divisors()

    def active(self, experts: int, chosen: int) -> float:
        """Weights a prompt token is multiplied with: of the routed experts its share, without embedding and output
        projection (which only sampled positions have)."""
        return sum(_active(name, shape, experts, chosen) for name, shape in self._given.items())


def _active(name: str, shape: Shape, experts: int, chosen: int) -> float:
    if len(shape) < 2 or "embed" in name or "lm_head" in name or name.endswith("_scale"):
        return 0.0
    size = math.prod(shape) * (2 if name.endswith("_packed") else 1)
    routed = ".experts." in name or (len(shape) == 3 and shape[0] == experts)
    return size * chosen / experts if routed and experts else size


def flops_of(config: Mapping[str, Any], groups: Groups, weights: CountedWeights) -> tuple[float, float]:
    """(per token, per token and earlier token it attends to) of a prefill."""
    text = config.get("text_config") or config
    experts = _first(text, "num_experts", "n_routed_experts", "num_local_experts")
    chosen = _first(text, "num_experts_per_token", "num_experts_per_tok")
    token = 2.0 * weights.active(experts, chosen)
    if groups.state is not None:
        s = groups.state
        token += STATE_FLOPS * s.layers * s.heads * s.key_dim * s.value_dim
    pair = 0
    if groups.kv is not None:
        pair += 4 * groups.query_heads * groups.kv.head_dim * groups.kv.layers
    if groups.latent is not None:
        dims = sum(_first(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        pair += 2 * _first(text, "num_attention_heads") * dims * groups.latent.layers
    return token, float(pair)


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)
