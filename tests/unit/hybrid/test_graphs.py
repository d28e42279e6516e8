"""Decode steps as CUDA graphs, without a GPU: what would be captured holds no wait and no copy from host memory, the
buffers get the right values, and a device that cannot capture serves without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import graphs
from engine.layers.pools import Groups
from engine.layers.static import StaticStep
from engine.plan import Row
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from runtime.config import Config
from runtime.errors import Unsupported
from tests.unit.hybrid.interpreted import LLAMA, MODELS
from tests.unit.hybrid.models import runner_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def traced() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.hybrid.fake_cuda", *MODELS, "llama+waits"]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_on_a_gpu_waits_for_nothing_and_copies_nothing(
    traced: dict[str, dict[str, Any]], name: str
) -> None:
    assert not traced[name]["error"], traced[name]["error"]
    assert "_attention_kernel" in traced[name]["launches"]
    short_window = name == "llama"
    assert ("_merge_kernel" in traced[name]["launches"]) != short_window, "keys are split where there are many"


def test_a_wait_would_be_noticed(traced: dict[str, dict[str, Any]]) -> None:
    assert "waits for the device" in traced["llama+waits"]["error"]


def groups_of(name: str) -> Groups:
    if name == "llama":
        return TorchRunner(LLAMA, RandomWeights(0), RunnerOptions(device="cpu", dtype="float32"))._model.groups
    return runner_of(name)._model.groups


def test_rows_and_padding_lie_where_the_kernels_look() -> None:
    """Given a step of two rows in buffers for four, then the rows' tokens go to their own pages and everything of the
    padding to page 0, with one token of context each."""
    groups = groups_of("llama")
    assert groups.kv is not None
    step = StaticStep(groups, 4, 256, 1, CPU)
    step.fill((Row(1, (7,), 33, (5, 6, 9)), Row(2, (8,), 16, (2, 3))))
    batch = step.batch
    assert batch.tokens.tolist() == [7, 8, 0, 0]
    assert batch.positions.tolist() == [33, 16, 0, 0]
    expected = groups.kv.cell_index(np.array([9, 3, 0, 0]), np.array([1, 0, 0, 0]))
    assert batch.cells.tolist() == expected.ravel().tolist()
    assert batch.paged is not None
    plan = batch.paged.decode
    assert plan.ends.tolist() == [34, 17, 1, 1]
    assert plan.firsts.tolist() == [0, 1, 2, 3, 4]
    assert plan.tables[:, :3].tolist() == [[5, 6, 9], [2, 3, 0], [0, 0, 0], [0, 0, 0]]


def test_a_step_leaves_nothing_of_itself_to_the_next() -> None:
    """A row that became padding points at nothing any more: not at its page, its slot or its records."""
    step = StaticStep(groups_of("kimi_linear"), 2, 256, 4, CPU)
    step.fill((Row(1, (7,), 33, (5, 6, 9), 3, whole=32), Row(2, (8,), 16, (2, 3), 2, whole=-1)))
    batch = step.batch
    assert batch.linear is not None
    assert batch.linear.replay is not None
    held, fold = batch.linear.replay
    assert (batch.linear.slots.tolist(), held.tolist(), fold.tolist()) == ([3, 2], [0, 0], [False, True])
    step.fill((Row(2, (8,), 17, (2, 3), 2, whole=16),))
    assert (batch.linear.slots.tolist(), held.tolist(), fold.tolist()) == ([2, 0], [1, 0], [True, False])
    assert batch.latent is not None
    assert batch.latent.decode.cells.tolist() == [3 * 16 + 1, 0]
    assert batch.latent.decode.tables[1, 0] == 0
    assert batch.latent.decode.ends.tolist() == [18, 1]


class Pieces(TorchDispatchMode):
    """Copies must be of one piece on both sides: others go by way of new memory that is not page-locked, and wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            assert all(x.is_contiguous() for x in args[:2])
            self.copies += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "kimi_linear"])
