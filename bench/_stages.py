"""What was foretold of every prompt, and what it took, by stage.

queue      until its first chunk runs on the worker                     predicted: the router's own books
prefill    its share of the steps that ran it, and what it loaded
passing    what lies between the worker's seconds and the router's
ttft       from the moment it is sent to its first token at the router: the sum
second     from the first token to the second, at the client: of a pair, with what the hand-off adds
step       between two tokens where it decodes
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from protos.v1 import common_pb2
from router.policy.view import Forecast
from router.workers.planner import Plan, Planner

STAGES = ("queue", "prefill", "passing", "ttft", "second", "step")
SHORTEST_S = 0.002
"""What takes less has no relative error worth the name."""

Pair = tuple[float, float]
"""(predicted, observed) seconds"""


@dataclass(slots=True)
class Row:
    """One prompt. tokens: of it; cached: those that its worker had."""

    forecast: Forecast
    local: bool
    tokens: int = 0
    cached: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    took_s: float = 0.0
    second_s: float = 0.0
    step_s: float = 0.0

    def pairs(self) -> dict[str, Pair]:
        """By stage; those that were not seen are left out."""
        said, found = self.forecast, dict[str, Pair]()
        if self.took_s > 0:
            found["queue"] = (max(said.queue_s, said.fetch_s), self.queue_s)
            found["prefill"] = (said.load_s + said.prefill_s, self.prefill_s)
            found["passing"] = (said.passing_s, self.took_s - self.queue_s - self.prefill_s)
            found["ttft"] = (said.ttft_s, self.took_s)
        if self.second_s > 0:
            found["second"] = (said.transfer_s + said.admit_s + said.tpot_s, self.second_s)
        if self.step_s > 0:
            found["step"] = (said.tpot_s, self.step_s)
        return found


class Watch:
    """Stands between a router and its planner. rows: by request, of the last decision about each."""

    def __init__(self, planner: Planner) -> None:
        self.rows: dict[str, Row] = {}
        self._by_forecast: dict[int, Row] = {}
        self._plan, self._prefilled = planner.plan, planner.prefilled
        planner.plan = self.plan  # type: ignore[method-assign]
        planner.prefilled = self.prefilled  # type: ignore[method-assign]

    def plan(self, *arguments: Any, **named: Any) -> Any:
        decision = self._plan(*arguments, **named)
        if isinstance(decision, Plan):
            row = Row(decision.placement.forecast, decision.placement.local)
            self.rows[arguments[0].request_id] = row
            self._by_forecast[id(row.forecast)] = row
        return decision

    def prefilled(
        self, worker: str, tokens: int, times: common_pb2.StageTimes, forecast: Forecast, took_s: float
    ) -> None:
        row = self._by_forecast.get(id(forecast))
        if row is not None:
            row.tokens, row.cached = tokens, times.cached_tokens
            row.queue_s, row.prefill_s, row.took_s = times.fetch_s + times.queue_s, times.prefill_s, took_s
        self._prefilled(worker, tokens, times, forecast, took_s)


def table(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """By stage: n; median seconds observed and of (predicted - observed); of those that took long enough, the medians
    of the relative error and of predicted by observed."""
    by_stage: dict[str, list[Pair]] = {}
    for row in rows:
        for stage, pair in row.pairs().items():
            by_stage.setdefault(stage, []).append(pair)
    return {stage: _figures(by_stage[stage]) for stage in STAGES if stage in by_stage}


def _figures(pairs: Sequence[Pair]) -> dict[str, float]:
    long = [(predicted, observed) for predicted, observed in pairs if observed >= SHORTEST_S]
    found = {
        "n": len(pairs),
        "observed_s": round(statistics.median(o for _, o in pairs), 4),
        "off_s": round(statistics.median(abs(p - o) for p, o in pairs), 4),
        "bias_s": round(statistics.median(p - o for p, o in pairs), 4),
    }
    if long:
        found["error"] = round(statistics.median(abs(p - o) / o for p, o in long), 3)
        found["ratio"] = round(statistics.median(p / o for p, o in long), 3)
    return found


def by_length(rows: Iterable[Row], edges: Sequence[int] = (64, 256, 768)) -> dict[str, dict[str, float]]:
    """The first token's figures by the tokens that had to be computed."""
    found: dict[str, list[Pair]] = {}
    names = [*(f"< {edge}" for edge in edges), f">= {edges[-1]}"]
    for row in rows:
        pair = row.pairs().get("ttft")
        if pair is not None:
            found.setdefault(names[bisect.bisect(edges, row.tokens - row.cached)], []).append(pair)
    return {name: _figures(found[name]) for name in names if name in found}
