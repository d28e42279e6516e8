"""Time the linear-state kernels on this machine's CPU, as ratios within one run.

    python -m bench.kernels [--threads 1] [--tokens 2048] [--out kernels.json]

prefill   one KDA layer and its chunk kernel alone, against transformers' torch fallback and against the same matmuls
decode    one token for a batch, against transformers' recurrence
replay    ReplaySSM against plain decode: seconds a step, and bytes moved a step counted over the cursors' schedule
          against the model S + r (L - 1) / 2 + r + S / L

Every figure is the best of `--repeat` runs: load from outside only ever adds. With one thread seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench._options import whole
from engine.kernels.conv import conv_prefill
from engine.kernels.delta_chunk import delta_chunk
from engine.kernels.delta_chunk_plan import CHUNK, ChunkPlan
from engine.kernels.delta_decode import delta_decode
from engine.kernels.gates import softplus_gate
from engine.kernels.norms import gated_rms_norm
from engine.kernels.replay import Ring, advance, flush_due, replay_decode

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int = 512
    heads: int = 4
    dim: int = 128
    width: int = 4


def best(run: Callable[[], object], repeat: int) -> float:
    """Seconds of the fastest of `repeat` runs after one to warm up."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    seconds = []
    for _ in range(repeat):
        begin = clock()
        run()
        seconds.append(clock() - begin)
    return min(seconds)


class KdaLayer:
    """A Kimi-Linear KDA layer made of the engine's kernels, with the weights of a transformers layer."""

    def __init__(self, reference: Any, shape: Shape, slots: int) -> None:
        self.shape = shape
        self.weights = {name: p.detach() for name, p in reference.named_parameters()}
        conv = self.weights["conv1d.weight"].squeeze(1)
        self.conv = torch.chunk(conv, 3)
        self.state = torch.zeros(slots, shape.heads, 1, shape.dim, shape.dim).select(2, 0)
        rows = torch.zeros(3, slots, shape.heads, 1, shape.dim, shape.width - 1)
        self.rows = [r.select(2, 0) for r in rows]

    def linear(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = F.linear(x, self.weights[f"{name}.weight"])
        return x

    def prefill(self, x: Tensor, plan: ChunkPlan) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        q, k, v = (
            torch.unflatten(
                conv_prefill(self.linear(x, name), self.conv[i], None, self.rows[i], plan), 1, (self.shape.heads, -1)
            )
            for i, name in enumerate(("q_proj", "k_proj", "v_proj"))
        )
        raw = torch.unflatten(self.linear(x, "forget_gate.f_a_proj", "forget_gate.f_b_proj"), 1, (self.shape.heads, -1))
        bias = self.weights["forget_gate.dt_bias"].view(self.shape.heads, -1)
        g = softplus_gate(raw, self.weights["forget_gate.A_log"].flatten(), bias)
        beta = torch.sigmoid(self.linear(x, "b_proj"))
        o = delta_chunk(q, k, v, g, beta, self.state, plan, scale=self.shape.dim**-0.5, l2norm=True)
        gate = torch.unflatten(self.linear(x, "g_a_proj", "g_b_proj"), 1, (self.shape.heads, -1))
        o = gated_rms_norm(o, gate, self.weights["o_norm.weight"], 1e-5, activation="sigmoid")
        return self.linear(o.flatten(1), "o_proj")

    def matmuls(self, tokens: int) -> Callable[[], None]:
        """The projections of one prefill, on fixed operands and buffers."""
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "b_proj", "forget_gate.f_a_proj", "forget_gate.f_b_proj",
                 "g_a_proj", "g_b_proj")  # fmt: skip
        pairs = [
            (self.weights[f"{n}.weight"], torch.randn(tokens, self.weights[f"{n}.weight"].shape[1])) for n in names
        ]
        outs = [torch.empty(tokens, len(w)) for w, _ in pairs]

        def run() -> None:
            for (w, x), out in zip(pairs, outs, strict=True):
                torch.mm(x, w.t(), out=out)

        return run


