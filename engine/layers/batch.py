"""A step's plan as tensors: what every layer shares, made once per step.

Order of tokens in a step: decode rows grouped by similar length, then each prompt chunk, then padding (page 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.attention import Block, DecodeGroup, PrefillGroup, block_rows
from engine.kernels.delta_chunk_plan import Checkpoint, ChunkPlan
from engine.kernels.mla_plan import PagedPlan
from engine.kernels.ops import uses_triton
from engine.layers.kv import KvShape
from engine.layers.latent import LatentStep
from engine.layers.pools import Groups
from engine.layers.state import STEADY_ROWS, LinearStep, folds, records_of
from engine.plan import Row
from kvtransfer.types import PAGE_TOKENS

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """tokens, positions [T]; cells: where each token's keys and values go (KvShape.cell_index, flattened).

    spans: first and last token of each row of the plan, in its order. min_rows: least rows of any matmul.
    decode, prefill and cells serve layers with keys and values, latent those with latent attention, linear those with
    a state; empty or None where the model has no such layer. On a GPU paged stands for decode and prefill, window is
    the model's.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillGroup, ...]
    spans: tuple[tuple[int, int], ...]
    min_rows: int = 1
    latent: LatentStep | None = None
    linear: LinearStep | None = None
    paged: LatentStep | None = None
    window: int = 0


