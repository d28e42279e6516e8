"""How hard each pool has it, from what workers report of their load and what the router measures of requests.

    prefill = seconds of prompts that wait for each worker / objective of the first token
              or the measured time to the first token / its objective, while prompts wait
    decode  = share of pages, slots or places in the batch that is taken by requests that decode; 1 while some are
              swapped out
              or the measured time between tokens / its objective, while workers decode more than one request
    a line at the router: 1 for the pool that is worse off

1 is full, or at the objective. A measured time counts only while there is something to share: a model that is slow
alone does not get faster by more workers. The speed of prefill is learned from the router's own counts, so nothing has
to be told about the model or the hardware. What a decode worker keeps free for prompts that still wait for their
prefill is the prefill pool's doing: it is known from that pool's queue, and taken off.
"""

from __future__ import annotations

import http.client
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from deploy.elastic_state import Member, View
from kvtransfer.types import PAGE_TOKENS
from protos.v1 import common_pb2, registry_pb2
from runtime.config import Config, RoleName

FIRST_SPEED = 2000.0
"""Prompt tokens a second of one worker, until one has been measured."""

SCRAPE_TIMEOUT_S = 2.0
STALE_S = 5.0
"""A worker whose load has not been reported for so long is not counted; it reports every second."""

ROLES: Mapping[common_pb2.Role.ValueType, RoleName] = {
    common_pb2.ROLE_PREFILL: "prefill",
    common_pb2.ROLE_DECODE: "decode",
    common_pb2.ROLE_BOTH: "both",
}

_SAMPLES = {
    ("pdserve_router_queue", ""): "line",
    ("pdserve_ttft_seconds_sum", ""): "ttft_s",
    ("pdserve_ttft_seconds_count", ""): "requests",
    ("pdserve_stage_seconds_sum", "queue"): "queue_s",
    ("pdserve_stage_seconds_sum", "prefill"): "prefill_s",
    ("pdserve_itl_seconds_sum", ""): "itl_s",
    ("pdserve_itl_seconds_count", ""): "answers",
    ("pdserve_prompt_tokens_total", "computed"): "computed",
    ("pdserve_prompt_tokens_total", "cached"): "cached",
}


@dataclass(slots=True)
class Sample:
    """One reading of the router's /metrics. All but `line` and `usable` only grow, until the router starts again."""

    line: float = 0.0
    ttft_s: float = 0.0
    requests: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    itl_s: float = 0.0
    answers: float = 0.0
    computed: float = 0.0
    cached: float = 0.0
    usable: dict[str, float] = field(default_factory=dict)  # workers that can be chosen, by role


def scrape(addresses: str) -> list[Sample]:
    """Read every router's /metrics, at host:port with commas between them. Raises OSError, ValueError."""
    return [_scrape(address) for address in addresses.split(",")]


def together(samples: Sequence[Sample]) -> Sample:
    """Of several routers: what they count adds up, and a worker is there when all of them see it."""
    whole = Sample(usable=dict(samples[0].usable))
    for one in samples:
        _add(whole, one)
        whole.usable = {role: min(count, one.usable.get(role, 0)) for role, count in whole.usable.items()}
    return whole


def _add(whole: Sample, one: Sample) -> None:
    for name in _SAMPLES.values():
        setattr(whole, name, getattr(whole, name) + getattr(one, name))


class Totals:
    """What several routers have counted altogether, whichever of them starts again and counts from nothing."""

    def __init__(self) -> None:
        self._last: list[Sample] = []
        self._before = Sample()  # of lives that are over

    def add(self, samples: Sequence[Sample]) -> Sample:
        """One reading of each router, always in the same order."""
        for old, new in zip(self._last, samples, strict=False):
            if new.requests < old.requests:
                _add(self._before, old)
                self._before.line = 0.0  # nobody waits there any more
        self._last = list(samples)
        whole = together(samples)
        _add(whole, self._before)
        return whole


def _scrape(address: str) -> Sample:
    host, _, port = address.rpartition(":")
    if host in ("", "0.0.0.0", "[::]"):
        host = "[::1]" if host == "[::]" else "127.0.0.1"
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=SCRAPE_TIMEOUT_S) as reply:
            return parsed(reply.read().decode())
    except http.client.HTTPException as error:  # no OSError: half an answer of a router that died
        raise ValueError("not an answer of a router") from error


