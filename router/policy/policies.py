"""Where a request goes: filter, score, pick. Policies are functions over plain state; the clock is an argument.

Every policy begins with the same filter (`view.split`: usable, fits the context) and pairs only workers of one group.
The simple ones are here, the other projects' costs in `peers`, our own in `cost`. What a policy must keep between
decisions (a turn, a session) is a field of the policy and nothing else.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from router.policy.pairing import Role
from router.policy.view import Decision, Nobody, Placement, RequestView, WorkerView, split

Score = Callable[[RequestView, WorkerView], tuple[float, ...]]


class Policy(Protocol):
    """choose() must not change workers or request. A worker of role both may be given as both halves."""

    name: str

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision: ...


def pairable(request: RequestView, workers: Sequence[WorkerView]) -> tuple[list[WorkerView], list[WorkerView]] | Nobody:
    """Prefill and decode candidates that share a group with at least one of the other side."""
    prefills, decodes = split(workers, request.tokens + 1)
    if not prefills or not decodes:
        return Nobody("no_prefill_worker" if not prefills else "no_decode_worker")
    groups = {p.group for p in prefills} & {d.group for d in decodes}
    if not groups:
        return Nobody("no_compatible_decode_worker")
    return [p for p in prefills if p.group in groups], [d for d in decodes if d.group in groups]


def fits(request: RequestView, worker: WorkerView) -> bool:
    """Whether a decode worker has room for it now, by our own books."""
    return worker.room_tokens() >= request.tokens + 1 and not (worker.max_batch and worker.decoding >= worker.max_batch)


def pick_pair(request: RequestView, workers: Sequence[WorkerView], prefill: Score, decode: Score) -> Decision:
    """argmin of each score, the prefill worker first, the decode worker of its group; one that has room is preferred.
    When every candidate does both, one worker does both."""
    found = pairable(request, workers)
    if isinstance(found, Nobody):
        return found
    prefills, decodes = found
    if all(worker.role is Role.BOTH for worker in (*prefills, *decodes)):
        one = min(decodes, key=lambda w: (not fits(request, w), *decode(request, w), *prefill(request, w)))
        return Placement(one.worker_id, one.worker_id)
    source = min(prefills, key=lambda w: prefill(request, w))
    partners = [worker for worker in decodes if worker.group == source.group]
    target = min(partners, key=lambda w: (not fits(request, w), *decode(request, w)))
    return Placement(source.worker_id, target.worker_id)


class RoundRobin:
    """Each request to the next worker of each pool, whatever the load."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        found = pairable(request, workers)
        if isinstance(found, Nobody):
            return found
        prefills, decodes = found
        source = prefills[self._turn % len(prefills)]
        partners = [worker for worker in decodes if worker.group == source.group]
        target = partners[self._turn % len(partners)]
        self._turn += 1
        if source.role is Role.BOTH and target.role is Role.BOTH:
            return Placement(target.worker_id, target.worker_id)
        return Placement(source.worker_id, target.worker_id)


class LeastLoad:
    """Fewest prompt tokens to run; fewest requests to decode. Ties: fewest tokens held, fewest ever sent, id."""

    name = "least_load"

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        return pick_pair(request, workers, _prefill_load, _decode_load)


class PowerOfTwo:
    """Two at random of each pool, the less loaded of the two."""

    name = "power_of_two"

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        found = pairable(request, workers)
        if isinstance(found, Nobody):
            return found
        prefills, decodes = found
        source = self._two(prefills, request, _prefill_load)
        partners = [worker for worker in decodes if worker.group == source.group]
        target = self._two(partners, request, _decode_load)
        return Placement(source.worker_id, target.worker_id)

    def _two(self, among: list[WorkerView], request: RequestView, score: Score) -> WorkerView:
        two = self._random.sample(among, 2) if len(among) > 2 else among
        return min(two, key=lambda w: score(request, w))


class SessionAffinity:
    """A session stays with the pair that served it while both are usable; else, and for new ones, least load.

    limit: sessions remembered, least recently seen forgotten first."""

    name = "session_affinity"

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._pairs: OrderedDict[str, Placement] = OrderedDict()
        self._fallback = LeastLoad()

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        known = self._pairs.get(request.session) if request.session else None
        if known is not None and self._serves(known, request, workers):
            self._pairs.move_to_end(request.session)
            return known
        decision = self._fallback.choose(request, workers, now)
        if request.session and isinstance(decision, Placement):
            self._pairs[request.session] = decision
            self._pairs.move_to_end(request.session)
            if len(self._pairs) > self._limit:
                self._pairs.popitem(last=False)
        return decision

    @staticmethod
    def _serves(pair: Placement, request: RequestView, workers: Sequence[WorkerView]) -> bool:
        prefills, decodes = split(workers, request.tokens + 1)
        return any(p.worker_id == pair.prefill for p in prefills) and any(d.worker_id == pair.decode for d in decodes)


def _prefill_load(request: RequestView, worker: WorkerView) -> tuple[float, ...]:
    return (worker.prefill_tokens, worker.decoding, worker.served, worker.bit)


def _decode_load(request: RequestView, worker: WorkerView) -> tuple[float, ...]:
    return (worker.decoding, worker.held_tokens, worker.served, worker.bit)
