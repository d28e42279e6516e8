"""Block attention residuals: see engine.kernels.attnres."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.common import block


@triton.jit
def _mix_kernel(
    sources, query, weight, out, count, width, stride_n, stride_t, eps, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one token. The softmax over sources is taken online, so each source is read once."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < width
    direction = tl.load(query + c, mask=inside, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        direction = direction * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.zeros([BLOCK], tl.float32)
    best = -float("inf")
    total = 0.0
    source = sources + token * stride_t
    for _ in range(count):
        x = tl.load(source + c, mask=inside, other=0.0).to(tl.float32)
        source += stride_n  # step by step: count times the stride may not fit 32 bits
        score = tl.sum(x * direction, 0) * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        top = tl.maximum(best, score)
        fade, share = tl.exp(best - top), tl.exp(score - top)
        mixed = mixed * fade + share * x
        total = total * fade + share
        best = top
    tl.store(out + token * width + c, (mixed / total).to(out.dtype.element_ty), mask=inside)


def attn_res(sources: Tensor, query: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    count, tokens, width = sources.shape
    assert sources.stride(2) == 1
    out = torch.empty(tokens, width, dtype=sources.dtype, device=sources.device)
    if tokens:
        _mix_kernel[(tokens,)](
            sources, query, weight, out, count, width, sources.stride(0), sources.stride(1), eps,
            HAS_WEIGHT=weight is not None, BLOCK=block(width), num_warps=8 if width > 4096 else 4,
        )  # fmt: skip
    return out
