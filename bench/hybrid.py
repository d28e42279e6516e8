"""A hybrid model on a CPU: our step against transformers', and what cached states save.

    python -m bench.hybrid [--threads 1] [--prompt 2048] [--repeat 3] [--family kimi_linear] [--steps-only]

8 layers, hidden 512, random weights in fp32. Every figure is a ratio of times taken in turn in one run, so that a busy
machine slows both alike; the best of the repetitions counts. decode_* is what one gets without any switch; where the
layers' decode rows are compiled (decode_compiled), tensor_operations_* is the same step without. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench._options import whole
from engine.api import EngineRequest, Mode, Tokens
from engine.loop import Engine, EngineSpec
from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from kvtransfer.hashing import root
from kvtransfer.types import LegKey
from runtime.clock import SystemClock
from runtime.config import Config

VOCAB, CHUNK, BATCH = 1024, 512, 8
SHAPE: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "model_max_length": 16384,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 8,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOKENS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "kimi_linear": SHAPE,
    "qwen3_next": {
        "model_type": "qwen3_next",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "max_position_embeddings": 16384,
        **_TOKENS,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "hidden_size": 512,
        "intermediate_size": 256,
        "shared_intermediate_size": 256,
        "num_hidden_layers": 8,
        "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "attention_multiplier": 0.125,
        "max_position_embeddings": 16384,
        **_TOKENS,
    },
}
GREEDY = SampleSpec(SamplingParams(), 0, 0)


def runner(threads: int, family: str = "kimi_linear", *, fused: bool = True) -> TorchRunner:
    options = RunnerOptions(dtype="float32", device="cpu", threads=threads, fused=fused)
    return TorchRunner(AutoConfig.for_model(**FAMILIES[family]).to_dict(), RandomWeights(0), options)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def best(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


# --- against transformers ------------------------------------------------------------------------------------------


def steps(ours: TorchRunner, prompt: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A prefill in chunks, and one decode step of a batch after prompts of 256 tokens."""
    pages = tuple(range(1, 2 + prompt // 16))
    text = tokens(prompt)

    def prefill() -> None:
        for start in range(0, prompt, CHUNK):
            end = min(start + CHUNK, prompt)
            sampled = (GREEDY,) if end == prompt else ()
            ours.run(StepPlan(1, (Row(1, text[start:end], start, pages, 1, sampled),)))

    rows = tuple(Row(b, (5,), 256, tuple(range(1 + 20 * b, 20 + 20 * b)), 1 + b, (GREEDY,)) for b in range(BATCH))
    return prefill, lambda: ours.run(StepPlan(1, rows))


def theirs(prompt: int, family: str) -> tuple[Callable[[], object], Callable[[], object]]:
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(**FAMILIES[family]), dtype=torch.float32).eval()
    text = torch.tensor([tokens(prompt)])
    with torch.inference_mode():
        cache = model(torch.randint(3, VOCAB, (BATCH, 256)), use_cache=True).cache

    def prefill() -> None:
        with torch.inference_mode():
            model(text, use_cache=True, logits_to_keep=1)

    def decode() -> None:
        with torch.inference_mode():
            model(torch.full((BATCH, 1), 5), cache=cache, use_cache=True)

    return prefill, decode


def against_transformers(threads: int, prompt: int, repeat: int, family: str) -> dict[str, Any]:
    ours, plain = (runner(threads, family, fused=fused) for fused in (True, False))
    for one in (ours, plain):
        one.allocate(20 * BATCH + prompt // 16 + 8, BATCH + 2)
    torch.set_num_threads(threads)
    mine, operations, reference = steps(ours, prompt), steps(plain, prompt), theirs(prompt, family)
    found: dict[str, Any] = {"family": family, "decode_compiled": ours.layers_compiled is not None}
    for i, (name, many) in enumerate((("prefill", repeat), ("decode", 10 * repeat))):
        works = {"": mine[i], "tensor_operations_": operations[i], "transformers_": reference[i]}
        taken: dict[str, list[float]] = {kind: [] for kind in works}
        for _ in range(1 + many):  # the first one warms up
            for kind, work in works.items():
                taken[kind].append(best(work, 1))
        least = {kind: min(times) for kind, times in taken.items()}
        found |= {f"{kind}{name}_ms": 1e3 * seconds for kind, seconds in least.items()}
        for kind in ("", "tensor_operations_"):
            found[f"{kind}{name}_times_transformers"] = least["transformers_"] / least[kind]
    return found


# --- cached states -------------------------------------------------------------------------------------------------


class Turns:
    """An engine run by hand; ttft() is the time to a request's first token."""

    def __init__(self, threads: int, **changes: Any) -> None:
        flags = {"model": "tiny-kimi", "max_batch": 4, "chunk_tokens": CHUNK, **changes}
        self.engine = Engine(runner(threads), EngineSpec(2100, 17, 16384), Config.load(flags), SystemClock())
        self.numbers = iter(range(1 << 30))

    def ttft(self, text: tuple[int, ...], output: int = 1) -> tuple[float, int]:
        """(seconds, tokens that came from the cache)"""
        events: list[Any] = []
        key = LegKey(f"r{next(self.numbers)}", "decode", 1)
        sampling = SamplingParams(max_tokens=output)
        begin = time.perf_counter()
        request = EngineRequest(key, Mode.LOCAL, text, len(text), sampling, root(b"", "m", "1"), 1e12)
        self.engine.submit(request, events.extend)
        while not any(isinstance(e, Tokens) for e in events):
            self.engine.turn()
        seconds = time.perf_counter() - begin
        while self.engine.turn():
            pass
        return seconds, next(e.cached_tokens for e in events if isinstance(e, Tokens))


def cached_states(threads: int, repeat: int) -> dict[str, float]:
    """A prefix hit of 7,936 of 8,000 tokens, and the checkpoint made inside the forward or by a forward of its own."""
    hot = Turns(threads)
    text = tokens(8000)
    cold_s, _ = hot.ttft(text[:7937])
    again = [hot.ttft(text[:7936] + tokens(64, seed)) for seed in range(1, 1 + repeat)]
    assert all(cached == 7936 for _, cached in again)
    ours = runner(threads)
    ours.allocate(600, 8)
    pages = tuple(range(1, 501))

    def inside() -> None:
        ours.run(StepPlan(1, (Row(1, text[:512], 0, pages, 1, (GREEDY,), checkpoints=((496, 2),)),)))

    def split() -> None:
        ours.run(StepPlan(1, (Row(1, text[:496], 0, pages, 1),)))
        ours.run(StepPlan(2, (Row(1, text[496:512], 496, pages, 1, (GREEDY,)),)))

    def plain() -> None:
        ours.run(StepPlan(1, (Row(1, text[:512], 0, pages, 1, (GREEDY,)),)))

    rounds = [[best(f, 1) for f in (plain, inside, split)] for _ in range(5 * repeat)]
    timed = dict(zip(("plain", "inside", "split"), map(min, zip(*rounds, strict=True)), strict=True))
    return {
        "cold_7937_ms": 1e3 * cold_s,
        "hit_7936_of_8000_over_cold": min(s for s, _ in again) / cold_s,
        "checkpoint_inside_over_none": timed["inside"] / timed["plain"],
        "checkpoint_by_split_over_none": timed["split"] / timed["plain"],
    }


def long_prompt(threads: int, repeat: int) -> dict[str, float]:
    """CPU time to the first token of 8,000 tokens: with the states the cache keeps written inside the forward (one, and
    one every 1,024 tokens), and without any, taken in turn. (A run of seconds meets too much of a busy machine for its
    wall time to show a few percent.)"""
    kinds: dict[str, dict[str, Any]] = {
        "none": {"prefix_cache": False},
        "last": {},
        "interval_1024": {"state_interval_tokens": 1024},
    }
    engines = {name: Turns(threads, **changes) for name, changes in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for seed in range(repeat):
        for name, turns in engines.items():
            begin = time.process_time()
            _, cached = turns.ttft(tokens(8000, 500 + seed))
            times[name].append(time.process_time() - begin)
            assert cached == 0
    least = {name: min(found) for name, found in times.items()}
    return {
        "ttft_8000_cpu_ms": 1e3 * least["none"],
        "ttft_8000_with_last_over_none": least["last"] / least["none"],
        "ttft_8000_with_interval_over_none": least["interval_1024"] / least["none"],
    }


def conversation(threads: int) -> dict[str, dict[str, float]]:
    """Six conversations of four turns over two shared prefixes of 600 tokens: share of prompt tokens that came from
    the cache, and mean time to first token, for each policy."""
    policies: dict[str, dict[str, Any]] = {
        "none": {"prefix_cache": False},
        "end": {"state_junctions": False},
        "end_and_junction": {},
        "interval_256": {"state_interval_tokens": 256},
    }
    found = {}
    for name, changes in policies.items():
        turns = Turns(threads, **changes)
        known = {c: tokens(600, c % 2) + tokens(120, 10 + c) for c in range(6)}
        times, cached, asked = [], 0, 0
        for turn in range(4):
            for c in known:
                seconds, hit = turns.ttft(known[c], 4)
                times.append(seconds)
                cached, asked = cached + hit, asked + len(known[c])
                known[c] = known[c] + tokens(40, 1000 + 10 * turn + c)
        found[name] = {"hit_rate": cached / asked, "ttft_ms": 1e3 * sum(times) / len(times)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=whole, default=1)
    parser.add_argument("--prompt", type=whole, default=2048)
    parser.add_argument("--repeat", type=whole, default=3)
    parser.add_argument("--family", choices=FAMILIES, default="kimi_linear", help="of the steps against transformers")
    parser.add_argument("--steps-only", action="store_true", help="nothing about cached states")
    args = parser.parse_args()
    report = against_transformers(args.threads, args.prompt, args.repeat, args.family)
    if args.steps_only:
        print(json.dumps(report, indent=2))
        return
    report |= cached_states(args.threads, args.repeat)
    report |= long_prompt(args.threads, args.repeat)
    report["policies"] = conversation(args.threads)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
