"""The hand-off as a client sees it: one prefill and one decode worker against one worker that does both.

python -m bench.handoff [--rounds 15] [--threads 1] [--prompt-tokens 512] [--flag KEY=VALUE ...] prints JSON, and fails
if a target is missed. Two clusters run at the same time, each with a router of its own: real processes, SmolLM2 in
bf16, the same threads per worker. Requests are asked one at a time, in turn, round by round, each of a prompt of its
own, streamed through the router's HTTP API, and timed where the client reads.

ttft             request sent to first token; `ratio` is the pair's median over the aggregated worker's
`ratio_best`     compares the best round of each: what repeats on a busy machine
handoff_steps    second token minus first, in decode steps: of the pair's own stream, the median between later tokens
                 (the first token is P's, the second is the first one of D)
idle_percent     CPU of each process of the pair with nothing to do, in percent of one core, from /proc
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from bench._options import positive, whole
from bench.router import Seconds, free_port
from runtime.config import Config
from runtime.modelfiles import ModelFiles

MODEL = "smollm2"
START_S = 120.0
MAX_TOKENS = 24
TARGET_TTFT, TARGET_STEPS, TARGET_IDLE = 1.15, 2.0, 5.0
PAUSE_S = 0.05
TEXT = (
    "The harbour was quiet in the early morning, and the only sound came from ropes that moved against wet wood. A man "
    "with a lamp walked along the quay, counting boats, and wrote their names into a book that he kept under his coat. "
)


@dataclass
class Cluster:
    """A router and its workers, each a process. config: of the workers."""

    roles: tuple[str, ...]
    config: Config
    processes: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    url: str = ""

    async def start(self) -> Cluster:
        http, grpc = free_port(), free_port()
        self.url = f"http://{http}"
        await self._spawn("router", Config(model=MODEL, http_listen=http, grpc_listen=grpc), "router")
        for role in self.roles:
            await self._spawn(role, self.config.model_copy(update={"role": role, "registry": grpc}), "worker")
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http_client:
            while not await self._ready(http_client):
                ended = [name for name, p in self.processes.items() if p.returncode is not None]
                assert not ended, f"ended early: {ended}"
                await asyncio.sleep(0.1)
        return self

    async def close(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.terminate()
        for process in self.processes.values():
            await process.wait()

    async def idle_percent(self, seconds: float) -> dict[str, float]:
        before = {name: Seconds.of(p.pid).ran for name, p in self.processes.items()}
        began = time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        return {
            name: round(100 * (Seconds.of(p.pid).ran - before[name]) / took, 2) for name, p in self.processes.items()
        }

    async def _spawn(self, name: str, config: Config, command: str) -> None:
        environment = dict(os.environ) | config.child_environment() | {"NIXL_LOG_LEVEL": "ERROR"}
        null = asyncio.subprocess.DEVNULL
        self.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pdserve", command, env=environment, stdout=null, stderr=null
        )

    async def _ready(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(f"{self.url}/health/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def clusters(config: Config) -> AsyncIterator[dict[str, Cluster]]:
    async with AsyncExitStack() as stack:
        made = {"pair": Cluster(("prefill", "decode"), config), "aggregated": Cluster(("both",), config)}
        for cluster in made.values():
            stack.push_async_callback(cluster.close)
            await cluster.start()
        yield made


class Prompts:
    """Prompts of so many tokens that share nothing: each begins with words of its own."""

    def __init__(self, tokens: int) -> None:
        self._tokenizer = ModelFiles.open(MODEL).tokenizer()
        self._tokens = tokens
        self._random = np.random.default_rng(os.getpid())

    def next(self) -> list[int]:
        begin = " ".join(str(n) for n in self._random.integers(0, 10**6, 8))
        ids: list[int] = self._tokenizer.encode(begin + " " + TEXT * (self._tokens // 40 + 1)).ids
        assert len(ids) >= self._tokens
        return ids[: self._tokens]


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the request to each token. One event holds one token here, or a few when the client lags."""

    at: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Between tokens after the second one."""
        return statistics.median(b - a for a, b in zip(self.at[1:], self.at[2:], strict=False))

    @property
    def handoff_s(self) -> float:
        return self.at[1] - self.at[0]


async def ask(client: aiohttp.ClientSession, cluster: Cluster, prompt: Sequence[int]) -> Answer:
    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    at: list[float] = []
    began = time.perf_counter()
    async with client.post(f"{cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                now = time.perf_counter() - began
                choices = json.loads(line[6:])["choices"]
                at += [now] * sum(len(choice.get("token_ids") or ()) for choice in choices)
    assert len(at) == MAX_TOKENS, f"{len(at)} tokens"
    return Answer(tuple(at))


def _ms(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(seconds) * 1e3, 2), "best": round(min(seconds) * 1e3, 2)}


async def measure(config: Config, rounds: int, tokens: int, idle_s: float) -> dict[str, Any]:
    prompts = Prompts(tokens)
    answers: dict[str, list[Answer]] = {"pair": [], "aggregated": []}
    async with clusters(config) as made, aiohttp.ClientSession() as client:
        await asyncio.sleep(1.0)
        idle = await made["pair"].idle_percent(idle_s)
        for i in range(rounds + 2):
            for name in sorted(made, reverse=bool(i % 2)):
                await asyncio.sleep(PAUSE_S)
                answer = await ask(client, made[name], prompts.next())
                if i >= 2:  # before that, pages are touched and connections made for the first time
                    answers[name].append(answer)
        idle_after = await made["pair"].idle_percent(idle_s)
    pair, both = ([a.at[0] for a in answers[name]] for name in ("pair", "aggregated"))
    return {
        "threads": config.threads,
        "prompt_tokens": tokens,
        "load_average": os.getloadavg()[0],
        "ttft_ms": {"pair": _ms(pair), "aggregated": _ms(both)},
        "ttft_ratio": round(statistics.median(pair) / statistics.median(both), 3),
        "ttft_ratio_best": round(min(pair) / min(both), 3),
        "step_ms": {name: _ms([a.step_s for a in found]) for name, found in answers.items()},
        "handoff_ms": _ms([a.handoff_s for a in answers["pair"]]),
        "handoff_steps": round(statistics.median(a.handoff_s / a.step_s for a in answers["pair"]), 2),
        "handoff_steps_best": round(min(a.handoff_s / a.step_s for a in answers["pair"]), 2),
        "second_token_steps_aggregated": round(
            statistics.median(a.handoff_s / a.step_s for a in answers["aggregated"]), 2
        ),
        "idle_percent": {"before": idle, "after": idle_after},
    }


def missed(result: dict[str, Any]) -> list[str]:
    found = []
    if result["ttft_ratio"] > TARGET_TTFT:
        found.append(f"TTFT {result['ttft_ratio']} of an aggregated worker's, wanted {TARGET_TTFT}")
    if result["handoff_steps"] > TARGET_STEPS:
        found.append(f"{result['handoff_steps']} decode steps to the second token, wanted {TARGET_STEPS}")
    for name, percent in result["idle_percent"]["after"].items():
        if percent > TARGET_IDLE:
            found.append(f"{name} uses {percent} % of a core with nothing to do, wanted {TARGET_IDLE}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=whole, default=15)
    parser.add_argument("--threads", type=whole, default=1)
    parser.add_argument("--prompt-tokens", type=whole, default=512)
    parser.add_argument("--idle-seconds", type=positive, default=5.0)
    parser.add_argument(
        "--flag", action="append", default=[], metavar="KEY=VALUE", help="of the workers' configuration"
    )
    args = parser.parse_args()
    flags: dict[str, Any] = {"model": MODEL, "dtype": "bfloat16", "device": "cpu", "threads": args.threads}
    flags |= dict(flag.split("=", 1) for flag in args.flag)
    config = Config.load(flags)
    result = asyncio.run(measure(config, args.rounds, args.prompt_tokens, args.idle_seconds))
    result["missed"] = missed(result)
    print(json.dumps(result, indent=1))
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
