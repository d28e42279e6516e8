"""Binds latent.cpp: the decode rows of a layer with latent attention, and RMSNorm."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels.cpu.build import Compiled
from engine.kernels.mla_plan import PagedPlan


class _Layer(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int64),
        ("plain", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("latent", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("norm", ctypes.c_void_p),
        ("up_key", ctypes.c_void_p),
        ("up_value", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("kv_stride", ctypes.c_int64),
        ("cells", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        ("ends", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
    )


class LatentAttention:
    """One token of each row against its own pages, from the projections to the heads' values."""

    def __init__(
        self, compiled: Compiled, norm: Tensor, up_key: Tensor, up_value: Tensor, shared: int, eps: float, scale: float
    ) -> None:
        """norm [R] and eps: of the latent; up_key [heads, N, R], up_value [heads, V, R] contiguous in the model's type;
        shared: channels of the key common to all heads."""
        heads, plain, latent = up_key.shape
        self._kept = norm.detach().float().clone(), up_key, up_value
        assert all(t.is_contiguous() for t in self._kept)
        self._inner = heads * up_value.shape[1]
        self._bound = _Layer(
            heads, plain, shared, latent, up_value.shape[1], eps, scale, *(t.data_ptr() for t in self._kept)
        )
        self._run = compiled.latent_library.pdserve_latent
        self._run.restype = None
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [pointer, number, number, pointer, number]

    def __call__(self, q: Tensor, kv: Tensor, cache: Tensor, plan: PagedPlan) -> Tensor:
        """q [B, heads * (N + shared)]; kv [B, R + shared], before the latent's norm; cache [page, 16, R + shared] of
        this layer, strided by page. The plan has one token of each row. Writes the rows' places in the cache.
        -> [B, heads * V]."""
        assert plan.tokens == len(plan.lengths) == len(q)
        width = cache.shape[2]
        assert cache.stride()[1:] == (width, 1)
        self._bound.cache, self._bound.page_stride = cache.data_ptr(), cache.stride(0)
        y = q.new_empty((len(q), self._inner))
        rows = _Rows(
            q.data_ptr(), kv.data_ptr(), q.stride(0), kv.stride(0), plan.cells.data_ptr(), plan.tables.data_ptr(),
            plan.tables.shape[1], plan.ends.data_ptr(), y.data_ptr(), y.stride(0),
        )  # fmt: skip
        narrow = q.dtype == torch.bfloat16
        self._run(ctypes.addressof(self._bound), narrow, len(q), ctypes.addressof(rows), torch.get_num_threads())
        return y


class RmsNorm:
    """x / sqrt(mean x^2 + eps) * weight over the last axis, a row's bits whatever the number of rows."""

    def __init__(self, compiled: Compiled, weight: Tensor, eps: float) -> None:
        self._weight = weight.detach().float().clone()
        self._eps = eps
        self._run = compiled.latent_library.pdserve_rms_norm
        self._run.restype = None
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [
            pointer, number, number, number, pointer, ctypes.c_float, pointer, number, number, number
        ]  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., width] of float or bf16 -> same shape and type, contiguous."""
        width = x.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width)
        y = x.new_empty(x.shape)
        self._run(
            rows.data_ptr(), rows.stride(0), len(rows), width, self._weight.data_ptr(), self._eps, y.data_ptr(), width,
            x.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return y
