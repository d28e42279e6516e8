"""What the kernels share. Under TRITON_INTERPRET=1 (tests) bf16 tiles must become fp32 right after their load: the
interpreter computes with their raw bits otherwise."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.mla_plan import PagedPlan

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
FP32_DOT = tl.constexpr("tf32x3")


@triton.jit
def operand(x):
    """A loaded tile as a matmul operand in its own type."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def dot32(a, b):
    """a @ b for fp32 tiles at fp32 accuracy."""
    return tl.dot(a, b, input_precision=FP32_DOT)


@triton.jit
def softplus(x):
    """log(1 + e^x) without overflow, exact for very negative x (log1p by its quotient)."""
    y = tl.exp(-tl.abs(x))
    one = 1.0 + y
    small = tl.where(one == 1.0, y, tl.log(one) * y / tl.where(one == 1.0, 1.0, one - 1.0))
    return tl.maximum(x, 0.0) + small


@triton.jit
def tanh(x):
    y = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - y) / (1.0 + y)


def block(n: int, least: int = 16) -> int:
    """The power of two that holds n."""
    return max(least, int(triton.next_power_of_2(n)))


def state_rows(width: int, keys: int) -> int:
    """Rows of V of a state's tile [rows, K]: as many as fit the registers beside a chunk's or a ring's operands."""
    return min(block(width), 32 if keys <= 128 else 16)


def rows_of(q: Tensor, plan: PagedPlan, width: int) -> Tensor:
    """Room for the result of q [T, heads, ...]: [T, heads, width], zero where there are rows past the plan's."""
    make = torch.empty if plan.tokens == len(q) else torch.zeros
    return make((*q.shape[:2], width), dtype=q.dtype, device=q.device)
