"""Tier figures: resuming a prefix from host memory against computing it, copies beside a decode, disk and plain I/O.

`python -m bench.tiers` prints JSON and fails if a target is missed. Every ratio is of two things measured in one run,
in turn, round by round, each by its best round.

resume     SmolLM2, 2K tokens of context: time to the first token with the prefix on the host against the same prompt
           computed. The host pool is separate memory and device pages are poisoned when they are given up, so the
           tokens are equal only if the bytes came back.
beside     a one-thread decode alone, and while pages of its size are copied down and up all the time: its slow-down and
           the bytes per second the copies sustain, checksums included.
disk       pages written and read through NIXL's POSIX backend against pwritev and preadv of the same sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench._options import whole
from engine.api import EngineRequest, Event, Failed, Mode, Tokens
from engine.loop import Engine, EngineSpec
from engine.plan import SamplingParams
from engine.runner import load_runner
from engine.tiers.carriers import carrier_for
from engine.tiers.pool import HostPool, Mover
from kvtransfer.files import BlockFile, NixlFile, PlainFile
from kvtransfer.hashing import root
from kvtransfer.types import LegKey, Region
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.modelfiles import ModelFiles

CONTEXT = 2048
RESUME_TARGET = 0.03
DECODE_TARGET = 1.15
COPY_TARGET = 2e9
DISK_TARGET = 0.6
PAGES_AT_ONCE = 16


@dataclass(eq=False)
class Run:
    """One request: when its first and last tokens came, on the engine's thread."""

    begun: float = 0.0
    first: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def sink(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens):
                self.first = self.first or now
                self.times.append(now)
                self.tokens += event.tokens
                self.cached = event.cached_tokens
                if event.last:
                    self.over.set()


class Bench:
    """An engine of SmolLM2 whose device pool holds one long context and little more."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.config = Config(
            model="smollm2",
            kv_pool_tokens=CONTEXT + 1024,
            host_pool_tokens=6 * CONTEXT,
            host_poison=True,
            max_batch=4,
            threads=threads,
        )
        files = ModelFiles.open("smollm2")
        self.runner = load_runner(files, self.config)
        spec = EngineSpec.of(self.runner.spec(), self.config)
        self.engine = Engine(self.runner, spec, self.config, SystemClock())
        self.engine.start_loop()
        self._numbers = iter(range(10**6))

    def run(self, tokens: Sequence[int], output: int, salt: bytes = b"") -> Run:
        made = Run()
        request = EngineRequest(
            key=LegKey(f"b{next(self._numbers)}", "decode", 1),
            mode=Mode.LOCAL,
            tokens=tuple(tokens),
            prompt_len=len(tokens),
            sampling=SamplingParams(max_tokens=output),
            root=root(salt, "smollm2", "bench"),
            deadline=time.monotonic() + 600,
        )
        made.begun = time.perf_counter()
        self.engine.submit(request, made.sink)
        made.over.wait()
        return made

    def settle(self) -> None:
        """Until nothing is copied any more."""
        assert self.engine.tiers is not None
        while not self.engine.tiers.idle:
            time.sleep(0.01)

    def close(self) -> None:
        self.engine.stop()
        self.runner.close()


def tokens_of(count: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(100, 40000, count)]


def resume(bench: Bench, rounds: int) -> dict[str, Any]:
    """Time to the first token of a prompt of CONTEXT tokens: computed, and with all but its last page on the host."""
    prompt, other = tokens_of(CONTEXT + 1, 1), tokens_of(CONTEXT + 512, 2)
    computed, resumed, equal = [], [], True
    for number in range(rounds):
        salt = b"%d" % number  # a name of its own, so that nothing is known
        first = bench.run(prompt, 8, salt)
        assert first.cached == 0
        bench.run(other, 2, salt)  # takes the device pool
        bench.settle()
        again = bench.run(prompt, 8, salt)
        equal = equal and again.tokens == first.tokens and again.cached == CONTEXT
        computed.append(first.first - first.begun)
        resumed.append(again.first - again.begun)
    tiers = bench.engine.tiers
    assert tiers is not None
    up = tiers.counts.moves["host", "up"]
    return {
        "computed_s": min(computed),
        "resumed_s": min(resumed),
        "ratio": min(resumed) / min(computed),
        "load_bytes_per_s": up.nbytes / up.seconds,
        "load_s": up.seconds / rounds,
        "tokens_equal": equal,
    }


class Copies:
    """A thread that copies pages of the engine's layout down and up, between pools of its own, with a duty cycle."""

    def __init__(self, bench: Bench, rate: float) -> None:
        spec = bench.runner.spec()
        count = 128
        device = HostPool(spec.components, bench.runner.regions(), count, 0)
        regions = tuple(
            Region(r.region_id, r.component.removesuffix("@host"), r.base, r.length, r.stride, r.first_unit, r.units)
            for r in device.regions
        )
        host = HostPool(spec.components, regions, count, 0)
        self._keep = (device, host)
        carrier = carrier_for(bench.config, regions, host.regions)
        self._mover = Mover(tuple(spec.components), regions, host.regions, carrier)
        self._page = self._mover.item_bytes(True)
        self._rate = rate
        self._stop = threading.Event()
        self.bytes = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._main)

    def __enter__(self) -> Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _main(self) -> None:
        pages = np.arange(1, 128)
        begun = time.perf_counter()
        for number in range(10**9):
            if self._stop.is_set():
                break
            chosen = np.roll(pages, -number * PAGES_AT_ONCE)[:PAGES_AT_ONCE].tolist()
            pairs = list(zip(chosen, chosen[::-1], strict=True))
            sums = self._mover.save(True, pairs)
            good = self._mover.load(True, pairs, sums)
            assert good == len(pairs)
            self.bytes += 2 * len(pairs) * self._page
            behind = begun + self.bytes / self._rate - time.perf_counter()
            if behind > 0:
                time.sleep(behind)
        self.seconds = time.perf_counter() - begun


