"""Causal depthwise convolution (width W, SiLU) with its state in slots, plain torch.

y[t, c] = silu(bias[c] + sum_i weight[c, i] x[t - W + 1 + i, c]), x before the sequence from the slot, zeros for a new
sequence. One call per sub-projection (q, k, v or x, B, C), each with its own state component.

State: one layer of the component, [slot, unit, channels, rows], rows oldest first, inputs before the convolution;
rows = W - 1 + draft. The first W - 1 rows are the committed window. Slot 0 is null: zeros when read, never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.delta_chunk_plan import ChunkPlan


def conv_prefill(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, plan: ChunkPlan, *, silu: bool = True
) -> Tensor:
    """x [T, C] packed by the plan (T may exceed its tokens: zeros there), weight [C, W], bias [C]. Returns [T, C].

    Leaves the last W - 1 inputs of each sequence in its final slot, those before each checkpoint in the checkpoint's.
    """
    keep = weight.shape[1] - 1
    joined, firsts = _join(x, state, plan, keep)
    y = x.new_zeros(x.shape) if len(x) > plan.tokens else torch.empty_like(x, memory_format=torch.contiguous_format)
    if plan.tokens:
        convolved = _convolve(joined, weight, bias, silu)
        at = 0
        for first, length in zip(firsts, plan.lengths, strict=True):
            y[at : at + length] = convolved[first : first + length]
            at += length
    for sequence, (first, length) in enumerate(zip(firsts, plan.lengths, strict=True)):
        if plan.final[sequence] and length:
            _store(state, plan.final[sequence], joined[first + length : first + length + keep])
    for point in plan.checkpoints:
        end = firsts[point.sequence] + point.offset
        _store(state, point.slot, joined[end : end + keep])
    return y


def conv_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, *, silu: bool = True
) -> Tensor:
    """One token of each request: x [B, C], slots [B] int64. Returns [B, C]; the window moves on by one row."""
    keep = weight.shape[1] - 1
    window = torch.cat((_window(state, slots, keep), x.unsqueeze(-1)), dim=-1)
    _scatter(state, slots, window[:, :, 1:])
    return _activate((window.float() * weight.float()).sum(-1), bias, silu).to(x.dtype)


def conv_verify(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, *, silu: bool = True
) -> Tensor:
    """T = 1 + draft rows of each request, of which conv_commit later keeps the first 1..T. x [B, T, C] -> [B, T, C].

    The window already moves on by the first row, which is always kept; the other rows wait behind it as draft rows.
    Needs W - 1 + (T - 1) state rows.
    """
    keep = weight.shape[1] - 1
    tokens = x.shape[1]
    assert state.shape[-1] >= keep + tokens - 1, "state component has too few draft rows"
    window = torch.cat((_window(state, slots, keep), x.transpose(1, 2)), dim=-1)
    _scatter(state, slots, window[:, :, 1:])
    views = window.float().unfold(-1, keep + 1, 1)  # [B, C, T, W]
    y = torch.einsum("bctw,cw->btc", views, weight.float())
    return _activate(y, bias, silu).to(x.dtype)


def conv_commit(state: Tensor, slots: Tensor, counts: Tensor, *, width: int) -> None:
    """Keep the first counts[b] (1..T) rows of the last conv_verify: the window begins counts - 1 rows later."""
    keep = width - 1
    rows = (counts - 1).unsqueeze(1) + torch.arange(keep, device=counts.device)
    held = state.index_select(0, slots)
    index = rows[:, None, None].expand(-1, *held.shape[1:3], -1)
    moved = held.gather(-1, index)
    _scatter(state, slots, moved.flatten(1, 2))


def _join(x: Tensor, state: Tensor, plan: ChunkPlan, keep: int) -> tuple[Tensor, list[int]]:
    """Every sequence with its W - 1 rows in front, in one buffer; and where each sequence begins in it."""
    joined = x.new_empty(plan.tokens + keep * len(plan.lengths), x.shape[1])
    firsts: list[int] = []
    at = token = 0
    for length, slot in zip(plan.lengths, plan.initial, strict=True):
        firsts.append(at)
        if slot:
            joined[at : at + keep] = state[slot, :, :, :keep].flatten(0, 1).t()
        else:
            joined[at : at + keep] = 0
        joined[at + keep : at + keep + length] = x[token : token + length]
        at += keep + length
        token += length
    return joined, firsts


def _convolve(joined: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """[R, C] -> fp32 [R - W + 1, C]. As a channels-last depthwise 2-d convolution it is one pass over memory."""
    rows, channels = joined.shape
    image = joined.float().view(1, 1, rows, channels).permute(0, 3, 1, 2)
    kernel = weight.float().reshape(channels, 1, 1, -1)
    y = torch.nn.functional.conv2d(image, kernel, None if bias is None else bias.float(), groups=channels)
    y = y.permute(0, 2, 3, 1).reshape(-1, channels)
    return torch.nn.functional.silu(y, inplace=True) if silu else y


def _activate(y: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    y = y if bias is None else y + bias.float()
    return torch.nn.functional.silu(y) if silu else y


def _store(state: Tensor, slot: int, rows: Tensor) -> None:
    """rows [W - 1, C] become the committed window of a slot."""
    state[slot, :, :, : len(rows)] = torch.unflatten(rows.t(), 0, state.shape[1:3])


def _window(state: Tensor, slots: Tensor, keep: int) -> Tensor:
    window = state[..., :keep].index_select(0, slots).flatten(1, 2)
    return window.masked_fill((slots == 0)[:, None, None], 0)


def _scatter(state: Tensor, slots: Tensor, rows: Tensor) -> None:
    """rows [B, C, n] -> the first n state rows of each slot; padding (slot 0) writes zeros to the null slot."""
    rows = torch.unflatten(rows.masked_fill((slots == 0)[:, None, None], 0), 1, state.shape[1:3])
    state[..., : rows.shape[-1]].index_copy_(0, slots, rows.to(state.dtype))
