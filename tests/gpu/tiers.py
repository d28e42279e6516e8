"""What a GPU must show of the tiers, and its figures: `python -m tests.gpu.tiers` prints JSON.

Checks raise AssertionError. Figures: bytes per second down and up between a pool in the GPU's memory and the pinned
host pool (checksums included and not), and what a decode step beside such copies takes against one alone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch

from engine.plan import Row, SampleSpec, SamplingParams, StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.runner_api import ModelSpec
from engine.tiers.cuda import CudaCarrier
from engine.tiers.pool import HostPool, Mover
from engine.weights import RandomWeights
from tests.gpu.engine import SMOLLM2, TINY

PAGES = 2049
ROUNDS = 20


def made(config: dict[str, Any], pages: int) -> tuple[TorchRunner, ModelSpec, HostPool, Mover]:
    """A runner on the GPU, its host pool, and what copies between the two."""
    runner = TorchRunner(config, RandomWeights(0), RunnerOptions(dtype="bfloat16", device="cuda"))
    runner.allocate(pages, 0)
    spec = runner.spec()
    host = HostPool(spec.components, runner.regions(), pages, 0)
    carrier = CudaCarrier(runner.regions(), host.regions)
    return runner, spec, host, Mover(tuple(spec.components), runner.regions(), host.regions, carrier)


def step(count: int) -> StepPlan:
    """A decode step of `count` requests at position 100."""
    rows = []
    for i in range(count):
        pages = tuple(range(1 + 7 * i, 8 + 7 * i))
        rows.append(Row(i + 1, (5 + i,), 100, pages, samples=(SampleSpec(SamplingParams(), 101, 0),)))
    return StepPlan(1, tuple(rows))


def check_copies() -> None:
    """Scattered pages come back where they were, and their checksums with them."""
    runner, _, _host, mover = made({"model_type": "llama", **TINY}, 33)
    runner.run(step(4))
    up = list(range(1, 29))
    pairs = [(page, 1 + (7 * index) % 32) for index, page in enumerate(up)]
    sums = mover.save(True, pairs)
    assert len(set(sums)) > 1, "the pages are all alike: nothing was written"
    before = runner.run(step(4)).rows
    carrier = mover.carrier
    assert isinstance(carrier, CudaCarrier)
    for pool in carrier.pools():
        pool.fill_(0xA5)
    torch.cuda.synchronize()
    assert mover.load(True, pairs, sums) == len(pairs)
    assert runner.run(step(4)).rows == before
    carrier.close()
    runner.close()


def figures() -> dict[str, float]:
    runner, _, _host, mover = made(SMOLLM2, PAGES)
    pairs = [(i, PAGES - i) for i in range(1, 513)]
    nbytes = len(pairs) * mover.item_bytes(True)
    runner.run(step(32))
    sums = mover.save(True, pairs)
    found: dict[str, float] = {}
    for name, move in (
        ("down", lambda: mover.save(True, pairs)),
        ("up", lambda: mover.load(True, pairs, sums)),
        ("down_without_sums", lambda: [mover.carrier.move(part, pairs, True) for part in mover._parts(True)]),
        ("up_without_sums", lambda: [mover.carrier.move(part, pairs, False) for part in mover._parts(True)]),
    ):
        found[f"{name}_bytes_per_s"] = nbytes / min(seconds(move) for _ in range(ROUNDS))
    quiet = min(seconds(lambda: runner.run(step(32))) for _ in range(ROUNDS))
    stop = threading.Event()

    def copy() -> None:
        while not stop.is_set():
            mover.save(True, pairs)

    thread = threading.Thread(target=copy)
    thread.start()
    busy = sorted(seconds(lambda: runner.run(step(32))) for _ in range(5 * ROUNDS))[ROUNDS]
    stop.set()
    thread.join()
    found["step_beside_copies_ratio"] = busy / quiet
    mover.carrier.close()
    runner.close()
    return found


def seconds(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> int:
    check_copies()
    print(json.dumps({"device": torch.cuda.get_device_name(), **figures()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
