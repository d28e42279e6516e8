"""With `deterministic` on, a row is a function of its own request: bit for bit, whatever runs beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.runner import TorchRunner
from tests.unit.engine_torch.families import Request, page_memory, prompt, runner_of, step

LENGTHS = (45, 33, 1, 16, 120, 64)
NEW = 6
FIRST_PAGE = (1, 6, 11, 16, 21, 31)


def _request(i: int, chunk: int = 32) -> Request:
    pages = tuple(range(FIRST_PAGE[i], FIRST_PAGE[i] + (10 if i == 4 else 5)))
    return Request(i, list(prompt(LENGTHS[i], i)), pages, chunk)


def _done(r: Request) -> bool:
    return len(r.tokens) == r.prompt_len + NEW


def _run(runner: TorchRunner, starts: dict[int, int]) -> dict[int, Request]:
    """Run requests together, request i entering at step starts[i]."""
    requests = {i: _request(i) for i in starts}
    for number in range(64):
        live = [r for i, r in requests.items() if starts[i] <= number and not _done(r)]
        if live:
            step(runner, live, number)
    assert all(_done(r) for r in requests.values())
    return requests


def _bytes(runner: TorchRunner, r: Request) -> Any:
    """The request's cells in token order: [token, kv_head, layer, K or V, bytes]."""
    memory = page_memory(runner)[list(r.pages)]
    cells = np.moveaxis(memory, 4, 1).reshape(-1, *memory.shape[1:4], memory.shape[5])
    return cells[: r.computed]


BATCHES = [
    {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0},
    {0: 3, 1: 0, 2: 1, 3: 2, 4: 0, 5: 4},
    {5: 0, 4: 1, 3: 2, 2: 3, 1: 4, 0: 5},
    {0: 0, 4: 2},
    {1: 1, 2: 0, 3: 1},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama-head24", "qwen3", "mistral-window"])
def test_a_row_does_not_depend_on_the_batch_around_it(family: str, dtype: str) -> None:
    alone = {}
    for i in range(len(LENGTHS)):
        runner = runner_of(family, dtype=dtype, deterministic=True)
        alone[i] = (_run(runner, {i: 0})[i], runner)
    for starts in BATCHES:
        runner = runner_of(family, dtype=dtype, deterministic=True)
        for i, r in _run(runner, starts).items():
            reference, its_runner = alone[i]
            assert r.tokens == reference.tokens, (starts, i)
            assert np.array_equal(r.matrix(), reference.matrix()), (starts, i)
            assert np.array_equal(_bytes(runner, r), _bytes(its_runner, reference)), (starts, i)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_computed_in_one_runner_and_continued_in_another_is_bitwise_the_same(dtype: str) -> None:
    """Prefill and decode apart, pages moved by copy: the hand-off itself changes nothing."""
    aggregated = runner_of("llama", dtype=dtype, deterministic=True)
    whole = _run(aggregated, {0: 0})[0]
    p, d = (runner_of("llama", dtype=dtype, deterministic=True) for _ in range(2))
    moved = _request(0)
    while len(moved.tokens) == moved.prompt_len:
        step(p, [moved])
    landing = (40, 38, 36, 34, 32)
    page_memory(d)[list(landing)] = page_memory(p)[list(moved.pages)]
    moved.pages = landing
    beside = _request(4)  # D is busy with something else
    while not _done(moved):
        step(d, [moved, beside])
    assert moved.tokens == whole.tokens
    assert np.array_equal(moved.matrix(), whole.matrix())
    assert np.array_equal(_bytes(d, moved), _bytes(aggregated, whole))


def test_without_it_batches_agree_to_rounding() -> None:
    reference = _run(runner_of("llama"), {0: 0})[0]
    together = _run(runner_of("llama"), BATCHES[1])[0]
    assert together.tokens == reference.tokens
    assert np.abs(together.matrix() - reference.matrix()).max() < 1e-4
