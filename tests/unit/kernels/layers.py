"""Layers of hybrid models twice, one with compiled decode rows and one without, over equal memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from engine.kernels.cpu.build import Compiled, using
from engine.kernels.delta_chunk_plan import ChunkPlan
from engine.kernels.mla_plan import PagedPlan
from engine.layers.batch import StepBatch
from engine.layers.latent import LatentStep
from engine.layers.params import Params
from engine.layers.state import LinearSpec, LinearStep, StatePool
from engine.weights import RandomWeights

L = TypeVar("L")

CPU = torch.device("cpu")


def twins(make: Callable[[Params], L], dtype: torch.dtype, library: Compiled) -> tuple[L, L]:
    """The same layer without and with compiled decode rows."""
    params = Params(RandomWeights(3), dtype, CPU)
    with using(library):
        fast = make(params)
    return make(params), fast


def step_of(rows: int, linear: LinearStep | None = None, latent: LatentStep | None = None) -> StepBatch:
    none = torch.zeros(0, dtype=torch.int64)
    return StepBatch(none, none, none, (), (), ((0, rows),), 1, latent, linear)


def decoding(slots: Sequence[int], replay: tuple[Tensor, Tensor] | None = None) -> LinearStep:
    return LinearStep(torch.tensor(slots), ChunkPlan.build([], [], [], [], [], CPU), 0, replay)


def filled(spec: LinearSpec, slots: int, seed: int = 5, ring: int = 1) -> StatePool:
    """A pool with something in every slot but the null one."""
    pool = StatePool(spec, slots, CPU, ring)
    generator = torch.Generator().manual_seed(seed)
    for tensor in pool.tensors:
        tensor[1:] = torch.randn(tensor[1:].shape, generator=generator).to(tensor.dtype)
    return pool


def pages_of(lengths: Sequence[int], seed: int = 6) -> tuple[PagedPlan, int]:
    """A plan of one new token each after lengths - 1 known ones, pages in no order; and the number of pages."""
    counts = [-(-n // 16) for n in lengths]
    free = (1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))).tolist()
    tables = [[free.pop() for _ in range(n)] for n in counts]
    plan = PagedPlan.build([1] * len(lengths), [n - 1 for n in lengths], tables)
    return plan, sum(counts) + 1


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