def chunk_matmuls(tokens: int, shape: Shape) -> Callable[[], None]:
    """The matmuls of one delta_chunk call in their own shapes, on operands and buffers that stay in cache as they do
    there: a slab of 2048 chunk rows at a time, then its walk."""
    heads, dim = shape.heads, shape.dim
    chunks = min(2048 // (CHUNK * heads), tokens // CHUNK)
    rows = chunks * heads
    levels = [
        (torch.randn(rows * CHUNK // (2 * b), 2 * b, dim), torch.randn(rows * CHUNK // (2 * b), dim, b))
        for b in (1, 2, 4, 8)
    ]
    mix, square, wide = (torch.randn(rows, n, m) for n, m in ((2 * CHUNK, CHUNK), (CHUNK, CHUNK), (CHUNK, dim)))
    w, x = torch.randn(rows, 2 * CHUNK, dim), torch.zeros(rows, 2 * CHUNK, dim)
    s, keys = torch.zeros(heads, dim, dim), torch.randn(rows, CHUNK, dim) * 1e-4
    outs = [torch.bmm(a, b) for a, b in levels]

    def run() -> None:
        for _ in range(tokens // CHUNK // chunks):
            for (a, b), out in zip(levels, outs, strict=True):
                torch.bmm(a, b, out=out)
            torch.bmm(square, square)
            torch.bmm(mix, wide, out=x)
            torch.bmm(mix, wide, out=w)
            for c in range(chunks):
                here = slice(c * heads, (c + 1) * heads)
                x[here].baddbmm_(w[here], s.transpose(1, 2), beta=0.5)
                s.baddbmm_(x[here, :CHUNK].transpose(1, 2), keys[here], beta=0.5)

    return run


def prefill(tokens: int, shape: Shape, repeat: int) -> Json:
    from transformers.models.kimi_linear import modeling_kimi_linear as hf
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    torch.manual_seed(0)
    config = KimiLinearConfig(
        hidden_size=shape.hidden, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
        linear_num_heads=shape.heads, linear_head_dim=shape.dim, linear_conv_kernel_dim=shape.width,
        num_hidden_layers=1, layer_types=["linear_attention"], mlp_layer_types=["dense"],
    )  # fmt: skip
    reference = hf.KimiLinearDeltaAttention(config, 0).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer = KdaLayer(reference, shape, 2)
    x = torch.randn(tokens, shape.hidden)
    plan = ChunkPlan.build([tokens], [0], [1])
    error = float((layer.prefill(x, plan) - reference(x[None])[0]).abs().max() / reference(x[None]).abs().max())
    q, k, v = (torch.randn(tokens, shape.heads, shape.dim) for _ in range(3))
    g, beta = -F.softplus(torch.randn(tokens, shape.heads, shape.dim)), torch.rand(tokens, shape.heads)
    ours = best(lambda: layer.prefill(x, plan), repeat)
    theirs = best(lambda: reference(x[None]), max(repeat // 3, 1))
    kernel = best(lambda: delta_chunk(q, k, v, g, beta, layer.state, plan, scale=shape.dim**-0.5, l2norm=True), repeat)
    fallback = best(
        lambda: hf.chunk_kimi_delta_attention(
            q[None], k[None], v[None], g[None], beta[None], use_qk_l2norm_in_kernel=True
        ),
        max(repeat // 3, 1),
    )
    kernel_matmuls = best(chunk_matmuls(tokens, shape), repeat)
    projections = best(layer.matmuls(tokens), repeat)
    return {
        "tokens": tokens,
        "relative_error": error,
        "layer_s": ours,
        "transformers_layer_s": theirs,
        "layer_speedup": theirs / ours,
        "layer_matmul_share": (projections + kernel_matmuls) / ours,
        "kernel_s": kernel,
        "transformers_kernel_s": fallback,
        "kernel_speedup": fallback / kernel,
        "kernel_matmul_share": kernel_matmuls / kernel,
    }


def decode_inputs(batch: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, shape.heads, shape.dim) for _ in range(3))
    return q, k, v, -torch.rand(batch, shape.heads, shape.dim), torch.rand(batch, shape.heads)


def decode(batch: int, shape: Shape, repeat: int) -> Json:
    from transformers.models.kimi_linear import modeling_kimi_linear as hf

    q, k, v, g, beta = decode_inputs(batch, shape)
    state = torch.zeros(batch + 1, shape.heads, 2, shape.dim, shape.dim).select(2, 1)
    slots = torch.arange(1, batch + 1)
    held = torch.zeros(batch, shape.heads, shape.dim, shape.dim)
    ours = best(lambda: delta_decode(q, k, v, g, beta, state, slots, scale=shape.dim**-0.5, l2norm=True), repeat * 10)
    one = [t.unsqueeze(1) for t in (q, k, v)]
    theirs = best(
        lambda: hf.recurrent_kimi_delta_attention(
            *one, g[:, None], beta[:, None], held, True, use_qk_l2norm_in_kernel=True
        ),
        repeat * 10,
    )
    return {"batch": batch, "step_s": ours, "transformers_step_s": theirs, "speedup": theirs / ours}


def replay(batch: int, length: int, shape: Shape, repeat: int, pre_decayed: bool) -> Json:
    """Steps over four whole rings, so every phase of the cursors is in the figure."""
    q, k, v, g, beta = decode_inputs(batch, shape)
    # Several layers' states, visited in turn, so that they do not sit in a cache as no real model's would.
    layers = max(1, 64 // batch)
    pools = torch.zeros(layers, batch + 1, shape.heads, shape.dim, shape.dim)
    rings = [
        Ring(k, u, g, pre_decayed) for k, u, g in torch.zeros(layers, 3, batch + 1, shape.heads, length, shape.dim)
    ]
    slots = torch.arange(1, batch + 1)
    flags: Json = {"scale": shape.dim**-0.5, "l2norm": True}
    steps = 4 * length
    moved = _Traffic(shape, length)

    def replayed() -> None:
        cursor = torch.zeros(batch, dtype=torch.long)
        for t in range(steps):
            flush = flush_due(cursor, slots, torch.full((batch,), t), length)
            for state, ring in zip(pools, rings, strict=True):
                replay_decode(q, k, v, g, beta, state, ring, slots, cursor, flush, **flags)
            moved.count(cursor, flush)
            cursor = advance(cursor, flush, slots)

    def plain() -> None:
        for _ in range(steps):
            for state in pools:
                delta_decode(q, k, v, g, beta, state, slots, **flags)

    calls = steps * layers
    seconds, plain_seconds = best(replayed, repeat) / calls, best(plain, repeat) / calls
    return {
        "batch": batch,
        "length": length,
        "pre_decayed": pre_decayed,
        "step_s": seconds,
        "plain_step_s": plain_seconds,
        "speedup": plain_seconds / seconds,
        **moved.report(),
    }


class _Traffic:
    """Bytes of state and records a request and layer moves in a step, from what each step reads and writes."""

    def __init__(self, shape: Shape, length: int) -> None:
        self.state = 4 * shape.heads * shape.dim * shape.dim
        self.record = 4 * shape.heads * 3 * shape.dim
        self.length = length
        self.bytes = self.steps = 0

    def count(self, cursor: Tensor, flush: Tensor) -> None:
        reads = self.state * len(cursor) + self.record * int(cursor.sum())
        writes = self.state * int(flush.sum()) + self.record * int((~flush).sum())
        self.bytes += reads + writes
        self.steps += len(cursor)

    def report(self) -> Json:
        counted = self.bytes / self.steps
        L = self.length
        model = self.state + self.record * (L - 1) / 2 + self.record + self.state / L
        return {"bytes": counted, "bytes_model": model, "bytes_plain": 2 * self.state, "bytes_ratio": counted / model}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=whole, default=1)
    parser.add_argument("--tokens", type=whole, default=2048)
    parser.add_argument("--repeat", type=whole, default=6)
    parser.add_argument("--only", choices=["prefill", "decode", "replay"], action="append")
    parser.add_argument("--heads", type=whole, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    wanted = options.only or ["prefill", "decode", "replay"]
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    shape = Shape(hidden=128 * options.heads, heads=options.heads)
    result: Json = {
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
    }
    if "prefill" in wanted:
        result["prefill"] = prefill(options.tokens, shape, options.repeat)
    if "decode" in wanted:
        result["decode"] = [decode(batch, shape, options.repeat) for batch in (1, 8, 32)]
    if "replay" in wanted:
        result["replay"] = [
            replay(batch, length, shape, max(options.repeat // 3, 1), pre)
            for batch in (1, 8, 32)
            for length, pre in ((8, True), (16, True), (8, False))
        ]
    text = json.dumps(result, indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
