"""Kimi K3's text model written down once more, token by token in fp64 and with none of our kernels or layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.weights import RandomWeights


class NaiveK3:
    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.c = config["text_config"]
        self.source = RandomWeights(seed)
        self.lin = self.c["linear_attn_config"]

    def w(self, name: str, *shape: int) -> Tensor:
        return self.source.get(name, shape).double()

    def logits(self, tokens: list[int]) -> Tensor:
        """[T, vocab]"""
        c, hidden = self.c, self.c["hidden_size"]
        h = self.w("model.embed_tokens.weight", c["vocab_size"], hidden)[torch.tensor(tokens)]
        blocks: list[Tensor] = []
        partial: Tensor | None = h
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            assert partial is not None
            x = self.mix(p + "self_attention_res", blocks, partial) if blocks else partial
            if i % c["attn_res_block_size"] == 0:
                blocks = [*blocks, partial]
                partial = None
            x = norm(x, self.w(p + "input_layernorm.weight", hidden), 1e-5)
            y = self.kda(p, x) if i + 1 in self.lin["kda_layers"] else self.mla(p, x)
            partial = y if partial is None else partial + y
            x = self.mix(p + "mlp_res", blocks, partial)
            x = norm(x, self.w(p + "post_attention_layernorm.weight", hidden), 1e-5)
            partial = partial + (self.moe(p + "mlp.", x) if i >= c["first_k_dense_replace"] else self.dense(p, x))
        assert partial is not None
        h = self.mix("model.output_attn_res", blocks, partial)
        h = norm(h, self.w("model.norm.weight", hidden), 1e-5)
        return h @ self.w("lm_head.weight", c["vocab_size"], hidden).T

    def mix(self, name: str, blocks: list[Tensor], partial: Tensor) -> Tensor:
        hidden = self.c["hidden_size"]
        query, weight = self.w(name + "_proj.weight", 1, hidden)[0], self.w(name + "_norm.weight", hidden)
        sources = [*blocks, partial]
        scores = torch.stack([norm(s, weight, 1e-5) @ query for s in sources])
        shares = scores.softmax(0)
        return sum((share[:, None] * s for share, s in zip(shares, sources, strict=True)), torch.zeros_like(partial))

    def kda(self, p: str, x: Tensor) -> Tensor:
        heads, dim, hidden = self.lin["num_heads"], self.lin["head_dim"], self.c["hidden_size"]
        p += "self_attn."
        size = heads * dim
        conv = self.w(p + "conv1d.weight", 3 * size, 4)
        qkv = torch.cat([x @ self.w(p + f"{n}_proj.weight", size, hidden).T for n in "qkv"], -1)
        padded = torch.cat([qkv.new_zeros(3, 3 * size), qkv])
        mixed = torch.stack([(padded[t : t + 4].T * conv).sum(-1) for t in range(len(x))])
        mixed = mixed * torch.sigmoid(mixed)
        q, k, v = (part.view(-1, heads, dim) for part in mixed.chunk(3, -1))
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        low = x @ self.w(p + "forget_gate.f_a_proj.weight", dim, hidden).T
        raw = (low @ self.w(p + "forget_gate.f_b_proj.weight", size, dim).T).view(-1, heads, dim)
        rate = self.w(p + "forget_gate.A_log", heads).exp()[:, None]
        bias = self.w(p + "forget_gate.dt_bias", size).view(heads, dim)
        g = self.lin["gate_lower_bound"] * torch.sigmoid(rate * (raw + bias))
        beta = torch.sigmoid(x @ self.w(p + "b_proj.weight", heads, hidden).T)
        gate = torch.sigmoid(x @ self.w(p + "g_proj.weight", size, hidden).T).view(-1, heads, dim)
        out = torch.zeros_like(v)
        for head in range(heads):
            s = torch.zeros(dim, dim, dtype=torch.float64)  # [K, V]
            for t in range(len(x)):
                s = g[t, head].exp()[:, None] * s
                u = beta[t, head] * (v[t, head] - k[t, head] @ s)
                s = s + k[t, head][:, None] * u
                out[t, head] = (q[t, head] * dim**-0.5) @ s
        out = norm(out, self.w(p + "o_norm.weight", dim), 1e-5) * gate
        return out.flatten(1) @ self.w(p + "o_proj.weight", hidden, size).T

    def mla(self, p: str, x: Tensor) -> Tensor:
        c, hidden, p = self.c, self.c["hidden_size"], p + "self_attn."
        heads, plain, shared = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        rank, latent, width = c["q_lora_rank"], c["kv_lora_rank"], c["v_head_dim"]
        q = norm(x @ self.w(p + "q_a_proj.weight", rank, hidden).T, self.w(p + "q_a_layernorm.weight", rank), 1e-6)
        q = (q @ self.w(p + "q_b_proj.weight", heads * (plain + shared), rank).T).view(-1, heads, plain + shared)
        both = x @ self.w(p + "kv_a_proj_with_mqa.weight", latent + shared, hidden).T
        low = norm(both[:, :latent], self.w(p + "kv_a_layernorm.weight", latent), 1e-6)
        kv = (low @ self.w(p + "kv_b_proj.weight", heads * (plain + width), latent).T).view(-1, heads, plain + width)
        out = torch.zeros(len(x), heads, width, dtype=torch.float64)
        for head in range(heads):
            keys = torch.cat([kv[:, head, :plain], both[:, latent:]], -1)
            for t in range(len(x)):
                scores = keys[: t + 1] @ q[t, head] * (plain + shared) ** -0.5
                out[t, head] = scores.softmax(0) @ kv[: t + 1, head, plain:]
        gate = torch.sigmoid(x @ self.w(p + "g_proj.weight", heads * width, hidden).T)
        return (out.flatten(1) * gate) @ self.w(p + "o_proj.weight", hidden, heads * width).T

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        b, c = float(self.c["activation_situ_beta"]), float(self.c["activation_situ_linear_beta"])
        return b * torch.tanh(gate / b) * torch.sigmoid(gate) * c * torch.tanh(up / c)

    def mlp(self, p: str, x: Tensor, inner: int) -> Tensor:
        hidden = self.c["hidden_size"]
        gate, up = (x @ self.w(p + f"{n}_proj.weight", inner, hidden).T for n in ("gate", "up"))
        return self.situ(gate, up) @ self.w(p + "down_proj.weight", hidden, inner).T

    def dense(self, p: str, x: Tensor) -> Tensor:
        return self.mlp(p + "mlp.", x, self.c["intermediate_size"])

    def moe(self, p: str, x: Tensor) -> Tensor:
        c, hidden, latent = self.c, self.c["hidden_size"], self.c["routed_expert_hidden_size"]
        experts, inner, top = c["num_experts"], c["moe_intermediate_size"], c["num_experts_per_token"]
        scores = torch.sigmoid(x @ self.w(p + "gate.weight", experts, hidden).T)
        order = (scores + self.w(p + "gate.e_score_correction_bias", experts)).argsort(-1, descending=True)
        ups = self.w(p + "experts.gate_up_proj", experts, 2 * inner, latent)
        downs = self.w(p + "experts.down_proj", experts, latent, inner)
        z = x @ self.w(p + "routed_expert_down_proj.weight", latent, hidden).T
        rows = []
        for t in range(len(x)):
            chosen = order[t, :top].tolist()
            total = float(sum(scores[t, e] for e in chosen))
            row = torch.zeros(latent, dtype=torch.float64)
            for e in chosen:
                gate, up = (ups[e] @ z[t]).chunk(2)
                row += scores[t, e] / total * (downs[e] @ self.situ(gate, up))
            rows.append(row)
        routed = norm(torch.stack(rows), self.w(p + "routed_expert_norm.weight", latent), 1e-5)
        routed = routed @ self.w(p + "routed_expert_up_proj.weight", hidden, latent).T
        return routed + self.mlp(p + "shared_experts.", x, inner * c["num_shared_experts"])


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
