"""Multi-head latent attention without rotary embedding (NoPE), as Kimi-Linear and Kimi K3 have it.

    q = Wq x, or Wq2 rms_norm(Wq1 x);  [c | p] = Wkv x;  a token's cache row is [rms_norm(c) | p], shared by all heads
    k_h = [Wk_h c | p];  v_h = Wv_h c;  o = softmax(q k^T / sqrt(dim)) v;  out = Wo o, or Wo (o * sigmoid(Wg x))
The part p exists although nothing is rotated. Decode absorbs Wk and Wv and attends to the cache rows themselves.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from engine.kernels.cpu.build import current
from engine.kernels.cpu.latent import LatentAttention
from engine.kernels.mla import mla_absorb, mla_expand
from engine.kernels.mla_plan import PagedPlan
from engine.kernels.ops import mla_decode, mla_prefill, mla_store
from engine.layers.batch import StepBatch
from engine.layers.latent import LatentStep
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.params import Params

NOTHING = PagedPlan.build([], [], [])  # no rows

LATENT_EPS = 1e-6  # of the norms inside the low-rank projections, whatever the model's own


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """plain: channels of a head's key made from the latent; shared: of the part common to all heads."""

    hidden: int
    heads: int
    latent: int
    plain: int
    shared: int
    value_dim: int
    query_rank: int = 0
    output_gate: bool = False
    bias: bool = False

    @property
    def width(self) -> int:
        """Of a cache row."""
        return self.latent + self.shared


class Mla:
    def __init__(self, config: MlaConfig, params: Params) -> None:
        """params: named relative to the layer's self_attn."""
        c = config
        self._config = config
        self._scale = (c.plain + c.shared) ** -0.5
        query = c.heads * (c.plain + c.shared)
        first = ["q_a_proj" if c.query_rank else "q_proj", "kv_a_proj_with_mqa"]
        self._split = [c.query_rank or query, c.latent, c.shared]
        rows = [self._split[0], c.width]
        biases = [_bias(params, n, r, c.bias) for n, r in zip(first, rows, strict=True)]
        joined = torch.cat(biases) if c.bias else None
        self._first = Linear(params.cat([f"{n}.weight" for n in first], rows, c.hidden), joined)
        self._query = None
        if c.query_rank:
            norm = RMSNorm(params.get("q_a_layernorm.weight", c.query_rank), LATENT_EPS)
            self._query = (norm, Linear(params.get("q_b_proj.weight", query, c.query_rank)))
        self._latent_norm = RMSNorm(params.get("kv_a_layernorm.weight", c.latent), LATENT_EPS)
        up = params.get("kv_b_proj.weight", c.heads * (c.plain + c.value_dim), c.latent)
        up_key, up_value = torch.split(up.view(c.heads, -1, c.latent), [c.plain, c.value_dim], 1)
        self._up_key, self._up_value = up_key.contiguous(), up_value.contiguous()
        self._compiled = self._decoder()
        inner = c.heads * c.value_dim
        self._gate = Linear(params.get("g_proj.weight", inner, c.hidden)) if c.output_gate else None
        self._out = Linear(
            params.get("o_proj.weight", c.hidden, inner), params.get("o_proj.bias", c.hidden) if c.bias else None
        )

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: StepBatch, cache: torch.Tensor
    ) -> torch.Tensor:
        """x [T, hidden] normed input, cache [page, 16, width] of this layer -> residual + output (None = none)."""
        y = self.mixed(x, step, cache)
        return self._out(y) if residual is None else self._out.add_to(residual, y)

    def mixed(self, x: torch.Tensor, step: StepBatch, cache: torch.Tensor) -> torch.Tensor:
        """The layer without its output projection: [T, heads * value_dim]."""
        first = self._first(x)
        q, kv = first[:, : self._split[0]], first[:, self._split[0] :]
        if self._query:
            norm, up = self._query
            q = up(norm(q))
        attended = self._run(q, kv, step, cache)
        return attended if self._gate is None else attended * torch.sigmoid(self._gate(x))

    def _decoder(self) -> LatentAttention | None:
        compiled, norm = current(), self._latent_norm.weight
        if compiled is None:
            return None
        return LatentAttention(
            compiled, norm, self._up_key, self._up_value, self._config.shared, LATENT_EPS, self._scale
        )

    def _run(self, q: torch.Tensor, kv: torch.Tensor, step: StepBatch, cache: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads * ...] and new rows of the cache, [latent before its norm | shared]: -> [T, heads * V]."""
        assert step.latent is not None
        at = step.latent.decode.tokens
        if self._compiled is None or not at:
            return self._plain(q, kv, step, cache)
        done = self._compiled(q[:at], kv[:at], cache, step.latent.decode)
        if at == len(q):
            return done
        rest = LatentStep(NOTHING, step.latent.prefill)
        return torch.cat((done, self._plain(q[at:], kv[at:], dataclasses.replace(step, latent=rest), cache)))

    def _plain(self, q: torch.Tensor, kv: torch.Tensor, step: StepBatch, cache: torch.Tensor) -> torch.Tensor:
        c = self._config
        assert step.latent is not None
        latent, shared = torch.split(kv, self._split[1:], -1)
        rows = torch.cat((self._latent_norm(latent), shared), -1)
        q = q.reshape(len(q), c.heads, -1)
        decoding = step.latent.decode.tokens
        if decoding:
            mla_store(rows[:decoding], cache, step.latent.decode)
        if decoding < len(q):
            mla_store(rows[decoding:], cache, step.latent.prefill)
        return self._attend(q, cache, step).flatten(1)

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, step: StepBatch) -> torch.Tensor:
        """q [T, heads, plain + shared] -> [T, heads, value_dim]."""
        c = self._config
        assert step.latent is not None
        plans, decoding = step.latent, step.latent.decode.tokens
        out = q.new_zeros(len(q), c.heads, c.value_dim)
        if decoding < len(q):
            tail = mla_prefill(q[decoding:], cache, plans.prefill, self._up_key, self._up_value, scale=self._scale)
            out[decoding:] = tail
        if decoding:
            # with neighbours where there are too few rows: a matmul's bits change below min_rows
            rows = max(decoding, step.min_rows)
            absorbed = mla_absorb(q[:rows], self._up_key)
            seen = mla_decode(absorbed, cache, plans.decode, latent=c.latent, scale=self._scale)
            out[:decoding] = mla_expand(seen, self._up_value)[:decoding]
        return out


def _bias(params: Params, name: str, rows: int, wanted: bool) -> torch.Tensor:
    """Of a down-projection; a query projected at once has none even where the others do."""
    if wanted and name != "q_proj":
        return params.get(f"{name}.bias", rows)
    return torch.zeros(rows, dtype=params.dtype, device=params.device)
