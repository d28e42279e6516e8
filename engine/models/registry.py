"""Which model file computes which checkpoint, and what every model looks like to the runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from engine.layers.batch import StepBatch
from engine.layers.pools import Groups, Pools
from engine.models.families import family_of, readable
from engine.models.granite_hybrid import GraniteHybridConfig, GraniteHybridModel
from engine.models.kimi_k3 import KimiK3Config, KimiK3Model
from engine.models.kimi_linear import KimiLinearConfig, KimiLinearModel
from engine.models.llama import LlamaConfig, LlamaModel
from engine.models.nemotron_h import NemotronHConfig, NemotronHModel
from engine.models.qwen3_next import Qwen3NextConfig, Qwen3NextModel
from engine.weights import WeightSource


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


ModelConfig = LlamaConfig | KimiLinearConfig | KimiK3Config | Qwen3NextConfig | GraniteHybridConfig | NemotronHConfig

_READERS: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "llama": LlamaConfig.from_hf,
    "kimi_k3": KimiK3Config.from_hf,
    "kimi_linear": KimiLinearConfig.from_hf,
    "granite_hybrid": GraniteHybridConfig.from_hf,
    "nemotron_h": NemotronHConfig.from_hf,
    "qwen3_next": Qwen3NextConfig.from_hf,
}


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face style config. Raises Unsupported for what is not computed, InvalidRequest for what is
    missing."""
    reader = _READERS[family_of(config)]
    with readable():
        return reader(config)


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
    """Load the weights. compiled: for the Llama family only (see families.check_together)."""
    if isinstance(config, LlamaConfig):
        return LlamaModel(config, source, dtype, device, max_len, progress, compiled=compiled)
    assert not compiled, "no other family has a compiled step"
    if isinstance(config, GraniteHybridConfig):
        return GraniteHybridModel(config, source, dtype, device, max_len, progress)
    if isinstance(config, NemotronHConfig):
        return NemotronHModel(config, source, dtype, device, max_len, progress)
    if isinstance(config, KimiK3Config):
        return KimiK3Model(config, source, dtype, device, max_len, progress)
    if isinstance(config, Qwen3NextConfig):
        return Qwen3NextModel(config, source, dtype, device, max_len, progress)
    return KimiLinearModel(config, source, dtype, device, max_len, progress)