class Inputs:
    """Makes batches on one device. Token, position and cell buffers are reused from step to step."""

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        *,
        alone: bool,
        min_rows: int,
        ring: int = 1,
    ) -> None:
        """alone: each decode row is its own group (a row then cannot depend on its neighbours). min_rows: pad a step to
        at least so many tokens. ring: records per state slot, see StatePool."""
        self._groups = groups
        self._window = groups.window
        self._device = device
        self._alone = alone
        self._min_rows = min_rows
        self._ring = ring
        self._paged_kernels = uses_triton(device)
        self._buffers: dict[str, torch.Tensor] = {}
        self._triangles: dict[int, torch.Tensor] = {}

    def build(self, rows: Sequence[Row]) -> StepBatch:
        groups = self._decode_groups([i for i, r in enumerate(rows) if r.is_decode], rows)
        order = [i for g in groups for i in g] + [i for i, r in enumerate(rows) if not r.is_decode]
        starts = np.cumsum([0] + [len(rows[i].tokens) for i in order])
        spans: list[tuple[int, int]] = [(0, 0)] * len(rows)
        for at, i in enumerate(order):
            spans[i] = (int(starts[at]), int(starts[at + 1]))
        tokens, positions, pages = self._flat([rows[i] for i in order], int(starts[-1]))
        decode = [rows[i] for g in groups for i in g]
        prefill = [r for r in rows if not r.is_decode]
        padding = len(tokens) - int(starts[-1])
        has_kv = self._groups.kv is not None
        gathers = has_kv and not self._paged_kernels
        cells = self._kv.cell_index(pages, positions % PAGE_TOKENS) if has_kv else np.zeros(0, dtype=np.int64)
        return StepBatch(
            tokens=self._put("tokens", tokens),
            positions=self._put("positions", positions),
            cells=self._put("cells", cells.ravel()),
            decode=tuple(self._decode(spans[g[0]][0], [rows[i] for i in g]) for g in groups) if gathers else (),
            prefill=tuple(self._prefill(spans[i][0], r) for i, r in enumerate(rows) if not r.is_decode)
            if gathers
            else (),
            spans=tuple(spans),
            min_rows=self._min_rows,
            latent=self._latent(decode, prefill, padding) if self._groups.latent else None,
            linear=self._linear(decode, prefill) if self._groups.state else None,
            paged=self._latent(decode, prefill, padding) if has_kv and self._paged_kernels else None,
            window=self._window,
        )

    @property
    def _kv(self) -> KvShape:
        assert self._groups.kv is not None, "this model has no keys and values"
        return self._groups.kv

    def _latent(self, decode: Sequence[Row], prefill: Sequence[Row], padding: int) -> LatentStep:
        return LatentStep(self._paged(decode, 0), self._paged(prefill, padding))

    def _paged(self, rows: Sequence[Row], padding: int) -> PagedPlan:
        lengths, starts = [len(r.tokens) for r in rows], [r.start for r in rows]
        return PagedPlan.build(lengths, starts, [r.pages for r in rows], padding, self._device)

    def _linear(self, decode: Sequence[Row], prefill: Sequence[Row]) -> LinearStep:
        assert all(r.slot > 0 for r in (*decode, *prefill)), "a state without a slot"
        assert not any(r.checkpoints for r in decode), "a decode row has no interior"
        assert all(r.whole < 0 for r in prefill), "a chunk starts from a whole state and leaves one"
        points = [
            Checkpoint(i, length - row.start, slot) for i, row in enumerate(prefill) for length, slot in row.checkpoints
        ]
        plan = ChunkPlan.build(
            lengths=[len(r.tokens) for r in prefill],
            initial=[r.slot if r.start else 0 for r in prefill],
            final=[r.slot for r in prefill],
            starts=[r.start for r in prefill],
            checkpoints=points,
            device=self._device,
        )
        slots = self._device_copy(np.array([r.slot for r in decode], dtype=np.int64))
        null_rows = -len(decode) % STEADY_ROWS if self._alone else 0
        return LinearStep(slots, plan, null_rows, self._replay(decode) if self._ring > 1 else None)

    def _replay(self, decode: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """None where no row has records or leaves one: then it is plain decoding, by plain decoding's code."""
        held = [records_of(r.slot, r.start, r.whole, self._ring) if r.whole >= 0 else 0 for r in decode]
        fold = [folds(r.slot, r.start, r.whole, self._ring) for r in decode]
        if not any(held) and all(fold):
            return None
        return self._device_copy(np.array(held, dtype=np.int64)), torch.tensor(fold, device=self._device)

    def _flat(self, rows: Sequence[Row], count: int) -> tuple[Array, Array, Array]:
        """Token ids, positions and pages of every token, padded."""
        padded = max(count, self._min_rows)
        if self._alone and self._groups.state is not None:
            padded = -(-padded // STEADY_ROWS) * STEADY_ROWS
        tokens, positions, pages = (np.zeros(padded, dtype=np.int64) for _ in range(3))
        at = 0
        for row in rows:
            end = at + len(row.tokens)
            tokens[at:end] = row.tokens
            positions[at:end] = np.arange(row.start, row.start + len(row.tokens))
            table = np.asarray(row.pages, dtype=np.int64)
            pages[at:end] = table[positions[at:end] // PAGE_TOKENS]
            at = end
        return tokens, positions, pages

    def _decode_groups(self, indices: list[int], rows: Sequence[Row]) -> list[list[int]]:
        """Rows of similar length together: a group's padded size is at most 1.5 times its own, or a few pages."""
        if self._alone:
            return [[i] for i in indices]
        groups: list[list[int]] = []
        real = 0
        for i in sorted(indices, key=lambda i: (-rows[i].start, i)):
            pages = rows[i].start // PAGE_TOKENS + 1
            longest = rows[groups[-1][0]].start // PAGE_TOKENS + 1 if groups else 0
            padded = longest * (len(groups[-1]) + 1) if groups else 0
            if groups and padded - real - pages <= max(64, (real + pages) // 2):
                groups[-1].append(i)
                real += pages
            else:
                groups.append([i])
                real = pages
        return groups

    def _decode(self, first: int, rows: Sequence[Row]) -> DecodeGroup:
        lengths = np.array([r.start + 1 for r in rows], dtype=np.int64)
        longest = int(lengths.max())
        width = -(-longest // PAGE_TOKENS)
        pages = np.zeros((len(rows), width), dtype=np.int64)
        for row, table in zip(rows, pages, strict=True):
            used = row.start // PAGE_TOKENS + 1
            table[:used] = row.pages[:used]
        key = np.arange(width * PAGE_TOKENS, dtype=np.int64)
        hidden = key[None, :] >= lengths[:, None]
        mask = self._additive(hidden[:, None, None, :]) if hidden.any() else None
        window_mask = mask
        if self._window and longest > self._window:
            early = key[None, :] < lengths[:, None] - self._window
            window_mask = self._additive((hidden | early)[:, None, None, :])
        return DecodeGroup(
            first=first,
            last=first + len(rows),
            rows=self._device_copy(self._kv.row_index(pages).ravel()),
            mask=mask,
            window_mask=window_mask,
            blank=self._blank(lengths, width) if mask is not None else None,
        )

    def _blank(self, lengths: Array, width: int) -> torch.Tensor | None:
        """Token rows past each sequence's end in its last page, in a buffer [2, B, KH, width * 16]."""
        heads, size = self._kv.kv_heads, width * PAGE_TOKENS
        found = [
            (b * heads + h) * size + np.arange(n, -(-n // PAGE_TOKENS) * PAGE_TOKENS, dtype=np.int64)
            for b, n in enumerate(lengths.tolist())
            for h in range(heads)
        ]
        one = np.concatenate(found)
        if not len(one):
            return None
        return self._device_copy(np.concatenate((one, one + len(lengths) * heads * size)))

    def _prefill(self, first: int, row: Row) -> PrefillGroup:
        end = row.start + len(row.tokens)
        pages = np.asarray(row.pages[: -(-end // PAGE_TOKENS)], dtype=np.int64)[None]
        return PrefillGroup(
            first=first,
            last=first + len(row.tokens),
            rows=self._device_copy(self._kv.row_index(pages).ravel()),
            blocks=self._blocks(first, row, 0),
            windowed=self._blocks(first, row, self._window) if self._window else (),
        )

    def _blocks(self, first: int, row: Row, window: int) -> tuple[Block, ...]:
        count = len(row.tokens)
        size = block_rows(self._groups.query_heads, row.start + count, self._kv.dtype.itemsize)
        blocks = []
        for begin in range(0, count, size):
            rows = min(size, count - begin)
            position = row.start + begin
            high = position + rows
            low = max(0, position - window + 1) if window else 0
            mask = self._triangle(rows)
            if window and high > window:
                key = np.arange(low, high, dtype=np.int64)
                query = np.arange(position, high, dtype=np.int64)[:, None]
                mask = self._additive((key > query) | (key <= query - window))
            blocks.append(Block(first + begin, first + begin + rows, low, high, mask))
        return tuple(blocks)

    def _triangle(self, rows: int) -> torch.Tensor:
        """Causal mask of a block against its own keys."""
        if rows not in self._triangles:
            self._triangles[rows] = self._additive(np.triu(np.ones((rows, rows), dtype=np.bool_), 1))
        return self._triangles[rows]

    def _additive(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        values = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return torch.from_numpy(values).to(dtype=self._kv.dtype, device=self._device)

    def _device_copy(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values).to(device=self._device)

    def _put(self, name: str, values: Array) -> torch.Tensor:
        """Copy into the named buffer, grown to the next power of two when it is too small."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < len(values):
            size = 1 << max(6, (len(values) - 1).bit_length())
            buffer = self._buffers[name] = torch.zeros(size, dtype=torch.int64, device=self._device)
        view = buffer[: len(values)]
        view.copy_(torch.from_numpy(values))
        return view
