"""The operations of the hybrid layers, each by the implementation that fits its tensors: Triton on a GPU, else torch.

In Triton's interpreter (TRITON_INTERPRET=1) CPU tensors take the GPU's path too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from engine.kernels import attnres as _attnres
from engine.kernels import conv as _conv
from engine.kernels import delta_chunk as _delta_chunk
from engine.kernels import delta_decode as _delta_decode
from engine.kernels import gates as _gates
from engine.kernels import mla as _mla
from engine.kernels import moe as _moe
from engine.kernels import norms as _norms
from engine.kernels import replay as _replay

P = ParamSpec("P")
R = TypeVar("R")

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def uses_triton(device: torch.device) -> bool:
    """Whether tensors of this device take the GPU's path."""
    return device.type == "cuda" or _INTERPRETED


def _by_device(reference: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """`reference` for CPU tensors, the function of the same name and signature in engine.kernels.triton for others."""
    module = f"engine.kernels.triton.{reference.__module__.rpartition('.')[2]}"

    @functools.cache
    def ported() -> Any:
        return getattr(import_module(module), reference.__name__)

    @functools.wraps(reference)
    def run(first: Tensor, /, *args: P.args, **options: P.kwargs) -> R:
        if uses_triton(first.device):
            result: R = ported()(first, *args, **options)
            return result
        return reference(first, *args, **options)

    return run


attn_res = _by_device(_attnres.attn_res)
conv_prefill = _by_device(_conv.conv_prefill)
conv_decode = _by_device(_conv.conv_decode)
delta_chunk = _by_device(_delta_chunk.delta_chunk)
delta_decode = _by_device(_delta_decode.delta_decode)
softplus_gate = _by_device(_gates.softplus_gate)
bounded_gate = _by_device(_gates.bounded_gate)
mamba2_gate = _by_device(_gates.mamba2_gate)
mla_store = _by_device(_mla.mla_store)
mla_decode = _by_device(_mla.mla_decode)
mla_prefill = _by_device(_mla.mla_prefill)
route_sigmoid = _by_device(_moe.route_sigmoid)
route_softmax = _by_device(_moe.route_softmax)
experts_mlp = _by_device(_moe.experts_mlp)
rms_norm = _by_device(_norms.rms_norm)
gated_rms_norm = _by_device(_norms.gated_rms_norm)
replay_decode = _by_device(_replay.replay_decode)
replay_materialise = _by_device(_replay.replay_materialise)
