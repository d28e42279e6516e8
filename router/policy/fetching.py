"""Bringing a prefix to where it is short, instead of computing it there: who has it, and what that takes.

Any worker's cache is a source, a decode worker's too: that is how the end of a conversation comes back to a prefill
worker. What lies on its disk it reads up to its host first, which is a part of the fetch. A fetch runs while the prompt
waits in its worker's queue, so it costs what is longer of the two.
It is worth considering when it spares a page or more; it is bounded on both sides, since its source pins cached pages
for it and its target holds room.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.types import PAGE_TOKENS
from router.policy.index import Hit
from router.policy.speeds import Speeds
from router.policy.view import Fetch, RequestView, WorkerView

LONGEST = 3
"""Holders that are looked at: those that have most."""

Holder = tuple[int, WorkerView]
"""(tokens that can be had there, whose they are)"""


def offered(hit: Hit, worker: WorkerView) -> int:
    """Tokens of a hit that another worker can be given; with a state, all of it or nothing."""
    if worker.state_bytes:
        return hit.resume if hit.resume - hit.kv < PAGE_TOKENS else 0
    return min(hit.resume, hit.kv)


def on_disk(hit: Hit, worker: WorkerView, tokens: int) -> float:
    """Bytes of the first `tokens` tokens, and of the state there, that the worker would read from its disk."""
    pages = max(tokens - max(hit.host, hit.device), 0) if tokens - hit.host >= PAGE_TOKENS else 0
    return pages * worker.bytes_per_token + (worker.state_bytes if hit.state == "disk" else 0.0)


def holders(request: RequestView, workers: Sequence[WorkerView]) -> list[Holder]:
    """Who has most of the prompt, and has not given too much away already."""
    if not request.hits:
        return []
    found = [
        (offered(request.hits[worker.bit], worker), worker)
        for worker in workers
        if worker.bit in request.hits and worker.serving < worker.fetches
    ]
    found = [holder for holder in found if holder[0] >= PAGE_TOKENS]
    found.sort(key=lambda holder: (-holder[0], holder[1].serving))
    return found[:LONGEST]


def best(
    speeds: Speeds, request: RequestView, target: WorkerView, cached: int, among: Sequence[Holder], step_s: float
) -> Fetch | None:
    """The fetch after which `target` has its first token soonest, were nobody in front of it. cached: tokens it need
    not run without one."""
    found: Fetch | None = None
    least = 0.0
    if target.fetching >= target.fetches:
        return None
    for tokens, source in among:
        usable = min(tokens, request.tokens - 1)
        if source is target or source.group != target.group or usable < cached + PAGE_TOKENS:
            continue
        held = min(request.hit(target).device, usable)
        size = (usable - held) * source.bytes_per_token + source.state_bytes
        flows = source.flows + target.flows + source.serving + target.fetching
        lifted = on_disk(request.hit(source), source, usable)
        seconds = speeds.load_s(lifted, "disk")
        seconds += speeds.fetch_s(source.worker_id, target.worker_id, size, flows)
        whole = seconds + speeds.prefill_s(target.worker_id, request.tokens - usable, usable, step_s)
        if found is None or whole < least:
            found, least = Fetch(source.worker_id, usable, seconds, lifted=lifted), whole
    return found
