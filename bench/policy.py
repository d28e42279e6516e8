"""How long a decision takes: prefix look-ups among a million units of 64 workers, and every policy over 128 workers.

CPU time of the thread, so that neighbours on the machine do not count.

pdserve bench policy [--json]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.sim.experiment import POLICIES
from kvtransfer.hashing import page_keys, root
from router.policy.index import Batch, CacheEvent, Hit, Kind, PrefixIndex
from router.policy.keys import PromptKeys
from router.policy.pairing import Role
from router.policy.policies import Policy
from router.policy.speeds import Speeds
from router.policy.view import RequestView, Work, WorkerView

ROOT = root(b"", "bench", "bench")
UNITS, WORKERS = 1_000_000, 64


def percentiles(run: Callable[[int], object], times: int) -> dict[str, float]:
    """p50 and p99 in CPU seconds. run(i) is timed alone."""
    taken = []
    for number in range(times):
        began = time.thread_time()
        run(number)
        taken.append(time.thread_time() - began)
    return {"p50": float(np.percentile(taken, 50)), "p99": float(np.percentile(taken, 99))}


def prompts(length: int, count: int) -> list[list[int]]:
    draw = random.Random(length)
    return [[draw.randrange(32_000) for _ in range(length)] for _ in range(count)]


def filled(known: Sequence[Sequence[int]]) -> PrefixIndex:
    """`known` prompts at 64 workers, each at a length of its own, and strangers' keys up to a million units."""
    index, draw = PrefixIndex(2 * UNITS), random.Random(1)
    sequence = [0] * WORKERS

    def store(worker: int, keys: Sequence[bytes]) -> None:
        sequence[worker] += 1
        index.apply(f"w{worker}", Batch(1, sequence[worker], [CacheEvent(Kind.STORED, keys)]))

    for tokens in known:
        keys = page_keys(ROOT, tokens)
        for worker in range(WORKERS):
            store(worker, keys[: draw.randrange(len(keys) + 1)])
    while len(index) < UNITS:
        store(draw.randrange(WORKERS), [draw.randbytes(32) for _ in range(512)])
    return index


def look_up() -> dict[str, Any]:
    sets = {8192: prompts(8192, 12), 131_072: prompts(131_072, 3)}
    began = time.perf_counter()
    index = filled([tokens for prompt in sets.values() for tokens in prompt])
    figures: dict[str, Any] = {"units": len(index), "workers": WORKERS, "fill_s": time.perf_counter() - began}
    for length, known in sets.items():
        times = 600 if length < 10_000 else 150
        figures |= _of_length(index, length, known, times)
    return figures


def _of_length(index: PrefixIndex, length: int, known: list[list[int]], times: int) -> dict[str, Any]:
    """Unit keys of the links where somebody's prefix ends are hashed before the look-up alone is timed."""
    ready = [PromptKeys(ROOT, tokens) for tokens in known]
    for keys in ready:
        index.match(keys)

    def look(number: int) -> object:
        return index.match(ready[number % len(ready)])

    def hash_and_look(number: int) -> object:
        return index.match(PromptKeys(ROOT, known[number % len(known)]))

    return {
        f"look_up_{length}": percentiles(look, times),
        f"hash_and_look_up_{length}": percentiles(hash_and_look, times // 3),
    }


def fleet(count: int) -> list[WorkerView]:
    draw = random.Random(2)
    views = []
    for bit in range(count):
        role = Role.PREFILL if bit % 2 else Role.DECODE
        view = WorkerView(f"{role.value}-{bit}", role, bit, kv_tokens=420_000, max_batch=256, bytes_per_token=131_072)
        if role is Role.PREFILL:
            for number in range(draw.randrange(6)):
                view.work[(f"{bit}-{number}", 1)] = Work(draw.random(), 8000, (0.0, number))
                view.prefill_tokens += 8000
        else:
            view.decoding = draw.randrange(30)
            view.context_tokens = view.held_tokens = 9000 * view.decoding
        views.append(view)
    return views


def decisions() -> dict[str, Any]:
    workers, draw, figures = fleet(128), random.Random(3), {}
    requests = []
    for number in range(64):
        hits = {bit: Hit(h, h, h, h) for bit in draw.sample(range(128), 40) for h in [draw.randrange(0, 8192, 16)]}
        requests.append(
            RequestView(str(number), 8192, 0.0, hits=hits, ttft_goal_s=3.0, tpot_goal_s=0.05, session=str(number))
        )
    for name, make in POLICIES.items():
        figures[name] = _of_policy(make(Speeds(), 1), requests, workers)
    return figures


def _of_policy(policy: Policy, requests: list[RequestView], workers: list[WorkerView]) -> dict[str, float]:
    return percentiles(lambda number: policy.choose(requests[number % len(requests)], workers, 0.1), 1500)


def memory() -> float:
    """Bytes a unit, by what Python allocated for 100,000 of them at one worker."""
    tracemalloc.start()
    index = PrefixIndex()
    index.apply("w", Batch(1, 1, [CacheEvent(Kind.STORED, [random.randbytes(32) for _ in range(100_000)])]))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(index)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    decided, size, index = decisions(), memory(), look_up()
    if options.json:
        print(json.dumps({"decision_128_workers": decided, "bytes_per_unit": size, "index": index}))
        return 0
    rows: dict[str, Any] = {**decided, **index}
    for name, row in rows.items():
        text = f"p50 {1e3 * row['p50']:.3f} ms  p99 {1e3 * row['p99']:.3f} ms" if isinstance(row, dict) else f"{row:g}"
        print(f"{name:<28} {text}")
    print(f"{'bytes_per_unit':<28} {size:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
