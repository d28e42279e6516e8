"""Which workers a request goes to: least-loaded, a pure function over plain state.

What it deliberately does not do: look at caches or predict seconds. It knows roles, readiness, who fits the request
and who may be paired with whom; the worker's own answer to Reserve is the truth, this is the forecast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from runtime.values import value


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@value
class WorkerState:
    """One worker as the policy sees it. `usable`: ready, not draining, compatible with the router's model.

    prefill_load: tokens of prefill work; decode_load: running and waiting requests; both the larger of what the worker
    last reported and what this router has in flight there. `group`: workers of the same group may exchange pages.
    `served`: requests ever sent, the tie-break that spreads an idle fleet.
    """

    worker_id: str
    role: Role
    usable: bool
    prefill_load: int
    decode_load: int
    pages_free: int
    max_model_len: int
    group: str
    served: int = 0


@value
class Pair:
    prefill: str
    decode: str


@dataclass(frozen=True, slots=True)
class Local:
    """One worker does both: prefill in its own pools, no ticket, lease or transfer."""

    worker: str


@dataclass(frozen=True, slots=True)
class NoWorker:
    """Nothing to choose: `missing` names the role; `too_small` when workers exist but none fits the request."""

    missing: str
    too_small: bool = False
    incompatible: bool = False


@dataclass(frozen=True, slots=True)
class AllRefused:
    """Workers exist, and every one of them is excluded for now."""


Choice = Pair | Local | NoWorker | AllRefused


def choose(
    workers: Iterable[WorkerState], length: int, refused_prefill: frozenset[str], refused_decode: frozenset[str]
) -> Choice:
    """length: tokens of prompt and answer. refused_*: workers that refused this request in this round."""
    prefills: list[WorkerState] = []
    decodes: list[WorkerState] = []
    for worker in workers:
        if worker.usable:
            if worker.role is not Role.DECODE:
                prefills.append(worker)
            if worker.role is not Role.PREFILL:
                decodes.append(worker)
    if not prefills or not decodes:
        return NoWorker("prefill" if not prefills else "decode")
    fitting_p = [worker for worker in prefills if worker.max_model_len >= length]
    fitting_d = [worker for worker in decodes if worker.max_model_len >= length]
    if not fitting_p or not fitting_d:
        return NoWorker("prefill" if not fitting_p else "decode", too_small=True)
    if not ({worker.group for worker in fitting_p} & {worker.group for worker in fitting_d}):
        return NoWorker("decode", incompatible=True)
    if refused_prefill:
        fitting_p = [worker for worker in fitting_p if worker.worker_id not in refused_prefill]
    if refused_decode:
        fitting_d = [worker for worker in fitting_d if worker.worker_id not in refused_decode]
    return _least_loaded(fitting_p, fitting_d)


def serves(workers: Iterable[WorkerState]) -> bool:
    """Whether somebody usable is there for each leg, of one group."""
    usable = [worker for worker in workers if worker.usable]
    prefills = {worker.group for worker in usable if worker.role is not Role.DECODE}
    return any(worker.role is not Role.PREFILL and worker.group in prefills for worker in usable)


def choose_decode(workers: Iterable[WorkerState], length: int, group: str, refused: frozenset[str]) -> str | None:
    """Another decode worker for a ticket that exists already."""
    fitting = [
        worker
        for worker in workers
        if worker.usable
        and worker.role is not Role.PREFILL
        and worker.group == group
        and worker.max_model_len >= length
        and worker.worker_id not in refused
    ]
    return min(fitting, key=_decode_rank).worker_id if fitting else None


def _least_loaded(prefills: list[WorkerState], decodes: list[WorkerState]) -> Choice:
    if all(worker.role is Role.BOTH for worker in (*prefills, *decodes)):
        return _local(prefills, decodes)
    for prefill in sorted(prefills, key=_prefill_rank):
        partners = [worker for worker in decodes if worker.group == prefill.group]
        if partners:
            decode = min(partners, key=_decode_rank)
            if decode.worker_id == prefill.worker_id:
                return Local(decode.worker_id)
            return Pair(prefill.worker_id, decode.worker_id)
    return AllRefused()


def _local(prefills: list[WorkerState], decodes: list[WorkerState]) -> Choice:
    """Only workers that do both: none needs another's help."""
    able = {worker.worker_id for worker in prefills}
    candidates = [worker for worker in decodes if worker.worker_id in able]
    if not candidates:
        return AllRefused()
    return Local(min(candidates, key=_local_rank).worker_id)


def _prefill_rank(worker: WorkerState) -> tuple[int, int, int, str]:
    return (worker.prefill_load, worker.decode_load, worker.served, worker.worker_id)


def _decode_rank(worker: WorkerState) -> tuple[int, int, int, int, str]:
    return (worker.decode_load, worker.prefill_load, worker.served, -worker.pages_free, worker.worker_id)


def _local_rank(worker: WorkerState) -> tuple[int, int, int, str]:
    return (worker.decode_load, worker.prefill_load, worker.served, worker.worker_id)
