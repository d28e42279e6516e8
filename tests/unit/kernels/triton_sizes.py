"""Launches at the sizes of published models, to be compiled only."""

from __future__ import annotations

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
