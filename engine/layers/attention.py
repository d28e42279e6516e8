"""One layer's attention over paged keys and values, for all rows of a step."""

from __future__ import annotations

import torch

from engine.kernels.attention import decode_attention, prefill_attention
from engine.layers.batch import StepBatch
from engine.layers.kv import Kv
from engine.layers.latent import LatentStep


def attend(
    q: torch.Tensor, step: StepBatch, kv: Kv, layer: int, scale: float, *, windowed: bool = False
) -> torch.Tensor:
    """q [T, heads, head_dim] -> [T, heads * head_dim]; the step's own keys and values are stored already. Padding rows
    are zero. windowed: the layer sees the model's sliding window only."""
    if step.paged is not None:
        return _by_pages(q, step.paged, kv.pool.layer(layer), scale, step.window if windowed else 0)
    out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
    covered = 0
    for d in step.decode:
        mask = d.window_mask if windowed else d.mask
        pages = kv.gather(layer, d.rows, d.last - d.first, d.blank)
        decode_attention(q[d.first : d.last], pages, mask, scale, out[d.first : d.last])
        covered = d.last
    for p in step.prefill:
        pages = kv.gather(layer, p.rows, 1, None)[:, 0]
        blocks = p.windowed if windowed else p.blocks
        rows = slice(p.first, p.last)
        prefill_attention(q[rows], pages, blocks, p.first, scale, out[rows])
        covered = p.last
    out[covered:].zero_()
    return out


def _by_pages(q: torch.Tensor, step: LatentStep, cache: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """On a GPU: straight from the pages, in one launch for the decode rows and one for prompt chunks."""
    from engine.kernels.triton.attention import paged_attention

    at = step.decode.tokens
    parts = [paged_attention(q[:at], cache, step.decode, scale=scale, window=window)] if at else []
    if at < len(q):
        parts.append(paged_attention(q[at:], cache, step.prefill, scale=scale, window=window))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
