"""Matrix products of few rows, and whole feed-forward parts, over weights that oneDNN has packed. fp32."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.cpu.build import Compiled
from engine.kernels.moe import Activation

MAX_ROWS = 32
"""Beyond, a product is bound by arithmetic, and oneDNN's kernels for that are as good."""

_PANEL, _INPUTS = 64, 16
_KINDS = {"silu": 0, "situ": 1, "relu2": 2}


class BoundLinear(ctypes.Structure):
    """Where a packed weight and its bias lie, as the compiled functions read it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
    )


class _Experts(ctypes.Structure):
    _fields_ = (
        ("up", ctypes.POINTER(BoundLinear)),
        ("down", ctypes.POINTER(BoundLinear)),
        ("all_up", ctypes.POINTER(BoundLinear)),
        ("all_down", ctypes.POINTER(BoundLinear)),
        ("count", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("beta", ctypes.c_float),
        ("linear_beta", ctypes.c_float),
    )


class Product:
    """y = x Wᵀ + b for at most MAX_ROWS rows. Keeps alive what it reads."""

    def __init__(self, compiled: Compiled, packed: Tensor, bias: Tensor | None, out: int, inputs: int) -> None:
        """packed: what torch.ops.mkldnn._reorder_linear_weight made, of the layout that in_panels() has checked."""
        self._kept = packed, bias
        self.bound = BoundLinear(
            torch.ops.mkldnn.data_ptr(packed), None if bias is None else bias.data_ptr(), out, inputs
        )
        self._address = ctypes.addressof(self.bound)
        self._out = out
        self._run = compiled.products_library.pdserve_linear
        self._run.restype = None
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [pointer, pointer, number, number, pointer, number, pointer, number, number]
        self.compiled = compiled

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """x [T, in], add [T, out], rows of any stride -> [T, out]."""
        assert x.stride(1) == 1
        y = x.new_empty((len(x), self._out))
        other, stride = (None, 0) if add is None else (add.data_ptr(), add.stride(0))
        self._run(
            self._address, x.data_ptr(), x.stride(0), len(x), other, stride, y.data_ptr(), self._out,
            torch.get_num_threads(),
        )  # fmt: skip
        return y


class FeedForward:
    """Experts of which each row takes some, and one part that every row takes, in one call."""

    def __init__(
        self,
        ups: Sequence[Product],
        downs: Sequence[Product],
        shared: tuple[Product, Product] | None,
        activation: Activation,
    ) -> None:
        """ups, downs: of each expert (none: only the shared part). shared: up and down."""
        first = ups[0] if ups else (shared or ups)[0]
        self._kept = ups, downs, shared
        self._ups = (BoundLinear * max(len(ups), 1))(*(p.bound for p in ups))
        self._downs = (BoundLinear * max(len(downs), 1))(*(p.bound for p in downs))
        up, down = (ctypes.pointer(p.bound) for p in shared) if shared else (None, None)
        self._bound = _Experts(
            self._ups, self._downs, up, down, len(ups),
            _KINDS[activation.kind], activation.beta, activation.linear_beta or 0.0,
        )  # fmt: skip
        self._address = ctypes.addressof(self._bound)
        self._out = (downs[0] if downs else (shared or downs)[1]).bound.out
        self._run = first.compiled.products_library.pdserve_experts
        self._run.restype = None
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [
            pointer, pointer, number, number, pointer, pointer, number, pointer, pointer, number, pointer, number
        ]  # fmt: skip

    def __call__(
        self,
        x: Tensor,
        *,
        routed: tuple[Tensor, Tensor] | None = None,
        add: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> Tensor:
        """x [T, in] -> [T, out] = add + the weighted experts + the shared part. routed: weights fp32 and experts int64,
        both [T, k] contiguous; shared_weights [T] fp32."""
        y = x.new_empty((len(x), self._out))
        weights, chosen, k = (
            (None, None, 0) if routed is None else (*(t.data_ptr() for t in routed), routed[0].shape[1])
        )
        other, stride = (None, 0) if add is None else (add.data_ptr(), add.stride(0))
        self._run(
            self._address, x.data_ptr(), x.stride(0), len(x), chosen, weights, k,
            None if shared_weights is None else shared_weights.data_ptr(), other, stride, y.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return y


_checked: dict[tuple[int, int], bool] = {}


def in_panels(packed: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN packs weights of this shape as these functions read them. (It chooses by shape and CPU.)"""
    if weight.dtype != torch.float32 or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return False
    shape = (weight.shape[0], weight.shape[1])
    if shape not in _checked:
        if weight.numel() > 1 and bool(weight.min() == weight.max()):
            return False  # nothing can be seen in it, for others of its shape either
        _checked[shape] = _is_in_panels(packed, weight)
    return _checked[shape]


def _is_in_panels(packed: Tensor, weight: Tensor) -> bool:
    """What lies behind a panel's outputs and inputs is never read into a result."""
    out, inputs = weight.shape
    panels, deep = -(-out // _PANEL), -(-inputs // _INPUTS) * _INPUTS
    if torch.ops.mkldnn._nbytes(packed) != panels * deep * _PANEL * weight.element_size():
        return False
    memory = (ctypes.c_float * (panels * deep * _PANEL)).from_address(torch.ops.mkldnn.data_ptr(packed))
    found = torch.frombuffer(memory, dtype=torch.float32).view(panels, deep, _PANEL)
    return all(
        torch.equal(found[i, :inputs, : len(rows)].t(), rows) for i, rows in enumerate(torch.split(weight, _PANEL))
    )
