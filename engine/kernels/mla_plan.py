"""Where the rows of a step find their keys: page tables and lengths, built once per step for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PAGE = 16
"""Tokens of a page."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """B sequences; sequence b runs lengths[b] query tokens at positions starts[b]... over totals[b] known tokens.

    Tensors are on the pool's device: tables [B, P] int32 page numbers (0 past the end), firsts [B + 1] int32 the first
    query row of each sequence, ends [B] int32 = totals, cells [T + padding] int64 = page * 16 + offset of each query
    token; padding rows point at page 0, offset 0.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    tables: torch.Tensor
    firsts: torch.Tensor
    ends: torch.Tensor
    cells: torch.Tensor

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(s + n for s, n in zip(self.starts, self.lengths, strict=True))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @staticmethod
    def build(
        lengths: Sequence[int],
        starts: Sequence[int],
        pages: Sequence[Sequence[int]],
        padding: int = 0,
        device: torch.device | str = "cpu",
    ) -> PagedPlan:
        """pages: each sequence's page table from position 0, long enough for starts + lengths."""
        used = [tuple(p[: -(-(s + n) // PAGE)]) for s, n, p in zip(starts, lengths, pages, strict=True)]
        assert all(len(u) * PAGE >= s + n for u, s, n in zip(used, starts, lengths, strict=True)), (
            "page table too short"
        )
        width = max((len(u) for u in used), default=1) or 1
        tables = torch.zeros(len(used), width, dtype=torch.int32)
        cells: list[int] = []
        firsts = [0]
        for b, (start, length, table) in enumerate(zip(starts, lengths, used, strict=True)):
            tables[b, : len(table)] = torch.tensor(table, dtype=torch.int32)
            cells.extend(table[p // PAGE] * PAGE + p % PAGE for p in range(start, start + length))
            firsts.append(firsts[-1] + length)
        return PagedPlan(
            lengths=tuple(lengths),
            starts=tuple(starts),
            pages=tuple(used),
            tables=tables.to(device),
            firsts=torch.tensor(firsts, dtype=torch.int32, device=device),
            ends=torch.tensor([s + n for s, n in zip(starts, lengths, strict=True)], dtype=torch.int32, device=device),
            cells=torch.tensor(cells + [0] * padding, dtype=torch.long, device=device),
        )
