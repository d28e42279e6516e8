"""Which tokens form which 16-token chunk, and which slots they begin and end in: built once per step for all layers.

Chunks lie on the absolute grid: a sequence that resumes at position p runs its first chunk only to the next multiple
of 16. Chunks are ordered by (step, sequence), sequences by falling chunk count, so the sequences still running at a
step are a prefix and one batched matmul serves them all; a chunk's arithmetic never depends on its neighbours.

Slot 0 is null: as an initial slot it means a zero state, as a final slot it means "do not write".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

CHUNK = 16
"""Tokens of a kernel block. 16 keeps |G| of a bounded gate (5 a token) under fp32's exponent range."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write the state after `offset` tokens of sequence `sequence` of this step to `slot`, beside the final state.

    start + offset is a multiple of 16 and 0 < offset <= length.
    """

    sequence: int
    offset: int
    slot: int


class Scratch:
    """Named fp32 buffers that every layer of a step reuses: fresh megabytes cost a page fault for each 4 KiB written,
    more than the arithmetic done on them."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """An uninitialised tensor, valid until `name` is taken again."""
        size = math.prod(shape)
        held = self._buffers.get(name)
        if held is None or len(held) < size:
            held = self._buffers[name] = torch.empty(size, dtype=torch.float32, device=self._device)
        return held[:size].view(shape)


@dataclass(frozen=True, slots=True)
class Tables:
    """The plan as int32 device tensors, for kernels that find their own work. B sequences, N chunks, P checkpoints.

    firsts [B + 1]: packed token each sequence begins at; initial, final [B]: slots; counts [B]: chunks; ranks [B]: the
    place of the sequence's chunk within a step; step_firsts [steps]: first chunk of each step; chunk_tokens,
    chunk_counts [N]: first packed token and number of tokens; point_firsts [B + 1] into point_steps, point_offsets,
    point_slots [P]: each sequence's checkpoints, rising.
    """

    firsts: torch.Tensor
    initial: torch.Tensor
    final: torch.Tensor
    counts: torch.Tensor
    ranks: torch.Tensor
    step_firsts: torch.Tensor
    chunk_tokens: torch.Tensor
    chunk_counts: torch.Tensor
    point_firsts: torch.Tensor
    point_steps: torch.Tensor
    point_offsets: torch.Tensor
    point_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """tokens: rows of the step's packed token batch. B sequences, N chunks, steps = chunks of the longest sequence."""

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    initial: tuple[int, ...]
    final: tuple[int, ...]
    checkpoints: tuple[Checkpoint, ...]
    order: tuple[int, ...]  # sequences with tokens, by falling chunk count
    steps: tuple[tuple[int, int], ...]  # (first chunk, chunks) of each step
    step_checkpoints: dict[int, tuple[tuple[int, int], ...]]  # step -> (rank in order, slot)
    rows: torch.Tensor  # [N * 16] packed token of each chunk row; padding repeats the chunk's last token
    padding: torch.Tensor  # chunk rows that hold no token
    places: torch.Tensor  # [tokens] chunk row of each packed token
    dense: bool  # the packed batch already is the chunk rows: no gather needed
    scratch: Scratch = field(repr=False, compare=False)
    tables: Tables = field(repr=False, compare=False)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def chunks(self) -> int:
        return len(self.rows) // CHUNK

    @staticmethod
    def build(
        lengths: Sequence[int],
        initial: Sequence[int],
        final: Sequence[int],
        starts: Sequence[int] | None = None,
        checkpoints: Sequence[Checkpoint] = (),
        device: torch.device | str = "cpu",
    ) -> ChunkPlan:
        """lengths, initial, final, starts: one per sequence; starts are absolute positions (default 0)."""
        starts = tuple(starts) if starts is not None else (0,) * len(lengths)
        assert len(lengths) == len(initial) == len(final) == len(starts)
        spans = [_spans(start, length) for start, length in zip(starts, lengths, strict=True)]
        order = sorted((i for i, s in enumerate(spans) if s), key=lambda i: -len(spans[i]))
        firsts = _first_tokens(lengths)
        rows: list[int] = []
        padding: list[int] = []
        steps: list[tuple[int, int]] = []
        counts: list[int] = []
        for step in range(len(spans[order[0]]) if order else 0):
            running = [i for i in order if len(spans[i]) > step]
            steps.append((len(rows) // CHUNK, len(running)))
            for i in running:
                begin, end = spans[i][step]
                counts.append(end - begin)
                padding.extend(range(len(rows) + end - begin, len(rows) + CHUNK))
                rows.extend(firsts[i] + t for t in range(begin, end))
                rows.extend([firsts[i] + end - 1] * (CHUNK - (end - begin)))
        row_index = torch.tensor(rows, dtype=torch.long)
        real = torch.ones(len(rows), dtype=torch.bool)
        real[padding] = False
        places = torch.empty(sum(lengths), dtype=torch.long)
        places[row_index[real]] = torch.arange(len(rows))[real]
        return ChunkPlan(
            lengths=tuple(lengths),
            starts=starts,
            initial=tuple(initial),
            final=tuple(final),
            checkpoints=tuple(checkpoints),
            order=tuple(order),
            steps=tuple(steps),
            step_checkpoints=_step_checkpoints(checkpoints, lengths, spans, order),
            rows=row_index.to(device),
            padding=torch.tensor(padding, dtype=torch.long, device=device),
            places=places.to(device),
            dense=not padding and rows == list(range(len(rows))),
            scratch=Scratch(device),
            tables=_tables(firsts, initial, final, spans, order, steps, rows[::CHUNK], counts, checkpoints, device),
        )


def _tables(
    firsts: list[int],
    initial: Sequence[int],
    final: Sequence[int],
    spans: list[list[tuple[int, int]]],
    order: list[int],
    steps: list[tuple[int, int]],
    chunk_tokens: list[int],
    chunk_counts: list[int],
    checkpoints: Sequence[Checkpoint],
    device: torch.device | str,
) -> Tables:
    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    points = sorted(checkpoints, key=lambda p: (p.sequence, p.offset))
    places = [(p.sequence, p.offset) for p in points]
    assert len(set(places)) == len(places), "two checkpoints at one place"
    return Tables(
        firsts=column(firsts),
        initial=column(initial),
        final=column(final),
        counts=column([len(s) for s in spans]),
        ranks=column([order.index(i) if spans[i] else 0 for i in range(len(spans))]),
        step_firsts=column([first for first, _ in steps]),
        chunk_tokens=column(chunk_tokens),
        chunk_counts=column(chunk_counts),
        point_firsts=column([sum(p.sequence < b for p in points) for b in range(len(spans) + 1)]),
        point_steps=column([[end for _, end in spans[p.sequence]].index(p.offset) for p in points]),
        point_offsets=column([p.offset for p in points]),
        point_slots=column([p.slot for p in points]),
    )


def _spans(start: int, length: int) -> list[tuple[int, int]]:
    """Token ranges of a sequence's chunks, relative to its first token in this step."""
    edges = [0, *range(CHUNK - start % CHUNK, length, CHUNK), length] if length else []
    return list(itertools.pairwise(edges))


def _first_tokens(lengths: Sequence[int]) -> list[int]:
    firsts = [0]
    for length in lengths:
        firsts.append(firsts[-1] + length)
    return firsts


def _step_checkpoints(
    checkpoints: Sequence[Checkpoint],
    lengths: Sequence[int],
    spans: list[list[tuple[int, int]]],
    order: list[int],
) -> dict[int, tuple[tuple[int, int], ...]]:
    found: dict[int, list[tuple[int, int]]] = {}
    for point in checkpoints:
        assert 0 < point.offset <= lengths[point.sequence], point
        assert point.slot > 0, point
        ends = [end for _, end in spans[point.sequence]]
        assert point.offset in ends, f"{point} is not on the chunk grid"
        found.setdefault(ends.index(point.offset), []).append((order.index(point.sequence), point.slot))
    return {step: tuple(entries) for step, entries in found.items()}
