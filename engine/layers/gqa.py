"""Full attention of the hybrid families: grouped queries, and by model q and k norms, an output gate, rotary or none.

q, k, v = Wq x, Wk x, Wv x;  q, k = rope(norm(q)), rope(norm(k))   (each part only where the model has it)
out = Wo attention(q, k, v), or Wo (attention(q, k, v) * sigmoid(gate)), gate beside q in Wq
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.attention import attend
from engine.layers.batch import StepBatch
from engine.layers.kv import Kv, KvShape
from engine.layers.linear import Linear
from engine.layers.norm import ZeroCentredNorm
from engine.layers.params import Params
from engine.layers.rope import rotate

RopeAt = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GqaConfig:
    """scale: of the scores; multiplier: of the output, before it is added to the residual. normed: q and k have
    zero-centred norms per head; gated: Wq has a gate beside each head."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float = 1e-6
    normed: bool = False
    gated: bool = False
    bias: bool = False
    multiplier: float = 1.0

    def shape(self, layers: int, dtype: torch.dtype) -> KvShape:
        return KvShape(layers, self.kv_heads, self.head_dim, dtype)


class Gqa:
    def __init__(self, config: GqaConfig, index: int, params: Params) -> None:
        """index: among the layers with keys and values. params: named relative to the layer's self_attn."""
        c = config
        self._config = config
        self._index = index
        weight, bias = _heads_first(c, params, "weight"), _heads_first(c, params, "bias") if c.bias else None
        self._widths = [n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads, c.heads if c.gated else 0)]
        self._in = Linear(weight, bias)
        self._norms = None
        if c.normed:
            norms = [params.get(f"{n}_norm.weight", c.head_dim) for n in "qk"]
            self._norms = (ZeroCentredNorm(norms[0], c.eps), ZeroCentredNorm(norms[1], c.eps))
        self._out = Linear(
            params.get("o_proj.weight", c.hidden, c.heads * c.head_dim),
            params.get("o_proj.bias", c.hidden) if c.bias else None,
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, step: StepBatch, kv: Kv, rope: RopeAt | None = None
    ) -> torch.Tensor:
        """x [T, hidden] normed input, rope at the step's positions -> residual + output."""
        attended = self.mixed(x, step, kv, rope)
        if self._config.multiplier == 1.0:
            return self._out.add_to(residual, attended)
        return residual + self._out(attended) * self._config.multiplier

    def mixed(self, x: torch.Tensor, step: StepBatch, kv: Kv, rope: RopeAt | None) -> torch.Tensor:
        """The layer without its output projection: [T, heads * head_dim]."""
        c = self._config
        q, k, v, gate = torch.split(self._in(x), self._widths, -1)
        q, k, v = (part.reshape(len(x), -1, c.head_dim) for part in (q, k, v))
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        if rope is not None:
            q, k = _rotated(q, rope), _rotated(k, rope)
        kv.pool.write(self._index, step.cells, torch.cat((k, v), 1))
        attended = attend(q, step, kv, self._index, c.scale)
        return attended * torch.sigmoid(gate) if c.gated else attended


def _heads_first(c: GqaConfig, params: Params, kind: str) -> torch.Tensor:
    """q | k | v | gate, one below the other; a checkpoint has each head's gate next to its query."""
    rest = (c.hidden,) if kind == "weight" else ()
    query = params.get(f"q_proj.{kind}", c.heads * c.head_dim * (1 + c.gated), *rest)
    parts = query.view(c.heads, 1 + c.gated, c.head_dim, *rest).unbind(1)
    keys, values = (params.get(f"{n}_proj.{kind}", c.kv_heads * c.head_dim, *rest) for n in "kv")
    return torch.cat([parts[0].flatten(0, 1), keys, values, *(gate.flatten(0, 1) for gate in parts[1:])])


def _rotated(x: torch.Tensor, rope: RopeAt) -> torch.Tensor:
    """The first channels of each head turned, as many as the tables have; the rest as they are."""
    size = rope[0].shape[-1]
    if size == x.shape[-1]:
        return rotate(x, *rope)
    return torch.cat((rotate(x[..., :size].contiguous(), *rope), x[..., size:]), -1)
