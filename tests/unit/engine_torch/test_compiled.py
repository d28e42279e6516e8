"""The compiled decode step computes what the model does, as exactly as bf16 allows."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.native import default_cache
from engine.plan import SamplingParams
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from runtime.errors import Unsupported
from tests.unit.engine_torch.families import VOCAB, Request, config_of, generate, page_memory, pages_for, prompt, step

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "head64": ("llama", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "head96-mha": ("llama", {"head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 2}),
    "biases": ("llama-biases", {"head_dim": 32}),
    "yarn-tied": ("llama-yarn", {"head_dim": 32, "tie_word_embeddings": True}),
    "window": ("mistral-window", {"head_dim": 32}),
    "some-windows": ("qwen2-window", {"head_dim": 32}),
    "qk-norm": ("qwen3", {}),
}


class Rounded(RandomWeights):
    """Weights that bf16 holds exactly, so that only the arithmetic differs."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return super().get(name, shape).bfloat16().float()


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def runner_for(shape: str, cache_folder: Path, *, dtype: str = "bfloat16", compiled: bool = False) -> TorchRunner:
    family, change = SHAPES[shape]
    options = RunnerOptions(dtype=dtype, device="cpu", threads=1, compile=compiled, compile_cache=str(cache_folder))
    runner = TorchRunner({**config_of(family), **change}, Rounded(0), options)
    runner.allocate(128, 0)
    return runner


LENGTHS = (45, 1, 16, 90, 33, 47, 2, 15, 31, 64, 17)


def decoded(runner: TorchRunner, count: int, steps: int = 3) -> Any:
    """Teacher-forced decode of `count` sequences in one batch: scores [sequence, step, vocab]."""
    requests = []
    for i, n in enumerate(LENGTHS[:count]):
        r = Request(i, list(prompt(n, i)), pages_for(n + 16, 1 + 8 * i), 256, prompt_scores=False)
        generate(runner, r, 1)
        r.tokens[-1] = 5 + i
        requests.append(r)
    for s in range(steps):
        step(runner, requests)
        for i, r in enumerate(requests):
            r.tokens[-1] = 7 + i + s
    return np.stack([r.matrix()[1:] for r in requests])


@cache
def exact(shape: str, folder: Path) -> Any:
    return decoded(runner_for(shape, folder, dtype="float32"), len(LENGTHS))


@pytest.mark.parametrize("count", [1, 3, 4, 8, len(LENGTHS)])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_close_to_fp32_as_the_model_is(shape: str, count: int, cache_folder: Path) -> None:
    reference = exact(shape, cache_folder)[:count]
    error = np.abs(decoded(runner_for(shape, cache_folder, compiled=True), count) - reference)
    eager = np.abs(decoded(runner_for(shape, cache_folder), count) - reference)
    assert error.mean() <= 1.3 * eager.mean()
    assert error.max() <= 2 * eager.max()
    assert eager.mean() > 0, "both at zero would prove nothing"


def test_a_row_does_not_depend_on_its_neighbours_beyond_rounding(cache_folder: Path) -> None:
    together = decoded(runner_for("llama", cache_folder, compiled=True), len(LENGTHS))
    alone = decoded(runner_for("llama", cache_folder, compiled=True), 1)
    assert np.array_equal(together[:1], alone), "every row is summed in one order here"


def test_it_writes_the_cells_the_model_writes(cache_folder: Path) -> None:
    pages = []
    for compiled in (False, True):
        runner = runner_for("llama", cache_folder, compiled=compiled)
        decoded(runner, 4)
        pages.append(page_memory(runner)[1:].copy().view(np.uint16).astype(np.uint32) << 16)
    eager, mine = (p.view(np.float32) for p in pages)
    assert np.array_equal(eager != 0, mine != 0)
    assert np.abs(eager - mine).max() < 0.1


@pytest.mark.parametrize("fault", ["swap keys and values", "swap heads", "swap layers"])
def test_a_fault_in_the_pages_shows(fault: str, cache_folder: Path) -> None:
    runner = runner_for("llama", cache_folder, compiled=True)
    request = Request(0, list(prompt(45)), pages_for(64), 256, prompt_scores=False)
    generate(runner, request, 1)
    memory = page_memory(runner)
    axis = {"swap keys and values": 2, "swap heads": 0, "swap layers": 1}[fault]
    clean = generate(runner, request, 2).matrix()[-1]
    request.computed, request.tokens = request.computed - 1, request.tokens[:-1]
    memory[2] = np.flip(memory[2], axis).copy()
    assert np.abs(generate(runner, request, 2).matrix()[-1] - clean).max() > 0.05


def test_a_stale_number_in_the_rest_of_a_page_is_not_seen(cache_folder: Path) -> None:
    clean = decoded(runner_for("window", cache_folder, compiled=True), 3)
    runner = runner_for("window", cache_folder, compiled=True)
    page_memory(runner)[1:].view(np.uint16)[...] = 0x7FC0
    assert np.array_equal(decoded(runner, 3), clean)


def test_steps_it_does_not_take_go_through_the_model(cache_folder: Path) -> None:
    """A prompt beside decode rows, prompt scores, and sampling of every kind."""
    runner = runner_for("llama", cache_folder, compiled=True)
    first = Request(0, list(prompt(45)), pages_for(64), 16)
    generate(runner, first, 1)
    second = Request(1, list(prompt(33, 1)), pages_for(64, 10), 16)
    second.params = SamplingParams(temperature=0.9, seed=1, top_p=0.9, logprobs=True, top_logprobs=VOCAB)
    for _ in range(6):
        step(runner, [first, second])
    assert len(second.tokens) > 33
    assert np.isfinite(first.matrix()).all()


def test_the_library_is_built_once(tmp_path: Path) -> None:
    runner_for("llama", tmp_path, compiled=True)
    (library,) = tmp_path.iterdir()
    before = library.stat().st_mtime_ns
    runner_for("llama", tmp_path, compiled=True)
    assert [p.stat().st_mtime_ns for p in tmp_path.iterdir()] == [before]


def test_the_cache_follows_the_users_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "there")
    assert default_cache() == Path(os.sep, "there", "pdserve", "compiled")


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"dtype": "float32"}, {"head_dim": 32}),
        ({"dtype": "bfloat16"}, {"head_dim": 16}),
        ({"dtype": "bfloat16"}, {"head_dim": 32, "intermediate_size": 84}),
        ({"dtype": "bfloat16", "deterministic": True}, {"head_dim": 32}),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        TorchRunner({**config_of("llama"), **change}, Rounded(0), RunnerOptions(device="cpu", compile=True, **options))
    assert refused.value.field == "compile"


def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match=r"g\+\+"):
        runner_for("llama", tmp_path, compiled=True)
