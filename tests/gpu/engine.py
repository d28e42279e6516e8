"""What a GPU must show of the dense engine, and its figures: `python -m tests.gpu.engine` prints JSON.

Checks raise AssertionError. The CPU, which the other tests hold against transformers, is the reference.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.noise import bits, gumbel, keys
from engine.plan import Row, RowResult, SampleSpec, SamplingParams, StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
FAMILIES: tuple[dict[str, Any], ...] = (
    {"model_type": "llama"},
    {"model_type": "mistral", "sliding_window": 20},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "tie_word_embeddings": True},
)
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def runner(config: dict[str, Any], device: str, dtype: str, pages: int) -> TorchRunner:
    made = TorchRunner(config, RandomWeights(0), RunnerOptions(dtype=dtype, device=device))
    made.allocate(pages, 0)
    return made


def scored(run: TorchRunner, params: SamplingParams) -> list[RowResult]:
    """Two prompts in chunks, then decode beside each other: every kind of row, and their results."""
    lengths, results = (45, 70), []
    known = [[(7 * i + 3 * j) % 96 + 1 for i in range(n)] for j, n in enumerate(lengths)]
    done = [0, 0]
    for step in range(10):
        rows = []
        for j, tokens in enumerate(known):
            end = min(len(tokens), (done[j] // 32 + 1) * 32)
            samples = (SampleSpec(params, len(tokens), 0),) if end == len(tokens) else ()
            pages = tuple(range(1 + 8 * j, 9 + 8 * j))
            rows.append(Row(j, tuple(tokens[done[j] : end]), done[j], pages, 0, samples))
            done[j] = end
        order = sorted(rows, key=lambda r: not r.is_decode)
        for row, result in zip(order, run.run(StepPlan(step, tuple(order))).rows, strict=True):
            results.append(result)
            known[row.seq] += [(11 * step + row.seq) % 96 + 1] * len(result.tokens)  # teacher-forced
    return results


def check_scores() -> float:
    """Every family in fp32: log-probabilities within 1e-4 of the CPU's. Returns the largest difference."""
    worst = 0.0
    params = SamplingParams(logprobs=True, top_logprobs=97)
    for family in FAMILIES:
        pair = [scored(runner({**TINY, **family}, device, "float32", 32), params) for device in ("cpu", "cuda")]
        for mine, theirs in zip(*pair, strict=True):
            for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
                assert a is not None
                assert b is not None
                left, right = dict(a.top), dict(b.top)
                worst = max(worst, *(abs(left[t] - right[t]) for t in left))
    assert worst < 1e-4, worst
    return worst


def check_noise() -> None:
    """Sampling noise is the same on both devices: integers exactly, Gumbel values to the bit."""
    events = [keys(s, c, p) for s in (0, 2**63 + 5) for c in (0, 3) for p in (0, 1, 131071)]
    ids = torch.arange(151936, dtype=torch.int64, device="cpu")[None]
    assert torch.equal(bits(events, ids), bits(events, ids.cuda()).cpu())
    differing = (gumbel(events, ids) != gumbel(events, ids.cuda()).cpu()).sum().item()
    assert differing == 0, f"{differing} Gumbel values differ"


def check_sampling() -> None:
    """Every sampling field runs on the device, and draws the CPU's tokens from the CPU's logits."""
    for extra in ({}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05, "top_p": 0.95}, {"repetition_penalty": 1.2}):
        params = SamplingParams(temperature=0.9, seed=5, logit_bias=((3, 2.0),), **extra)
        cpu, gpu = (
            [r.tokens for r in scored(runner({**TINY, **FAMILIES[0]}, d, "float32", 32), params)]
            for d in ("cpu", "cuda")
        )
        assert cpu == gpu, extra


def timed(call: Callable[[], object], rounds: int) -> float:
    """Median seconds; run() ends synchronised."""
    call()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[rounds // 2]


def figures() -> dict[str, float]:
    """Tokens per second in bf16 at SmolLM2's shape, random weights."""
    run = runner(SMOLLM2, "cuda", "bfloat16", 5000)
    greedy = SamplingParams()
    out = {}
    for length in (512, 2048):
        rows = tuple(
            Row(0, (7,) * 512, begin, tuple(range(1, length // 16 + 1)), 0, (SampleSpec(greedy, begin + 512, 0),))
            for begin in range(0, length, 512)
        )
        out[f"prefill {length}"] = length / timed(lambda rows=rows: [run.run(StepPlan(0, (r,))) for r in rows], 10)  # type: ignore[misc]
    for batch, context in ((1, 128), (8, 128), (64, 128), (1, 8000), (8, 2000)):
        per = context // 16 + 1
        plan = tuple(
            Row(
                i, (7,), context, tuple(range(1 + i * per, 1 + (i + 1) * per)), 0, (SampleSpec(greedy, context + 1, 0),)
            )
            for i in range(batch)
        )
        out[f"decode {batch} at {context}"] = batch / timed(lambda plan=plan: run.run(StepPlan(0, plan)), 20)  # type: ignore[misc]
    return {name: round(value, 1) for name, value in out.items()}


def main() -> int:
    worst = check_scores()
    check_noise()
    check_sampling()
    print(
        json.dumps(
            {"device": torch.cuda.get_device_name(), "worst_logprob_difference": worst, "tokens_per_s": figures()}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
