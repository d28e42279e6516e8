"""Latent attention over pages against a dense float64 attention with expanded keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.mla import mla_absorb, mla_decode, mla_expand, mla_prefill, mla_store
from engine.kernels.mla_plan import PagedPlan

from .naive import relative

HEADS, PLAIN, SHARED, LATENT, VALUE = 3, 8, 4, 16, 8
SCALE = (PLAIN + SHARED) ** -0.5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights() -> tuple[Tensor, Tensor]:
    return draw(HEADS, PLAIN, LATENT, seed=8) * 0.3, draw(HEADS, VALUE, LATENT, seed=9) * 0.3


def dense(q: Tensor, rows: Tensor, start: int) -> Tensor:
    """q [t, heads, PLAIN + SHARED] at positions start..., rows [start + t, D]: float64 definition."""
    up_key, up_value = (w.double() for w in weights())
    latent, shared = torch.split(rows.double(), [LATENT, SHARED], dim=-1)
    keys = torch.cat((torch.einsum("lr,hnr->hln", latent, up_key), shared.expand(HEADS, -1, -1)), dim=-1)
    values = torch.einsum("lr,hvr->hlv", latent, up_value)
    scores = torch.einsum("thd,hld->htl", q.double(), keys) * SCALE
    hidden = torch.arange(len(rows)) > start + torch.arange(len(q)).unsqueeze(1)
    return torch.einsum("htl,hlv->thv", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def scattered_pages(lengths: list[int]) -> list[list[int]]:
    """Page tables in falling, interleaved order, so that neither order nor contiguity can be assumed."""
    counts = [-(-n // 16) for n in lengths]
    numbers = iter(range(sum(counts), 0, -1))
    return [[next(numbers) for _ in range(c)] for c in counts]


def cache_pool(pages: int) -> tuple[Tensor, Tensor]:
    """[page, layer, 16, D] and the second layer, NaN outside page 0 so that a read past the tokens shows."""
    whole = torch.full((pages + 1, 3, 16, LATENT + SHARED), torch.nan)
    whole[0] = 0
    return whole, whole.select(1, 1)


@pytest.mark.parametrize("form", ["prefill", "decode"])
@pytest.mark.parametrize("starts", [[0, 0, 0], [0, 16, 30], [5, 40, 0]])
def test_both_forms_equal_dense_attention(form: str, starts: list[int]) -> None:
    lengths = [20, 1, 5]
    totals = [s + n for s, n in zip(starts, lengths, strict=True)]
    tables = scattered_pages(totals)
    whole, cache = cache_pool(sum(map(len, tables)))
    known = [draw(n, LATENT + SHARED, seed=i) for i, n in enumerate(totals)]
    mla_store(torch.cat(known), cache, PagedPlan.build(totals, [0, 0, 0], tables))
    plan = PagedPlan.build(lengths, starts, tables)
    q = draw(sum(lengths) + 2, HEADS, PLAIN + SHARED, seed=7)
    up_key, up_value = weights()
    if form == "prefill":
        out = mla_prefill(q, cache, plan, up_key, up_value, scale=SCALE)
    else:
        latent = mla_decode(mla_absorb(q, up_key), cache, plan, latent=LATENT, scale=SCALE)
        out = mla_expand(latent, up_value)
    at = 0
    for i, n in enumerate(lengths):
        assert relative(out[at : at + n], dense(q[at : at + n], known[i], starts[i])) <= 1e-5
        at += n
    assert (out[at:] == 0).all(), "padding rows"
    assert torch.isnan(whole[1:, 0]).all(), "another layer was written"


def test_padding_rows_are_stored_in_page_zero_only() -> None:
    whole, cache = cache_pool(2)
    before = whole.clone()
    plan = PagedPlan.build([1], [17], [[2, 1]], padding=3)
    mla_store(torch.ones(4, LATENT + SHARED), cache, plan)
    assert (cache[1, 1] == 1).all()
    changed = (whole != before) & ~(whole.isnan() & before.isnan())
    assert sorted({(int(p), int(t)) for p, t in changed[:, 1].any(-1).nonzero()}) == [(0, 0), (1, 1)]
    assert not changed[:, 0].any()


def test_long_prefills_cross_query_blocks() -> None:
    tables = scattered_pages([300])
    _, cache = cache_pool(len(tables[0]))
    known = draw(300, LATENT + SHARED)
    mla_store(known, cache, PagedPlan.build([300], [0], tables))
    q = draw(290, HEADS, PLAIN + SHARED, seed=7)
    out = mla_prefill(q, cache, PagedPlan.build([290], [10], tables), *weights(), scale=SCALE)
    assert relative(out, dense(q, known, 10)) <= 1e-5
