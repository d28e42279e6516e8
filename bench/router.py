"""The router alone: requests per second of its CPU, and the latency it adds, between workers that take no time.

python -m bench.router [--json] [--model smollm2] [--seconds 4] [--no-pin] [--parts]

CPU seconds are worth less on a machine whose caches and cores others use: `ref_us` is what tokenizing the prompt costs
in CPU time just before and after, a tenth or so of a short request. Compare figures at equal ref_us only.

Rendering, tokenizing, routing, reserving, streaming and formatting included. Router, workers and load generator are
three processes; only the router's CPU time is counted (all its threads, from /proc). Short replies have 4 tokens,
streams 64, one per engine step, or four, as with speculation or a router that shares chunks under load.
The router has a core for itself and the other two the rest, where there are two or more (--no-pin: as it comes).

Added latency, at 16 connections: the router is at LIGHT of what it did in a closed loop just before, each connection
thinks in between, and a request takes from its last byte to its answer's last. Part of that is the workers' and
gRPC's: reserve, prefill and ticket, tokens are three round trips even with workers that take no time. What they take is
measured beside it, in turns of a second at the same rate and the same times: a bare gRPC client (bench._direct_load) on
the router's core goes through the same messages with the same workers. Added is the difference of the percentiles of
all turns (not a percentile of differences: no request goes both ways); the range behind it holds four in five of what
other choices of the same turns would have given. It takes LONGER times as long as the other cases, or the p99 would be
the 23rd request from the top, and one stall of the machine. Most of what is left of it is queueing: the router works
half of the time at that rate, since nothing is collected then, and the slowest in fifty find three or four others.

The closed loop's own latency is 16 / throughput, whatever the router does, and is shown too. `gen` is the generator's
share of a core: near 1 it is what is measured. `wait us` is how long the router's threads waited for its core, per
request: for each other, some 200 us; beyond that for others, and then latencies are the machine's. As root, `chrt -r 5`
before the command has its processes go first (and everything else stand still, where the load is a closed loop).
--parts: what a short request's microseconds go to, each part measured by itself, and what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bench._http_load import QUESTION
from bench._options import positive
from bench._router_parts import parts
from runtime.config import Config
from runtime.modelfiles import ModelFiles

CASES = (("short", 1, 64), ("short", 1, 256), ("stream", 1, 64), ("stream", 1, 256), ("stream", 4, 256))
LATENCY_CASE = ("short", 1, 16)
LIGHT = 0.3
LONGER = 3
TURN_S = 1.0
START_S = 90.0


@dataclass(frozen=True)
class Seconds:
    """Of all threads of a process: on a processor, and ready to run without one."""

    ran: float = 0.0
    waited: float = 0.0

    @classmethod
    def of(cls, pid: int) -> Seconds:
        tasks = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return cls(*(sum(int(task[place]) for task in tasks) / 1e9 for place in (0, 1)))

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.ran + other.ran, self.waited + other.waited)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.ran - other.ran, self.waited - other.waited)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def cores() -> tuple[set[int], set[int]]:
    """(the router's, everybody else's)."""
    mine = sorted(os.sched_getaffinity(0))
    return ({mine[-1]}, set(mine[:-1])) if len(mine) > 1 else (set(mine), set(mine))


@contextmanager
def router(model: str) -> Iterator[tuple[int, str, str]]:
    """(pid, http, grpc) of a router process of its own. Its log is thrown away, but written."""
    http, grpc = free_port(), free_port()
    config = Config(model=model, http_listen=http, grpc_listen=grpc, max_inflight=4096, max_queue=4096)
    environment = dict(os.environ) | config.child_environment() | {"RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pdserve", "router"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid, http, grpc
    finally:
        process.terminate()
        process.wait(15)


@contextmanager
def workers(grpc: str, model: str, per_step: int) -> Iterator[dict[str, str]]:
    """Their addresses, by role."""
    command = [sys.executable, "-m", "bench._null_workers", grpc, model, str(per_step)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline().split() for _ in range(2)]
        yield {line[0]: line[1] for line in said}
    finally:
        process.kill()
        process.communicate()


def load(
    http: str, model: str, mode: str, concurrency: int, seconds: float, rate: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """rate, seed: see bench._http_load."""
    return _json_of("bench._http_load", http, model, mode, *map(str, (concurrency, seconds, rate, seed)))


def _json_of(module: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True, timeout=START_S
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _until_ready(http: str, model: str) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            if load(http, model, "short", 1, 0.05)["failed"] == 0:
                return
        except subprocess.CalledProcessError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the router did not become ready")


class Reference:
    """CPU microseconds of tokenizing the prompt once, here and now."""

    def __init__(self, model: str) -> None:
        self._files = ModelFiles.open(model)
        self.us()  # the tokenizer's own cache is warm from here on

    def us(self) -> float:
        started, count = time.process_time(), 300
        for _ in range(count):
            self._files.encode(QUESTION, allow_special=True)
        return (time.process_time() - started) / count * 1e6


def measure(
    model: str, mode: str, per_step: int, concurrency: int, seconds: float, *, pin: bool = False, light: float = 0.0
) -> dict[str, Any]:
    """light: the load is this share of what a closed loop does, and the workers are asked directly in between."""
    with ExitStack() as stack:
        pid, http, grpc = stack.enter_context(_pinned(model) if pin else router(model))
        addresses = stack.enter_context(workers(grpc, model, per_step))
        _until_ready(http, model)
        full = load(http, model, mode, concurrency, 1.0)  # caches and connections are warm
        rate = light * full["requests"] / full["seconds"]
        reference = Reference(model)
        around = [reference.us()]
        if light:
            seen, used = _in_turns(pid, http, model, mode, concurrency, seconds, rate, addresses)
        else:
            before = Seconds.of(pid)
            seen = load(http, model, mode, concurrency, seconds)
            used = Seconds.of(pid) - before
        around.append(reference.us())
    answered = seen["requests"] + seen["warm"]
    return {
        "case": _name(mode, per_step, light),
        "concurrency": concurrency,
        "requests_per_cpu_s": answered / used.ran,
        "cpu_us": 1e6 * used.ran / answered,
        "wait_us": 1e6 * used.waited / answered,
        "ref_us": sum(around) / len(around),
        "cpu_share": used.ran / seen["seconds"],
        **seen,
    }


def _in_turns(
    pid: int,
    http: str,
    model: str,
    mode: str,
    concurrency: int,
    seconds: float,
    rate: float,
    addresses: dict[str, str],
) -> tuple[dict[str, Any], Seconds]:
    """(what _http_load would say of LONGER * seconds, with what the workers alone took; what the router used)."""
    turns: list[dict[str, Any]] = []
    pairs: list[Pair] = []
    used = Seconds()
    for seed in range(max(1, round(LONGER * seconds / TURN_S))):
        before = Seconds.of(pid)
        turns.append(load(http, model, mode, concurrency, TURN_S, rate, seed))
        used += Seconds.of(pid) - before
        direct = (addresses["prefill"], addresses["decode"], model, *map(str, (concurrency, TURN_S, rate, seed)))
        with _on_its_core(pid):
            pairs.append((turns[-1].pop("latencies_ms"), _json_of("bench._direct_load", *direct)["latencies_ms"]))
    whole: dict[str, Any] = {
        name: sum(turn[name] for turn in turns) for name in ("requests", "warm", "failed", "chunks", "seconds")
    }
    whole["own_share"] = sum(turn["own_share"] for turn in turns) / len(turns)
    others = [random.Random(number).choices(pairs, k=len(pairs)) for number in range(OTHERS)]
    for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        whole[name], whole[f"direct_{name}"] = (_at(share, some) for some in zip(*pairs, strict=True))
        whole[f"added_{name}"] = _added(share, pairs)
        found = sorted(_added(share, other) for other in others)
        whole[f"added_{name}_range"] = [found[OTHERS // 10], found[-OTHERS // 10]]
    return whole, used


Pair = tuple[list[float], list[float]]
"""Latencies of one turn: through the router, and of the workers asked directly."""

OTHERS = 200


def _at(share: float, turns: Iterable[list[float]]) -> float:
    """The percentile of all turns together."""
    every = sorted(chain.from_iterable(turns))
    return every[int(share * len(every))]


def _added(share: float, pairs: Iterable[Pair]) -> float:
    through, direct = zip(*pairs, strict=True)
    return _at(share, through) - _at(share, direct)


@contextmanager
def _on_its_core(pid: int) -> Iterator[None]:
    """What is started meanwhile runs where the router does."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _name(mode: str, per_step: int, light: float) -> str:
    name = mode if per_step == 1 else f"{mode} ({per_step} tokens a step)"
    return f"{name}, {light:.0%} load" if light else name


