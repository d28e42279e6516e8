"""Our cost: predicted seconds, and the policy that takes the cheapest way.

Three kinds of ways are compared in the same unit: a pair (prefill on P, hand over to D), prefill on D itself (short or
mostly cached prompts, or when the prefill queues are long and D's step time allows), each with or without bringing a
prefix from another worker's cache there first, and waiting in the router's own
queue when every worker is busy for longer than `hold_s`, so that a later decision can be a better one.

    TTFT  = wait for room on D + max(queue, fetch) + load (lower tiers) + prefill(uncached, cached)
    later = max(0, transfer - overlap with the prefill's chunks)                    the hand-off only delays token two
    cost  = TTFT + misses + work_weight * prefill + later_weight * (later + output * TPOT) + what it does to others

The wait for room counts in full: nothing is dispatched before both sides have room.

Work may have a price beyond the request's own time, since it delays whoever comes next (`work_weight`). It is 0 by
default: measured on a busy fleet it saves work and no time, and it queues a hot prefix at its first owner instead of
letting a second worker learn it. A prefill on D holds up everybody who decodes there, and may not push them over their
TPOT objective. Whoever is held up holds room for longer: where a fleet is short of decode workers' room, that is what
prefill there costs most, long before none is left. Deadline misses dominate. Near-ties go to the worker used less.

The argmin is each request's own good. For a prefix that many want it is not everybody's: `rent` says when one of them
goes to an idle worker instead, so that those who follow find another copy.

Seconds come from `speeds`, which learns them from reports; room and queues from the ledger; hits from the index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtransfer.hashing import LINK_TOKENS
from router.policy.fetching import Holder, best, holders
from router.policy.index import Hit
from router.policy.policies import pairable
from router.policy.rent import Rents
from router.policy.speeds import Speeds
from router.policy.view import Decision, Fetch, Forecast, Nobody, Placement, RequestView, Wait, WorkerView, split


@dataclass(frozen=True, slots=True)
class CostConfig:
    """work_weight: price of a second of prefill work beyond the request's own, on a fleet whose prefill workers all
    have `busy_s` or more to do; less on an idler one. later_weight: of a second after the first token. disturb_weight:
    of a second during which somebody else's decoding stands still; crowd_weight: added to it when no decode worker has
    any room left, in part from a share of `crowded` reserved on. miss_s: price of a missed objective. margin: share of
    an objective that is planned with. tie: costs this close are equal (a share, and at least tie_s). share_window_s:
    over which a decode worker's share of prefill is counted. chunk_tokens: tokens of a prompt that become readable at
    once. pause_tokens: of a chunk, after which a prompt gives way to one that is due sooner. hold_s: a request waits
    here while every prefill worker has more than this to do before it, 0 = never. deflect: workers of the decode role
    may prefill. fetch_share: a prefix is fetched when that takes less than this share of computing it, since a prompt
    that waits for its prefix loses its place in the queue. finalists: of each half, combined into pairs.
    """

    work_weight: float = 0.0
    busy_s: float = 1.0
    later_weight: float = 0.05
    disturb_weight: float = 0.005
    crowd_weight: float = 0.2
    crowded: float = 0.5
    miss_s: float = 20.0
    margin: float = 0.8
    tie: float = 0.02
    tie_s: float = 0.001
    share_window_s: float = 5.0
    chunk_tokens: int = 4096
    pause_tokens: int = 1024
    hold_s: float = 0.0
    deflect: bool = True
    fetch_share: float = 0.5
    finalists: int = 8


@dataclass(slots=True)
class _Start:
    """The first token from this worker."""

    worker: WorkerView
    queue_s: float
    load_s: float
    prefill_s: float
    cached: int
    cost: float
    fetch: Fetch | None = None
    step_s: float = 0.0  # of whoever decodes there
    said: int = 0  # tokens it was said to have, whatever that is worth


@dataclass(slots=True)
class _Rest:
    """The other tokens from this worker."""

    worker: WorkerView
    admit_s: float
    step_s: float
    tpot_s: float
    cost: float


_Way = tuple[float, _Start, _Rest, float]
"""(cost, first token from here, the rest from there, seconds the hand-off adds after the first token)"""


class Predicted:
    """The argmin over all ways, or another copy of a hot prefix. Keeps what waiting for such prefixes has cost."""

    name = "predicted"

    def __init__(self, speeds: Speeds, config: CostConfig | None = None) -> None:
        self._speeds = speeds
        self._config = config or CostConfig()
        self._rents = Rents()
        self._pause_s = 0.0  # half a chunk: until a prompt gives way to one that is due sooner
        self._stall = 0.0  # price of a second during which one other's decoding stands still

    def choose(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        found = pairable(request, workers)
        if isinstance(found, Nobody):
            return found
        return self._decide(request, *found, workers, now)

    def alone(self, request: RequestView, workers: Sequence[WorkerView], now: float) -> Decision:
        """Every prefill worker is away: those that decode do both meanwhile."""
        prefills, decodes = split(workers, request.tokens + 1)
        if prefills or not decodes or not self._config.deflect:
            return Nobody("no_prefill_worker")
        return self._decide(request, [], decodes, workers, now)

    def _decide(
        self,
        request: RequestView,
        prefills: list[WorkerView],
        decodes: list[WorkerView],
        workers: Sequence[WorkerView],
        now: float,
    ) -> Decision:
        self._speeds.relax(now)
        price = self._price(prefills, now)
        self._pause_s = 0.5 * self._speeds.prefill_s("", self._config.pause_tokens, 0)
        self._stall = self._stall_price(decodes)
        among = holders(request, workers)
        rests = sorted((self._rest(request, worker, now) for worker in decodes), key=lambda rest: rest.cost)
        able = {worker.worker_id for worker in prefills}
        starts = [self._start(request, worker, now, price, among) for worker in prefills]
        if request.behind:  # whoever waits here waits for these workers
            for start in starts:
                start.cost += request.behind * start.prefill_s / len(prefills)
        starts.sort(key=lambda start: start.cost)
        options = self._pairs(request, starts, rests, now)
        options += self._locals(request, rests, able, price, among, now)
        if not options:
            return Nobody("no_compatible_decode_worker")
        way = self._pick(options)
        way = self._copy(request, way, options, prefills) or way
        best = self._placement(*way)
        hold = self._config.hold_s
        if hold and best.forecast.queue_s > hold and self._all_busy(request, way[1].worker, prefills, now):
            return Wait(best.forecast.queue_s - hold, "workers_busy")
        return best

    def _all_busy(self, request: RequestView, chosen: WorkerView, prefills: Sequence[WorkerView], now: float) -> bool:
        """Everywhere it would stand behind others for longer than it should. While a worker is free it may queue for
        another, that has its prefix: it is in nobody's way."""
        hold = self._config.hold_s
        return all(worker.queue_s(now, request.due) > hold for worker in (chosen, *prefills))

    # --- the halves ---------------------------------------------------------------------------------------------

    def _price(self, prefills: Sequence[WorkerView], now: float) -> float:
        """Of a second of work: what it delays, which is nothing while there are idle workers for whoever comes next.
        So a hot prefix spreads over an idle fleet, and a busy one keeps requests where their prefix is."""
        crowd = sum(min(worker.queue_s(now) / self._config.busy_s, 1.0) for worker in prefills) / max(len(prefills), 1)
        return self._config.work_weight * crowd

    def _stall_price(self, decodes: Sequence[WorkerView]) -> float:
        config = self._config
        full = sum(worker.reserved() for worker in decodes) / max(len(decodes), 1)
        crowd = max(full - config.crowded, 0.0) / (1.0 - config.crowded)
        return config.disturb_weight + config.crowd_weight * crowd

    def _start(
        self,
        request: RequestView,
        worker: WorkerView,
        now: float,
        price: float,
        among: Sequence[Holder],
        step_s: float = 0.0,
    ) -> _Start:
        hit = request.hit(worker)
        coming = request.expected_hits.get(worker.bit)
        said = min(max(hit.resume, coming.resume if coming is not None else 0), request.tokens - 1)
        cached = int(said * self._speeds.trust.of(worker.worker_id))
        queue_s = worker.queue_s(now, request.due, self._pause_s)
        load_s = self._load_s(hit, worker)
        prefill_s = self._speeds.prefill_s(worker.worker_id, request.tokens - cached, cached, step_s)
        fetch = best(self._speeds, request, worker, cached, among, step_s) if among else None
        if fetch is not None:
            left = self._speeds.prefill_s(worker.worker_id, request.tokens - fetch.tokens, fetch.tokens, step_s)
            saved = load_s + prefill_s - left
            worth = saved * (1.0 + price) * self._speeds.fetch_trust(fetch.source, worker.worker_id)
            if fetch.seconds < self._config.fetch_share * worth:
                there = min(hit.resume, cached)  # what is only on its way may come no sooner than this
                whole_s = self._speeds.prefill_s(worker.worker_id, request.tokens - there, there, step_s)
                fetch = replace(fetch, budget_s=queue_s + load_s + whole_s - left)
                load_s, prefill_s, cached = 0.0, left, fetch.tokens
            else:
                fetch = None
        ttft = max(queue_s, fetch.seconds if fetch is not None else 0.0) + load_s + prefill_s
        cost = ttft + price * (prefill_s + load_s)
        passed = worker.passed(request.due) if worker.work else 0
        cost += (worker.fetching + passed) * prefill_s  # those due later, or whose prefix still comes, are overtaken
        cost += self._missed(request.waited_s + ttft, request.ttft_goal_s)
        return _Start(worker, queue_s, load_s, prefill_s, cached, cost, fetch, step_s, said)

    def _load_s(self, hit: Hit, worker: WorkerView) -> float:
        """Bringing up what of the hit lies below the device: pages, and the state where it can be resumed."""
        above = max(min(hit.host, hit.resume), hit.device)
        sizes = {"host": above - hit.device, "disk": hit.resume - above}
        seconds = 0.0
        for tier, tokens in sizes.items():
            size = max(tokens, 0) * worker.bytes_per_token + (worker.state_bytes if hit.state == tier else 0.0)
            if size > 0:
                seconds += self._speeds.load_s(size, tier)
        return seconds

    def _rest(self, request: RequestView, worker: WorkerView, now: float) -> _Rest:
        step_s = self._speeds.step_s(worker.worker_id, worker.decoding + 1, worker.context_tokens + request.tokens)
        tpot_s = step_s / (1.0 - min(worker.mixed_share(now, self._config.share_window_s), 0.9))
        tpot_s += worker.queue_s(now) / max(request.expected_output, 32.0)
        admit_s = self._admit_s(request, worker, tpot_s)
        cost = admit_s + self._config.later_weight * request.expected_output * tpot_s
        cost += self._missed(tpot_s, request.tpot_goal_s)
        return _Rest(worker, admit_s, step_s, tpot_s, cost)

    def _admit_s(self, request: RequestView, worker: WorkerView, tpot_s: float) -> float:
        """Until the pool holds prompt and answer: what is there ends at about one request's share per its remaining
        steps. In-flight hand-offs hold their room already, so this is the bound on them."""
        need = request.tokens + request.expected_output - worker.room_tokens()
        if worker.max_batch and worker.decoding >= worker.max_batch:
            need = max(need, worker.held_tokens / max(worker.decoding, 1))
        if need <= 0:
            return 0.0
        freed_per_s = worker.held_tokens / max(request.expected_output * tpot_s, 1e-3)
        return need / max(freed_per_s, 1.0)

    # --- the ways -----------------------------------------------------------------------------------------------

    def _pairs(self, request: RequestView, starts: list[_Start], rests: list[_Rest], now: float) -> list[_Way]:
        """The best of each half with each other; what a hand-off costs is small beside what divides the halves."""
        config = self._config
        targets = rests[: config.finalists] + [
            rest for rest in rests[config.finalists :] if request.hit(rest.worker).kv >= request.tokens // 2
        ]
        options: list[_Way] = []
        for start in starts[: config.finalists]:
            partners = [r for r in targets if r.worker.group == start.worker.group] or [
                rest for rest in rests if rest.worker.group == start.worker.group
            ][: config.finalists]
            for rest in partners:
                if rest.worker is start.worker:
                    continue
                late_s = self._late_s(request, start, rest)
                cost = start.cost + rest.cost + config.later_weight * late_s
                options.append((cost, start, rest, late_s))
        return options

    def _late_s(self, request: RequestView, start: _Start, rest: _Rest) -> float:
        """What the hand-off adds after the first token: the transfer less what flies while chunks are computed, but
        never less than the last chunk's flight."""
        source, target = start.worker, rest.worker
        missing = request.tokens - min(request.hit(target).kv, request.tokens)
        size = missing * source.bytes_per_token + source.state_bytes
        whole = self._speeds.transfer_s(source.worker_id, target.worker_id, size, source.flows + target.flows)
        last = whole * min(1.0, self._config.chunk_tokens / max(missing, 1))
        uncached = max(request.tokens - start.cached, 1)
        overlap = start.prefill_s * max(0.0, 1.0 - self._config.chunk_tokens / uncached)
        return max(whole - overlap, last)

    def _locals(
        self,
        request: RequestView,
        rests: list[_Rest],
        able: set[str],
        price: float,
        among: Sequence[Holder],
        now: float,
    ) -> list[_Way]:
        """Prefill on the worker that decodes: no transfer, but whoever decodes there waits meanwhile."""
        options: list[_Way] = []
        for rest in rests:
            worker = rest.worker
            if worker.worker_id not in able and not self._config.deflect:
                continue
            start = self._start(request, worker, now, price, among, rest.step_s if worker.decoding else 0.0)
            options.append((start.cost + rest.cost + self._disturbance(request, start, rest, now), start, rest, 0.0))
        return options

    def _disturbance(self, request: RequestView, start: _Start, rest: _Rest, now: float) -> float:
        config, worker = self._config, rest.worker
        others = worker.decoding
        if not others:
            return 0.0
        window = config.share_window_s
        share = worker.mixed_share(now, window) + start.prefill_s / window
        tpot_s = rest.step_s / (1.0 - min(share, 0.95))
        missed = self._missed(tpot_s, request.tpot_goal_s)
        return others * (self._stall * start.prefill_s + missed)

    def _missed(self, seconds: float, goal_s: float) -> float:
        """A step with a slope, so that among hopeless ways the least late one still wins. Rounded at the edge: what is
        predicted close to the objective is missed now and then."""
        if not goal_s:
            return 0.0
        over = seconds / (goal_s * self._config.margin) - 1.0
        if over < -1.0 / 3.0:
            return 0.0
        return self._config.miss_s / (1.0 + math.exp(min(-20.0 * over, 50.0))) * (1.0 + max(over, 0.0))

    # --- the pick -----------------------------------------------------------------------------------------------

    def _pick(self, options: list[_Way]) -> _Way:
        least = min(option[0] for option in options)
        limit = least + max(self._config.tie * abs(least), self._config.tie_s)
        tied = [option for option in options if option[0] <= limit]
        return min(tied, key=lambda o: (o[1].worker.served, o[1].worker.bit, o[2].worker.served, o[2].worker.bit))

    def _copy(
        self, request: RequestView, way: _Way, options: list[_Way], prefills: Sequence[WorkerView]
    ) -> _Way | None:
        """An idle worker that is to learn the prefix for whose holder `way` waits, when that has cost enough. The price
        is what this request loses, and the extra work by the share of workers that are busy: on an idle fleet it is in
        nobody's way."""
        cost, start, _, _ = way
        links = request.keys.links()[: start.cached // LINK_TOKENS] if request.keys is not None else ()
        if not links or start.queue_s <= 0:
            return None
        holder = request.hit(start.worker).resume >= start.cached
        idle = [o for o in options if o[1].queue_s <= 0 and (o[1].cached < start.cached or (holder and o[1].fetch))]
        copy = min(idle, key=lambda option: option[0], default=None)
        price, count = math.inf, max(len(prefills), 1)  # without any, those that decode do both
        if copy is not None:
            work = copy[1].load_s + copy[1].prefill_s - start.load_s - start.prefill_s
            price = copy[0] - cost + max(work, 0.0) * sum(bool(w.work) for w in prefills) / count
        waits = start.queue_s * (1.0 + request.behind / count)  # those behind it wait as well
        return copy if self._rents.due(links[-1], request.request_id, waits, price) else None

    def _placement(self, cost: float, start: _Start, rest: _Rest, late_s: float) -> Placement:
        forecast = Forecast(
            start.queue_s,
            start.load_s,
            start.prefill_s,
            late_s,
            rest.admit_s,
            rest.tpot_s,
            start.cached,
            start.fetch.seconds if start.fetch is not None else 0.0,
            start.step_s,
            start.said if start.fetch is None else 0,
            self._speeds.passing_s,
        )
        return Placement(start.worker.worker_id, rest.worker.worker_id, forecast, cost, start.fetch)
