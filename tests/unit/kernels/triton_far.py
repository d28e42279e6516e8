"""Kernels on memory whose offsets do not fit 31 bits: a pool of a large GPU has them. Items lie 2^30 elements apart in
memory that is reserved and, but for them, never touched."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

APART = (1 << 30) + 64
MAP_NORESERVE = 0x4000  # Linux; Python has no name for it before 3.13


def far(x: Tensor) -> Tensor:
    """The same values, the first axis 2^30 elements and more apart: the third item lies beyond 2^31."""
    size = ((len(x) - 1) * APART + x[0].numel()) * x.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    flat = torch.from_numpy(memory).view(x.dtype)
    there = flat.as_strided(x.shape, (APART, *x.contiguous().stride()[1:]))
    assert len(x) > 2, "nothing would be far"
    return there.copy_(x)


def cases() -> dict[str, Callable[[Callable[[Tensor], Tensor]], list[Tensor]]]:
    """Name -> what gets a way to place memory, and returns what a kernel made."""
    return {
        "paged_attention": _attention,
        "latent_attention": _latents,
        "states": _states,
        "records": _records,
        "convolutions": _convolutions,
        "experts": _experts,
        "rows": _rows,
    }


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def _plan() -> Any:
    from engine.kernels.mla_plan import PagedPlan

    return PagedPlan.build([1, 3], [20, 14], [[1, 3], [2, 3]])


def _attention(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    from engine.kernels.triton import attention

    pool = place(_draw(4, 2, 2, 16, 32, seed=1))
    return [attention.paged_attention(place(_draw(4, 4, 32)), pool, _plan(), scale=0.2)]


def _latents(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    from engine.kernels.triton import mla

    pool = place(_draw(4, 16, 40, seed=1))
    mla.mla_store(place(_draw(4, 40, seed=2)), pool, _plan())
    return [mla.mla_decode(place(_draw(4, 3, 40)), pool, _plan(), latent=32, scale=0.2), pool[3]]


def _inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (_draw(tokens, 2, 16, seed=seed) for seed in (1, 2, 3))
    return q, k, v, -_draw(tokens, 2, 16, seed=4).abs(), _draw(tokens, 2, seed=5).sigmoid()


def _states(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    from engine.kernels.delta_chunk_plan import Checkpoint, ChunkPlan
    from engine.kernels.triton import delta_chunk, delta_decode

    state = place(_draw(5, 2, 16, 16, seed=6))
    plan = ChunkPlan.build([20], [3], [4], [0], [Checkpoint(0, 16, 2)])
    made = [delta_chunk.delta_chunk(*_inputs(20), state, plan, scale=1.0, l2norm=True)]
    slots = torch.tensor([4, 3])
    made.append(delta_decode.delta_decode(*_inputs(2), state, slots, scale=1.0, l2norm=True))
    return [*made, state[2], state[3], state[4]]


def _records(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    from engine.kernels.replay import Ring
    from engine.kernels.triton import replay

    state = place(_draw(4, 2, 16, 16, seed=6))
    keys, values, logs = (place(_draw(4, 2, 4, 16, seed=s)) for s in (7, 8, 9))
    logs.abs_().neg_()
    ring = Ring(keys, values, logs, False)
    slots, held = torch.tensor([3, 2]), torch.tensor([2, 3])
    made = replay.replay_decode(*_inputs(2), state, ring, slots, held, held == 3, scale=1.0, l2norm=True)
    replay.replay_materialise(state, ring, torch.tensor([3]), torch.tensor([3]), torch.tensor([2]))
    return [made, state[2], state[3], ring.k[3], ring.u[3], ring.g[3]]


def _convolutions(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    from engine.kernels.delta_chunk_plan import ChunkPlan
    from engine.kernels.triton import conv

    state, weight = place(_draw(4, 2, 8, 3, seed=1)), _draw(16, 4, seed=2)
    plan = ChunkPlan.build([5], [3], [2], [16])
    made = [conv.conv_prefill(place(_draw(5, 16)), weight, None, state, plan)]
    made.append(conv.conv_decode(place(_draw(3, 16, seed=3)), weight, None, state, torch.tensor([3, 2, 0])))
    return [*made, state[2], state[3]]


def _experts(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    from engine.kernels.moe import Activation
    from engine.kernels.triton import moe

    up, down = place(_draw(4, 32, 16, seed=1)), place(_draw(4, 16, 16, seed=2))
    x, chosen = place(_draw(5, 16)), torch.tensor([[3, 0], [2, 3], [1, 2], [0, 1], [3, 2]])
    return [moe.experts_mlp(x, _draw(5, 2, seed=4), chosen, up, down, Activation())]


def _rows(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    from engine.kernels.triton import attnres, norms

    x = place(_draw(4, 32))
    mixed = attnres.attn_res(place(_draw(4, 3, 32)), _draw(32, seed=1), None, 1e-5)
    return [norms.gated_rms_norm(x, x, _draw(32), 1e-5, activation="silu"), mixed]


def check(name: str) -> None:
    """Far memory gives what near memory gives, bit for bit. A kernel that reaches wrong memory crashes, or differs."""
    work = cases()[name]
    for near, away in zip(work(Tensor.clone), work(far), strict=True):
        assert torch.equal(near, away.contiguous()), name