def parsed(text: str) -> Sample:
    """Raises ValueError for what is no exposition."""
    sample = Sample()
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            name = _SAMPLES.get((one.name, one.labels.get("stage", one.labels.get("source", ""))))
            if name is not None:
                setattr(sample, name, one.value)
            elif one.name == "pdserve_router_workers_usable":
                sample.usable[one.labels.get("role", "")] = one.value
    return sample


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the last while; None = no request ended. speed: prompt tokens a second of one worker, 0 = unknown."""

    line: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: float = 0.0
    speed: float = 0.0


class Window:
    """Samples of the last `length_s`; what happened between the oldest and the newest."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, Sample]] = deque()
        self._speed = 0.0
        self._prompt = 0.0

    def add(self, now: float, sample: Sample) -> None:
        self._samples.append((now, sample))
        while len(self._samples) > 2 and self._samples[1][0] <= now - self._length_s:
            self._samples.popleft()
        self._learn(sample, self._samples[0][1] if len(self._samples) > 1 else Sample())

    def measured(self) -> Measured:
        """Time in the router's line is not counted as time to the first token: no prefill worker could help it."""
        if not self._samples:
            return Measured()
        new, old = self._samples[-1][1], self._samples[0][1]
        requests, answers = new.requests - old.requests, new.answers - old.answers
        waited = (new.ttft_s - old.ttft_s) - (new.queue_s - old.queue_s)
        return Measured(
            line=new.line,
            ttft_s=max(waited, 0.0) / requests if requests > 0 else None,
            tpot_s=(new.itl_s - old.itl_s) / answers if answers > 0 else None,
            prompt_tokens=self._prompt,
            speed=self._speed,
        )

    def _learn(self, new: Sample, old: Sample) -> None:
        """What was last seen stays known while nothing comes."""
        requests, seconds = new.requests - old.requests, new.prefill_s - old.prefill_s
        if requests > 0:
            self._prompt = (new.computed + new.cached - old.computed - old.cached) / requests
        if seconds > 0 and new.computed > old.computed:
            self._speed = (new.computed - old.computed) / seconds


@dataclass(slots=True)
class Hearing:
    """When each worker's load was last news."""

    _heard: dict[str, tuple[int, int, float]] = field(default_factory=dict)

    def fresh(self, record: registry_pb2.WorkerRecord, now: float) -> bool:
        known = self._heard.get(record.worker_id)
        if known is None or known[:2] != (record.epoch, record.load.sequence):
            known = self._heard[record.worker_id] = (record.epoch, record.load.sequence, now)
        return now - known[2] <= STALE_S

    def keep(self, names: Iterable[str]) -> None:
        """Forget everybody else."""
        self._heard = {name: self._heard[name] for name in names if name in self._heard}


@dataclass(frozen=True, slots=True)
class Goals:
    """max_batch: answers one worker computes at once."""

    ttft_s: float = 2.0
    ttft_s_per_1k: float = 0.125
    tpot_s: float = 0.05
    max_batch: int = 64

    @classmethod
    def of(cls, config: Config) -> Goals:
        return cls(config.ttft_goal_s, config.ttft_goal_s_per_1k, config.tpot_goal_s, config.max_batch)


@dataclass(frozen=True, slots=True)
class Landing:
    """Prompts that have a place to decode and are not computed yet."""

    tokens: int
    requests: int


def look(
    records: Sequence[registry_pb2.WorkerRecord], hearing: Hearing, measured: Measured, goals: Goals, now: float
) -> View:
    """The fleet as the controller's rules want it."""
    members = tuple(
        Member(
            name=record.worker_id,
            epoch=record.epoch,
            role=ROLES[record.role],
            ready=record.ready,
            draining=record.draining,
            fresh=hearing.fresh(record, now),
            load=float(record.load.running + record.load.waiting + record.load.leases),
        )
        for record in records
        if record.role in ROLES
    )
    hearing.keep(one.name for one in members)
    counted = {one.name for one in members if one.usable and one.fresh}
    loads = {record.worker_id: record.load for record in records if record.worker_id in counted}
    prefill = [loads[one.name] for one in members if one.name in loads and one.serves("prefill")]
    decode = [loads[one.name] for one in members if one.name in loads and one.serves("decode")]
    pure = [loads[one.name] for one in members if one.name in loads and one.role == "prefill"]
    landing = Landing(sum(load.queued_prefill_tokens for load in prefill), sum(map(_requests, pure)))
    pressures = {
        "prefill": _prefill(prefill, measured, goals),
        "decode": _decode(decode, landing, measured, goals),
    }
    if measured.line >= 1:
        worse = max(pressures, key=lambda pool: pressures[pool])
        pressures[worse] = max(pressures[worse], 1.0)
    return View(members, **pressures)


def _prefill(loads: Sequence[common_pb2.Load], measured: Measured, goals: Goals) -> float:
    waiting = sum(load.queued_prefill_tokens for load in loads)
    if not waiting:
        return 0.0
    goal = goals.ttft_s + goals.ttft_s_per_1k * measured.prompt_tokens / 1000
    backlog_s = waiting / len(loads) / (measured.speed or FIRST_SPEED)
    return max(backlog_s, measured.ttft_s or 0.0) / goal


def _decode(loads: Sequence[common_pb2.Load], landing: Landing, measured: Measured, goals: Goals) -> float:
    if not loads:
        return 0.0
    busy = sum(map(_requests, loads)) / len(loads)
    pages_total, slots_total = sum(load.pages_total for load in loads), sum(load.slots_total for load in loads)
    pages_kept, slots_kept = landing.tokens / PAGE_TOKENS, landing.requests
    pages = _taken(pages_total, sum(load.pages_free for load in loads) + pages_kept)
    slots = _taken(slots_total, sum(load.slots_free for load in loads) + slots_kept)
    swapped = 1.0 if any(load.swapped for load in loads) else 0.0
    slow = measured.tpot_s / goals.tpot_s if measured.tpot_s and goals.tpot_s and busy > 1 else 0.0
    return max(busy / goals.max_batch, pages, slots, swapped, slow)


def _requests(load: common_pb2.Load) -> int:
    return load.running + load.waiting


def _taken(total: int, free: float) -> float:
    return max(1 - free / total, 0.0) if total else 0.0
