"""What is said of a model's memory without torch, against what the models themselves say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from engine.models import families
from engine.models.families import FAMILIES
from engine.models.footprint import least_spec
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from runtime.config import Config
from runtime.errors import InvalidRequest
from tests.unit.engine_torch.families import FAMILIES as LLAMAS
from tests.unit.engine_torch.families import config_of as llama_of
from tests.unit.hybrid.models import CONFIGS, config_of

MODELS = {name: llama_of(name) for name in LLAMAS} | {name: config_of(name) for name in CONFIGS}
OTHER_WORDS: dict[str, dict[str, Any]] = {
    "no head_dim": {**llama_of("llama"), "head_dim": None},
    "every fourth": {**config_of("qwen3_next"), "layer_types": None, "full_attention_interval": 2},
    "letters": {
        **config_of("nemotron_h"), "layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "M*E-M*",
    },
    "block types": {
        **config_of("granitemoehybrid"), "layer_types": None,
        "layers_block_type": ["mamba", "mamba", "attention", "mamba", "attention"],
    },
}  # fmt: skip
"""The same in the words that other checkpoints have for it."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*MODELS, *OTHER_WORDS])
def test_pages_and_slots_are_as_large_as_the_model_makes_them(name: str, dtype: Literal["float32", "bfloat16"]) -> None:
    model = MODELS.get(name) or OTHER_WORDS[name]
    options = RunnerOptions(dtype=dtype, device="cpu", threads=1, replay_len=16, fused=False)
    made = TorchRunner(model, RandomWeights(0), options).spec()
    said = least_spec(model, Config(dtype=dtype, replay_ssm=True, replay_len=16))
    assert (said.page_bytes, said.slot_bytes, said.record_bytes) == (
        made.page_bytes, made.slot_bytes, made.record_bytes,
    )  # fmt: skip
    assert said.has_state == made.has_state
    auto = least_spec(model, Config(replay_ssm=True, replay_len=16))
    assert (auto.page_bytes, auto.slot_bytes) <= (said.page_bytes, said.slot_bytes)


def test_every_type_has_a_file_that_computes_it_and_a_test_of_its_size() -> None:
    folder = Path(families.__file__).parent
    assert all((folder / f"{family}.py").is_file() for family in FAMILIES.values())
    assert {FAMILIES[model["model_type"]] for model in MODELS.values()} == set(FAMILIES.values())


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "nemotron_h", "granitemoehybrid"])
def test_a_model_without_attention_is_refused_and_not_divided_by(name: str) -> None:
    kinds = {"layer_types": ["linear_attention"] * 5, "num_hidden_layers": 5, "layers_block_type": ["mamba"] * 5}
    broken = {**MODELS[name], **kinds}
    for read in (
        lambda: least_spec(broken, Config()),
        lambda: TorchRunner(broken, RandomWeights(0), RunnerOptions(device="cpu", fused=False)),
    ):
        with pytest.raises(InvalidRequest, match="attention has no pages to serve from"):
            read()


@pytest.mark.parametrize("change", [{"num_attention_heads": None}, {"num_attention_heads": "many"}])
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "nemotron_h", "granitemoehybrid"])
def test_a_config_that_cannot_be_read_is_refused_alike_with_and_without_torch(
    name: str, change: dict[str, Any]
) -> None:
    broken = {**MODELS[name], **change}
    broken = {key: value for key, value in broken.items() if value is not None}
    said = []
    for read in (
        lambda: least_spec(broken, Config()),
        lambda: TorchRunner(broken, RandomWeights(0), RunnerOptions(device="cpu")),
    ):
        with pytest.raises(InvalidRequest) as refused:
            read()
        assert refused.value.field == "model"
        said.append(refused.value.message)
    assert said[0] == said[1]