def beside(bench: Bench, rounds: int) -> dict[str, Any]:
    """Median time of a decode step alone and beside copies at COPY_TARGET."""
    quiet, busy, rates = [], [], []
    prompt = tokens_of(64, 3)
    for number in range(rounds):
        quiet.append(step_s(bench.run(prompt, 40, b"q%d" % number)))
        with Copies(bench, 1.05 * COPY_TARGET) as copies:
            busy.append(step_s(bench.run(prompt, 40, b"b%d" % number)))
        rates.append(copies.bytes / copies.seconds)
    return {
        "quiet_step_s": min(quiet),
        "busy_step_s": min(busy),
        "ratio": min(busy) / min(quiet),
        "copy_bytes_per_s": max(rates),
    }


def step_s(run: Run) -> float:
    return float(np.median(np.diff(run.times[1:])))


def disk(bench: Bench, folder: Path, rounds: int) -> dict[str, Any]:
    """Bytes per second of both files, in turn. The file is in the page cache: what is compared is the path to it."""
    spec, count = bench.runner.spec(), 65
    pool = HostPool(spec.components, bench.runner.regions(), count, 0)
    (region,) = pool.regions
    ranges = [(region.base + i * region.stride, region.stride, i * region.stride) for i in range(1, count)]
    kinds: dict[str, Callable[[Path, int, Sequence[Region]], BlockFile]] = {"plain": PlainFile, "nixl": NixlFile}
    files = {name: kind(folder / name, count * region.stride, pool.regions) for name, kind in kinds.items()}
    best = {f"{name}_{what}": float("inf") for name in files for what in ("write", "read")}
    for _ in range(rounds):
        for name, file in files.items():
            for what, move in (("write", file.write), ("read", file.read)):
                begun = time.perf_counter()
                move(ranges)
                best[f"{name}_{what}"] = min(best[f"{name}_{what}"], time.perf_counter() - begun)
    for file in files.values():
        file.close()
    total = sum(size for _, size, _ in ranges)
    figures: dict[str, Any] = {f"{key}_bytes_per_s": total / seconds for key, seconds in best.items()}
    figures["write_ratio"] = best["plain_write"] / best["nixl_write"]
    figures["read_ratio"] = best["plain_read"] / best["nixl_read"]
    return figures


def missed(figures: dict[str, dict[str, Any]]) -> list[str]:
    checks = {
        "resume.ratio": figures["resume"]["ratio"] <= RESUME_TARGET,
        "resume.tokens_equal": figures["resume"]["tokens_equal"],
        "beside.ratio": figures["beside"]["ratio"] <= DECODE_TARGET,
        "beside.copy_bytes_per_s": figures["beside"]["copy_bytes_per_s"] >= COPY_TARGET,
        "disk.write_ratio": figures["disk"]["write_ratio"] >= DISK_TARGET,
        "disk.read_ratio": figures["disk"]["read_ratio"] >= DISK_TARGET,
    }
    return [name for name, met in checks.items() if not met]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--threads", type=whole, default=1)
    arguments = parser.parse_args()
    bench = Bench(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        figures: dict[str, Any] = {
            "resume": resume(bench, arguments.rounds),
            "beside": beside(bench, 2 * arguments.rounds),
            "disk": disk(bench, Path(folder), 4 * arguments.rounds),
        }
    bench.close()
    figures["missed"] = missed(figures)
    print(json.dumps(figures, indent=2))
    return 1 if figures["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
