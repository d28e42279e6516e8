"""What a run comes to, from the raw results of all processes together: no figure is made of figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.load.crew import Loader
from bench.load.results import COMPLETED, CUT, PARTS, STATES, Result
from bench.sim.world import TPOT_GOAL_S, TTFT_GOAL_PER_TOKEN_S, TTFT_GOAL_S

PER_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Objective:
    """As in `bench replay`: TTFT <= ttft_s + ttft_s_per_8k for each 8K prompt tokens, mean TPOT <= tpot_s."""

    ttft_s: float = TTFT_GOAL_S
    ttft_s_per_8k: float = TTFT_GOAL_PER_TOKEN_S * PER_TOKENS
    tpot_s: float = TPOT_GOAL_S

    def met(self, result: Result) -> bool:
        prompt = result.prompt or result.asked_prompt
        goal = self.ttft_s + self.ttft_s_per_8k * prompt / PER_TOKENS
        return result.state == COMPLETED and result.ttft <= goal and result.tpot <= self.tpot_s


def spread(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not len(values):
        return None
    data = np.asarray(values, np.float64)
    p50, p90, p99 = np.percentile(data, (50, 90, 99)).tolist()
    return {"mean": float(data.mean()), "p50": p50, "p90": p90, "p99": p99, "max": float(data.max())}


def figures(loaders: Sequence[Loader], objective: Objective) -> dict[str, Any]:
    """Everything but the configuration. Times of answers are over those that completed; goodput is over all that ended
    without our doing."""
    results = [result for loader in loaders for result in loader.results]
    done = [result for result in results if result.state == COMPLETED]
    judged = [result for result in results if result.state != CUT]
    good = sum(objective.met(result) for result in judged)
    took = max((result.end for result in results), default=0.0)
    counts = Counter(result.state for result in results)
    prompt, output = sum(result.prompt for result in done), sum(result.output for result in done)
    return {
        "requests": {"sum": len(results), **{state: counts[state] for state in STATES}},
        "reasons": {state: _reasons(results, state) for state in STATES if state != COMPLETED},
        "seconds": took,
        "requests_per_s": len(done) / took if took else 0.0,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "prompt_tokens_per_s": prompt / took if took else 0.0,
        "output_tokens_per_s": output / took if took else 0.0,
        "ttft_s": spread([result.ttft for result in done]),
        "tpot_s": spread([result.tpot for result in done if result.output > 1]),
        "itl_s": spread(np.concatenate([result.gaps for result in done])) if done else None,
        "latency_s": spread([result.latency for result in done]),
        "goodput": good / len(judged) if judged else 0.0,
        "goodput_requests_per_s": good / took if took else 0.0,
        **_cache(done),
        **_unlike(done),
        "parts_s": _parts(done),
        "load": _load(results, loaders),
    }


def _reasons(results: Iterable[Result], state: str) -> dict[str, int]:
    return dict(Counter(result.reason for result in results if result.state == state).most_common())


def _cache(done: Sequence[Result]) -> dict[str, Any]:
    """None where the server does not say what it had cached."""
    known = [result for result in done if result.cached >= 0]
    prompt, cached = sum(result.prompt for result in known), sum(result.cached for result in known)
    return {"cached_tokens": cached if known else None, "hit_rate": cached / prompt if prompt else None}


def _unlike(done: Sequence[Result]) -> dict[str, int]:
    """Answers that were not what the load is made of."""
    return {
        "short_answers": sum(0 < result.output < result.asked_output for result in done),
        "prompts_of_other_length": sum(0 < result.asked_prompt != result.prompt > 0 for result in done),
    }


def _parts(done: Sequence[Result]) -> dict[str, dict[str, float] | None] | None:
    told = [result.parts for result in done if result.parts]
    if not told:
        return None
    return {name.removesuffix("_s"): spread([parts[place] for parts in told]) for place, name in enumerate(PARTS)}


def _load(results: Sequence[Result], loaders: Sequence[Loader]) -> dict[str, Any]:
    """Whether the load generators kept up: seconds lost between due and sent, and the busiest one's share of a core."""
    return {
        "late_s": _over(results, lambda result: result.late),
        "held_s": _over(results, lambda result: result.held),
        "own_share": max((loader.own_share for loader in loaders if loader.results), default=0.0),
        "lost": sum(loader.lost for loader in loaders),
        "loaders": [
            {
                "node": loader.node,
                "requests": len(loader.results),
                "late_s": _over(loader.results, lambda result: result.late),
                "own_share": loader.own_share,
                "lost": loader.lost,
            }
            for loader in loaders
        ],
    }


def _over(results: Iterable[Result], value: Callable[[Result], float]) -> dict[str, float] | None:
    return spread([value(result) for result in results if result.sent])
