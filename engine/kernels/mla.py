"""Multi-head latent attention over paged latents, plain torch.

A token's cache row is [normalised latent R | shared key part D - R], for all heads. One layer of the pool is
[page, 16, D], strided by page. Prefill expands keys and values from the latents (fewer operations for many queries);
decode absorbs the up-projections into query and output and attends to the latents themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.mla_plan import PAGE, PagedPlan

QUERY_BLOCK = 128
"""Queries scored at once: scores of a block stay in cache and keys past its last query are never read."""


def mla_store(rows: Tensor, cache: Tensor, plan: PagedPlan) -> None:
    """Write rows [len(plan.cells), D] to their places; padding rows land in page 0."""
    cells = plan.cells
    cache[cells // PAGE, cells % PAGE] = rows.to(cache.dtype)


def mla_absorb(q: Tensor, up_key: Tensor) -> Tensor:
    """q [T, heads, N + D - R] (N channels against the expanded key, the rest against the shared part) and up_key
    [heads, N, R] -> absorbed queries [T, heads, D]."""
    plain = up_key.shape[1]
    latent = torch.bmm(q[..., :plain].transpose(0, 1), up_key).transpose(0, 1)
    return torch.cat((latent, q[..., plain:]), dim=-1)


def mla_expand(out: Tensor, up_value: Tensor) -> Tensor:
    """Latent outputs [T, heads, R] and up_value [heads, V, R] -> [T, heads, V]."""
    return torch.bmm(out.transpose(0, 1), up_value.transpose(1, 2)).transpose(0, 1)


def mla_decode(q: Tensor, cache: Tensor, plan: PagedPlan, *, latent: int, scale: float) -> Tensor:
    """Absorbed attention, causal by position: q [T, heads, D], T >= plan.tokens -> [T, heads, latent]; rows past the
    plan return zeros. Every sequence may have one or several query tokens (speculative rows)."""
    out = q.new_zeros(*q.shape[:2], latent)
    at = 0
    for b, (length, start) in enumerate(zip(plan.lengths, plan.starts, strict=True)):
        if not length:
            continue
        known = _gather(cache, plan.pages[b], start + length).to(q.dtype)
        rows = q[at : at + length].flatten(0, 1)  # heads of a token are rows over the same keys
        scores = (rows @ known.t()).mul_(scale).view(length, -1, start + length)
        if length > 1:
            scores.masked_fill_(_future(length, start, 0, start + length, q.device).unsqueeze(1), -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).flatten(0, 1)
        out[at : at + length] = (weights @ known[:, :latent]).view(length, -1, latent)
        at += length
    return out


def mla_prefill(q: Tensor, cache: Tensor, plan: PagedPlan, up_key: Tensor, up_value: Tensor, *, scale: float) -> Tensor:
    """Expanded attention, causal: q [T, heads, N + D - R], up_key [heads, N, R], up_value [heads, V, R]. The step's own
    rows must be stored already. Returns [T, heads, V]; rows past the plan return zeros."""
    heads, plain, latent = up_key.shape
    out = q.new_zeros(len(q), heads, up_value.shape[1])
    at = 0
    for b, (length, start) in enumerate(zip(plan.lengths, plan.starts, strict=True)):
        if not length:
            continue
        total = start + length
        known = _gather(cache, plan.pages[b], total).to(q.dtype)
        keys = q.new_empty(heads, total, q.shape[-1])
        keys[..., :plain] = torch.matmul(known[:, :latent], up_key.transpose(1, 2))
        keys[..., plain:] = known[:, latent:]
        values = torch.matmul(known[:, :latent], up_value.transpose(1, 2))
        queries = q[at : at + length].transpose(0, 1).contiguous()
        for first in range(0, length, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, length)
            seen = start + last
            scores = torch.bmm(queries[:, first:last], keys[:, :seen].transpose(1, 2)).mul_(scale)
            scores[:, :, start + first :].masked_fill_(
                _future(last - first, start + first, start + first, seen, q.device), -torch.inf
            )
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            out[at + first : at + last] = torch.bmm(weights, values[:, :seen]).transpose(0, 1)
        at += length
    return out


def _gather(cache: Tensor, pages: tuple[int, ...], tokens: int) -> Tensor:
    """The first `tokens` rows of a sequence [tokens, D]. Copied as 64-bit words where they fit: index operations on
    narrow types are several times slower."""
    index = torch.tensor(pages, dtype=torch.long, device=cache.device)
    if cache.shape[-1] * cache.element_size() % 8 == 0 and cache.element_size() < 8:
        words = cache.view(torch.int64).index_select(0, index)
        return words.view(cache.dtype).flatten(0, 1)[:tokens]
    return cache.index_select(0, index).flatten(0, 1)[:tokens]


def _future(queries: int, start: int, low: int, high: int, device: torch.device) -> Tensor:
    """[queries, high - low]: keys at positions low... that the query at start + i must not see."""
    return torch.arange(low, high, device=device) > torch.arange(start, start + queries, device=device).unsqueeze(1)
