"""Conversations three times larger than the device pool: time to the first token, goodput and hits, by tier and policy.

`python -m bench.turns` runs SmolLM2 on one thread and prints JSON and a table; `--plot FILE` draws them; `--model
hybrid` runs a small Kimi-Linear of random weights, whose states go down and up with the pages. Conversations take
turns, one request at a time: each comes back when all others have been served, which is the worst order for a pool
that forgets the longest unused. A turn's prompt is all that was said, and something new.

ttft_ratio   mean time to the first token of turns after the first, against the same without a host tier, in this run
goodput      turns per second whose first token came within the goal: half of what a whole prompt takes to compute
hits         where the tokens of those prompts came from, as shares
restarted    the worker ends before the last turn and another finds its disk: figures are those of the last turn
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench._options import whole
from bench.hybrid import runner as hybrid_runner
from engine.api import EngineRequest, Event, Failed, Mode, Tokens
from engine.loop import Engine, EngineSpec
from engine.plan import SamplingParams
from engine.runner import load_runner
from engine.tiers.build import Ways
from kvtransfer.hashing import root
from kvtransfer.types import PAGE_TOKENS, LegKey
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.modelfiles import ModelFiles

TARGET = 0.4
BOUND = ("host lru", "host")
"""Policies it holds for."""
OVER = 3
"""How many times the device pool the conversations are."""

OPENING, QUESTION, ANSWER = 320, 80, 16


@dataclass(frozen=True, slots=True)
class Policy:
    """One configuration of the tiers. host: tokens, as a multiple of what all conversations fill; 0 = none. restarted:
    before the last turn. few_states: no more than are of use, which is what each conversation's last turn left."""

    name: str
    host: float = 0.0
    changes: dict[str, Any] = field(default_factory=dict)
    disk: bool = False
    restarted: bool = False
    few_states: bool = False


POLICIES = (
    Policy("none"),
    Policy("host lru", 1.2),
    Policy("host flops", 1.2, {"host_evict": "flops"}),
    Policy("host lru, 2nd sighting", 1.2, {"host_store_after": 2}),
    Policy("host lru, prompts only", 1.2, {"host_store": "prompt"}),
    Policy("small host lru", 0.5),
    Policy("small host flops", 0.5, {"host_evict": "flops"}),
    Policy("small host and disk", 0.5, {}, True),
)
HYBRID = (
    Policy("none"),
    Policy("host", 1.2),
    Policy("host, few states", 1.2, few_states=True),
    Policy("small host", 0.4),
    Policy("small host and disk", 0.4, {}, True),
    Policy("the same, restarted", 0.4, {}, True, True),
)
STATES = 2
"""What a turn of a hybrid's conversation leaves: before its last page, and where it ends."""


@dataclass(eq=False)
class Turn:
    number: int
    prompt: int
    begun: float = 0.0
    first: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def sink(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens):
                self.first = self.first or now
                self.tokens += event.tokens
                self.cached = event.cached_tokens
                if event.last:
                    self.over.set()