def test_what_a_step_sends_to_the_device_is_in_one_piece(name: str) -> None:
    step = StaticStep(groups_of(name), 4, 256, 4, CPU)
    with Pieces() as pieces:
        step.fill((Row(1, (7,), 33, (5, 6, 9), 3, whole=32), Row(2, (8,), 16, (2, 3), 2, whole=16)))
    assert pieces.copies >= 3


class Model:
    """Logits are the tokens themselves."""

    vocab_size = 1
    groups = Groups()

    def forward(self, step: Any, pools: Any) -> torch.Tensor:
        out: torch.Tensor = step.tokens[:, None].float()
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> graphs.DecodeGraphs:
    """As on a GPU, but for the capture itself."""
    monkeypatch.setattr(graphs, "uses_triton", lambda device: True)
    made = graphs.DecodeGraphs(Model(), None, 64, 1, CPU, 8)  # type: ignore[arg-type]
    made._device = torch.device("cuda")
    monkeypatch.setattr(graphs, "StaticStep", lambda g, size, length, ring, device: StaticStep(g, size, 64, 1, CPU))
    return made


def test_a_device_that_cannot_capture_serves_without(
    made: graphs.DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(captured: Any) -> None:
        captured.graph = object()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(made, "_capture", refused)
    rows = tuple(Row(i, (40 + i,), 3, (1,)) for i in range(3))
    assert made.takes(rows)
    assert made.logits(rows)[:, 0].tolist() == [40, 41, 42]
    assert not made.takes(rows)


def test_a_device_that_is_full_keeps_the_graphs_it_has(
    made: graphs.DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given graphs for one row and none for three, then both are served, each with what there is."""
    replayed = []

    def capture(captured: Any) -> None:
        if captured.step.size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        captured.logits = torch.zeros(1, 1)
        captured.graph = SimpleNamespace(replay=lambda: replayed.append(captured.step.batch.tokens.tolist()))

    monkeypatch.setattr(made, "_capture", capture)
    rows = tuple(Row(i, (40 + i,), 3, (1,)) for i in range(3))
    made.logits(rows[:1])
    assert made.logits(rows)[:, 0].tolist() == [40, 41, 42]
    assert made.takes(rows)
    made.logits(rows[1:2])
    assert replayed == [[40], [41]]


def test_only_decode_steps_of_captured_sizes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "uses_triton", lambda device: True)
    made = graphs.DecodeGraphs(Model(), None, 64, 1, CPU, 2)  # type: ignore[arg-type]
    decode, chunk = Row(1, (4,), 3, (1,)), Row(2, (4, 5), 0, (1,))
    assert made.takes((decode, decode))
    assert not made.takes((decode, decode, decode))
    assert not made.takes((decode, chunk))
    assert not made.takes((Row(1, (4,), 3, (1,), prompt_targets=(5,)),))
    assert not made.takes((Row(1, (4,), 15, (1,), checkpoints=((16, 2),)),))


def test_a_graph_reaches_as_far_as_the_longest_sequence_and_not_much_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row needs the wide buffers, its neighbours alone do not; none are wider than the model's longest."""
    monkeypatch.setattr(graphs, "uses_triton", lambda device: True)
    made = graphs.DecodeGraphs(Model(), None, 40_000, 1, CPU, 8)  # type: ignore[arg-type]
    for start in (3, 4095, 4096, 16_384, 39_999):
        rows = (Row(1, (41,), 3, (1,)), Row(2, (42,), start, tuple(range(1, 2 + start // 16))))
        assert made.logits(rows)[:, 0].tolist() == [41, 42]
    assert sorted(made._captured) == [(2, 4096), (2, 16_384), (2, 40_000)]


def test_the_configuration_says_whether_there_are_graphs() -> None:
    assert RunnerOptions.of(Config(max_batch=16)).graph_rows == 16
    assert RunnerOptions.of(Config(max_batch=4096)).graph_rows == 256
    assert RunnerOptions.of(Config(cuda_graphs=False)).graph_rows == 0


def test_deterministic_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Unsupported, match="needs a CPU"):
        TorchRunner(LLAMA, RandomWeights(0), RunnerOptions(device="cuda", deterministic=True))
