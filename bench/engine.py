"""Engine figures: steps of SmolLM2 in bf16 against what its linear layers and attention alone would take.

`python -m bench.engine` prints JSON and fails if a target is missed. Everything is measured in one run, in turn, round
by round, and each figure is the best of its rounds: on a shared machine the best is what repeats.

limit        the linear layers of the whole step in a loop, plus contiguous grouped-matmul attention in a loop; nothing
             else (no norms, rotary, pages, sampling). Of every variant the bench knows it takes the fastest: linear
             layers compiled by inductor (freezing, max-autotune, C++ templates) or packed by oneDNN; attention as one
             grouped matmul, in blocks, or by sdpa; and for decode the compiled step as a whole, should it be faster.
eager        TorchRunner.run as a worker has it by default
compiled     the same with `compile: on`
`ratio` is limit / step (1 = nothing lost); `ratio_to_parts` leaves our own step out of the limit.
Without inductor (--no-inductor) the limit is not one, and the run fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench._options import whole
from engine.kernels.attention import Block, block_rows, decode_attention, prefill_attention
from engine.layers.linear import Linear
from engine.models.llama import LlamaConfig
from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import TorchRunner, load_runner
from runtime.config import Config
from runtime.modelfiles import ModelFiles

BF16 = torch.bfloat16
CHUNK = 512
TARGET = 0.75
TARGET_PAGED = 0.4
TARGET_READ = 2.5


@dataclass(frozen=True, slots=True)
class Case:
    """rows sequences; prefill: `tokens` each in chunks; decode: one token each after a context of `tokens`."""

    name: str
    rows: int
    tokens: int
    prefill: bool
    long: bool = False

    @property
    def produced(self) -> int:
        return self.tokens if self.prefill else self.rows


CASES = (
    Case("prefill 512", 1, 512, True),
    Case("prefill 2048", 1, 2048, True),
    Case("decode 1 at 128", 1, 128, False),
    Case("decode 8 at 128", 8, 128, False),
    Case("decode 1 at 8K", 1, 8160, False, long=True),
    Case("decode 8 at 2K", 8, 2040, False, long=True),
)


class Linears(torch.nn.Module):
    """Every matmul of a step and the least that joins them. rows: of which logits are wanted."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        g = torch.Generator(device="cpu").manual_seed(0)

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            value = torch.randn(rows, columns, generator=g, device="cpu") * 0.05
            return torch.nn.Parameter(value.to(BF16), requires_grad=False)

        q, kv = c.heads * c.head_dim, 2 * c.kv_heads * c.head_dim
        self.width = q
        shapes = {
            "qkv": (q + kv, c.hidden),
            "o": (c.hidden, q),
            "gate_up": (2 * c.intermediate, c.hidden),
            "down": (c.hidden, c.intermediate),
        }
        for name, (rows, columns) in shapes.items():
            setattr(self, name, torch.nn.ParameterList(weight(rows, columns) for _ in range(c.layers)))
        self.head = weight(c.vocab_size, c.hidden)

    def forward(self, x: torch.Tensor, wanted: int) -> torch.Tensor:
        for qkv, o, gate_up, down in zip(self.qkv, self.o, self.gate_up, self.down, strict=True):  # type: ignore[arg-type]
            x = x + F.linear(F.linear(x, qkv)[:, : self.width], o)
            gate, up = F.linear(x, gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(x[:wanted], self.head)


class PackedLinears:
    """The same through engine.layers.linear."""

    def __init__(self, plain: Linears) -> None:
        names = ("qkv", "o", "gate_up", "down")
        self._layers = list(zip(*([Linear(w) for w in getattr(plain, n)] for n in names), strict=True))
        self._head, self._width = Linear(plain.head), plain.width

    def __call__(self, x: torch.Tensor, wanted: int) -> torch.Tensor:
        for qkv, o, gate_up, down in self._layers:
            x = o.add_to(x, qkv(x)[:, : self._width].contiguous())
            gate, up = gate_up(x).chunk(2, -1)
            x = down.add_to(x, F.silu(gate) * up)
        return self._head(x[:wanted])


def inductor(plain: Linears, cache: str) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Compiled once per shape at its first call, which takes a minute or two."""
    import os

    if cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    import torch._inductor.config as settings

    settings.freezing = True
    settings.max_autotune = True
    settings.max_autotune_gemm_backends = "CPP,ATEN"
    compiled: Callable[[torch.Tensor, int], torch.Tensor] = torch.compile(plain.eval(), dynamic=False)
    return compiled


Timed = Callable[[], object]


def attention_variants(c: LlamaConfig, rows: int, queries: int, keys: int) -> dict[str, Timed]:
    """Attention of all layers over contiguous keys and values, as every way we know. Each layer has its own for
    decode, so that they come from memory as they do in a step; a chunk's are reused within it anyway."""
    q = torch.randn(rows * queries, c.heads, c.head_dim, device="cpu").to(BF16)
    layers = [torch.randn(2, rows, c.kv_heads, keys, c.head_dim, device="cpu").to(BF16)]
    layers += [layers[0].clone() if queries == 1 else layers[0] for _ in range(c.layers - 1)]
    out = torch.empty(rows * queries, c.heads * c.head_dim, dtype=BF16, device="cpu")
    scale = c.head_dim**-0.5
    grouped = q.view(rows, queries, c.kv_heads, -1, c.head_dim).permute(0, 2, 3, 1, 4)

    def sdpa() -> None:
        for kv in layers:
            k, v = (x.repeat_interleave(c.heads // c.kv_heads, 1) for x in kv)
            F.scaled_dot_product_attention(grouped.flatten(1, 2), k, v, is_causal=queries == keys)

    def whole() -> None:
        for kv in layers:
            decode_attention(q, kv, None, scale, out)

    def in_blocks() -> None:
        for kv in layers:
            prefill_attention(q, kv[:, 0], blocks, 0, scale, out)

    if queries == 1:
        return {"grouped": whole, "sdpa": sdpa}
    size = block_rows(c.heads, keys, BF16.itemsize)
    mask = torch.full((size, size), -torch.inf, dtype=BF16, device="cpu").triu(1)
    past = keys - queries
    blocks = tuple(Block(i, i + size, 0, past + i + size, mask) for i in range(0, queries, size))
    return {"grouped in blocks": in_blocks, "sdpa": sdpa}


class Runners:
    """Our own steps, eager and compiled."""

    def __init__(self, threads: int) -> None:
        files = ModelFiles.open("smollm2")
        self.config = LlamaConfig.from_hf(files.config)
        flags = {"model": "smollm2", "dtype": "bfloat16", "device": "cpu", "threads": threads}
        self.by_name: dict[str, TorchRunner] = {}
        for name, compiled in (("eager", False), ("compiled", True)):
            self.by_name[name] = load_runner(files, Config.load({**flags, "compile": compiled}))
            self.by_name[name].allocate(8 * 136 + 8, 0)

    def step(self, name: str, case: Case) -> Timed:
        plans = list(_prefill_plans(case) if case.prefill else _decode_plans(case))
        runner = self.by_name[name]

        def run() -> None:
            for plan in plans:
                runner.run(plan)

        return run


def _spec(position: int) -> tuple[SampleSpec, ...]:
    return (SampleSpec(SamplingParams(), position, 0),)


def _scattered(case: Case) -> list[tuple[int, ...]]:
    per = case.tokens // 16 + 1
    order = np.random.default_rng(0).permutation(np.arange(1, case.rows * per + 1)).tolist()
    return [tuple(order[i * per : (i + 1) * per]) for i in range(case.rows)]


def _prefill_plans(case: Case) -> list[StepPlan]:
    tokens = np.random.default_rng(1).integers(3, 49000, case.tokens).tolist()
    (pages,) = _scattered(case)
    plans = []
    for begin in range(0, case.tokens, CHUNK):
        end = begin + CHUNK
        samples = _spec(end) if end == case.tokens else ()
        plans.append(StepPlan(0, (Row(0, tuple(tokens[begin:end]), begin, pages, 0, samples),)))
    return plans


def _decode_plans(case: Case) -> list[StepPlan]:
    rows = (Row(i, (7,), case.tokens, p, 0, _spec(case.tokens + 1)) for i, p in enumerate(_scattered(case)))
    return [StepPlan(0, tuple(rows))]


def best_of(timed: Mapping[str, Timed], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The least seconds of each, taken in turn."""
    best = dict.fromkeys(timed, float("inf"))
    for i in range(rounds + 1):  # the first round warms up
        for name, call in timed.items():
            began = clock()
            call()
            if i:
                best[name] = min(best[name], clock() - began)
    return best


def measure(case: Case, runners: Runners, linears: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    c = runners.config
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    x = torch.randn(CHUNK if case.prefill else case.rows, c.hidden, device="cpu").to(BF16)
    wanted = 1 if case.prefill else case.rows
    calls = case.tokens // CHUNK if case.prefill else 1
    timed: dict[str, Timed] = {f"linear {n}": (lambda f=f: f(x, wanted)) for n, f in linears.items()}  # type: ignore[misc]
    for chunk in range(calls):
        keys = (chunk + 1) * CHUNK if case.prefill else -(-case.tokens // 16) * 16
        shape = (1, CHUNK, keys) if case.prefill else (case.rows, 1, keys)
        timed |= {f"attention {chunk} {n}": f for n, f in attention_variants(c, *shape).items()}
    timed |= {name: runners.step(name, case) for name in runners.by_name}
    if not case.prefill:
        timed["compiled, no context"] = runners.step("compiled", Case("", case.rows, 1, False))
    best = best_of(timed, args.rounds, clock)
    linear = min((n for n in best if n.startswith("linear")), key=best.__getitem__)
    attention = sum(min(v for n, v in best.items() if n.startswith(f"attention {i} ")) for i in range(calls))
    parts = best[linear] * calls + attention
    variants = {f"{linear} + contiguous attention": parts}
    if not case.prefill:
        variants["compiled step"] = best["compiled"]
    limit = min(variants, key=variants.__getitem__)
    result: dict[str, Any] = {
        "limit": limit,
        "limit_ms": round(variants[limit] * 1e3, 2),
        "variants_ms": {n: round(v * 1e3, 3) for n, v in best.items()},
    }
    for name in runners.by_name:
        result[name] = {
            "ms": round(best[name] * 1e3, 2),
            "tokens_per_s": round(case.produced / best[name], 1),
            "ratio": round(variants[limit] / best[name], 3),
            "ratio_to_parts": round(parts / best[name], 3),
        }
    if case.long:
        result["paged_attention_ratio"] = round(
            attention / max(1e-9, best["compiled"] - best["compiled, no context"]), 3
        )
        result["step_over_read_once"] = round(best["compiled"] / _read_once(case, runners, args), 2)
    return result


def _read_once(case: Case, runners: Runners, args: argparse.Namespace) -> float:
    """Seconds to read weights and KV once at the bandwidth of summing 256 MiB."""
    c = runners.config
    kv = case.rows * (case.tokens + 1) * 2 * c.kv_heads * c.head_dim * 2 * c.layers
    per_layer = c.hidden * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.hidden * c.intermediate
    weights = 2 * (c.layers * per_layer + c.vocab_size * c.hidden)
    memory = torch.ones(1 << 25, dtype=torch.int64, device="cpu")
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    seconds = best_of({"read": memory.sum}, args.rounds, clock)["read"]
    return (kv + weights) * seconds / (memory.numel() * 8)


def missed(name: str, result: Mapping[str, Any]) -> list[str]:
    case = next(c for c in CASES if c.name == name)
    if not case.long:
        ratio = result["compiled"]["ratio"]
        return [f"{name}: {ratio} of the limit, wanted {TARGET}"] if ratio < TARGET else []
    found = []
    if result["paged_attention_ratio"] < TARGET_PAGED:
        found.append(f"{name}: paged attention {result['paged_attention_ratio']} of contiguous, wanted {TARGET_PAGED}")
    if result["step_over_read_once"] > TARGET_READ:
        found.append(f"{name}: {result['step_over_read_once']} times one read, wanted {TARGET_READ}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=whole, default=1)
    parser.add_argument("--rounds", type=whole, default=8)
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: with one thread on a busy machine"
    )
    parser.add_argument("--case", action="append", choices=[c.name for c in CASES])
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--inductor-cache", default="")
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu adds up threads: it needs --threads 1")
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        runners = Runners(args.threads)
    plain = Linears(runners.config)
    with torch.no_grad():
        linears: dict[str, Any] = {"packed": PackedLinears(plain)}
        if not args.no_inductor:
            linears["inductor"] = inductor(plain, args.inductor_cache)
        results = {c.name: measure(c, runners, linears, args) for c in CASES if not args.case or c.name in args.case}
    failures = [m for name, result in results.items() for m in missed(name, result)]
    if args.no_inductor:
        failures.append("inductor was left out, so the limit is not one")
    print(json.dumps({"threads": args.threads, "clock": args.clock, "cases": results, "missed": failures}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
