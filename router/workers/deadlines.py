"""Whether a request can still be answered in time.

The failure that shapes it: a prompt whose client has given up long before its first token is computed all the same,
and makes those behind it late as well. What is said here must hold for certain, since it refuses: predictions count by
half, and what anybody has cached of the prompt, or will have, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from router.policy.speeds import Speeds
from router.policy.view import WorkerView

SURE = 0.5
"""Of a predicted time, what it takes for certain."""

KNOWN = 10
"""Predictions that were compared with what came, until they are believed that far."""


def too_late_s(
    views: Iterable[WorkerView],
    speeds: Speeds,
    tokens: int,
    left_s: float,
    now: float,
    due: Callable[[], float],
    cached: Callable[[], int],
) -> float:
    """Seconds that the first token of a prompt due then takes at the quickest of these workers, when that is more than
    `left_s`; else 0, also while nothing is known. cached: tokens of it that may be in some cache."""
    if speeds.ttft_error.count < KNOWN:
        return 0.0
    least, held = math.inf, -1
    for view in views:
        queue_s = view.queue_s(now, due()) if view.work else 0.0
        seconds = SURE * (queue_s + speeds.prefill_s(view.worker_id, tokens, 0))
        if seconds > left_s:
            held = min(cached(), tokens - 1) if held < 0 else held
            seconds = SURE * (queue_s + speeds.prefill_s(view.worker_id, tokens - held, held))
        if seconds <= left_s:
            return 0.0
        least = min(least, seconds)
    return least if least < math.inf else 0.0
