"""Which model file computes which checkpoint, and what every model looks like to the runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.layers.batch import StepBatch
from engine.layers.pools import Groups, Pools
from engine.models.kimi_linear import KimiLinearConfig, KimiLinearModel
from engine.models.llama import LlamaConfig, LlamaModel
from engine.weights import WeightSource
from runtime.errors import Unsupported


class Model(Protocol):
    """groups: what pages and slots hold for it."""

    vocab_size: int
    groups: Groups

    def forward(self, step: StepBatch, pools: Pools) -> torch.Tensor:
        """Run the step's tokens over their pages and slots -> final hidden states [T, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of hidden states [R, hidden] -> [R, vocab]."""
        ...


class ModelConfig(Protocol):
    """max_len: the longest sequence the model is right for."""

    @property
    def max_len(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Family:
    read: Callable[[Mapping[str, Any]], Any]
    make: Callable[..., Model]


_LLAMA = _Family(LlamaConfig.from_hf, LlamaModel)
_KIMI_LINEAR = _Family(KimiLinearConfig.from_hf, KimiLinearModel)

_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "kimi_linear": _KIMI_LINEAR,
}

SUPPORTED = tuple(sorted(_FAMILIES))


@dataclass(frozen=True, slots=True)
class Described:
    """A config that was read, and the family that computes it."""

    family: _Family
    config: Any

    @property
    def max_len(self) -> int:
        return int(self.config.max_len)


def model_config(config: Mapping[str, Any]) -> Described:
    """Read a Hugging Face style config. Raises Unsupported naming the model type and what is supported."""
    kind = str(config.get("model_type", ""))
    family = _FAMILIES.get(kind)
    if family is None:
        raise Unsupported(f"model type {kind!r} is not supported (known: {', '.join(SUPPORTED)})", field="model")
    return Described(family, family.read(config))


def build(
    described: Described,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    progress: Callable[[float], None],
    *,
    compiled: bool,
) -> Model:
    """Load the weights. Raises Unsupported when `compiled` is asked of a model that has no compiled step."""
    if compiled and described.family is not _LLAMA:
        raise Unsupported("compile is for models of the Llama family", field="compile")
    options = {"compiled": True} if compiled else {}
    return described.family.make(described.config, source, dtype, device, max_len, progress, **options)
