"""Other projects' costs over the same state, with their published defaults, for comparison in one run.

They are written from the descriptions of their sources, not copied: what a formula leaves open is said where we decide
it. Both see what this router sees: its own books for load, its own index for prefixes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.policy.policies import fits, pairable
from router.policy.view import Decision, Nobody, Placement, RequestView, WorkerView


@dataclass(frozen=True, slots=True)
class DynamoConfig:
    """Defaults of lib/kv-router's DefaultWorkerSelector."""

    block: int = 16
    overlap_score_credit: float = 1.0
    overlap_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    active_request_weight: float = 0.0
    temperature: float = 0.0


class Dynamo:
    """cost(w) = P * max(raw prefill blocks - credit, 0) + decode blocks + a * active requests; argmin, ties at random.

    Disaggregated: the prefill pool does not track decode blocks; the decode pool gives no overlap credit and does not
    track prefill tokens, so its cost is decode blocks alone. There is no queue (queue_threshold is off by default)."""

    name = "dynamo"

    def __init__(self, seed: int = 0, config: DynamoConfig | None = None) -> None:
        self._random = random.Random(seed)
        self._config = config or DynamoConfig()

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        found = pairable(request, workers)
        if isinstance(found, Nobody):
            return found
        prefills, decodes = found
        least = min(worker.prefill_tokens for worker in prefills)
        source = self._pick(prefills, [self.prefill_cost(request, worker, least) for worker in prefills])
        partners = [worker for worker in decodes if worker.group == source.group]
        target = self._pick(partners, [self.decode_cost(request, worker) for worker in partners])
        return Placement(source.worker_id, target.worker_id)

    def prefill_cost(self, request: RequestView, worker: WorkerView, least_active: int) -> float:
        """In blocks. least_active: the smallest active prefill tokens of the pool."""
        config, block = self._config, self._config.block
        hit = request.hit(worker)
        raw = (worker.prefill_tokens + request.tokens) / block
        request_blocks = max(request.tokens / block, 1.0)
        spread = (worker.prefill_tokens - least_active) / block
        decay = 1.0 / (1.0 + config.overlap_credit_decay * spread / request_blocks)
        device, host = hit.device // block, hit.host // block - hit.device // block
        disk = hit.kv // block - hit.host // block
        credit = config.overlap_score_credit * decay * device
        credit += config.host_weight * host + config.disk_weight * disk
        adjusted = max(raw - credit, 0.0)
        return config.prefill_load_scale * adjusted + config.active_request_weight * len(worker.work)

    def decode_cost(self, request: RequestView, worker: WorkerView) -> float:
        """In blocks: those of the requests there and of this one."""
        config = self._config
        blocks = math.ceil((worker.context_tokens + request.tokens) / config.block)
        return blocks + config.active_request_weight * worker.decoding

    def _pick(self, workers: Sequence[WorkerView], costs: Sequence[float]) -> WorkerView:
        if self._config.temperature > 0:
            return self._softmax(workers, costs)
        best = min(costs)
        return self._random.choice([w for w, cost in zip(workers, costs, strict=True) if cost <= best])

    def _softmax(self, workers: Sequence[WorkerView], costs: Sequence[float]) -> WorkerView:
        low, high = min(costs), max(costs)
        spread = (high - low) or 1.0
        weights = [math.exp(-(cost - low) / spread / self._config.temperature) for cost in costs]
        return self._random.choices(list(workers), weights)[0]


@dataclass(frozen=True, slots=True)
class SglConfig:
    """Defaults of sgl-router's cache_aware."""

    min_matched_tokens: int = 1024
    candidates_min: int = 8
    candidates_max: int = 32
    candidates_share: float = 0.05
    switch_margin_tokens: int = 1024
    pressure_gap_tokens: int = 1024
    pressure_ratio: float = 1.5


class Sgl:
    """Longest match first, among those whose uncached work is within a margin the less pressed one; a miss takes the
    better of two. pressure = waiting uncached tokens + running tokens. The decode pool is chosen by power of two
    (waiting, running, share of KV used, KV tokens): its prefixes save no prefill. Dispatched at once, nothing waits."""

    name = "sgl"

    def __init__(self, seed: int = 0, config: SglConfig | None = None) -> None:
        self._random = random.Random(seed)
        self._config = config or SglConfig()

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        found = pairable(request, workers)
        if isinstance(found, Nobody):
            return found
        prefills, decodes = found
        source = self.owner(request, prefills) or self._better(request, prefills, _sgl_prefill_load)
        partners = [worker for worker in decodes if worker.group == source.group]
        return Placement(source.worker_id, self._better(request, partners, _sgl_decode_load).worker_id)

    def owner(self, request: RequestView, workers: Sequence[WorkerView]) -> WorkerView | None:
        """The cache owner to send it to, or None for a miss."""
        config = self._config
        owners = [w for w in workers if request.hit(w).kv >= config.min_matched_tokens and fits(request, w)]
        if not owners:
            return None
        owners.sort(key=lambda w: (-request.hit(w).kv, pressure(w), w.bit))
        share = math.ceil(config.candidates_share * len(workers))
        limit = min(len(workers), config.candidates_max, max(config.candidates_min, share))
        owners = owners[:limit]
        floor = min(request.tokens - request.hit(w).kv for w in owners)
        kept = [w for w in owners if request.tokens - request.hit(w).kv <= floor + config.switch_margin_tokens]
        best = kept[0]
        for other in kept[1:]:
            if self._beats(request, other, best):
                best = other
        return best

    def _beats(self, request: RequestView, one: WorkerView, other: WorkerView) -> bool:
        config = self._config
        work_one, work_other = request.tokens - request.hit(one).kv, request.tokens - request.hit(other).kv
        press_one, press_other = pressure(one), pressure(other)
        high, low = max(press_one, press_other), min(press_one, press_other)
        if high - low > config.pressure_gap_tokens and high > config.pressure_ratio * low:
            return press_one < press_other
        return (work_one, press_one, one.bit) < (work_other, press_other, other.bit)

    def _better(
        self, request: RequestView, among: Sequence[WorkerView], load: Callable[[WorkerView], tuple[float, ...]]
    ) -> WorkerView:
        fitting = [worker for worker in among if fits(request, worker)] or list(among)
        two = self._random.sample(fitting, 2) if len(fitting) > 2 else fitting
        return min(two, key=load)


def pressure(worker: WorkerView) -> int:
    """In tokens: waiting uncached ones and running ones."""
    return worker.prefill_tokens + worker.context_tokens


def _sgl_prefill_load(worker: WorkerView) -> tuple[float, ...]:
    return (worker.prefill_tokens, len(worker.work), worker.bit)


def _sgl_decode_load(worker: WorkerView) -> tuple[float, ...]:
    used = worker.held_tokens / worker.kv_tokens if worker.kv_tokens else 0.0
    return (worker.landing, worker.decoding, used, worker.held_tokens)
