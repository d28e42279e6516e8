"""Parts of the GPU check that measure: steps, ReplaySSM, copies to the host, resuming against computing again.

Figures stand beside what the device does at best, measured in the same part (parts.limits).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import TorchRunner
from engine.runner_api import ModelSpec
from engine.tiers.carriers import PLAIN, Carrier
from engine.tiers.pool import HostPool, Mover
from kvtransfer.types import PAGE_TOKENS
from tests.gpu import parts
from tests.gpu.parts import SMOLLM2, TINY, Figures, hybrids, limits, seconds, synchronise

GREEDY = SamplingParams()
BATCHES = (1, 8, 32)

HYBRID: dict[str, Any] = {
    **hybrids()["kimi_linear"],
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "linear", "full") * 2],
    "mlp_layer_types": ["dense"] * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_num_heads": 16,
    "linear_head_dim": 128,
    "model_max_length": 8192,
}
"""Layers of Kimi-Linear's width in one place in four: states of 1 MiB a layer, dense feed-forward."""


def runner(config: dict[str, Any], device: str, dtype: str, pages: int, slots: int = 0, **options: int) -> TorchRunner:
    return parts.runner(config, device, dtype, pages, slots, source=parts.Tiled(), **options)


def shapes(device: str) -> dict[str, tuple[dict[str, Any], str]]:
    """(config, dtype) of a dense and a hybrid model."""
    if device == "cuda":
        return {"dense": (SMOLLM2, "bfloat16"), "hybrid": (HYBRID, "bfloat16")}
    return {"dense": (TINY, "float32"), "hybrid": (hybrids()["kimi_linear"], "float32")}


def decode_plan(spec: ModelSpec, batch: int, context: int, step: int = 0) -> StepPlan:
    """One token each for `batch` requests with `context` tokens before it, `step` steps after their state was whole."""
    per = (context + step) // PAGE_TOKENS + 1
    rows = []
    for i in range(batch):
        pages = tuple(range(1 + i * per, 1 + (i + 1) * per))
        slot, whole = (i + 1, context) if spec.has_state else (0, -1)
        samples = (SampleSpec(GREEDY, context + step + 1, 0),)
        rows.append(Row(i, (7 + i,), context + step, pages, slot, samples, whole=whole))
    return StepPlan(step, tuple(rows))


