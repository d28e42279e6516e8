"""The page pool and the index arithmetic on it.

One tensor [page, kv_head, layer, 2 (K, V), 16 tokens, head_dim]. Two flat views of the same memory do all the work, in
64-bit words because index operations on narrow types are several times slower:
  rows   [.., 16 * head_dim]  one (page, head, layer, K or V): what attention gathers
  cells  [.., head_dim]       one token of it: what a step writes
Indices are made once per step for layer 0; a layer is reached by starting the flat view at its offset, so no layer
does index arithmetic. Page 0 is null: padding writes there and nothing that is read comes from there.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.types import PAGE_TOKENS, Component

Index = npt.NDArray[np.int64]

HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def component(self) -> Component:
        return Component(
            name="kv",
            paged=True,
            units=self.kv_heads,
            layers=self.layers,
            rows=2,
            tokens=PAGE_TOKENS,
            token_bytes=self.head_dim * self.dtype.itemsize,
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def row_index(self, pages: Index) -> Index:
        """pages [B, P] -> rows of layer 0 [2, B, kv_heads, P]."""
        head = np.arange(self.kv_heads, dtype=np.int64)[:, None]
        unit = (pages[:, None, :] * self.kv_heads + head) * (self.layers * 2)
        return np.stack((unit, unit + 1))

    def cell_index(self, pages: Index, offsets: Index) -> Index:
        """The page and the offset in it of each token [T] -> cells of layer 0 [T, 2, kv_heads]."""
        head = np.arange(self.kv_heads, dtype=np.int64)
        unit = (pages[:, None] * self.kv_heads + head) * (self.layers * 2)
        rows = np.stack((unit, unit + 1), axis=1)
        return rows * PAGE_TOKENS + offsets[:, None, None]


def _memory(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised. On Linux it begins on a huge page and asks for huge ones: pages of KV are read in no order the
    hardware can follow, and with small ones the address look-ups cost a third of a long decode step."""
    if device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype, device=device)
    raw = torch.empty(count + HUGE_PAGE // dtype.itemsize, dtype=dtype, device=device)
    begin = -raw.data_ptr() % HUGE_PAGE // dtype.itemsize
    pool = raw[begin : begin + count]
    # advice: where the kernel does not take it, small pages do
    libc = ctypes.CDLL(None)
    libc.madvise(ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(count * dtype.itemsize), mmap.MADV_HUGEPAGE)
    return pool


class KvPool:
    """Owns the pages' memory."""

    def __init__(self, shape: KvShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        size = (num_pages, shape.kv_heads, shape.layers, 2, PAGE_TOKENS, shape.head_dim)
        self.pages = _memory(math.prod(size), shape.dtype, device).view(size).zero_()
        self._rows = self.pages.view(-1, PAGE_TOKENS * shape.head_dim).view(torch.int64)
        self._cells = self.pages.view(-1, shape.head_dim).view(torch.int64)

    def write(self, layer: int, cells: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [T, 2 * kv_heads, head_dim] (K heads, then V heads) at cell_index() of layer 0, flattened."""
        values = kv.reshape(-1, self.shape.head_dim).view(torch.int64)
        self._cells[layer * 2 * PAGE_TOKENS :].index_copy_(0, cells, values)

    def layer(self, index: int) -> torch.Tensor:
        """[page, kv_head, 2, 16, head_dim] of one layer, strided by page and head."""
        return self.pages[:, :, index]

    def gather(self, layer: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Fetch rows (row_index() of layer 0, flattened) into out [len(rows), 16 * head_dim words]."""
        torch.index_select(self._rows[layer * 2 :], 0, rows, out=out)

    @property
    def row_words(self) -> int:
        """64-bit words of one row."""
        return self._rows.shape[1]


class Kv:
    """The pool and the scratch its pages are gathered into, shared by all layers."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self._scratch = torch.empty(0, dtype=torch.int64, device=pool.pages.device)

    def gather(self, layer: int, rows: torch.Tensor, batch: int, blank: torch.Tensor | None) -> torch.Tensor:
        """-> [2, batch, kv_heads, keys, head_dim] with the token rows of `blank` zeroed; valid until the next call."""
        shape, words = self.pool.shape, self.pool.row_words
        need = len(rows) * words
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need + need // 4, dtype=torch.int64, device=rows.device)
        out = self._scratch[:need].view(len(rows), words)
        self.pool.gather(layer, rows, out)
        if blank is not None:
            out.view(-1, shape.head_dim * shape.dtype.itemsize // 8).index_fill_(0, blank, 0)
        return out.view(shape.dtype).view(2, batch, shape.kv_heads, -1, shape.head_dim)
