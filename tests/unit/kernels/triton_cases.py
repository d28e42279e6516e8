"""Every Triton kernel beside its torch namesake, on pools strided as in a worker. Run in processes of their own:

    TRITON_INTERPRET=1 python -m tests.unit.kernels.triton_cases run [case ...]      compare, in the interpreter
    python -m tests.unit.kernels.triton_cases compile [case ...]                     compile what is launched, sm_90a

One JSON line a case: {"case", "error" (text, empty when fine), "kernels" (compiled: name -> shared memory, stack)}.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import triton_far, triton_split
from .naive import Case, copy_of, draw, joined, make_case, relative, slot_pool
from .triton_sizes import at_published_sizes, every_head_size

RUN = sys.argv[1:2] == ["run"]
FLOOR = 0.0
"""Least tolerance: on a GPU, sums are taken in other orders than a CPU's."""
ERRORS: list[float] = []
CASES: dict[str, Callable[[], None]] = {}
Maker = Callable[[], None]


def case(function: Maker) -> Maker:
    CASES[function.__name__] = function
    return function


def same(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """Compare where kernels really ran; when they are only compiled there is nothing to compare."""
    if RUN:
        assert got.dtype == want.dtype, (got.dtype, want.dtype)
        tolerance = max(tolerance, FLOOR)
        error = relative(got.float(), want.float())
        ERRORS.append(error)
        assert error <= tolerance, f"error {error:.2e}"
        worse = got.float().flatten().clone()
        worse[:1] += max(4 * tolerance, 1e-3) * max(float(want.float().abs().max()), 1.0) if want.numel() else 0.0
        noticed = not want.numel() or relative(worse, want.float().flatten()) > tolerance
        assert noticed, "a wrong number would not be noticed here"


LINEAR: dict[str, dict[str, Any]] = {
    "kda": {"K": 128, "V": 128},
    "bounded": {"K": 64, "V": 64},
    "extreme": {"K": 64, "V": 64, "heads": 1},
    "gdn": {"K": 64, "V": 128, "heads": 1, "group": 2},
    "mamba2": {"K": 128, "V": 64, "heads": 1, "group": 2},
}


def linear_case(kind: str, length: int, seed: int = 0) -> Case:
    made = make_case(seed, length, kind, **LINEAR[kind])
    if made.skip is not None:
        made.skip = draw(made.v.shape[1], seed=5, std=1.0)
    return made


def state_for(made: Case, slots: int = 6) -> Tensor:
    return slot_pool(slots, made.v.shape[1], made.v.shape[2], made.k.shape[2])


def chunked(kind: str) -> None:
    from engine.kernels import delta_chunk as torch_kernel
    from engine.kernels.delta_chunk_plan import Checkpoint, ChunkPlan
    from engine.kernels.triton import delta_chunk as triton_kernel

    cases = [linear_case(kind, n, n) for n in (37, 3, 20)]
    packed = joined([*cases, linear_case(kind, 2, 9)])
    state = state_for(cases[0], 9)
    twin = copy_of(state)
    plan = ChunkPlan.build(
        [37, 3, 0, 20], [0, 1, 2, 3], [4, 1, 2, 5], [0, 7, 0, 5], [Checkpoint(0, 16, 6), Checkpoint(3, 11, 7)]
    )
    got = triton_kernel.delta_chunk(*packed, state, plan, **cases[0].flags)
    want = torch_kernel.delta_chunk(*packed, twin, plan, **cases[0].flags)
    same(got, want)
    same(state, twin)


def decoded(kind: str) -> None:
    from engine.kernels import delta_decode as torch_kernel
    from engine.kernels.triton import delta_decode as triton_kernel

    made = linear_case(kind, 3)
    state = state_for(made)
    twin = copy_of(state)
    slots = torch.tensor([3, 0, 1])
    got = triton_kernel.delta_decode(*made.tensors, state, slots, **made.flags)
    want = torch_kernel.delta_decode(*made.tensors, twin, slots, **made.flags)
    same(got, want)
    same(state, twin)


def verified(kind: str) -> None:
    from engine.kernels import delta_decode as torch_kernel
    from engine.kernels.triton import delta_decode as triton_kernel

    cases = [linear_case(kind, 3, seed) for seed in (1, 2)]
    packed = joined(cases, stack=True)
    state = state_for(cases[0])
    twin = copy_of(state)
    slots, counts, targets = torch.tensor([3, 1]), torch.tensor([2, 3]), torch.tensor([4, 1])
    got, rows = triton_kernel.delta_verify(*packed, state, slots, **cases[0].flags)
    want, twin_rows = torch_kernel.delta_verify(*packed, twin, slots, **cases[0].flags)
    same(got, want)
    same(rows.k, twin_rows.k)
    same(rows.u, twin_rows.u)
    same(rows.g, twin_rows.g)
    triton_kernel.delta_commit(rows, counts, state, slots, targets)
    torch_kernel.delta_commit(twin_rows, counts, twin, slots, targets)
    same(state, twin)


def replayed(kind: str, length: int = 3, steps: int = 5) -> None:
    from engine.kernels import replay as torch_kernel
    from engine.kernels.triton import replay as triton_kernel

    made = linear_case(kind, steps)
    state = state_for(made)
    twin = copy_of(state)
    HV, V, K = made.v.shape[1], made.v.shape[2], made.k.shape[2]
    pre = kind == "bounded"
    scalar = made.g.dim() == 2
    rings = []
    for _ in range(2):
        k, u, g = (slot_pool(6, HV, length, n) for n in (K, V, 1 if scalar else K))
        rings.append(torch_kernel.Ring(k, u, g, pre))
    slots = torch.tensor([2, 5, 0])
    cursor = torch.zeros(3, dtype=torch.long)
    for t in range(steps):
        flush = torch_kernel.flush_due(cursor, slots, torch.full((3,), t), length)
        args = made.row(t, 3)
        got = triton_kernel.replay_decode(*args, state, rings[0], slots, cursor, flush, **made.flags)
        want = torch_kernel.replay_decode(*args, twin, rings[1], slots, cursor, flush, **made.flags)
        same(got, want)
        cursor = torch_kernel.advance(cursor, flush, slots)
    same(state, twin)
    targets = torch.tensor([3, 5, 0])
    triton_kernel.replay_materialise(state, rings[0], slots, cursor, targets)
    torch_kernel.replay_materialise(twin, rings[1], slots, cursor, targets)
    same(state, twin)


for _name in LINEAR:
    for _make in (chunked, decoded, verified, replayed):
        CASES[f"{_make.__name__}_{_name}"] = partial(_make, _name)


@case
def a_ring_of_one_is_plain_decode_bit_for_bit() -> None:
    from engine.kernels.replay import Ring
    from engine.kernels.triton.delta_decode import delta_decode
    from engine.kernels.triton.replay import replay_decode

    for kind in ("kda", "bounded"):
        made = linear_case(kind, 3)
        state = state_for(made)
        twin = copy_of(state)
        HV, V, K = made.v.shape[1], made.v.shape[2], made.k.shape[2]
        ring = Ring(slot_pool(6, HV, 1, K), slot_pool(6, HV, 1, V), slot_pool(6, HV, 1, K), kind == "bounded")
        slots = torch.tensor([2])
        for t in range(3):
            args, none, flush = made.row(t), torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool)
            got = replay_decode(*args, state, ring, slots, none, flush, **made.flags)
            want = delta_decode(*args, twin, slots, **made.flags)
            same(got, want, 0.0)
        same(state, twin, 0.0)


