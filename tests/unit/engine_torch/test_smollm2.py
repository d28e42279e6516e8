"""The real model: SmolLM2 from its GGUF against transformers with the same weights, computed in the run."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.models import llama
from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import TorchRunner, load_runner
from engine.weights import open_weights
from runtime.config import Config
from runtime.modelfiles import ModelFiles

QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
MARGIN = 1e-3


@cache
def files() -> ModelFiles:
    return ModelFiles.open("smollm2")


@cache
def ours(dtype: str) -> TorchRunner:
    flags = {"model": "smollm2", "dtype": dtype, "device": "cpu", "threads": 1, "max_model_len": 2048}
    runner = load_runner(files(), Config.load(flags))
    runner.allocate(128, 0)
    return runner


@cache
def theirs() -> Any:
    f = files()
    source = open_weights(f.path, f.kind, f.config, "auto", 0)
    factory: Any = AutoModelForCausalLM
    model: Any = factory.from_config(LlamaConfig(**f.config), dtype=torch.float32).eval()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, shape in llama.parameter_shapes(llama.LlamaConfig.from_hf(f.config)).items():
            named[name].copy_(source.get(name, shape))
    return model


def greedy(runner: TorchRunner, tokens: list[int], count: int) -> list[int]:
    pages, out, done = tuple(range(1, 128)), list(tokens), 0
    while len(out) < len(tokens) + count:
        end = min(len(out), (done // 512 + 1) * 512)
        samples = (SampleSpec(SamplingParams(), len(out), 0),) if end == len(out) else ()
        (result,) = runner.run(StepPlan(0, (Row(1, tuple(out[done:end]), done, pages, 0, samples),))).rows
        out += result.tokens
        done = end
    return out[len(tokens) :]


def encode(text: str) -> list[int]:
    ids: list[int] = files().tokenizer().encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_knows_the_capital_of_france(dtype: str) -> None:
    out = greedy(ours(dtype), encode(QUESTION.format("What is the capital of France?")), 8)
    end = next(i for i, t in enumerate(out) if t in files().eos_token_ids)
    assert files().tokenizer().decode(out[:end]) == "The capital of France is Paris."


def _agree(tokens: list[int], count: int) -> None:
    """Token-identical, wherever transformers' best two logits are more than MARGIN apart (else we stop there)."""
    got = greedy(ours("float32"), tokens, count)
    with torch.no_grad():
        logits = theirs()(torch.tensor([tokens + got])).logits[0, len(tokens) - 1 : -1]
    best = logits.topk(2).values
    for i, token in enumerate(got):
        if best[i, 0] - best[i, 1] > MARGIN:
            assert token == int(logits[i].argmax()), f"token {i} of {count}"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_greedy_tokens_are_those_of_transformers(length: int) -> None:
    text = encode("The history of the lighthouse begins long before the lamp. " * 20)
    _agree(text[:length], 24)


@pytest.mark.slow
@pytest.mark.parametrize(
    "length", [1, 2, 15, 16, 17, 31, 33, 64, 127, 200, 255, 256, 257, 400, 511, 512, 513, 900, 1100, 1500]
)
def test_greedy_tokens_are_those_of_transformers_over_64_tokens(length: int) -> None:
    tokens = np.random.default_rng(length).integers(3, 49152, 1500).tolist()
    text = encode(QUESTION.format("Tell me about the sea. " * 400))
    mixed = [t if i % 7 == 3 else s for i, (t, s) in enumerate(zip(tokens, text, strict=False))]
    _agree(mixed[:length], 64)
