"""Cases of attention whose keys are split over programs, for triton_cases: long and ragged batches, windows, chunks of
few tokens, padding rows, and rows that must not notice what runs beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.kernels.mla_plan import PagedPlan

from .naive import draw

Same = Callable[[Tensor, Tensor, float], None]

PAGE = 16
LONG = (1, 2300, 16, 257)
"""Ends of decode rows: one token, many spans, one whole page, one token in the second span."""

BORDERS = (255, 256, 257, 511, 513, 1024, 1025, 2049, 2560)


@contextmanager
def split() -> Iterator[None]:
    """What runs inside must split keys."""
    from engine.kernels.triton.split import Split

    merge, held = Split.merge, []

    def noted(one: Split, out: Tensor, plan: PagedPlan) -> None:
        held.append(one.held)
        merge(one, out, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Split, "merge", noted)
        yield
    assert held, "no attention ran"
    assert min(held) > 1, "nothing was split"


def scattered(ends: Sequence[int]) -> list[list[int]]:
    """Page tables in falling, interleaved order."""
    counts = [-(-end // PAGE) for end in ends]
    tables: list[list[int]] = [[] for _ in ends]
    free = sum(counts)
    for i in range(max(counts, default=0)):
        for table, count in zip(tables, counts, strict=True):
            if i < count:
                table.append(free)
                free -= 1
    return tables


def filled(shape: tuple[int, ...], tables: Sequence[Sequence[int]], ends: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A layer of a pool [pages, *shape[:-1], 16, shape[-1]] with values where the sequences have tokens and NaN
    elsewhere."""
    pages = sum(map(len, tables)) + 1
    whole = torch.full((pages, *shape[:-1], 2, PAGE, shape[-1]), torch.nan).to(dtype)
    cache = whole.select(-3, 1)
    for i, (table, end) in enumerate(zip(tables, ends, strict=True)):
        at = torch.arange(end)
        rows = draw(end, *shape, seed=i, std=1.0).to(dtype)
        cache.movedim(-2, 1)[torch.tensor(table, dtype=torch.int64)[at // PAGE], at % PAGE] = rows
    return cache


def rows_at(cache: Tensor, table: Sequence[int], end: int) -> Tensor:
    """A sequence's rows [end, ...] of a pool's layer."""
    return cache[torch.tensor(table, dtype=torch.int64)].movedim(-2, 1).flatten(0, 1)[:end]


def attended(
    same: Same,
    width: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    ends: Sequence[int] = LONG,
    count: int = 1,
    window: int = 0,
) -> None:
    """The last `count` tokens of each sequence, with an empty one between them and two rows of padding."""
    from engine.kernels.attention import attention_reference
    from engine.kernels.triton.attention import paged_attention

    ends = [*ends[:1], 0, *ends[1:]]
    tables, lengths = scattered(ends), [min(count, end) for end in ends]
    cache = filled((kv_heads, 2, width), tables, ends, dtype)
    plan = PagedPlan.build(lengths, [e - n for e, n in zip(ends, lengths, strict=True)], tables)
    q = draw(plan.tokens + 2, heads + 1, width, seed=9, std=1.0).to(dtype)[:, :heads]
    with split():
        got = paged_attention(q, cache, plan, scale=width**-0.5, window=window)
    at = 0
    for n, end, table in zip(lengths, ends, tables, strict=True):
        if n:
            kv = rows_at(cache, table, end)
            want = attention_reference(q[at : at + n], kv[:, :, 0], kv[:, :, 1], end - n, window)
            same(got[at : at + n].flatten(1).float(), want.float(), 1e-5 if dtype == torch.float32 else 1e-2)
        at += n
    same(got[at:], torch.zeros_like(got[at:]), 0.0)


def crowded(same: Same) -> None:
    """Where tiles are enough for the GPU without, only a row that is much longer than others is split."""
    from engine.kernels.triton import split as rule

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "DECODE_PROGRAMS", 0)
        attended(same, 16, 2, 1, torch.bfloat16, ends=(9000, 3, rule.MOST, rule.MOST + 1))


def latents(
    same: Same, latent: int, shared: int, heads: int, dtype: torch.dtype, ends: Sequence[int] = LONG, count: int = 1
) -> None:
    from engine.kernels import mla as torch_kernel
    from engine.kernels.triton import mla as triton_kernel

    tables, lengths = scattered(ends), [min(count, end) for end in ends]
    cache = filled((latent + shared,), tables, ends, dtype)
    plan = PagedPlan.build(lengths, [e - n for e, n in zip(ends, lengths, strict=True)], tables)
    q = draw(plan.tokens + 1, heads, latent + shared, seed=9, std=1.0).to(dtype)
    with split():
        got = triton_kernel.mla_decode(q, cache, plan, latent=latent, scale=(latent + shared) ** -0.5)
    want = torch_kernel.mla_decode(q, cache, plan, latent=latent, scale=(latent + shared) ** -0.5)
    same(got, want, 1e-5 if dtype == torch.float32 else 2e-2)


def alone(same: Same) -> None:
    """A row's bits are the same at another place of the batch, beside other rows, in a batch of another size
    (of the same power of two), beside one of many spans, and with tables laid out for longer sequences."""
    from engine.kernels.triton.attention import paged_attention
    from engine.kernels.triton.mla import mla_decode

    ends = [1000, 530, 33, 1, 4900]
    tables = scattered(ends)
    kv = filled((1, 2, 64), tables, ends, torch.float32)
    rows = filled((80,), tables, ends, torch.float32)
    queries = draw(5, 2, 80, std=1.0)

    def run(*order: int, wide: bool = False) -> tuple[Tensor, Tensor]:
        plan = PagedPlan.build([1] * len(order), [ends[i] - 1 for i in order], [tables[i] for i in order])
        if wide:
            by_page = torch.zeros(400, len(order), dtype=torch.int32)
            by_page[: plan.tables.shape[1]] = plan.tables.t()
            plan = replace(plan, tables=by_page.t())
        q = queries[torch.tensor(order)]
        return paged_attention(q[..., :64], kv, plan, scale=0.2), mla_decode(q, rows, plan, latent=64, scale=0.2)

    with split():
        first = run(0, 1, 2)
        others = [run(0, 3, 2, 2), run(2, 2, 0), run(1, 0, 1, 3), run(4, 1, 0), run(0, 2, 1, wide=True)]
    for (got, latent), at in zip(others, (0, 2, 1, 2, 0), strict=True):
        same(got[at], first[0][0], 0.0)
        same(latent[at], first[1][0], 0.0)


def cases(same: Same) -> dict[str, Callable[[], None]]:
    wide, half = torch.float32, torch.bfloat16
    return {
        "split_decode": lambda: attended(same, 64, 6, 2, wide),
        "split_decode_of_one_head_a_group": lambda: attended(same, 128, 2, 2, half),
        "split_decode_of_eight_heads_a_group": lambda: attended(same, 128, 8, 1, half, ends=(4097, 300, 15, 2)),
        "split_decode_of_many_heads_a_group": lambda: attended(same, 64, 23, 1, wide, ends=(1, 600)),
        "split_decode_of_wide_heads": lambda: attended(same, 256, 3, 1, wide, ends=(1000, 1, 513)),
        "split_decode_of_odd_heads": lambda: attended(same, 80, 5, 1, half, ends=(640, 1, 321)),
        "split_decode_at_borders": lambda: attended(same, 16, 1, 1, wide, ends=BORDERS),
        "split_decode_of_a_long_row_among_many": lambda: crowded(same),
        "split_decode_of_windows": lambda: attended(same, 64, 4, 2, wide, window=600),
        "split_decode_of_short_windows": lambda: attended(same, 64, 2, 1, wide, ends=(2000, 5, 490), window=250),
        "split_chunks": lambda: attended(same, 64, 4, 1, wide, ends=(600, 7), count=21),
        "split_chunks_of_many_heads_a_group": lambda: attended(same, 256, 23, 1, wide, ends=(300, 7), count=3),
        "split_chunks_of_windows": lambda: attended(same, 64, 4, 1, wide, ends=(600, 7), count=21, window=300),
        "split_latent_decode": lambda: latents(same, 64, 16, 18, wide, ends=(1, 900, 257)),
        "split_latent_decode_at_full_width": lambda: latents(same, 512, 64, 16, half, ends=(1, 900, 16, 257)),
        "split_latent_decode_at_full_width_in_fp32": lambda: latents(same, 512, 64, 3, wide, ends=(1, 600, 16)),
        "split_latent_chunks": lambda: latents(same, 64, 16, 3, wide, ends=(600, 7), count=9),
        "split_rows_do_not_notice_others": lambda: alone(same),
    }
