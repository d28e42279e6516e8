"""Who moves from one decode worker to another, and where to: decided here, purely, over what workers report.

Two causes. A worker that drains, or will compute prompts only from now on, is left by everything, a few at a time; what
nobody has room for stays and finishes there. A worker that has put running requests aside for want of memory gives away
one at a time, the one that waits longest, to a worker that has clearly more room: so a move does not bring the pressure
along, and the one it moved does not come back soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtransfer.types import PAGE_TOKENS
from router.policy.pairing import Role

MARGIN = 1.5
"""A worker that takes from another one in need has this much of what is taken, and SPARE of its pool beyond."""
SPARE = 0.1

REST_S = 30.0
"""What was moved stays for a while."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A worker as a move sees it. usable: new requests may go there. movable: it can give away and take (`handover`).
    decoding: requests of this router there. pages and slots: in all, and those that nobody runs on; swapped, waiting:
    requests short of memory."""

    worker_id: str
    role: Role
    usable: bool
    draining: bool
    movable: bool
    decoding: int
    group: str
    pages: int
    pages_free: int
    slots_free: int
    has_slots: bool
    swapped: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Seat:
    """A running choice of this router. silent_s: since its last token; here_s: since it came by a move, infinite if it
    did not."""

    worker_id: str
    tokens: int
    silent_s: float
    here_s: float = float("inf")


def leaving(workers: Iterable[Decoder]) -> dict[str, str]:
    """Workers that everything should leave, and why: "drain" or "role"."""
    causes = {}
    for worker in workers:
        if not (worker.movable and worker.decoding):
            continue
        if worker.draining:
            causes[worker.worker_id] = "drain"
        elif worker.role is Role.PREFILL:
            causes[worker.worker_id] = "role"
    return causes


class Need:
    """Since when workers have had requests put aside. One that has none for a moment has got over it."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._since: dict[str, float] = {}

    def lasting(self, workers: Iterable[Decoder], now: float) -> list[str]:
        """Workers in need for long enough, the longest first."""
        short = {worker.worker_id for worker in workers if worker.swapped and worker.movable and worker.decoding}
        self._since = {worker_id: self._since.get(worker_id, now) for worker_id in short}
        lasting = [worker_id for worker_id, since in self._since.items() if now - since >= self._after_s]
        return sorted(lasting, key=lambda worker_id: (self._since[worker_id], worker_id))

    def relieved(self, worker_id: str, now: float) -> None:
        """A request is leaving it: what it reports counts anew."""
        if worker_id in self._since:
            self._since[worker_id] = now


def longest_silent(seats: Mapping[int, Seat], worker_id: str) -> list[int]:
    """Keys of the choices at this worker that may move for its relief, the one that waits longest first."""
    found = [key for key, seat in seats.items() if seat.worker_id == worker_id and seat.here_s >= REST_S]
    return sorted(found, key=lambda key: (-seats[key].silent_s, -seats[key].tokens))


def roomiest(workers: Iterable[Decoder], seat: Seat, group: str, headroom: int) -> str | None:
    """The worker that may take this choice from one in need; None: it would only carry the need along."""
    needed = -(-(seat.tokens + headroom) // PAGE_TOKENS)
    able = [
        worker
        for worker in workers
        if worker.usable
        and worker.movable
        and worker.role is not Role.PREFILL
        and worker.group == group
        and worker.worker_id != seat.worker_id
        and not (worker.swapped or worker.waiting)
        and worker.pages_free >= MARGIN * needed + SPARE * worker.pages
        and (worker.slots_free > 1 or not worker.has_slots)
    ]
    return max(able, key=lambda worker: (worker.pages_free, worker.worker_id)).worker_id if able else None