@contextmanager
def _pinned(model: str) -> Iterator[tuple[int, str, str]]:
    """A router on a core of its own; whatever is started meanwhile is on the others."""
    before, (its, others) = os.sched_getaffinity(0), cores()
    os.sched_setaffinity(0, its)  # a child inherits it, with all its threads
    with router(model) as made:
        os.sched_setaffinity(0, others)
        try:
            yield made
        finally:
            os.sched_setaffinity(0, before)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=positive, default=4.0)
    parser.add_argument("--no-pin", dest="pin", action="store_false")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args(arguments)
    rows = [measure(options.model, *case, seconds=options.seconds, pin=options.pin) for case in (*CASES, LATENCY_CASE)]
    rows.append(measure(options.model, *LATENCY_CASE, seconds=options.seconds, pin=options.pin, light=LIGHT))
    costs = parts(options.model) if options.parts else {}
    if options.json:
        print(json.dumps({"rows": rows, "parts_us": costs}))
        return int(any(row["failed"] for row in rows))
    print(
        f"{'case':<26}{'conc.':>6}{'req/CPU-s':>11}{'req/s':>8}{'p50 ms':>9}{'p99 ms':>9}{'failed':>8}{'ref us':>8}"
        f"{'wait us':>9}{'gen':>6}"
    )
    for row in rows:
        print(
            f"{row['case']:<26}{row['concurrency']:>6}{row['requests_per_cpu_s']:>11.0f}"
            f"{row['requests'] / row['seconds']:>8.0f}{row['p50_ms']:>9.2f}{row['p99_ms']:>9.2f}"
            f"{row['failed']:>8}{row['ref_us']:>8.0f}{row['wait_us']:>9.0f}{row['own_share']:>6.2f}"
        )
    print(
        "added by the router at 16 connections and {:.0%} load: "
        "p50 {added_p50_ms:.2f} ms ({added_p50_ms_range[0]:.2f} to {added_p50_ms_range[1]:.2f}), "
        "p99 {added_p99_ms:.2f} ms ({added_p99_ms_range[0]:.2f} to {added_p99_ms_range[1]:.2f}); "
        "workers asked directly: {direct_p50_ms:.2f} and {direct_p99_ms:.2f}".format(LIGHT, **rows[-1])
    )
    if costs:
        whole = next(row["cpu_us"] for row in rows if (row["case"], row["concurrency"]) == ("short", 256))
        for name, us in {**costs, "the rest": whole - sum(costs.values())}.items():
            print(f"{name:<60}{us:>7.1f} us {us / whole:>6.1%}")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
