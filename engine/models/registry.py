"""Which model file computes which checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.models.llama import LlamaConfig, LlamaModel
from engine.weights import WeightSource
from runtime.errors import Unsupported

LLAMA_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})

Model = LlamaModel
ModelConfig = LlamaConfig


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face style config. Raises Unsupported naming the model type."""
    kind = str(config.get("model_type", ""))
    if kind not in LLAMA_FAMILY:
        known = ", ".join(sorted(LLAMA_FAMILY))
        raise Unsupported(f"model type {kind!r} is not supported (known: {known})", field="model")
    return LlamaConfig.from_hf(config)


def build(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    progress: Callable[[float], None],
    *,
    compiled: bool,
) -> Model:
    return LlamaModel(config, source, dtype, device, max_len, progress, compiled=compiled)