def prefill_plans(spec: ModelSpec, length: int) -> list[StepPlan]:
    slot = 1 if spec.has_state else 0
    pages = tuple(range(1, length // PAGE_TOKENS + 1))
    rows = [
        Row(0, (7,) * 512, start, pages, slot, (SampleSpec(GREEDY, start + 512, 0),)) for start in range(0, length, 512)
    ]
    return [StepPlan(0, (row,)) for row in rows]


def parameter_bytes(run: TorchRunner) -> int:
    """What a decode step reads of the weights at least: all of them, embeddings of other tokens included where tied."""
    seen: dict[int, int] = {}
    todo: list[Any] = [run._model]
    visited = set()
    while todo:
        one = todo.pop()
        if id(one) in visited:
            continue
        visited.add(id(one))
        if isinstance(one, torch.Tensor):
            opaque = one.layout is not torch.strided  # packed for a CPU
            seen[id(one) if opaque else one.untyped_storage().data_ptr()] = one.numel() * one.element_size()
        elif isinstance(one, (list, tuple)):
            todo += one
        elif type(one).__module__.startswith("engine."):
            todo += [getattr(one, name) for name in getattr(one, "__slots__", ()) if hasattr(one, name)]
            todo += vars(one).values() if hasattr(one, "__dict__") else []
    return sum(seen.values())


def decode(device: str) -> Figures:
    """Step times with and without graphs; best_ratio = time of reading the weights once / time of the step."""
    best = limits(device)
    found: Figures = {"limits": best}
    context = 512 if device == "cuda" else 40
    for name, (config, dtype) in shapes(device).items():
        pages = 2 + BATCHES[-1] * (context // PAGE_TOKENS + 1)
        for graphs in (True, False):
            run = runner(config, device, dtype, pages, BATCHES[-1] + 1, graph_rows=BATCHES[-1] * graphs)
            floor = parameter_bytes(run) / best["memory_bytes_per_s"]
            for batch in BATCHES:
                plan = decode_plan(run.spec(), batch, context)
                took = seconds(lambda run=run, plan=plan: run.run(plan), device)  # type: ignore[misc]
                kind = "graphs" if graphs else "eager"
                found[f"{name} {kind} {batch}"] = {"step_s": took, "best_ratio": floor / took}
            assert run._graphs is None or run._graphs.works, "the device did not capture"
            run.close()
    for name in shapes(device):
        for batch in BATCHES:
            pair = [found[f"{name} {kind} {batch}"]["step_s"] for kind in ("eager", "graphs")]
            found[f"{name} eager / graphs {batch}"] = pair[0] / pair[1]
    return found


def prefill(device: str) -> Figures:
    """Prompts in chunks of 512; best_ratio = time of the layers' matrix products at the device's peak / time."""
    best = limits(device)
    found: Figures = {"limits": best}
    for name, (config, dtype) in shapes(device).items():
        length = 2048 if device == "cuda" else 512
        run = runner(config, device, dtype, length // PAGE_TOKENS + 1, 3)
        plans = prefill_plans(run.spec(), length)
        took = seconds(lambda run=run, plans=plans: [run.run(p) for p in plans], device, 5)  # type: ignore[misc]
        floor = run.spec().flops(0, length) / best["matmul_flops"]
        found[f"{name} {length}"] = {"tokens_per_s": length / took, "best_ratio": floor / took}
        run.close()
    return found


def replay(device: str) -> Figures:
    """ReplaySSM against plain decode, with graphs: bytes of states and records a step moves (counted), and its time.
    Every step of a cycle is timed, since one in `records` folds."""
    best = limits(device)
    found: Figures = {"limits": best}
    config, dtype = shapes(device)["hybrid"]
    rounds = 5 if device == "cuda" else 1
    took: dict[tuple[int, int], float] = {}
    moved: dict[int, float] = {}
    for records in (0, 8, 16):
        run = runner(
            config, device, dtype, 2 + 4 * BATCHES[-1], BATCHES[-1] + 1, graph_rows=BATCHES[-1], replay_len=records
        )
        state = run._model.groups.state
        assert state is not None
        moved[records] = bytes_per_step(state, records)
        for batch in BATCHES:
            took[records, batch] = _cycle(run, batch, records or 8, device, rounds)
        run.close()
    for batch in BATCHES:
        plain = took[0, batch]
        for records in (8, 16):
            found[f"batch {batch}, {records} records"] = {
                "step_ratio": took[records, batch] / plain,
                "bytes_ratio": moved[records] / moved[0],
                "plain_step_s": plain,
                "plain_state_share": batch * moved[0] / best["memory_bytes_per_s"] / plain,
            }
    return found


def _cycle(run: TorchRunner, batch: int, steps: int, device: str, rounds: int) -> float:
    """Seconds of a step, over a whole cycle of records."""
    plans = [decode_plan(run.spec(), batch, 32, step) for step in range(steps)]
    for plan in plans:
        run.run(plan)
    taken = []
    for _ in range(rounds):
        synchronise(device)
        began = time.perf_counter()
        for plan in plans:
            run.run(plan)
        taken.append((time.perf_counter() - began) / steps)
    return statistics.median(taken)


def bytes_per_step(state: Any, records: int) -> float:
    """Of one request: states read and written, or the state read, on average half a ring, one record written, and the
    state written (and the ring read again) once in `records` steps."""
    whole: int = state.layers * state.heads * state.key_dim * state.value_dim * 4
    if not records:
        return 2.0 * whole
    ring: int = state.ring_bytes(records)
    return float(whole + ring / 2 + ring / records + (whole + ring) / records)


def _mover(run: TorchRunner, pages: int, slots: int, device: str) -> Mover:
    spec = run.spec()
    host = HostPool(spec.components, run.regions(), pages, slots)
    carrier: Carrier = PLAIN
    if device == "cuda":
        from engine.tiers.cuda import CudaCarrier

        carrier = CudaCarrier(run.regions(), host.regions)
    mover = Mover(tuple(spec.components), run.regions(), host.regions, carrier)
    _kept.append(host)  # its memory must outlive the mover
    return mover


_kept: list[HostPool] = []


def tiers(device: str) -> Figures:
    """Scattered pages to the host and back: right bytes, bytes per second beside page-locked copies, and what a decode
    step takes beside them."""
    best = limits(device)
    config, dtype = shapes(device)["dense"]
    count = 512 if device == "cuda" else 16
    run = runner(config, device, dtype, 4 * count + 1, graph_rows=32)
    mover = _mover(run, 4 * count + 1, 0, device)
    plan = decode_plan(run.spec(), 8, 33)
    before = run.run(plan).rows
    there = [(page, 4 * count - 3 * (page - 1)) for page in range(1, count + 1)]
    sums = mover.save(True, there)
    assert len(set(sums)) > 1, "the pages are all alike: nothing was written"
    elsewhere = [(2 * count + page, host) for page, host in there]
    assert mover.load(True, elsewhere, sums) == count, "what came back is not what went"
    assert mover.save(True, [(page, host + 1) for page, host in elsewhere if host < 4 * count]) == [
        s for (_, host), s in zip(elsewhere, sums, strict=True) if host < 4 * count
    ], "pages came back to other places, or with other bytes"
    assert run.run(plan).rows == before
    found: Figures = {"limits": best, **_copies(mover, there, sums, device, best)}
    found["step_beside_copies_ratio"] = _beside(
        lambda: run.run(plan), lambda: mover.save(True, there), device, 5 if device == "cpu" else 60
    )
    mover.carrier.close()
    run.close()
    return found


def _copies(mover: Mover, pairs: list[tuple[int, int]], sums: Any, device: str, best: Figures) -> Figures:
    nbytes = len(pairs) * mover.item_bytes(True)
    found: Figures = {}
    for name, limit, move in (
        ("down", "down_bytes_per_s", lambda: mover.save(True, pairs)),
        ("up", "up_bytes_per_s", lambda: mover.load(True, pairs, sums)),
        ("down without sums", "down_bytes_per_s", lambda: [mover.carrier.move(p, pairs, True) for p in _parts(mover)]),
        ("up without sums", "up_bytes_per_s", lambda: [mover.carrier.move(p, pairs, False) for p in _parts(mover)]),
    ):
        rate = nbytes / seconds(move, device, 5)
        found[name] = {"bytes_per_s": rate, "best_ratio": rate / best[limit]}
    return found


def _parts(mover: Mover) -> list[Any]:
    return mover._parts(True)


def _beside(step: Callable[[], object], copy: Callable[[], object], device: str, rounds: int) -> float:
    """Time of a step beside copies that never pause, over that of one alone."""
    quiet = seconds(step, device, rounds)
    stop = threading.Event()

    def copies() -> None:
        while not stop.is_set():
            copy()

    thread = threading.Thread(target=copies)
    thread.start()
    try:
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            step()
            taken.append(time.perf_counter() - began)
    finally:
        stop.set()
        thread.join()
    return statistics.median(taken) / quiet


def resume(device: str) -> Figures:
    """A conversation's pages (and state) from the host and one more token, against computing its prompt again."""
    found: Figures = {}
    length = 2048 if device == "cuda" else 512
    for name, (config, dtype) in shapes(device).items():
        pages = length // PAGE_TOKENS
        run = runner(config, device, dtype, 2 * pages + 3, 4, graph_rows=1)
        spec = run.spec()
        mover = _mover(run, pages + 2, 3 if spec.has_state else 0, device)
        plans = prefill_plans(spec, length)
        computed = seconds(lambda run=run, plans=plans: [run.run(p) for p in plans], device, 3, 1)  # type: ignore[misc]
        last = Row(
            0, (9,), length, tuple(range(1, pages + 2)), int(spec.has_state), (SampleSpec(GREEDY, length + 1, 0),)
        )
        whole = [(page, page) for page in range(1, pages + 1)]
        sums = mover.save(True, whole)
        states = mover.save(False, [(1, 1)]) if spec.has_state else []
        want = run.run(StepPlan(0, (last,))).rows[0].tokens

        def resumed(mover: Mover = mover, run: TorchRunner = run, last: Row = last) -> Any:
            assert mover.load(True, whole, sums) == len(whole)  # noqa: B023
            if states:  # noqa: B023
                assert mover.load(False, [(1, 1)], states) == 1  # noqa: B023
            return run.run(StepPlan(0, (last,))).rows[0].tokens

        assert resumed() == want, "another token after the pages came back"
        found[f"{name} {length}"] = {"resumed / computed": seconds(resumed, device, 5) / computed}
        mover.carrier.close()
        run.close()
    return found
