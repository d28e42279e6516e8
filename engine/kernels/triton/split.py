"""Attention whose keys are split over programs (Flash-Decoding), for steps of too few tiles to fill a GPU.

A tile's keys are cut into spans, each is one program's, which leaves its maximum, its sum and its unnormalised output;
a second kernel weighs them. How long a span is follows from the tile's own keys and from `parts`, and `parts` follows
from the shape of the launch (tiles, the GPU) and not from what is in the batch. So a row's result depends on its own
keys and on the power of two of rows it runs with, whatever else runs beside it, and a CUDA graph can hold the launch:
programs that would lie past a tile's last key end at once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.mla_plan import PAGE, PagedPlan
from engine.kernels.triton.common import block

LEAST = 256
"""Keys of a span at least: with fewer, what it leaves and its own start cost as much as reading them."""

MOST = 4096
"""Keys of a decode row's span at most, however many tiles there are: one long row among many would be read by too few
multiprocessors for their share of the memory's bandwidth, and everybody would wait for it."""

PARTS = 128
"""Spans of a tile at most where `parts` decides."""

MERGED = 32
"""Spans that the second kernel adds up at a time; of more it takes several rounds."""

DECODE_PROGRAMS, CHUNK_PROGRAMS = 4, 2
"""Wanted of each multiprocessor: about as many are there at a time. A prompt chunk has more to compute than to read."""

MULTIPROCESSORS = 132
"""Of an H100, where there is no GPU to ask."""

VARYING = ("parts", "held", "all_rows", "stride_tb", "stride_tp")
"""Numbers that a kernel is not compiled anew for: they differ from step to step."""


@triton.jit
def span_of(low, high, split, parts, KEYS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """First and last key of the split-th span of keys [low, high); empty past the last one."""
    span = tl.cdiv(tl.cdiv(high - low, parts), KEYS) * KEYS
    span = tl.minimum(tl.maximum(span, LEAST), MOST)
    begin = low + split * span
    return begin, tl.minimum(high, begin + span)


@triton.jit
def soften(scores, best):
    """One step of the online softmax over masked scores [rows, keys]: the new maxima, these keys' shares, and what
    everything before is to be multiplied with. A row may have seen no key yet."""
    top = tl.maximum(best, tl.max(scores, 1))
    level = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.exp(scores - level[:, None]), tl.exp(best - level)


@triton.jit
def leave(partial, stats, at, held, split, all_rows, width, result, best, norm, valid, columns, tile, some):
    """What a span's program leaves of its rows at rows `at` (token and head), row by row [held] beside each other."""
    place = at * held + split
    tl.store(stats + place, best, mask=valid)
    tl.store(stats + all_rows * held + place, norm, mask=valid)
    if some:
        tl.store(partial + place[:, None] * width + columns[None, :], result, mask=tile)


@triton.jit(do_not_specialize=["held", "all_rows"])
def _merge_kernel(
    partial, stats, out, held, all_rows, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: BLOCK channels of one head of one token. Spans are added up so many at a time however many there
    are: a compiler orders the sums of a tile by its shape, and what others make room for must not change a row."""
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (c < WIDTH)[None, :]
    top = tl.full([1], -float("inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    result = tl.zeros([BLOCK], tl.float32)
    for first in range(0, held, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        place = row * held + split
        best = tl.load(stats + place, mask=split < held, other=-float("inf"))
        seen = best > -float("inf")
        norms = tl.load(stats + all_rows * held + place, mask=seen, other=0.0)
        parts = tl.load(partial + place[:, None] * WIDTH + c[None, :], mask=seen[:, None] & inside, other=0.0)
        top, share, fade = soften(best[None, :], top)
        norm = norm * fade + tl.sum(share * norms[None, :], 1)
        result = result * fade + tl.sum(tl.trans(share) * parts, 0)
    tl.store(out + row * WIDTH + c, (result / norm).to(out.dtype.element_ty), mask=c < WIDTH)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def parts_of(sequences: int, tiles: int, programs: int) -> int:
    """Spans that a tile's keys are cut into: a power of two. sequences: counted as their next power of two, as a CUDA
    graph's buffers have them. tiles: of one sequence."""
    wanted = programs // ((1 << (sequences - 1).bit_length()) * tiles)
    return min(1 << max(wanted, 1).bit_length() - 1, PARTS)


@dataclass(frozen=True, slots=True)
class Split:
    """parts, most: see span_of. held: programs of a tile, 1 = nothing is split. partial [rows, held, width] and stats
    [2, rows, held] (maxima, sums), both fp32; a row is a head of a token."""

    parts: int
    most: int
    held: int
    rows: int
    partial: Tensor
    stats: Tensor

    @classmethod
    def of(cls, q: Tensor, plan: PagedPlan, width: int, *, tiles: int, heads: int, reach: int = 0) -> Split:
        """For the plan's rows of q [T, heads, ...]. width: channels of the result. tiles: of the longest sequence for
        each of `heads` groups of heads. reach: keys a tile sees at most (0 = all)."""
        decode = max(plan.lengths) == 1
        programs = multiprocessors(q.device) * (DECODE_PROGRAMS if decode else CHUNK_PROGRAMS)
        parts = parts_of(len(plan.lengths), tiles * heads, programs)
        keys = plan.tables.shape[1] * PAGE
        keys = min(keys, reach) if reach else keys
        most = MOST if decode else 1 << 30
        held = max(min(parts, -(-keys // LEAST)), -(-keys // most))
        rows = plan.tokens * q.shape[1] if held > 1 else 0
        partial = torch.empty((rows, held, width), dtype=torch.float32, device=q.device)
        return cls(parts, most, held, rows, partial, torch.empty((2, rows, held), dtype=torch.float32, device=q.device))

    def merge(self, out: Tensor, plan: PagedPlan) -> None:
        """Into the plan's rows of out [T, heads, width], contiguous."""
        if self.held == 1:
            return
        heads, width = out.shape[1:]
        size = min(block(width), 128)
        _merge_kernel[(plan.tokens, heads, triton.cdiv(width, size))](
            self.partial, self.stats, out, self.held, self.rows, WIDTH=width, AT_ONCE=MERGED, BLOCK=size
        )
