"""A decode step of a fixed number of rows in buffers that never move: what a CUDA graph is captured over.

Everything that differs from step to step is a tensor: tokens, positions, page tables, lengths, slots, records. Rows
past the step's own are padding: they run on page 0 and slot 0, which nobody reads, with a length of one token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.delta_chunk_plan import ChunkPlan
from engine.kernels.mla_plan import PagedPlan
from engine.layers.batch import StepBatch
from engine.layers.latent import LatentStep
from engine.layers.pools import Groups
from engine.layers.state import LinearStep, folds, records_of
from engine.plan import Row
from kvtransfer.types import PAGE_TOKENS


class _Twin:
    """A device tensor and the host array it is filled from. On a GPU the host's is page-locked, so a copy does not
    wait; it may be written again only when the copy is over, which the end of every step sees to (Runner.run)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self.host: npt.NDArray[np.int64] = self._host.numpy()

    def send(self, count: int | None = None) -> None:
        """The first `count` along the first axis, or all: one piece of memory, or the copy would go by way of memory
        that is not page-locked, and wait."""
        self.device[:count].copy_(self._host[:count], non_blocking=True)


class StaticStep:
    """batch: always the same tensors. fill() gives them a step's values."""

    def __init__(self, groups: Groups, size: int, reach: int, ring: int, device: torch.device) -> None:
        """reach: tokens of the longest sequence."""
        self.size = size
        self._kv = groups.kv
        self._ring = ring
        columns = 2 * groups.kv.kv_heads if groups.kv is not None else 1
        self._numbers = _Twin((5, size), torch.int64, device)  # tokens, positions, latent cells, slots, records
        self._cells = _Twin((size, columns), torch.int64, device)
        self._tables = _Twin((-(-reach // PAGE_TOKENS), size), torch.int32, device)  # page by page: see send()
        self._ends = _Twin((size,), torch.int32, device)
        self._fold = _Twin((size,), torch.bool, device)
        tokens, positions, cells, slots, held = self._numbers.device.unbind()
        paged = LatentStep(self._plan(cells, device), PagedPlan.build((), (), (), 0, device))
        replay = (held, self._fold.device) if ring > 1 else None
        self.batch = StepBatch(
            tokens=tokens,
            positions=positions,
            cells=self._cells.device.view(-1) if groups.kv is not None else cells[:0],
            decode=(),
            prefill=(),
            spans=tuple((i, i + 1) for i in range(size)),
            latent=paged if groups.latent is not None else None,
            linear=LinearStep(slots, ChunkPlan.build((), (), (), device=device), 0, replay) if groups.state else None,
            paged=paged if groups.kv is not None else None,
            window=groups.window,
        )

    def _plan(self, cells: torch.Tensor, device: torch.device) -> PagedPlan:
        """One token of each row; the kernels read where it lies from the tensors alone."""
        return PagedPlan(
            lengths=(1,) * self.size,
            starts=(),
            pages=(),
            tables=self._tables.device.t(),
            firsts=torch.arange(self.size + 1, dtype=torch.int32, device=device),
            ends=self._ends.device,
            cells=cells,
        )

    def fill(self, rows: Sequence[Row]) -> None:
        """Values of these decode rows, in order, and of padding after them."""
        assert len(rows) <= self.size
        numbers, tables, ends, fold = self._numbers.host, self._tables.host, self._ends.host, self._fold.host
        numbers[:], tables[0], ends[:], fold[:] = 0, 0, 1, False
        width = 1
        for i, row in enumerate(rows):
            used = row.start // PAGE_TOKENS + 1
            width = max(width, used)
            tables[:used, i] = row.pages[:used]
            ends[i] = row.start + 1
            last = row.pages[used - 1] * PAGE_TOKENS + row.start % PAGE_TOKENS
            numbers[:, i] = row.tokens[0], row.start, last, row.slot, 0
            if self._ring > 1:
                fold[i] = folds(row.slot, row.start, row.whole, self._ring)
                numbers[4, i] = records_of(row.slot, row.start, row.whole, self._ring) if row.whole >= 0 else 0
        if self._kv is not None:
            pages, offsets = np.divmod(numbers[2], PAGE_TOKENS)
            self._cells.host[:] = self._kv.cell_index(pages, offsets).reshape(self.size, -1)
            self._cells.send()
        self._numbers.send()
        self._tables.send(width)
        self._ends.send()
        if self._ring > 1:
            self._fold.send()
