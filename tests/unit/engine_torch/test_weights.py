"""Checkpoints: folders, shards, GGUF, random; and refusals that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.models.llama import LlamaConfig, parameter_shapes
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import GgufWeights, RandomWeights, SafetensorsWeights, WeightSource, open_weights
from runtime.errors import InvalidRequest
from tests.unit.engine_torch.families import Request, config_of, generate, pages_for, prompt


def parameters(family: str) -> dict[str, torch.Tensor]:
    source = RandomWeights(0)
    return {n: source.get(n, s) for n, s in parameter_shapes(LlamaConfig.from_hf(config_of(family))).items()}


def scores_of(family: str, source: WeightSource, dtype: str = "auto") -> Any:
    runner = TorchRunner(config_of(family), source, RunnerOptions(dtype=dtype, device="cpu", threads=1))
    runner.allocate(8, 0)
    request = generate(runner, Request(1, list(prompt(20)), pages_for(32), 16), 3)
    return runner.spec().dtype, request.matrix()


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    save_file(parameters("llama"), tmp_path / "model.safetensors")
    dtype, got = scores_of("llama", SafetensorsWeights(tmp_path))
    assert dtype == "float32"
    assert np.array_equal(got, scores_of("llama", RandomWeights(0))[1])


def test_a_folder_with_shards(tmp_path: Path) -> None:
    named = parameters("llama")
    halves = [dict(list(named.items())[::2]), dict(list(named.items())[1::2])]
    shard_of = {}
    for i, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{i}.safetensors")
        shard_of.update(dict.fromkeys(half, f"model-{i}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    assert np.array_equal(scores_of("llama", SafetensorsWeights(tmp_path))[1], scores_of("llama", RandomWeights(0))[1])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_checkpoints_run_in_bf16(tmp_path: Path, stored: torch.dtype) -> None:
    save_file({n: t.to(stored) for n, t in parameters("llama").items()}, tmp_path / "model.safetensors")
    dtype, got = scores_of("llama", SafetensorsWeights(tmp_path))
    assert dtype == "bfloat16"
    assert np.abs(got - scores_of("llama", RandomWeights(0))[1]).max() < 0.3
    assert scores_of("llama", SafetensorsWeights(tmp_path), "float32")[0] == "float32"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_weights_are_renamed_and_unpermuted(tmp_path: Path, family: str) -> None:
    config = config_of(family)
    path = tmp_path / "model.gguf"
    _write_gguf(path, config)
    assert np.array_equal(scores_of(family, GgufWeights(path, config))[1], scores_of(family, RandomWeights(0))[1])


def _write_gguf(path: Path, config: dict[str, Any]) -> None:
    """As llama.cpp's converter would: its names, and for the llama architecture interleaved rotary halves."""
    arch = str(config["model_type"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, arch)
    for name, tensor in parameters(next(f for f in ("llama", "qwen2", "qwen3") if f == arch)).items():
        values = tensor.numpy()
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for letter, count in heads.items():
            if arch == "llama" and f"self_attn.{letter}_proj" in name:
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_missing_or_misshapen_weight_is_named(tmp_path: Path) -> None:
    named = parameters("llama")
    named["model.norm.weight"] = torch.ones(7)
    del named["lm_head.weight"]
    save_file(named, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path)
    with pytest.raises(InvalidRequest, match=r"lm_head\.weight"):
        source.get("lm_head.weight", (97, 96))
    with pytest.raises(InvalidRequest, match=r"model\.norm\.weight"):
        source.get("model.norm.weight", (96,))


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    path = tmp_path / "model.gguf"
    _write_gguf(path, config)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(InvalidRequest, match="shorter"):
        scores_of("llama", GgufWeights(path, config))


def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"")
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest):
        SafetensorsWeights(folder)


@pytest.mark.parametrize(("kind", "load_format"), [("hf", "gguf"), ("gguf", "safetensors")])
def test_a_load_format_that_does_not_fit_is_refused(tmp_path: Path, kind: str, load_format: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_weights(tmp_path, kind, config_of("llama"), load_format, 0)
    assert refused.value.field == "load_format"


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        open_weights(tmp_path, "hf", config_of("llama"), "auto", 0)


def test_random_weights_depend_on_seed_and_name_only() -> None:
    a, b = RandomWeights(1), RandomWeights(2)
    assert torch.equal(a.get("x.weight", (50, 50)), a.get("x.weight", (50, 50)))
    assert not torch.equal(a.get("x.weight", (50, 50)), b.get("x.weight", (50, 50)))
    assert not torch.equal(a.get("x.weight", (50, 50)), a.get("y.weight", (50, 50)))
    assert float(a.get("x.weight", (200, 200)).std()) == pytest.approx(0.1, rel=0.02)


def test_progress_grows_to_one() -> None:
    seen: list[float] = []
    TorchRunner(config_of("llama"), RandomWeights(0), RunnerOptions(device="cpu"), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len(seen) > 2
