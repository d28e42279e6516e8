"""Launches at the sizes of published models, to be compiled only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def at_published_sizes() -> None:
    """Launches with the sizes of Kimi-Linear, Kimi K3 and Qwen3-Next; memory is reserved and never touched."""
    from engine.kernels.delta_chunk_plan import ChunkPlan
    from engine.kernels.mla_plan import PagedPlan
    from engine.kernels.moe import Activation
    from engine.kernels.replay import Ring
    from engine.kernels.triton import attention, attnres, conv, delta_chunk, delta_decode, mla, moe, norms, replay

    def reserve(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype)

    plan = ChunkPlan.build([512, 100], [0, 1], [2, 1])
    pages = PagedPlan.build([512], [0], [list(range(1, 33))])
    for heads, groups in ((96, 1), (32, 2)):  # K3; Qwen3-Next: 16 q/k heads, 32 value heads
        state = reserve(4, heads, 4, 128, 128, dtype=torch.float32).select(2, 1)
        q, k, v = (reserve(612, heads // n, 128) for n in (groups, groups, 1))
        gate = (
            reserve(612, heads, 128, dtype=torch.float32) if groups == 1 else reserve(612, heads, dtype=torch.float32)
        )
        beta = reserve(612, heads, dtype=torch.float32)
        delta_chunk.delta_chunk(q, k, v, gate, beta, state, plan, scale=128**-0.5, l2norm=True)
        few = [x[:4] for x in (q, k, v, gate, beta)]
        slots = torch.tensor([1, 2, 3, 0])
        delta_decode.delta_decode(few[0], few[1], few[2], few[3], few[4], state, slots, scale=1.0, l2norm=True)
        records = reserve(3, 4, heads, 16, 128, dtype=torch.float32)
        ring = Ring(records[0], records[1], records[2] if groups == 1 else records[2, ..., :1], groups == 1)
        none, flush = torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.bool)
        replay.replay_decode(few[0], few[1], few[2], few[3], few[4], state, ring, slots, none, flush, scale=1.0)
        rows = reserve(4, heads, 4, 128, 3).select(2, 1)
        conv.conv_prefill(q.flatten(1), reserve(heads // groups * 128, 4), None, rows[:, : heads // groups], plan)
        norms.gated_rms_norm(v, v, reserve(128), 1e-5, activation="sigmoid")
    latents = reserve(64, 2, 16, 576).select(1, 1)
    mla.mla_decode(reserve(512, 96, 576), latents, pages, latent=512, scale=192**-0.5)
    attention.paged_attention(reserve(512, 16, 256), reserve(64, 2, 2, 2, 16, 256).select(2, 1), pages, scale=0.0625)
    attnres.attn_res(reserve(9, 512, 7168), reserve(7168), reserve(7168), 1e-5)
    norms.rms_norm(reserve(512, 7168), reserve(7168), 1e-5)
    moe.route_sigmoid(reserve(512, 896, dtype=torch.float32), reserve(896, dtype=torch.float32), 16)
    chosen = torch.arange(512 * 16).view(512, 16) % 32
    up, down = reserve(32, 6144, 3584), reserve(32, 3584, 3072)
    moe.experts_mlp(reserve(512, 3584), chosen.float(), chosen, up, down, Activation("situ", 4.0, 25.0))


def every_head_size(dtype: torch.dtype) -> None:
    """Attention, latent attention, states, convolutions and experts as the models have them: head sizes 64 to 256,
    prompt chunks, decode steps and drafts."""
    for width in (64, 80, 128, 192, 256):
        _attention(width, dtype)
    for heads, latent, shared in ((16, 512, 64), (4, 24, 8)):
        _latents(heads, latent, shared, dtype)
    for heads, groups, keys, values in ((96, 96, 128, 128), (32, 16, 128, 128), (128, 8, 128, 64), (48, 1, 128, 64)):
        _states(heads, groups, keys, values, dtype)
    for experts, top_k, hidden, inner in ((512, 10, 2048, 512), (256, 8, 2304, 1024), (8, 3, 96, 48)):
        _experts(experts, top_k, hidden, inner, dtype)


def _reserve(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def _plans(tokens: int = 512) -> list[Any]:
    """A decode step, drafts and chunks. The keys of the first two are split, if there are enough of them."""
    from engine.kernels.mla_plan import PagedPlan

    table = list(range(1, tokens // 16 + 1))
    return [PagedPlan.build([n] * 2, [tokens - n] * 2, [table] * 2) for n in (1, 4, tokens)]


def _attention(width: int, dtype: torch.dtype) -> None:
    from engine.kernels.triton import attention, norms

    for heads, kv_heads in ((9, 3), (32, 1)):
        pool = _reserve(34, kv_heads, 3, 2, 16, width, dtype=dtype)
        for plan in (*_plans(), *_plans(128)[:2]):
            q = _reserve(plan.tokens, heads + kv_heads, width, dtype=dtype)[:, :heads]
            for window in (0, 100) if plan.lengths[0] == 1 else (0,):
                attention.paged_attention(q, pool[:, :, 1], plan, scale=0.1, window=window)
    norms.rms_norm(q, _reserve(width, dtype=dtype), 1e-6, plus_one=True)


def _latents(heads: int, latent: int, shared: int, dtype: torch.dtype) -> None:
    from engine.kernels.triton import mla

    pool = _reserve(34, 3, 16, latent + shared, dtype=dtype)[:, 1]
    for plan in (*_plans(), *_plans(128)[:2]):
        mla.mla_decode(_reserve(plan.tokens, heads, latent + shared, dtype=dtype), pool, plan, latent=latent, scale=0.1)
        mla.mla_store(_reserve(plan.tokens, latent + shared, dtype=dtype), pool, plan)


def _states(heads: int, groups: int, keys: int, values: int, dtype: torch.dtype) -> None:
    from engine.kernels.delta_chunk_plan import ChunkPlan
    from engine.kernels.replay import Ring
    from engine.kernels.triton import conv, delta_chunk, delta_decode, gates, norms, replay

    plan = ChunkPlan.build([100, 30], [0, 1], [2, 1])
    vector = heads == groups
    state = _reserve(4, heads, 3, values, keys, dtype=torch.float32)[:, :, 1]
    q, k = (_reserve(130, groups, keys, dtype=dtype) for _ in "qk")
    v = _reserve(130, heads, values, dtype=dtype)
    gate = _reserve(130, heads, keys, dtype=torch.float32) if vector else _reserve(130, heads, dtype=torch.float32)
    beta = _reserve(130, heads, dtype=torch.float32)
    delta = values == keys
    skip = None if delta else _reserve(heads, dtype=torch.float32)
    flags: dict[str, Any] = {"scale": 1.0, "l2norm": delta, "delta": delta, "skip": skip}
    delta_chunk.delta_chunk(q, k, v, gate, beta, state, plan, **flags)
    slots = torch.tensor([1, 2, 3, 0])
    few = (q[:4], k[:4], v[:4], gate[:4], beta[:4])
    delta_decode.delta_decode(*few, state, slots, **flags)
    for length, fits in ((16, vector), (8, False)):
        k_ring, u_ring = (_reserve(3, 4, heads, length, n, dtype=torch.float32)[1] for n in (keys, values))
        g_ring = _reserve(3, 4, heads, length, keys if vector else 1, dtype=torch.float32)[1]
        ring = Ring(k_ring, u_ring, g_ring, fits)
        replay.replay_decode(*few, state, ring, slots, slots * 0, slots > 1, **flags)
        replay.replay_materialise(state, ring, slots, slots, slots)
    rows = _reserve(4, groups, 3, keys, 3, dtype=dtype)[:, :, 1]
    weight = _reserve(groups * keys, 4, dtype=dtype)
    conv.conv_prefill(q.flatten(1), weight, None, rows, plan)
    conv.conv_decode(q[:4].flatten(1), weight, weight[:, 0].contiguous(), rows, slots)
    gates.softplus_gate(gate.to(dtype), beta[0], gate[0])
    if delta:
        norms.gated_rms_norm(v, v, _reserve(values, dtype=dtype), 1e-5, activation="silu")
    else:
        flat, norm = v.flatten(1), _reserve(heads * values, dtype=dtype)
        norms.gated_rms_norm(flat, flat, norm, 1e-5, activation="silu", gate_first=True, group=heads * values // groups)


def _experts(experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    from engine.kernels.moe import Activation
    from engine.kernels.triton import moe

    for tokens in (4, 512):
        logits = _reserve(tokens, experts, dtype=torch.float32)
        moe.route_sigmoid(logits, logits[0], top_k)
        moe.route_softmax(logits.to(dtype), top_k)
        chosen = (torch.arange(tokens * top_k) % experts).view(tokens, top_k)
        few = min(experts, 8)  # weights of all of them would be gigabytes; the count is a number to the kernel
        up, down = _reserve(few, 2 * inner, hidden, dtype=dtype), _reserve(few, hidden, inner, dtype=dtype)
        moe.experts_mlp(_reserve(tokens, hidden, dtype=dtype), chosen.float(), chosen % few, up, down, Activation())
