"""Models through the GPU's path, in Triton's interpreter, against the torch path's scores.

TRITON_INTERPRET=1 python -m tests.unit.hybrid.interpreted SCORES.json 0,0 4,0 4,4     (the file is made without it)

Prompts in chunks, then decode rows beside each other: in steps made anew, and in the padded buffers a CUDA graph is
captured over (here they run call by call), with records of states and without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from engine.kernels.ops import uses_triton
from engine.plan import StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from tests.unit.hybrid.models import CONFIGS, VOCAB, Walk, config_of, tokens_of

LLAMA = {
    "model_type": "mistral",
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 20,
}
MODELS = ["llama", *(name for name in CONFIGS if "-" not in name)]
LENGTHS = (25, 18, 16)  # a decode step of three rows is padded to four


def runner_of(name: str, graph_rows: int, replay_len: int) -> TorchRunner:
    config = LLAMA if name == "llama" else config_of(name)
    options = RunnerOptions(dtype="float32", device="cpu", threads=1, replay_len=replay_len, graph_rows=graph_rows)
    runner = TorchRunner(config, RandomWeights(0), options, (2,))
    runner.allocate(10, 0 if name == "llama" else 5)
    return runner


def scores(name: str, graph_rows: int = 0, replay_len: int = 0) -> list[list[float]]:
    """A chunk, a chunk that resumes off the grid, whole prompts, and decode steps of all of them."""
    runner = runner_of(name, graph_rows, replay_len)
    walks = [Walk(runner, tokens_of(30, seed), 1 + seed, 1 + 3 * seed) for seed in range(len(LENGTHS))]
    for walk, length in zip(walks, LENGTHS, strict=True):
        walk.pages = walk.pages[:3]
        if length == LENGTHS[0]:
            walk.run(21, () if name == "llama" else ((16, 4),))
        walk.run(length)
        walk.whole = walk.computed
    for _ in range(3):
        rows = [walk.row(walk.computed + 1) for walk in walks]
        if name == "llama":
            rows = [row.__class__(row.seq, row.tokens, row.start, row.pages, 0, row.samples) for row in rows]
        for walk, row, result in zip(walks, rows, runner.run(StepPlan(1, tuple(rows))).rows, strict=True):
            walk.take(row, result)
    taken = runner._graphs is not None and bool(runner._graphs._captured)
    assert taken == (uses_triton(torch.device("cpu")) and graph_rows > 0), "another path than the one to be tested"
    return [list(map(float, s)) for walk in walks for s in walk.scores]


def check(name: str, theirs: list[list[float]], graph_rows: int, replay_len: int) -> None:
    mine = scores(name, graph_rows, replay_len)
    gap = np.abs(np.array(mine) - np.array(theirs)).max() / np.abs(np.array(theirs)).max()
    print(f"{name} rows {graph_rows} records {replay_len}: {gap:.2e}", flush=True)
    assert gap <= 2e-4, name


def main() -> None:
    """SCORES.json: name -> scores; then the pairs of rows and records to try, as "4,0"."""
    expected = json.loads(Path(sys.argv[1]).read_text())
    modes = [tuple(map(int, mode.split(","))) for mode in sys.argv[2:]]
    for name, theirs in expected.items():
        for graph_rows, replay_len in modes:
            if name != "llama" or not replay_len:
                check(name, theirs, graph_rows, replay_len)


if __name__ == "__main__":
    main()
