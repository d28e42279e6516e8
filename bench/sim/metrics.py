"""What a run of a policy comes to, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.sim.world import Outcome, World


def summary(outcomes: Sequence[Outcome], world: World) -> dict[str, Any]:
    """Seconds and shares. Percentiles and means are over the requests that got a first token; goodput over all."""
    served = [outcome for outcome in outcomes if not outcome.failed]
    ttft = np.array([outcome.ttft_s for outcome in served] or [0.0])
    tpot = np.array([outcome.tpot_s for outcome in served if outcome.entry.output_tokens > 1] or [0.0])
    prompt = sum(outcome.entry.prompt_tokens for outcome in served)
    busy = np.array([worker.busy_prefill_s for worker in world.workers.values()])
    sent = Counter(outcome.prefill for outcome in served)
    forecast = [outcome for outcome in served if outcome.predicted_s > 0]
    observed = np.array([outcome.ttft_s - outcome.waited_s for outcome in forecast])
    predicted = np.array([outcome.predicted_s for outcome in forecast])
    error = np.abs(predicted - observed) / np.maximum(observed, 1e-9)
    longest = max((outcome.arrived + outcome.ttft_s for outcome in served), default=0.0)
    return {
        "ttft_mean": float(ttft.mean()),
        "ttft_p50": float(np.percentile(ttft, 50)),
        "ttft_p90": float(np.percentile(ttft, 90)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "tpot_mean": float(tpot.mean()),
        "tpot_p50": float(np.percentile(tpot, 50)),
        "tpot_p99": float(np.percentile(tpot, 99)),
        "goodput": sum(outcome.good for outcome in outcomes) / max(len(outcomes), 1),
        "hit_rate": sum(outcome.cached for outcome in served) / max(prompt, 1),
        "failed": len(outcomes) - len(served),
        "failed_reasons": dict(Counter(outcome.failed for outcome in outcomes if outcome.failed)),
        "local": sum(outcome.local for outcome in served),
        "waited": sum(outcome.waited_s > 0 for outcome in served),
        "waited_mean": float(np.mean([outcome.waited_s for outcome in served] or [0.0])),
        "load_spread": float(busy.std() / busy.mean()) if busy.sum() else 0.0,
        "prefill_workers_used": len(sent),
        "moved_bytes": world.counts.moved_bytes,
        "decisions": world.counts.decisions,
        "predicted_mean": float(predicted.mean()) if len(predicted) else None,
        "observed_mean": float(observed.mean()) if len(observed) else None,
        "prediction_error_median": float(np.median(error)) if len(error) else None,
        "prediction_error_p90": float(np.percentile(error, 90)) if len(error) else None,
        "virtual_seconds": longest,
    }
