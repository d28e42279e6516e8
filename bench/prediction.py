"""Predicted against observed seconds to the first token, on real workers; and policies against each other there.

    python -m bench.prediction [--policies predicted,least_load] [--requests 96] [--rate 1.2] [--seconds 200] [--json]

For every policy a fleet of its own: 2 prefill and 2 decode workers that run SmolLM2 on this machine's CPU, one thread
each, and a router (all routers run in this process). Two fleets at once would compete for the same cores, so they take
turns: every policy gets the same block of requests, one after the other, in an order that is reversed from block to
block, and a block ends when its last answer does. Prompts of 16 to 1,500 tokens (log-uniform), two fifths of them
behind one of four shared prefixes; answers of 4 to 24 tokens; arrivals are a Poisson process. The first quarter is
warm-up: sent, and not counted. After --seconds no further block begins.

error    |predicted - observed| / observed, observed from the moment the request is sent to its workers to its first
         token at the router; the time in the router's own queue is in neither
ttft     as the client sees it, from the moment the request should have been sent
sooner   seconds by which the first policy is sooner than another, of the same requests, with 95 % intervals (bootstrap
         over requests)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from bench._options import positive, whole
from bench._stages import Row, Watch, by_length, table
from bench.handoff import MODEL, TEXT
from bench.router import free_port
from router.app import Router
from runtime import logs
from runtime.config import Config
from runtime.modelfiles import ModelFiles

SHORTEST, LONGEST = 16, 1500
PREFIXES = (192, 384, 640, 960)
SHARED = 0.4
START_S = 180.0
ANY_PORT = "127.0.0.1:0"
WARM = 1 / 4
BLOCK = 12
DRAWS = 2000


@dataclass(frozen=True, slots=True)
class Ask:
    """at: seconds after the start."""

    at: float
    tokens: list[int]
    output: int


def asks(seed: int, count: int, rate: float) -> list[Ask]:
    """The load: a function of its arguments."""
    rng = np.random.default_rng(seed)
    tokenizer = ModelFiles.open(MODEL).tokenizer()
    words = tokenizer.encode(TEXT * (LONGEST // 30)).ids

    def text(length: int) -> list[int]:
        """Shares nothing with another one beyond chance."""
        ids: list[int] = tokenizer.encode(" ".join(str(n) for n in rng.integers(0, 10**6, 8))).ids
        return (ids + words)[:length]

    prefixes = [text(length) for length in PREFIXES]
    made, at = [], 0.0
    for _ in range(count):
        at += float(rng.exponential(1 / rate))
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        prefix = prefixes[int(rng.integers(len(prefixes)))] if rng.random() < SHARED else []
        prefix = prefix[: LONGEST - length]
        made.append(Ask(at, prefix + text(length), int(rng.integers(4, 25))))
    return made


class Workers:
    """Two of each role, each a process."""

    def __init__(self, config: Config, registry: str) -> None:
        self._config = config.model_copy(update={"registry": registry})
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Workers:
        for role in ("prefill", "prefill", "decode", "decode"):
            config = self._config.model_copy(update={"role": role})
            environment = dict(os.environ) | config.child_environment() | {"NIXL_LOG_LEVEL": "ERROR"}
            null = asyncio.subprocess.DEVNULL
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "pdserve", "worker", env=environment, stdout=null, stderr=null
                )
            )
        return self

    async def __aexit__(self, *exc: object) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in self._processes))

    def ended(self) -> list[int]:
        """Exit statuses of those that should run. Nobody starts them again here."""
        return [process.returncode for process in self._processes if process.returncode is not None]


@dataclass(slots=True)
class Seen:
    """What became of one request."""

    ttft_s: float = 0.0
    prompt: int = 0
    cached: int = 0
    local: bool = False
    request: str = ""
    second_s: float = 0.0
    step_s: float = 0.0
    failure: str = ""


@dataclass(slots=True)
class Fleet:
    """One policy's. seen: by request, in the order of the load."""

    policy: str
    router: Router
    workers: Workers
    watch: Watch
    seen: list[Seen] = field(default_factory=list)


