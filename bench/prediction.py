"""Predicted against observed seconds to the first token, on real workers; and policies against each other there.

    python -m bench.prediction [--policies predicted,least_load] [--requests 120] [--rate 0.35] [--json]

For every policy a fleet of its own: 2 prefill and 2 decode workers that run SmolLM2 on this machine's CPU, one thread
each, and a router (all routers run in this process). All fleets get the same requests at the same times, so that
whatever else the machine does is the same to them. Prompts of 16 to 1,500 tokens (log-uniform), two fifths of them
behind one of four shared prefixes; answers of 4 to 24 tokens; arrivals are a Poisson process. The first third is
warm-up: sent, and not counted.

error    |predicted - observed| / observed, observed from the moment the request is sent to its workers to its first
         token at the router; the time in the router's own queue is in neither
ttft     as the client sees it, from the moment the request should have been sent
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

from bench.handoff import MODEL, TEXT
from bench.router import free_port
from router.app import Router
from router.policy.speeds import Accuracy
from runtime import logs
from runtime.config import Config
from runtime.modelfiles import ModelFiles

SHORTEST, LONGEST = 16, 1500
PREFIXES = (192, 384, 640, 960)
SHARED = 0.4
START_S = 180.0
ANY_PORT = "127.0.0.1:0"
WARM = 1 / 3


@dataclass(slots=True)
class Recorded(Accuracy):
    """Keeps every pair it learns from."""

    pairs: list[tuple[float, float]] = field(default_factory=list)

    def learn(self, predicted: float, observed: float) -> None:
        Accuracy.learn(self, predicted, observed)
        self.pairs.append((predicted, observed))


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
    failure: str = ""


@dataclass(slots=True)
class Fleet:
    """One policy's."""

    policy: str
    router: Router
    workers: Workers
    seen: list[Seen] = field(default_factory=list)
    recorded: Recorded = field(default_factory=Recorded)
    learned: int = 0  # pairs of the warm-up


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
            made = Fleet(policy, router, workers)
            router.planner.speeds.ttft_error = made.recorded
            yield made
    finally:
        await router.close()


async def play(one: Fleet, load: Sequence[Ask], began: float, warm: int) -> None:
    one.seen = [Seen() for _ in load]
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(f"http://{one.router.http}", timeout=timeout) as client:
        calls = [asyncio.create_task(_ask(client, ask, began, seen)) for ask, seen in zip(load, one.seen, strict=True)]
        await asyncio.gather(*calls[:warm])
        one.learned = len(one.recorded.pairs)
        await asyncio.gather(*calls)


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
    first = 0.0
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
            if not first and any(choice.get("token_ids") for choice in content.get("choices", ())):
                first = time.perf_counter()
            usage = content.get("usage") or usage
            ledger = content.get("ledger") or ledger
    if first and usage:
        seen.ttft_s = first - began - ask.at
        seen.prompt = usage["prompt_tokens"]
        seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        seen.local = ledger.get("prefill_worker") == ledger.get("decode_worker")


def figures(one: Fleet, warm: int) -> dict[str, Any]:
    counted = one.seen[warm:]
    served = [seen for seen in counted if seen.ttft_s]
    ttft = [seen.ttft_s for seen in served]
    pairs = [(predicted, observed) for predicted, observed in one.recorded.pairs[one.learned :] if observed > 0]
    errors = [abs(predicted - observed) / observed for predicted, observed in pairs]
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
        "predicted_by_observed_median": round(statistics.median(p / o for p, o in pairs), 3) if pairs else None,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # no worker is left behind
    names = [name.strip() for name in options.policies.split(",")]
    load, warm = asks(options.seed, options.requests, options.rate), int(WARM * options.requests)
    async with AsyncExitStack() as stack:
        fleets = [await stack.enter_async_context(fleet(name)) for name in names]
        began = time.perf_counter() + 1.0
        await asyncio.gather(*(play(one, load, began, warm) for one in fleets))
        load_average = os.getloadavg()[0]
        results = {one.policy: figures(one, warm) for one in fleets}
    first, *others = fleets
    return {
        "policies": results,
        "first_against": {other.policy: _compared(first, other, warm) for other in others},
        "config": {**vars(options), "cores": os.cpu_count(), "load_average": load_average},
    }


def _compared(one: Fleet, other: Fleet, warm: int) -> dict[str, float]:
    """Of the same requests: seconds the first policy's token came sooner in the mean, with the half width of the 95 %
    interval, and the share of requests in which it did."""
    gains = [b.ttft_s - a.ttft_s for a, b in zip(one.seen[warm:], other.seen[warm:], strict=True)]
    half = 1.96 * statistics.stdev(gains) / len(gains) ** 0.5
    share = sum(gain > 0 for gain in gains) / len(gains)
    return {"sooner_s": round(statistics.fmean(gains), 4), "half": round(half, 4), "share": round(share, 3)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="predicted,least_load")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=0.35, help="requests per second, of each fleet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    logs.setup(Config(log_level="error"), role="router")
    result = asyncio.run(measure(parser.parse_args(arguments)))
    if result["config"]["json"]:
        print(json.dumps(result))
        return 0
    print(json.dumps(result["config"]))
    for name, row in result["policies"].items():
        print(f"{name:<18}" + "  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"the first one against the others: {result['first_against']}")
    return int(any(row["failed"] for row in result["policies"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
