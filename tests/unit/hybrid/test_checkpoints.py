"""Checkpoints in the namings they come in give the same model as transformers' own names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights, SafetensorsWeights
from runtime.errors import InvalidRequest, Unsupported
from runtime.modelfiles import ModelFiles
from tests.unit.hybrid.models import CONFIGS, Walk, config_of, runner_of, tokens_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Recording(RandomWeights):
    """Random weights that remember what was asked for: the model's parameters by transformers' names."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.asked: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked[name] = super().get(name, shape)
        return self.asked[name]


def native(name: str) -> dict[str, torch.Tensor]:
    source = Recording(0)
    TorchRunner(config_of(name), source, RunnerOptions(dtype="float32", device="cpu", threads=1))
    return {key: value.contiguous().clone() for key, value in source.asked.items()}


def scores(config: dict[str, Any], folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    runner = TorchRunner(config, SafetensorsWeights(folder), RunnerOptions(dtype="float32", device="cpu", threads=1))
    runner.allocate(8, 2)
    walk = Walk(runner, tokens_of(40))
    walk.run(40)
    return walk.scores[0]


def original_kimi(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of moonshotai's files: three convolutions, a decay without a module of its own, experts one by one."""
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        sparse = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, _, last = sparse.rpartition(".experts.")
        if name.endswith("conv1d.weight"):
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                found[name.replace("conv1d", f"{part}_conv1d")] = piece.unsqueeze(1)
        elif last == "gate_up_proj":
            for e, one in enumerate(value):
                found[f"{prefix}.experts.{e}.w1.weight"], found[f"{prefix}.experts.{e}.w3.weight"] = one.chunk(2)
        elif last == "down_proj":
            for e, one in enumerate(value):
                found[f"{prefix}.experts.{e}.w2.weight"] = one
        elif name.endswith("A_log"):
            found[sparse.replace("forget_gate.", "")] = value.view(1, 1, -1, 1)
        else:
            dense = ".mlp." in name and name.startswith("model.layers.0.")
            found[name if dense else sparse.replace("forget_gate.", "")] = value
    return found


def test_the_original_names_of_kimi_linear_are_read(tmp_path: Path) -> None:
    tensors = native("kimi_linear")
    config = CONFIGS["kimi_linear"]  # with linear_attn_config and layers counted from 1, as the original has it
    renamed = original_kimi(tensors)
    assert "model.layers.1.block_sparse_moe.experts.3.w1.weight" in renamed
    assert "model.layers.0.self_attn.f_a_proj.weight" in renamed
    ours = Walk(runner_of("kimi_linear"), tokens_of(40))
    ours.run(40)
    assert np.array_equal(scores(config_of("kimi_linear"), tmp_path / "native", tensors), ours.scores[0])
    assert np.array_equal(scores(config, tmp_path / "original", renamed), ours.scores[0])


def test_the_shipped_tiny_kimi_is_read_in_the_names_it_has() -> None:
    files = ModelFiles.open("tiny-kimi")
    source = SafetensorsWeights(files.path)
    runner = TorchRunner(files.config, source, RunnerOptions(dtype="float32", device="cpu", threads=1))
    runner.allocate(4, 2)
    assert {c.name for c in runner.spec().components} == {"mla", "recurrent", "conv_q", "conv_k", "conv_v"}


def quantised(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows, n] -> packed, scales, and what they stand for, by scalar code: the spec's, not ours."""
    rows, n = value.shape
    packed, scales, meant = np.zeros((rows, n // 2), np.uint8), np.zeros((rows, n // 32), np.uint8), np.zeros((rows, n))
    for r in range(rows):
        for block in range(n // 32):
            piece = value[r, block * 32 : block * 32 + 32].tolist()
            exponent = math.floor(math.log2(max(abs(v) for v in piece))) - 2
            scales[r, block] = exponent + 127
            for i, v in enumerate(piece):
                code = min(range(8), key=lambda c: abs(abs(v) / 2.0**exponent - E2M1[c]))
                signed = code + 8 * (v < 0)
                at = block * 32 + i
                packed[r, at // 2] |= signed << (4 * (at % 2))
                meant[r, at] = (-1 if v < 0 else 1) * E2M1[code] * 2.0**exponent
    return torch.from_numpy(packed), torch.from_numpy(scales), torch.from_numpy(meant).float()


def test_kimi_k3_is_read_with_mxfp4_experts_under_the_language_model(tmp_path: Path) -> None:
    """Only routed experts are quantised; A_log has more entries than heads, of which the first count."""
    config = {**config_of("kimi_k3")}
    tensors = native("kimi_k3")
    plain, packed = dict(original_kimi(tensors)), {}
    for name in list(plain):
        if ".experts." in name:
            codes, scale, plain[name] = quantised(plain[name])
            packed[f"{name}_packed"], packed[f"{name}_scale"] = codes, scale
        elif name.endswith("A_log"):
            packed[name] = torch.cat([plain[name].flatten(), torch.full((5,), 9.0)])
        else:
            packed[name] = plain[name]
    nested = {f"language_model.{name}": value for name, value in packed.items()}
    quantised_config = {"quantization_config": {"format": "mxfp4-pack-quantized", "quant_method": "compressed-tensors"}}
    text = {**config["text_config"], **quantised_config}
    expected = scores(config, tmp_path / "plain", plain)
    assert np.array_equal(scores({**config, "text_config": text}, tmp_path / "packed", nested), expected)


def test_another_quantisation_and_a_rotated_latent_attention_are_refused() -> None:
    config = config_of("kimi_k3")
    for change, field in (
        ({"quantization_config": {"format": "int-quantized"}}, "quantization_config"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"hidden_act": "silu"}, "hidden_act"),
    ):
        changed = {**config, "text_config": {**config["text_config"], **change}}
        with pytest.raises(Unsupported) as refused:
            TorchRunner(changed, RandomWeights(0), RunnerOptions(device="cpu", threads=1))
        assert refused.value.field == field


def test_a_checkpoint_that_lacks_a_parameter_or_has_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    tensors = native("qwen3_next")
    name = "model.layers.0.linear_attn.dt_bias"
    for number, change in enumerate(({}, {name: torch.zeros(3)})):
        broken = {k: v for k, v in tensors.items() if k != name} | change
        with pytest.raises(InvalidRequest, match="dt_bias"):
            scores(config_of("qwen3_next"), tmp_path / str(number), broken)
