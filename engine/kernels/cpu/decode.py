"""Builds and binds decode.cpp: one decode step of a Llama-family model in bf16, compiled for this CPU.

The library is built once with g++ and kept on disk under a name made of everything it depends on. Its reference is
the model itself (engine/models/llama.py); a test compares the two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.cpu.build import FLAGS, openmp_of_torch
from engine.kernels.cpu.products import BoundLinear
from engine.native import NotBuilt, library
from kvtransfer.types import PAGE_TOKENS
from runtime.errors import Unsupported

MAX_ROWS = 64
"""Largest step it takes; beyond, the packed matmuls of the model are as good."""

SOURCE = Path(__file__).with_name("decode.cpp")


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", BoundLinear),
        ("o", BoundLinear),
        ("gate_up", BoundLinear),
        ("down", BoundLinear),
        ("norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("window", ctypes.c_int64),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("embed", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("head", BoundLinear),
        ("layer", ctypes.POINTER(_Layer)),
        ("pool", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """weight: [ceil(out / 16), in / 2, 16, 2] bf16, zero past `out`; bias padded alike, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out: int
    inputs: int

    def bound(self) -> BoundLinear:
        return BoundLinear(self.weight.data_ptr(), _address(self.bias), self.out, self.inputs)


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """weight [out, in] bf16, in even."""
    out, inputs = weight.shape
    extra = -out % 16
    padded = torch.nn.functional.pad(weight, (0, 0, 0, extra))
    packed = padded.view(-1, 16, inputs // 2, 2).transpose(1, 2).contiguous()
    return PackedLinear(packed, None if bias is None else torch.nn.functional.pad(bias, (0, extra)), out, inputs)


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    window: int

    def bound(self) -> _Layer:
        return _Layer(
            self.qkv.bound(),
            self.o.bound(),
            self.gate_up.bound(),
            self.down.bound(),
            _address(self.norm),
            _address(self.mlp_norm),
            _address(self.q_norm),
            _address(self.k_norm),
            self.window,
        )


@dataclass(frozen=True, slots=True)
class DecodeModel:
    """All bf16 on the CPU. scale: what is left for the scores (the q weights may carry it)."""

    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    eps: float
    scale: float
    embed: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    norm: torch.Tensor
    head: PackedLinear
    layers: tuple[DecodeLayer, ...]


def _address(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def require_supported(*, dtype: torch.dtype, device: torch.device, head_dim: int, widths: Sequence[int]) -> None:
    """Raises Unsupported for what the compiled step does not compute. widths: of every layer but the vocabulary's."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        raise Unsupported("compile is for bfloat16 on a CPU", field="compile")
    if head_dim % 32 or any(w % 16 for w in widths):
        raise Unsupported("compile needs a head_dim that is a multiple of 32 and widths of 16", field="compile")


class CompiledDecoder:
    """Runs decode steps over one pool. Not for two threads at once: it writes the pool."""

    def __init__(self, model: DecodeModel, pool: torch.Tensor, cache: Path | None) -> None:
        self._model, self._pool = model, pool  # own what the addresses below point to
        self._run = _load(cache).pdserve_decode
        self._run.restype = None
        self._run.argtypes = [
            ctypes.POINTER(_Model), ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
            ctypes.c_void_p, ctypes.c_int64,
        ]  # fmt: skip
        self._layers = (_Layer * len(model.layers))(*(layer.bound() for layer in model.layers))
        self._bound = _Model(
            model.embed.shape[1],
            model.heads,
            model.kv_heads,
            model.head_dim,
            model.inner,
            len(model.layers),
            model.eps,
            model.scale,
            _address(model.embed),
            _address(model.cos),
            _address(model.sin),
            _address(model.norm),
            model.head.bound(),
            self._layers,
            _address(pool),
        )

    def run(self, tokens: Sequence[int], positions: Sequence[int], tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """One token per row at its position; tables: each row's pages from position 0. -> logits [rows, vocab] fp32."""
        used = [p // PAGE_TOKENS + 1 for p in positions]
        pages = np.zeros((len(tokens), max(used)), dtype=np.int64)
        for row, table, count in zip(pages, tables, used, strict=True):
            row[:count] = table[:count]
        ids, at = (_words(x) for x in (tokens, positions))
        for what, values, end in (
            ("page", pages, len(self._pool)),
            ("token", ids, len(self._model.embed)),
            ("position", at, len(self._model.cos)),
        ):
            assert 0 <= values.min() <= values.max() < end, f"{what} out of bounds"
        logits = torch.empty((len(tokens), self._model.head.out), dtype=torch.float32, device="cpu")
        self._run(
            ctypes.byref(self._bound),
            len(tokens),
            ids.ctypes.data,
            at.ctypes.data,
            pages.ctypes.data,
            pages.shape[1],
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits


def _words(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def _load(cache: Path | None) -> ctypes.CDLL:
    """Raises Unsupported."""
    try:
        return library(SOURCE, cache, FLAGS, openmp_of_torch())
    except NotBuilt as error:
        raise Unsupported(f"the decode step cannot be compiled: {error}", field="compile") from error