@asynccontextmanager
async def fleet(policy: str) -> AsyncIterator[Fleet]:
    """Ready to serve."""
    shared = {"model": MODEL, "dtype": "bfloat16", "device": "cpu", "threads": 1, "log_level": "error"}
    grpc = free_port()
    router = await Router.start(Config.load({**shared, "policy": policy, "grpc_listen": grpc, "http_listen": ANY_PORT}))
    try:
        async with Workers(Config.load(shared), grpc) as workers, asyncio.timeout(None) as limit:
            limit.reschedule(asyncio.get_running_loop().time() + START_S)
            while sum(worker.usable for worker in router.fleet.workers()) < 4:
                assert not workers.ended(), "a worker has ended before it was ready"
                await asyncio.sleep(0.1)
            limit.reschedule(None)
            yield Fleet(policy, router, workers, Watch(router.planner))
    finally:
        await router.close()


async def play(one: Fleet, block: Sequence[Ask]) -> None:
    """The block's requests at their times, counted from its first one; returns after the last answer."""
    seen = [Seen() for _ in block]
    one.seen += seen
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(f"http://{one.router.http}", timeout=timeout) as client:
        began = time.perf_counter() + 0.2 - block[0].at
        await asyncio.gather(*(_ask(client, ask, began, seen) for ask, seen in zip(block, seen, strict=True)))


async def _ask(client: aiohttp.ClientSession, ask: Ask, began: float, seen: Seen) -> None:
    body = {
        "model": MODEL,
        "prompt": ask.tokens,
        "max_tokens": ask.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_ledger": True,
    }
    await asyncio.sleep(began + ask.at - time.perf_counter())
    first, second, number = 0.0, 0.0, ""
    usage: dict[str, Any] = {}
    ledger: dict[str, Any] = {}
    async with client.post("/v1/completions", json=body) as response:
        seen.failure = f"status {response.status}" if response.status != 200 else "no token"
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            content = json.loads(line[6:])
            if "error" in content:
                seen.failure = content["error"].get("code") or "error"
            tokens = sum(len(choice.get("token_ids") or ()) for choice in content.get("choices", ()))
            if tokens and not first:
                first = time.perf_counter()
                second = first if tokens > 1 else 0.0  # in one chunk: nothing is known of it
            elif tokens and not second:
                second = time.perf_counter()
            number = content.get("id") or number
            usage = content.get("usage") or usage
            ledger = content.get("ledger") or ledger
    if first and usage:
        seen.ttft_s = first - began - ask.at
        seen.prompt = usage["prompt_tokens"]
        seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        seen.local = ledger.get("prefill_worker") == ledger.get("decode_worker")
        seen.request = number.partition("-")[2]
        seen.second_s = second - first if second else 0.0
        seen.step_s = ledger.get("decode_s", 0.0) / max(ask.output - 1, 1)


def rows(one: Fleet, warm: int) -> list[Row]:
    """What was foretold of those that count, with what the client has heard of the rest of them."""
    found = []
    for seen in one.seen[warm:]:
        row = one.watch.rows.get(seen.request)
        if row is not None and seen.ttft_s:
            row.second_s, row.step_s = seen.second_s, seen.step_s
            found.append(row)
    return found


def figures(one: Fleet, warm: int) -> dict[str, Any]:
    counted = one.seen[warm:]
    served = [seen for seen in counted if seen.ttft_s]
    ttft = [seen.ttft_s for seen in served]
    foretold = rows(one, warm) if one.policy == "predicted" else []
    errors = [abs(predicted - observed) / observed for row in foretold for predicted, observed in _first(row)]
    return {
        "requests": len(served),
        "failed": len(counted) - len(served),
        "workers_ended": one.workers.ended(),
        "failures": dict(Counter(seen.failure for seen in counted if not seen.ttft_s)),
        "ttft_mean": round(statistics.fmean(ttft), 4),
        "ttft_p50": round(statistics.median(ttft), 4),
        "ttft_p90": round(float(np.percentile(ttft, 90)), 4),
        "hit_rate": round(sum(seen.cached for seen in served) / sum(seen.prompt for seen in served), 3),
        "on_decode_workers": sum(seen.local for seen in served),
        "error_median": round(statistics.median(errors), 3) if errors else None,
        "error_p90": round(float(np.percentile(errors, 90)), 3) if errors else None,
        "stages": table(foretold),
        "by_uncached_tokens": by_length(foretold),
    }


