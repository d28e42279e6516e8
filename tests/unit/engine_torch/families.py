"""Tiny random-weight models of each family, ours and transformers' with the same parameters."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.plan import Row, RowResult, SampleSpec, SamplingParams, StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights

VOCAB = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-mha": {"model_type": "llama", "num_key_value_heads": 6, "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head24": {"model_type": "llama", "head_dim": 24},
    "llama-linear": {"model_type": "llama", **_rope(rope_type="linear", factor=2.5)},
    "llama-dynamic": {"model_type": "llama", **_rope(rope_type="dynamic", factor=2.0)},
    "llama-llama3": {"model_type": "llama", **_rope(**LLAMA3)},
    "llama-yarn": {"model_type": "llama", **_rope(**YARN)},
    "llama-yarn-mscale": {"model_type": "llama", **_rope(**YARN, mscale=0.7, mscale_all_dim=1.0, truncate=False)},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-biases": {"model_type": "qwen3", "attention_bias": True},
}


def config_of(family: str) -> dict[str, Any]:
    kwargs = {**BASE, **FAMILIES[family]}
    config: dict[str, Any] = AutoConfig.for_model(**kwargs).to_dict()
    return config


def reference(family: str, seed: int = 0) -> Any:
    """transformers' model in fp32 with RandomWeights(seed)."""
    config = AutoConfig.for_model(**{**BASE, **FAMILIES[family]})
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    source = RandomWeights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.get(name, tuple(parameter.shape)))
    return model


def runner_of(
    family: str, *, seed: int = 0, dtype: str = "float32", pages: int = 64, deterministic: bool = False
) -> TorchRunner:
    options = RunnerOptions(dtype=dtype, device="cpu", threads=1, deterministic=deterministic)
    runner = TorchRunner(config_of(family), RandomWeights(seed), options)
    runner.allocate(pages, 0)
    return runner


def page_memory(runner: TorchRunner) -> npt.NDArray[np.uint8]:
    """The pool's bytes [page, kv_head, layer, K or V, token, bytes], as a peer would address them."""
    (region,) = runner.regions()
    (c,) = runner.spec().components
    raw = memoryview((ctypes.c_uint8 * region.length).from_address(region.base)).cast("B")
    memory: npt.NDArray[np.uint8] = np.frombuffer(raw, dtype=np.uint8)
    return memory.reshape(-1, c.units, c.layers, c.rows, c.tokens, c.token_bytes)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(1, VOCAB, length))


@dataclass
class Request:
    """One sequence's walk through a runner: chunks of the prompt, then greedy tokens, every score recorded."""

    seq: int
    tokens: list[int]
    pages: tuple[int, ...]
    chunk: int
    params: SamplingParams = field(default_factory=lambda: SamplingParams(logprobs=True, top_logprobs=VOCAB))
    scores: list[dict[int, float]] = field(default_factory=list)
    computed: int = 0
    prompt_scores: bool = True
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def decodes(self) -> bool:
        return self.computed == len(self.tokens) - 1 and self.computed > 0

    def row(self) -> Row:
        """The next row: up to the next multiple of chunk while in the prompt."""
        end = min(len(self.tokens), (self.computed // self.chunk + 1) * self.chunk)
        step = tuple(self.tokens[self.computed : end])
        last = end == len(self.tokens)
        targets = (
            tuple(self.tokens[self.computed + 1 : end + 1]) if self.prompt_scores and end <= self.prompt_len else ()
        )
        spec = SampleSpec(self.params, len(self.tokens), 0)
        return Row(self.seq, step, self.computed, self.pages, 0, (spec,) if last else (), targets, VOCAB)

    def take(self, row: Row, result: RowResult) -> None:
        assert result.seq == self.seq
        self.computed += len(row.tokens)
        self.scores += [dict(p.top) for p in result.prompt]
        if result.tokens:
            self.tokens.append(result.tokens[0])
            self.scores += [dict(p.top) for p in result.logprobs if p is not None]

    def matrix(self) -> npt.NDArray[np.float64]:
        """Log-probabilities [positions scored, vocab]."""
        return np.array([[s[v] for v in range(VOCAB)] for s in self.scores])


def step(runner: TorchRunner, requests: Sequence[Request], number: int = 0) -> None:
    rows = [r.row() for r in requests]
    order = sorted(range(len(rows)), key=lambda i: not rows[i].is_decode)
    result = runner.run(StepPlan(number, tuple(rows[i] for i in order)))
    for at, i in enumerate(order):
        requests[i].take(rows[i], result.rows[at])


def generate(runner: TorchRunner, request: Request, new_tokens: int) -> Request:
    while len(request.tokens) < request.prompt_len + new_tokens:
        step(runner, [request])
    return request


def pages_for(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + math.ceil(length / 16)))
