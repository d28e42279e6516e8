"""Whether a request can still be answered in time.

The failure that shapes it: a prompt whose client has given up long before its first token is computed all the same,
and makes those behind it late as well. What is said here must hold for certain, since it refuses: predictions count
by half or a little more, and what anybody has cached of the prompt, or will have, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from router.policy.speeds import Speeds
from router.policy.view import WorkerView

SURE, SUREST = 0.5, 0.9
"""Of a predicted time, what it takes for certain: the less predictions err of late the more, between these."""

KNOWN = 10
"""Predictions that were compared with what came, until they are believed that far."""


def sure(speeds: Speeds) -> float:
    """The share of predicted seconds to a first token that it takes for certain; 0 while little is known."""
    if speeds.ttft_error.count < KNOWN:
        return 0.0
    return min(max(1.0 - 2.0 * speeds.ttft_error.median, SURE), SUREST)


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
    share = sure(speeds)
    if not share:
        return 0.0
    least, held = math.inf, -1
    for view in views:
        queue_s = view.queue_s(now, due()) if view.work else 0.0
        seconds = share * (queue_s + speeds.prefill_s(view.worker_id, tokens, 0))
        if seconds > left_s:
            held = min(cached(), tokens - 1) if held < 0 else held
            seconds = share * (queue_s + speeds.prefill_s(view.worker_id, tokens - held, held))
        if seconds <= left_s:
            return 0.0
        least = min(least, seconds)
    return least if least < math.inf else 0.0
