"""Who is computed first: a pure rule over due times.

The failure that shapes it: a prompt of 32,000 tokens and a short one behind it, which waits for all of its chunks.
First come first served does that; shortest first never gets to the long one while short ones come.

Whoever's first token is due first goes first, to the queue and to the chunks of a step; a prompt in the middle of its
chunks gives way to one that is due sooner. Due times are absolute (arrival + an objective that grows with the prompt,
as the router says it), so waiting is ageing: a request that comes after another's due time is due later itself, and can
pass it no more. A long one is therefore passed over for no longer than its own objective is longer than the others',
whatever comes. Priorities move due times by a fixed step, and wear off in the same way. Requests without a due time are
due when they come: first come first served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

PRIORITY_STEP_S = 5.0
"""What one priority is worth in due time (lower is sooner). The router's line counts with the same."""


def due_at(due: float | None, priority: int, arrived: float) -> float:
    """The time a request is ordered by."""
    return arrived + PRIORITY_STEP_S * priority if due is None else due


def chosen(
    chunks: Iterable[tuple[tuple[float, int, int], int]], budget: int, takes: Callable[[int], bool] = lambda _: True
) -> Sequence[int]:
    """Which prompts get a chunk in this step: places in `chunks`, in ascending order. chunks: (order, tokens) of the
    next chunk of each. The first in order always gets one, however small the budget is; nobody passes one that finds
    no room. takes: asked of each in its turn; one that does not take its chunk leaves its tokens to those behind it."""
    ranked = sorted((order, place, tokens) for place, (order, tokens) in enumerate(chunks))
    found: list[int] = []
    for _, place, tokens in ranked:
        if found and tokens > budget:
            break
        if takes(place):
            budget -= tokens
            found.append(place)
    return sorted(found)
