"""The runner as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine.plan import Copy, Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import RunnerOptions, TorchRunner, load_runner
from engine.runner_api import RowsFailed, Runner
from engine.weights import RandomWeights
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.modelfiles import ModelFiles
from tests.unit.engine_torch.families import (
    VOCAB,
    Request,
    config_of,
    generate,
    page_memory,
    pages_for,
    prompt,
    runner_of,
    step,
)

GREEDY = SamplingParams()


def test_spec_and_region_describe_the_pool() -> None:
    runner: Runner = runner_of("llama", dtype="bfloat16", pages=9)
    (component,) = runner.spec().components
    (region,) = runner.regions()
    assert (component.units, component.layers, component.rows, component.tokens) == (2, 3, 2, 16)
    assert component.token_bytes == 32
    assert region.stride == runner.spec().page_bytes == 2 * 3 * 2 * 16 * 32
    assert region.length == 9 * region.stride
    assert (region.first_unit, region.units, region.memory) == (0, 2, "DRAM")


def test_copies_come_before_the_rows() -> None:
    """A forked choice: the last, partial page is copied and both continue."""
    runner, request = runner_of("llama"), Request(1, list(prompt(40)), (1, 2, 3), 16)
    generate(runner, request, 1)
    fork = Request(2, list(request.tokens), (1, 2, 9), 16)
    fork.computed, fork.prompt_len, fork.prompt_scores = request.computed, 40, False
    row = fork.row()
    fork.take(row, runner.run(StepPlan(1, (row,), (Copy(True, 3, 9),))).rows[0])
    generate(runner, request, 2)
    assert fork.tokens == request.tokens
    assert np.array_equal(fork.matrix()[-1], request.matrix()[-1])


def test_rows_of_every_kind_share_a_step() -> None:
    """Decode rows of very different lengths, a middle chunk, a last chunk, a whole prompt: as if each were alone."""
    lengths = (300, 9, 33, 200, 64, 16)
    base = {**config_of("llama"), "max_position_embeddings": 512}

    def fresh() -> TorchRunner:
        runner = TorchRunner(base, RandomWeights(0), RunnerOptions(device="cpu", threads=1))
        runner.allocate(128, 0)
        return runner

    starts = np.cumsum([1] + [n // 16 + 2 for n in lengths])
    together, runner = [], fresh()
    for i, n in enumerate(lengths):
        together.append(Request(i, list(prompt(n, i)), pages_for(n + 16, int(starts[i])), 64))
    for r in together[:4]:
        generate(runner, r, 1)
    for _ in range(4):
        step(runner, together)
    for i, r in enumerate(together):
        alone = Request(i, list(prompt(lengths[i], i)), pages_for(lengths[i] + 16), 64)
        generate(fresh(), alone, len(r.tokens) - r.prompt_len)
        assert r.tokens == alone.tokens
        assert np.abs(r.matrix() - alone.matrix()).max() < 1e-4


def test_several_first_tokens_come_from_one_row() -> None:
    runner, tokens = runner_of("llama"), prompt(20)
    params = SamplingParams(temperature=1.0, seed=3)
    specs = tuple(SampleSpec(params, 20, c) for c in range(4))
    (both,) = runner.run(StepPlan(0, (Row(1, tokens, 0, (1, 2), 0, specs),))).rows
    single = [runner.run(StepPlan(0, (Row(1, tokens, 0, (1, 2), 0, (s,)),))).rows[0].tokens[0] for s in specs]
    assert list(both.tokens) == single
    assert len(set(single)) > 1
    assert both.logprobs == ()


def test_a_row_without_samples_returns_none_and_an_empty_plan_nothing() -> None:
    runner = runner_of("llama")
    (row,) = runner.run(StepPlan(3, (Row(1, prompt(16), 0, (1,)),))).rows
    assert (row.seq, row.tokens, row.logprobs, row.prompt) == (1, (), (), ())
    assert runner.run(StepPlan(4, ())).rows == ()


def test_prompt_scores_do_not_depend_on_how_many_rows_are_scored_at_once() -> None:
    long = generate(runner_of("llama"), Request(1, list(prompt(200)), pages_for(256), 256), 1)
    short = generate(runner_of("llama"), Request(1, list(prompt(200)), pages_for(256), 16), 1)
    assert long.matrix().shape == short.matrix().shape == (200, VOCAB)
    assert np.abs(long.matrix() - short.matrix()).max() < 1e-4


def test_a_row_whose_pages_are_poisoned_fails_alone() -> None:
    runner = runner_of("llama")
    good, bad = (Request(i, list(prompt(40, i)), pages_for(48, 1 + 4 * i), 64) for i in range(2))
    generate(runner, good, 1)
    generate(runner, bad, 1)
    page_memory(runner)[5].view(np.float32)[...] = np.nan
    rows = (bad.row(), good.row())
    with pytest.raises(RowsFailed) as failure:
        runner.run(StepPlan(7, rows))
    assert failure.value.seqs == (1,)
    assert [r.seq for r in failure.value.result.rows] == [0]
    good.take(rows[1], failure.value.result.rows[0])
    alone = generate(runner_of("llama"), Request(0, list(prompt(40)), pages_for(48), 64), 2)
    assert good.tokens == alone.tokens


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        TorchRunner(config_of("llama"), RandomWeights(0), RunnerOptions(device="cpu", max_model_len=257))
    assert (refused.value.field, refused.value.limit) == ("max_model_len", "256")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest) as refused:
        TorchRunner(config_of("llama"), RandomWeights(0), RunnerOptions(device="cuda"))
    assert refused.value.field == "device"


def test_the_configuration_chooses_random_weights_for_a_model_on_disk() -> None:
    runner = load_runner(ModelFiles.open("smollm2"), _config(load_format="random", dtype="float32"))
    assert runner.spec().vocab_size == 49152
    assert runner.spec().dtype == "float32"


def _config(**values: Any) -> Config:
    return Config.load({"model": "smollm2", "threads": 1, "device": "cpu", "max_model_len": 64, **values})


FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.arange, torch.tensor, torch.randn, torch.rand, torch.eye,
    torch.linspace, torch.as_tensor, torch.scalar_tensor, torch.randint, torch.tril_indices, torch.empty_strided,
}  # fmt: skip


class _EveryFactoryNamesItsDevice(TorchFunctionMode):
    """Fails on a tensor made without an explicit device: on a GPU it would be on the wrong one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES:
            self.seen.add(func)
            assert (kwargs or {}).get("device") is not None, f"{func.__name__} without a device"
        return func(*args, **(kwargs or {}))