def _first(row: Row) -> list[tuple[float, float]]:
    return [row.pairs()["ttft"]] if "ttft" in row.pairs() else []


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # no worker is left behind
    names = [name.strip() for name in options.policies.split(",")]
    load, warm = asks(options.seed, options.requests, options.rate), int(WARM * options.requests)
    blocks = [load[start : start + BLOCK] for start in range(0, len(load), BLOCK)]
    busy = [os.getloadavg()[0]]
    async with AsyncExitStack() as stack:
        fleets = await asyncio.gather(*(stack.enter_async_context(fleet(name)) for name in names))
        until = time.perf_counter() + options.seconds
        for number, block in enumerate(blocks):
            if time.perf_counter() > until and number * BLOCK > warm:
                break
            for one in fleets if number % 2 else reversed(fleets):
                await play(one, block)
        busy.append(os.getloadavg()[0])
        results = {one.policy: figures(one, warm) for one in fleets}
    first, *others = fleets
    return {
        "policies": results,
        "first_against": {other.policy: compared(first.seen[warm:], other.seen[warm:]) for other in others},
        "config": {**vars(options), "cores": os.cpu_count(), "load_average": busy},
    }


def compared(ours: Sequence[Seen], theirs: Sequence[Seen]) -> dict[str, Any]:
    """Of the same requests: seconds the first policy's token came sooner, mean, median and 90th percentile, each with
    its 95 % interval, and the share of requests in which it did. Requests that one of them did not serve are left
    out."""
    both = np.array([(a.ttft_s, b.ttft_s) for a, b in zip(ours, theirs, strict=True) if a.ttft_s and b.ttft_s])
    drawn = both[np.random.default_rng(1).integers(0, len(both), (DRAWS, len(both)))]
    found: dict[str, Any] = {"requests": len(both), "share": round(float((both[:, 0] < both[:, 1]).mean()), 3)}
    for name, of in (("mean", np.mean), ("p50", np.median), ("p90", lambda a, axis: np.percentile(a, 90, axis=axis))):
        per_draw = of(drawn, axis=1)
        low, high = np.percentile(per_draw[:, 1] - per_draw[:, 0], (2.5, 97.5))
        ours_, theirs_ = of(both, axis=0)
        found[f"sooner_{name}"] = [round(float(value), 4) for value in (theirs_ - ours_, low, high)]
    return found


def show(result: dict[str, Any]) -> None:
    """For people."""
    print(json.dumps(result["config"]))
    for name, row in result["policies"].items():
        tables = {key: row.pop(key) for key in ("stages", "by_uncached_tokens")}
        print(f"{name:<18}" + "  ".join(f"{key} {value}" for key, value in row.items()))
        for entries in tables.values():
            for stage, one in entries.items():
                print(f"    {stage:<10}" + "  ".join(f"{key} {value}" for key, value in one.items()))
    for name, one in result["first_against"].items():
        print(f"sooner than {name}: " + "  ".join(f"{key} {value}" for key, value in one.items()))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="predicted,least_load")
    parser.add_argument("--requests", type=whole, default=96, help="of each policy")
    parser.add_argument("--rate", type=positive, default=1.2, help="requests per second")
    parser.add_argument("--seconds", type=positive, default=200.0, help="after which no block of requests begins")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    logs.setup(Config(log_level="error"), role="router")
    result = asyncio.run(measure(parser.parse_args(arguments)))
    if result["config"]["json"]:
        print(json.dumps(result))
        return 0
    failed = any(row["failed"] for row in result["policies"].values())
    show(result)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