@case
def gates() -> None:
    from engine.kernels import gates as torch_kernel
    from engine.kernels.triton import gates as triton_kernel

    raw, a_log, bias = draw(5, 2, 64, std=20.0), draw(2, std=1.0), draw(2, 64, std=1.0)
    same(triton_kernel.softplus_gate(raw, a_log, bias), torch_kernel.softplus_gate(raw, a_log, bias))
    same(triton_kernel.bounded_gate(raw, a_log, bias, -5.0), torch_kernel.bounded_gate(raw, a_log, bias, -5.0))
    half = raw.bfloat16()
    same(triton_kernel.softplus_gate(half, a_log, bias), torch_kernel.softplus_gate(half, a_log, bias))
    scalar = (raw[..., 0], a_log, bias[:, 0])
    same(triton_kernel.softplus_gate(*scalar), torch_kernel.softplus_gate(*scalar))
    got, want = (m.mamba2_gate(*scalar, 0.01, 2.0) for m in (triton_kernel, torch_kernel))
    same(got[0], want[0])
    same(got[1], want[1])


def conv_inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and one layer of a component of 3 units with 64 channels and 2 draft rows."""
    channels = 3 * 64
    weight, bias = draw(channels, 4, seed=1, std=1.0).to(dtype), draw(channels, seed=2).to(dtype)
    return draw(tokens, channels).to(dtype), weight, bias, slot_pool(6, 3, 64, 5).to(dtype)


@case
def conv_prefills() -> None:
    from engine.kernels import conv as torch_kernel
    from engine.kernels.delta_chunk_plan import Checkpoint, ChunkPlan
    from engine.kernels.triton import conv as triton_kernel

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x, weight, bias, state = conv_inputs(46, dtype)
        twin = copy_of(state)
        points = [Checkpoint(0, 16, 4), Checkpoint(3, 2, 5)]
        plan = ChunkPlan.build([35, 1, 0, 5], [0, 1, 2, 3], [2, 1, 2, 3], [0, 0, 0, 14], points)
        for has_bias in (bias, None):
            got = triton_kernel.conv_prefill(x, weight, has_bias, state, plan)
            same(got, torch_kernel.conv_prefill(x, weight, has_bias, twin, plan), tolerance)
            same(state, twin, 0.0)


@case
def conv_decodes_verifies_and_commits() -> None:
    from engine.kernels import conv as torch_kernel
    from engine.kernels.triton import conv as triton_kernel

    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x, weight, bias, state = conv_inputs(9, dtype)
        twin = copy_of(state)
        slots = torch.tensor([2, 0, 5])
        got = triton_kernel.conv_decode(x[:3], weight, bias, state, slots)
        same(got, torch_kernel.conv_decode(x[:3], weight, bias, twin, slots), tolerance)
        same(state, twin, 0.0)
        wide = x.view(3, 3, -1)
        got = triton_kernel.conv_verify(wide, weight, None, state, slots, silu=False)
        same(got, torch_kernel.conv_verify(wide, weight, None, twin, slots, silu=False), tolerance)
        same(state, twin, 0.0)
        counts = torch.tensor([3, 1, 2])
        triton_kernel.conv_commit(state, slots, counts, width=4)
        torch_kernel.conv_commit(twin, slots, counts, width=4)
        same(state, twin, 0.0)


@case
def norms_and_output_gates() -> None:
    from engine.kernels import norms as torch_kernel
    from engine.kernels.triton import norms as triton_kernel

    for width in (64, 128, 96):
        x, gate, weight = draw(4, 3, width), draw(4, 3, width, seed=1, std=3.0), draw(width, seed=2, std=1.0)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            a, z = x.to(dtype), gate.to(dtype)
            for plus_one in (False, True):
                got, want = (m.rms_norm(a, weight, 1e-5, plus_one=plus_one) for m in (triton_kernel, torch_kernel))
                same(got, want, tolerance)
            for kind in ("sigmoid", "silu"):
                got, want = (
                    m.gated_rms_norm(a, z, weight, 1e-5, activation=kind) for m in (triton_kernel, torch_kernel)
                )
                same(got, want, tolerance)
            same(triton_kernel.l2_norm(a), torch_kernel.l2_norm(a), tolerance)
    x, gate, weight = draw(5, 256), draw(5, 256, seed=1, std=3.0), draw(256, seed=2, std=1.0)
    got, want = (
        m.gated_rms_norm(x, gate, weight, 1e-5, activation="silu", gate_first=True, group=64)
        for m in (triton_kernel, torch_kernel)
    )
    same(got, want)


@case
def rotary_embeddings() -> None:
    from engine.kernels import norms as torch_kernel
    from engine.kernels.triton import norms as triton_kernel

    for width, pairs in ((64, 32), (128, 16)):
        x, angle = draw(5, 3, 2 * width)[..., :width], draw(5, pairs, seed=1, std=30.0)
        for interleaved in (False, True):
            got, want = (
                m.rotary(x, angle.cos(), angle.sin(), interleaved=interleaved) for m in (triton_kernel, torch_kernel)
            )
            same(got, want)


@case
def attention_residuals() -> None:
    from engine.kernels import attnres as torch_kernel
    from engine.kernels.triton import attnres as triton_kernel

    sources, query, weight = draw(5, 3, 192), draw(192, seed=1, std=1.0), draw(192, seed=2, std=1.0)
    for scale in (weight, None):
        got, want = (m.attn_res(sources, query, scale, 1e-5) for m in (triton_kernel, torch_kernel))
        same(got, want)


LENGTHS, STARTS, TABLES = [20, 1, 0, 5], [0, 16, 8, 30], [[7, 3], [9, 1], [2], [6, 4, 8]]


def attended(width: int, heads: int, kv_heads: int, dtype: torch.dtype, lengths: list[int], window: int = 0) -> None:
    from engine.kernels.attention import attention_reference
    from engine.kernels.mla_plan import PagedPlan
    from engine.kernels.triton.attention import paged_attention

    pages = torch.full((10, kv_heads, 2, 2, 16, width), torch.nan).to(dtype)
    cache = pages.select(2, 1)
    plan = PagedPlan.build(lengths, STARTS, TABLES)
    known = []
    for table, total in zip(plan.pages, plan.totals, strict=True):
        kv = draw(total, 2, kv_heads, width, seed=total, std=1.0).to(dtype)
        for t in range(total):
            cache[table[t // 16], :, :, t % 16] = kv[t].transpose(0, 1)
        known.append(kv)
    q = draw(plan.tokens + 2, heads, width, std=1.0).to(dtype)
    got = paged_attention(q, cache, plan, scale=width**-0.5, window=window)
    at = 0
    for n, start, kv in zip(lengths, STARTS, known, strict=True):
        if n:
            want = attention_reference(q[at : at + n], kv[:, 0], kv[:, 1], start, window)
            same(got[at : at + n].flatten(1).float(), want.float(), 1e-5 if dtype == torch.float32 else 1e-2)
        at += n
    same(got[at:], torch.zeros_like(got[at:]), 0.0)


@case
def paged_attention_of_mixed_batches() -> None:
    attended(64, 6, 2, torch.float32, LENGTHS)
    attended(128, 4, 1, torch.bfloat16, LENGTHS)


@case
def paged_attention_of_decode_and_windows() -> None:
    attended(128, 8, 2, torch.float32, [1, 1, 0, 1])
    attended(64, 2, 2, torch.bfloat16, [1, 1, 0, 1])
    attended(64, 2, 1, torch.float32, LENGTHS, window=7)


def latent_attended(latent: int, shared: int, heads: int, dtype: torch.dtype, lengths: list[int]) -> None:
    from engine.kernels import mla as torch_kernel
    from engine.kernels.mla_plan import PagedPlan
    from engine.kernels.triton import mla as triton_kernel

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    cache, twin = (torch.zeros(10, 2, 16, latent + shared, dtype=dtype).select(1, 1) for _ in range(2))
    fill = PagedPlan.build([s + n for s, n in zip(STARTS, lengths, strict=True)], [0] * 4, TABLES, padding=1)
    rows = draw(len(fill.cells), latent + shared, std=1.0).to(dtype)
    triton_kernel.mla_store(rows, cache, fill)
    torch_kernel.mla_store(rows, twin, fill)
    same(cache, twin, 0.0)
    plan = PagedPlan.build(lengths, STARTS, TABLES)
    q = draw(plan.tokens + 1, heads, latent + shared, seed=1, std=1.0).to(dtype)
    got, want = (
        m.mla_decode(q, twin, plan, latent=latent, scale=(latent + shared) ** -0.5)
        for m in (triton_kernel, torch_kernel)
    )
    same(got, want, tolerance)
    up_key, up_value = draw(heads, 32, latent, seed=2).to(dtype), draw(heads, 48, latent, seed=3).to(dtype)
    q = draw(plan.tokens + 1, heads, 32 + shared, seed=4, std=1.0).to(dtype)
    got, want = (m.mla_prefill(q, twin, plan, up_key, up_value, scale=0.2) for m in (triton_kernel, torch_kernel))
    same(got, want, tolerance)


@case
def latent_attention() -> None:
    latent_attended(64, 16, 3, torch.float32, LENGTHS)
    latent_attended(64, 16, 18, torch.float32, [1, 1, 0, 1])


@case
def latent_attention_at_full_width() -> None:
    latent_attended(512, 64, 16, torch.bfloat16, [3, 1, 0, 2])
    latent_attended(512, 64, 4, torch.bfloat16, [1, 1, 0, 1])


@case
def routing() -> None:
    from engine.kernels import moe as torch_kernel
    from engine.kernels.triton import moe as triton_kernel

    logits, bias = draw(6, 20, std=1.0), draw(20, seed=1)
    for renormalise in (True, False):
        for flags in ({}, {"groups": 4, "kept_groups": 2}):
            got, want = (
                m.route_sigmoid(logits, bias, 3, renormalise=renormalise, scaling=2.446, **flags)
                for m in (triton_kernel, torch_kernel)
            )
            same(got[0], want[0])
            same(got[1], want[1], 0.0)
        got, want = (m.route_softmax(logits, 3, renormalise=renormalise) for m in (triton_kernel, torch_kernel))
        same(got[0], want[0])
        same(got[1], want[1], 0.0)


@case
def grouped_experts() -> None:
    from engine.kernels import moe as torch_kernel
    from engine.kernels.moe import Activation
    from engine.kernels.triton import moe as triton_kernel

    E, hidden, inner = 5, 96, 40
    for activation in (Activation(), Activation("situ", 4.0, 25.0), Activation("situ"), Activation("relu2")):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            if dtype == torch.bfloat16 and activation.kind != "silu":
                continue
            x = draw(37, hidden, std=1.0).to(dtype)
            up = draw(E, inner * (2 if activation.gated else 1), hidden, seed=1).to(dtype)
            down = draw(E, hidden, inner, seed=2).to(dtype)
            logits = draw(37, E, seed=3, std=1.0)
            logits[:, 2] = -50.0  # an expert nobody chooses
            weights, experts = torch_kernel.route_softmax(logits, 2)
            got, want = (
                m.experts_mlp(x, weights, experts, up, down, activation) for m in (triton_kernel, torch_kernel)
            )
            same(got, want, tolerance)


CASES |= triton_split.cases(same)
RUN_ONLY = {f"far_{name}": partial(triton_far.check, name) for name in triton_far.cases()}
COMPILE_ONLY = {"at_published_sizes": at_published_sizes}
SLOW = {
    "every_head_size": partial(every_head_size, torch.bfloat16),
    "every_head_size_fp32": partial(every_head_size, torch.float32),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    compiled: dict[str, Any] = {}
    if not RUN:
        from .aot import compile_launches

        compiled = compile_launches()
    known = CASES | RUN_ONLY if RUN else CASES | COMPILE_ONLY | SLOW
    for name in sys.argv[2:] or known.keys() - SLOW.keys():
        error = ""
        try:
            known[name]()
        except Exception:
            error = traceback.format_exc()[-1500:]
        print(json.dumps({"case": name, "error": error, "kernels": dict(compiled)}), flush=True)
        compiled.clear()


if __name__ == "__main__":
    main()