class Talks:
    """One engine and its conversations."""

    def __init__(self, policy: Policy, talks: int, turns: int, folder: Path, hybrid: bool) -> None:
        self.count, self.turns, self.hybrid = talks, turns, hybrid
        self.restarted = policy.restarted
        whole = talks * (OPENING + turns * (QUESTION + ANSWER))
        changes: dict[str, Any] = dict(policy.changes)
        if policy.host:
            changes["host_pool_tokens"] = int(policy.host * whole)
        if hybrid:
            changes["state_slots"] = max(talks * turns * STATES // OVER, 4)
            states = STATES * talks if policy.few_states else int(policy.host * talks * turns * STATES)
            changes["host_state_slots"] = max(states, 1)
        self.config = Config(
            model="smollm2",
            kv_pool_tokens=whole // OVER,
            max_batch=2,
            threads=1,
            headroom_tokens=ANSWER,
            **changes,
        )
        if policy.disk:
            self._open()
            model = self.runner.spec()
            self.close()
            size = 2 * whole // PAGE_TOKENS * model.page_bytes
            size = max(size, 4 * talks * turns * STATES * model.slot_bytes)
            self.config = self.config.model_copy(update={"disk_pool_bytes": size, "disk_pool_dir": str(folder)})
        self._open()

    def _open(self) -> None:
        if self.hybrid:
            self.runner = hybrid_runner(1)
        else:
            self.runner = load_runner(ModelFiles.open("smollm2"), self.config)
        spec = EngineSpec.of(self.runner.spec(), self.config)
        self.engine = Engine(self.runner, spec, self.config, SystemClock(), Ways(layout="bench"))
        self.engine.start_loop()

    def run(self) -> list[Turn]:
        said = [tokens_of(OPENING, talk) for talk in range(self.count)]
        made: list[Turn] = []
        for number in range(self.turns):
            if self.restarted and number == self.turns - 1:
                self.close()
                self._open()
            for talk in range(self.count):
                prompt = said[talk] + tokens_of(QUESTION, 1000 * (number + 1) + talk)
                turn = self.ask(f"{number}-{talk}", number, prompt)
                said[talk] = prompt + turn.tokens
                made.append(turn)
        return made

    def ask(self, name: str, number: int, prompt: list[int]) -> Turn:
        turn = Turn(number, len(prompt))
        request = EngineRequest(
            key=LegKey(name, "decode", 1),
            mode=Mode.LOCAL,
            tokens=tuple(prompt),
            prompt_len=len(prompt),
            sampling=SamplingParams(max_tokens=ANSWER),
            root=root(b"", "smollm2", "bench"),
            deadline=time.monotonic() + 600,
        )
        turn.begun = time.perf_counter()
        self.engine.submit(request, turn.sink)
        turn.over.wait()
        return turn

    def close(self) -> None:
        self.engine.stop()
        self.runner.close()


def tokens_of(count: int, seed: int) -> list[int]:
    """In the vocabulary of either model."""
    return [int(t) for t in np.random.default_rng(seed).integers(100, 1000, count)]


def measured(policy: Policy, talks: int, turns: int, hybrid: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Talks(policy, talks, turns, Path(folder), hybrid)
        begun = time.perf_counter()
        made = bench.run()
        took = time.perf_counter() - begun
        tiers = bench.engine.tiers
        host = tiers.counts.hit_pages * PAGE_TOKENS if tiers is not None else 0
        disk = tiers.counts.disk_pages * PAGE_TOKENS if tiers is not None else 0
        bench.close()
    first = turns - 1 if policy.restarted else 1
    later = [turn for turn in made if turn.number >= first]
    asked, cached = sum(t.prompt for t in later), sum(t.cached for t in later)
    return {
        "policy": policy.name,
        "ttft_s": statistics.fmean(t.first - t.begun for t in later),
        "ttfts_s": [(t.number, t.first - t.begun) for t in made],
        "from_turn": first,
        "cold_s_per_token": statistics.fmean((t.first - t.begun) / t.prompt for t in made if not t.number),
        "whole_prompt_tokens": asked / len(later),
        "took_s": took,
        "hits": {
            "device": max(cached - host, 0) / asked,
            "host": max(host - disk, 0) / asked,
            "disk": disk / asked,
            "computed": (asked - cached) / asked,
        },
        "answers": [t.tokens for t in made],
    }


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Against the first row, which has no tiers. Answers must be equal."""
    plain = rows[0]
    goal = 0.5 * plain["ttft_s"]
    for row in rows:
        ttfts = [seconds for number, seconds in row["ttfts_s"] if number >= row["from_turn"]]
        row["ttft_ratio"] = row["ttft_s"] / statistics.fmean(
            seconds for number, seconds in plain["ttfts_s"] if number >= row["from_turn"]
        )
        row["goodput_per_s"] = sum(t <= goal for t in ttfts) / row["took_s"]
        row["equal"] = row["answers"] == plain["answers"]
    for row in rows:
        del row["answers"], row["ttfts_s"]
    return {"goal_s": goal, "rows": rows, "missed": missed(rows)}


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = [f"{row['policy']}: other answers" for row in rows if not row["equal"]]
    return found + [f"{r['policy']}: ttft" for r in rows if r["policy"] in BOUND and r["ttft_ratio"] > TARGET]


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"{'policy':<24}{'TTFT ms':>9}{'ratio':>7}{'good/s':>8}{'device':>8}{'host':>7}{'disk':>7}{'computed':>10}"
    ]
    for row in figures["rows"]:
        hits = row["hits"]
        lines.append(
            f"{row['policy']:<24}{1e3 * row['ttft_s']:>9.0f}{row['ttft_ratio']:>7.2f}{row['goodput_per_s']:>8.2f}"
            f"{hits['device']:>8.0%}{hits['host']:>7.0%}{hits['disk']:>7.0%}{hits['computed']:>10.0%}"
        )
    return "\n".join(lines)


def plot(figures: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = figures["rows"]
    names = [row["policy"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), sharey=True)
    left.barh(names, [row["ttft_ratio"] for row in rows], color="tab:blue")
    left.axvline(TARGET, color="black", linestyle=":")
    left.set_xlabel("mean time to the first token, against none")
    left.invert_yaxis()
    begin = np.zeros(len(rows))
    for tier in ("device", "host", "disk", "computed"):
        share = np.array([row["hits"][tier] for row in rows])
        right.barh(names, share, left=begin, label=tier)
        begin += share
    right.set_xlabel("where the prompts' tokens came from")
    right.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--talks", type=whole, default=9)
    parser.add_argument("--turns", type=whole, default=4)
    parser.add_argument("--model", choices=("smollm2", "hybrid"), default="smollm2")
    parser.add_argument("--policies", type=whole, default=len(POLICIES), help="only the first so many")
    parser.add_argument("--plot", type=Path, help="write a picture there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hybrid = arguments.model == "hybrid"
    policies = (HYBRID if hybrid else POLICIES)[: arguments.policies]
    rows = [measured(policy, arguments.talks, arguments.turns, hybrid) for policy in policies]
    figures = compared(rows)
    print(json.dumps(figures, indent=2))
    print(table(figures), file=sys.stderr)
    if arguments.plot:
        plot(figures, arguments.plot)
    return 1 if figures["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