@contextmanager
def _asserted_devices() -> Iterator[_EveryFactoryNamesItsDevice]:
    with _EveryFactoryNamesItsDevice() as mode:
        yield mode
    assert {torch.empty, torch.zeros, torch.arange, torch.tensor} <= mode.seen, "the check has seen nothing"


@pytest.mark.parametrize("family", ["llama-yarn", "llama-llama3", "mistral-window", "qwen2-window", "qwen3-biases"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_tensor_is_made_on_a_named_device(family: str, deterministic: bool) -> None:
    params = SamplingParams(
        temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias=((3, 1.0),), logprobs=True, top_logprobs=VOCAB,
    )  # fmt: skip
    with _asserted_devices():
        runner = runner_of(family, deterministic=deterministic)
        requests = [Request(i, list(prompt(n, i)), pages_for(64, 1 + 4 * i), 16) for i, n in enumerate((45, 12, 33))]
        requests[0].params = params
        for _ in range(6):
            step(runner, requests)
        row = Row(1, (5,), 20, (1, 2), 0, (SampleSpec(params, 21, 0, (1, 2, 3), (3, 4), banned=(7,)),))
        plain = Row(2, (5,), 20, (3, 4), 0, (SampleSpec(SamplingParams(temperature=1.0), 21, 0),))
        runner.run(
            StepPlan(0, (row, plain, Row(3, (5,), 4, (6,), 0, (SampleSpec(GREEDY, 5, 0),))), (Copy(True, 1, 9),))
        )
