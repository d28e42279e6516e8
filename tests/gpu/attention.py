"""Part of the GPU check that measures attention of a decode step beside reading its keys once.

Each shape is run as a worker runs it (split over programs as engine.kernels.triton.split says) and with one program a
tile; calls are captured, or Python's own time would be measured. best_ratio = time of reading the keys once / time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.kernels.mla_plan import PAGE, PagedPlan
from tests.gpu.parts import Figures, limits, seconds

CALLS = 10
KV = {"8 heads of 128": (32, 8, 128), "3 heads of 64": (9, 3, 64), "1 head of 256": (16, 1, 256)}
LATENT = {"16 heads": (16, 512, 64), "128 heads": (128, 512, 64)}
STEPS = ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (32, 4096), (128, 1024))
"""(requests, tokens each) of a step."""


def plans(device: str, steps: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, PagedPlan, int]]:
    """Equal rows; and one long row beside short ones, which is what other rows may have to wait for."""
    for batch, context in steps:
        yield f"{batch} x {context}", plan_of([context] * batch, device), batch * context
    batch, context = steps[-1]
    ends = [(16 if device == "cuda" else 2) * context, *[context] * (batch - 1)]
    yield f"{batch} x {context}, one of {ends[0]}", plan_of(ends, device), sum(ends)


def plan_of(ends: list[int], device: str) -> PagedPlan:
    """Pages in no order."""
    counts = [-(-end // PAGE) for end in ends]
    order = iter((torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1).tolist())
    tables = [[next(order) for _ in range(count)] for count in counts]
    return PagedPlan.build([1] * len(ends), [end - 1 for end in ends], tables, device=device)


@contextmanager
def unsplit() -> Iterator[None]:
    from engine.kernels.triton import split

    with patch.object(split, "DECODE_PROGRAMS", 0), patch.object(split, "MOST", 1 << 30):
        yield


def captured(call: Callable[[], object]) -> Callable[[], object]:
    call()  # compiled before anything is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def took(call: Callable[[], object], device: str) -> float:
    if device == "cpu":
        return seconds(call, device, 1, 0)
    return seconds(captured(call), device) / CALLS


def compared(call: Callable[[], Tensor], device: str, floor: float) -> Figures:
    """Its times, split and not, whose results must be equal but for rounding."""
    result, time = call(), took(call, device)
    with unsplit():
        whole, alone = call(), took(call, device)
    error = float((result.float() - whole.float()).abs().max() / whole.float().abs().max())
    assert error < 2e-2, error
    return {"seconds": time, "best_ratio": floor / time, "unsplit / split": alone / time}


def attention(device: str) -> Figures:
    from engine.kernels.triton.attention import paged_attention
    from engine.kernels.triton.mla import mla_decode

    best = limits(device)
    rate = best["memory_bytes_per_s"]
    dtype = torch.bfloat16
    cuda = device == "cuda"
    found: dict[str, Any] = {"limits": best}
    for step, plan, keys in plans(device, STEPS if cuda else ((1, 300), (2, 150))):
        pages = int(plan.tables.max()) + 1
        for name, (heads, kv_heads, width) in (KV if cuda else {"small": (2, 1, 16)}).items():
            cache = torch.randn(pages, kv_heads, 2, PAGE, width, device=device, dtype=dtype)
            q = torch.randn(len(plan.lengths), heads, width, device=device, dtype=dtype)
            floor = 2 * keys * kv_heads * width * dtype.itemsize / rate
            found[f"{name}, {step}"] = compared(
                lambda q=q, c=cache, p=plan, w=width: paged_attention(q, c, p, scale=w**-0.5),  # type: ignore[misc]
                device,
                floor,
            )
        for name, (heads, latent, shared) in (LATENT if cuda else {"small": (2, 32, 16)}).items():
            rows = torch.randn(pages, PAGE, latent + shared, device=device, dtype=dtype)
            q = torch.randn(len(plan.lengths), heads, latent + shared, device=device, dtype=dtype)
            floor = keys * (latent + shared) * dtype.itemsize / rate
            found[f"latent, {name}, {step}"] = compared(
                lambda q=q, c=rows, p=plan, r=latent: mla_decode(q, c, p, latent=r, scale=0.05),  # type: ignore[misc]
                device,
                floor,
            )
    return found
