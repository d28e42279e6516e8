"""The page pool and the index arithmetic on it.

One tensor [page, kv_head, layer, 2 (K, V), 16 tokens, head_dim]. Two flat views of the same memory do all the work, in
64-bit words because index operations on narrow types are several times slower:
  rows   [.., 16 * head_dim]  one (page, head, layer, K or V): what attention gathers
  cells  [.., head_dim]       one token of it: what a step writes
Indices are made once per step for layer 0; a layer is reached by starting the flat view at its offset, so no layer
does index arithmetic. Page 0 is null: padding writes there and nothing that is read comes from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.types import PAGE_TOKENS, Component, Region

Index = npt.NDArray[np.int64]


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


class KvPool:
    """Owns the pages' memory."""

    def __init__(self, shape: KvShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.pages = torch.zeros(
            (num_pages, shape.kv_heads, shape.layers, 2, PAGE_TOKENS, shape.head_dim), dtype=shape.dtype, device=device
        )
        self._rows = self.pages.view(-1, PAGE_TOKENS * shape.head_dim).view(torch.int64)
        self._cells = self.pages.view(-1, shape.head_dim).view(torch.int64)

    def copy_page(self, source: int, target: int) -> None:
        self.pages[target].copy_(self.pages[source])

    def write(self, layer: int, cells: torch.Tensor, kv: torch.Tensor) -> None:
        """Store kv [T, 2 * kv_heads, head_dim] (K heads, then V heads) at cell_index() of layer 0, flattened."""
        values = kv.reshape(-1, self.shape.head_dim).view(torch.int64)
        self._cells[layer * 2 * PAGE_TOKENS :].index_copy_(0, cells, values)

    def gather(self, layer: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Fetch rows (row_index() of layer 0, flattened) into out [len(rows), 16 * head_dim words]."""
        torch.index_select(self._rows[layer * 2 :], 0, rows, out=out)

    @property
    def row_words(self) -> int:
        """64-bit words of one row."""
        return self._rows.shape[1]

    def region(self, region_id: int) -> Region:
        c = self.shape.component()
        return Region(
            region_id=region_id,
            component=c.name,
            base=self.pages.data_ptr(),
            length=self.pages.numel() * self.pages.element_size(),
            stride=c.item_bytes,
            first_unit=0,
            units=c.units,
            device=self.pages.device.index or 0,
            memory="DRAM" if self.pages.device.type == "cpu" else "VRAM",
        )
