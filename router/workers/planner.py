"""The chosen policy over the live fleet: views and bookings kept current, speeds learned, caches listened to.

The pure parts (index, speeds, ledger, policies) know no workers, tasks or protobuf; this is the thin shell around them.
What a policy decides on is this router's own account of its workers, corrected by what they report; a wrong entry
costs time and never correctness, since the worker's own answer to Reserve is the truth.

`least_load`, the default, looks at what workers report of themselves and needs nothing of this: it stays in `policy`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import grpc
import structlog

from kvtransfer.hashing import root
from protos.v1 import common_pb2, kvsource_pb2
from router.policy import pairing
from router.policy.cost import CostConfig, Predicted
from router.policy.index import NO_HIT, PrefixIndex
from router.policy.keys import PromptKeys
from router.policy.ledger import Demand, Ledger
from router.policy.pairing import Role
from router.policy.peers import Dynamo, Sgl
from router.policy.policies import Policy, PowerOfTwo, RoundRobin, SessionAffinity
from router.policy.speeds import Speeds
from router.policy.trust import as_seen
from router.policy.view import Forecast, Key, Nobody, Placement, RequestView, Wait, WorkerView
from router.request import Work
from router.shared.cache_wire import batch_of
from router.shared.index import SharedIndex
from router.shared.others import Others
from router.workers.deadlines import SURE, sure, too_late_s
from router.workers.worker import Worker
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import PdserveError
from runtime.metrics import Metrics

RETRY_S = 0.5
PACE_RATE = 0.1
GAP_PAUSE_S = 30.0
"""Most between two subscriptions to a cache feed that never fits."""
LISTENING = frozenset({"predicted", "dynamo", "sgl"})
"""Policies that look at caches."""

_log = structlog.get_logger("pdserve.router.planner")


@dataclass(slots=True)
class Booked:
    """One leg's place in the ledger. Given back once, by the leg."""

    ledger: Ledger
    key: Key
    worker: str
    clock: Clock

    def prefilled(self) -> None:
        self.ledger.prefilled(self.key, self.worker, self.clock.monotonic())

    def landed(self) -> None:
        self.ledger.landed(self.key, self.worker)

    def grown(self, tokens: int) -> None:
        self.ledger.grown(self.key, self.worker, tokens)

    def release(self) -> None:
        """Idempotent."""
        self.ledger.release(self.key, self.worker, self.clock.monotonic())


@dataclass(slots=True)
class Plan:
    """What was decided for one passage, and what was expected of it. demands: by worker. surely_s: until the first
    token, for certain; 0 = not known."""

    choice: pairing.Pair | pairing.Local
    demands: Mapping[str, Demand]
    placement: Placement
    keys: PromptKeys | None
    surely_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Of a request in the line: since when, when it is due as workers are told, and how many wait behind it."""

    waited_s: float = 0.0
    due: float = math.inf
    behind: int = 0


class Planner:
    """`active`: a policy other than least_load decides. workers(): the fleet's, as they are now."""

    def __init__(
        self,
        config: Config,
        model: str,
        revision: str,
        clock: Clock,
        metrics: Metrics,
        workers: Callable[[], list[Worker]],
    ) -> None:
        self.active = config.policy != "least_load"
        self.speeds = Speeds()
        self.ledger = Ledger()
        self.index = PrefixIndex()
        self._config = config
        self._model, self._revision = model, revision
        self._clock = clock
        self._workers = workers
        self.listening = config.policy in LISTENING
        self._policy = _made(config.policy, self.speeds, config.line_hold_s)
        self._pace_s = 0.0  # seconds of prefill per prompt token, cached ones included, where no policy learns speeds
        self.shared: SharedIndex | None = None
        self.others = Others(self.speeds)
        self._feeds: dict[str, tuple[Worker, asyncio.Task[None]]] = {}
        self._numbers = 0
        self._risen: dict[tuple[str, str], tuple[int, float]] = {}  # by worker and tier: bytes and seconds so far
        self._error = metrics.gauge(
            "pdserve_router_ttft_prediction_error", "Median relative error of predicted seconds to the first token"
        )
        self._fetches = metrics.counter(
            "pdserve_router_prefix_fetches", "Prompts sent with a worker to fetch their prefix from", ["outcome"]
        )
        self._gaps = metrics.counter("pdserve_router_cache_feed_snapshots", "Snapshots asked for of workers' caches")

    # --- workers

    def joined(self, worker: Worker) -> None:
        """It has described itself (again)."""
        if not self.active:
            return
        view = self.ledger.view(worker.id)
        if view is None:
            view = WorkerView(worker.id, worker.role or Role.BOTH, bit=self.index.bit(worker.id))
            self.ledger.add(view)
        assert worker.facts is not None
        view.max_model_len = worker.facts.max_model_len
        view.bytes_per_token, view.state_bytes = _sizes(worker.facts.layout)
        if view.state_bytes:
            self.index.stateful = True
        if self.listening:
            self._follow(worker)

    def _follow(self, worker: Worker) -> None:
        """Its cache's events. One that comes again under its name is another process, at another place."""
        known = self._feeds.get(worker.id)
        if known is not None and known[0] is worker:
            return
        if known is not None:
            known[1].cancel()
        feed = asyncio.create_task(self._listen(worker), name=f"cache-events-{worker.id}")
        self._feeds[worker.id] = (worker, feed)

    def left(self, worker: Worker) -> None:
        feed = self._feeds.pop(worker.id, None)
        if feed is not None:
            feed[1].cancel()
        if self.active:
            self.ledger.remove(worker.id)
            self.index.forget(worker.id)
            self.speeds.trust.forget(worker.id)
            self._risen = {key: value for key, value in self._risen.items() if key[0] != worker.id}
            self.others.forget(worker.id)
        if self.shared is not None:
            self.shared.left(worker.id)

    async def close(self) -> None:
        feeds = [feed for _, feed in self._feeds.values()]
        for feed in feeds:
            feed.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)

    def observe(self) -> None:
        self._error.set(self.speeds.ttft_error.median)

    # --- decisions

    def busy(self, hold_s: float) -> bool:
        """Every prefill worker has more than this to do. `predicted` answers that by itself, for each request."""
        return bool(hold_s) and self._policy.name != "predicted" and self._all_have(hold_s) > 0.0

    def _all_have(self, seconds: float) -> float:
        """The least any prefill worker has to do, by the mean pace, if that is more than `seconds`; else 0."""
        least = math.inf
        for worker in self._workers() if self._pace_s else ():
            state = worker.state()
            if state.usable and state.role is not Role.DECODE:
                least = min(least, state.prefill_load * self._pace_s)
                if least <= seconds:
                    return 0.0
        return least if least < math.inf else 0.0

    def too_late_s(
        self, work: Work, tokens: tuple[int, ...], left_s: float, due: Callable[[], float], last: Callable[[], float]
    ) -> float:
        """Seconds until the first token, if that is surely more than `left_s`; else 0. last: due time of the last
        prompt at a worker; where nobody books who is where, another is behind all of them or may be behind none."""
        if self._policy.name != "predicted":
            wait_s = SURE * self._all_have(left_s / SURE)
            return wait_s if wait_s and due() >= last() else 0.0
        now = self._clock.monotonic()
        views = (self.others.corrected(view, worker.load, now) for worker, view in self._known())
        return too_late_s(views, self.speeds, len(tokens), left_s, now, due, partial(self._most_cached, work, tokens))

    def _most_cached(self, work: Work, tokens: tuple[int, ...]) -> int:
        keys = PromptKeys(root(work.salt, self._model, self._revision), tokens)
        return max((hit.kv for hit in self.index.match(keys, expected=True).values()), default=0)

    def plan(
        self,
        work: Work,
        tokens: tuple[int, ...],
        allowed: Callable[[str, Role], Role | None],
        place: Standing,
        *,
        alone: bool = False,
    ) -> Plan | Wait | Nobody:
        """allowed: the role a worker may be given now, or None. alone: there is no prefill worker at all, and those
        that decode may do without. Changes nothing but the policy's own memory."""
        now = self._clock.monotonic()
        views = self._views(allowed, now)
        request = self._request(work, tokens, place)
        decision: Placement | Wait | Nobody = Nobody("no_prefill_worker")
        if not alone:
            decision = self._policy.choose(request, views, now)
        elif isinstance(self._policy, Predicted):
            decision = self._policy.alone(request, views, now)
        if not isinstance(decision, Placement):
            return decision
        choice: pairing.Pair | pairing.Local = pairing.Pair(decision.prefill, decision.decode)
        if decision.local:
            choice = pairing.Local(decision.decode)
        surely_s = sure(self.speeds) * decision.forecast.ttft_s
        return Plan(choice, self._demands(request, decision), decision, _keys_of(request), surely_s)

    def _views(self, allowed: Callable[[str, Role], Role | None], now: float) -> list[WorkerView]:
        """One per usable worker, with the role it may be given; the account is shared with the ledger's, unless other
        routers have something there."""
        views = []
        for worker, view in self._known():
            role = allowed(worker.id, view.role)
            if role is not None:
                seen = self.others.corrected(view, worker.load, now)
                views.append(seen if role is view.role else replace(seen, role=role))
        return views

    def _known(self) -> Iterator[tuple[Worker, WorkerView]]:
        """Usable workers, and the ledger's view of each."""
        for worker in self._workers():
            view = self.ledger.view(worker.id)
            if view is None or worker.role is None or not worker.usable:
                continue
            view.role, view.group = worker.role, worker.group
            view.kv_tokens, view.slots = worker.room()
            view.fetches = self._config.prefix_fetches if worker.can("prefix_source") else 0
            yield worker, view

    def _request(self, work: Work, tokens: tuple[int, ...], place: Standing) -> RequestView:
        now, config = self._clock.monotonic(), self._config
        goal_s = config.ttft_goal_s + config.ttft_goal_s_per_1k * len(tokens) / 1000
        request = RequestView(
            work.request_id,
            len(tokens),
            now - place.waited_s,
            expected_output=self.speeds.output.expect(len(tokens), work.sampling.max_tokens),
            ttft_goal_s=min(goal_s, work.deadline - work.arrived),  # else who could be in time is passed over
            tpot_goal_s=config.tpot_goal_s,
            session=work.session,
            waited_s=place.waited_s,
            due=place.due,
            behind=place.behind,
        )
        if not self.listening:
            return request
        keys = PromptKeys(root(work.salt, self._model, self._revision), tokens)
        hits = self.index.match(keys)
        expected = self.index.match(keys, expected=True) if self._policy.name == "predicted" else {}
        return replace(request, keys=keys, hits=hits, expected_hits=expected)

    def _demands(self, request: RequestView, placed: Placement) -> dict[str, Demand]:
        """What both legs book. The context grows to the whole answer; on average half of it counts."""
        view = self.ledger.view(placed.prefill)
        hit = request.hit(view) if view is not None else NO_HIT
        cached = placed.forecast.cached_tokens or min(hit.resume, request.tokens - 1)
        prefill_s = max(placed.forecast.load_s + placed.forecast.prefill_s, 1e-6)
        due = request.due
        slots = 1 if view is not None and view.state_bytes else 0
        source = placed.fetch.source if placed.fetch is not None else ""
        whole = request.tokens + int(request.expected_output)
        decode = Demand(whole, slots, request.tokens + int(request.expected_output / 2), decode=True, landing=True)
        if placed.local:
            uncached = request.tokens - cached
            both = replace(decode, landing=False, prefill_tokens=uncached, prefill_s=prefill_s, due=due)
            both = replace(both, fetch_from=source)
            return {placed.decode: both}
        prefill = Demand(request.tokens, slots, prefill_tokens=request.tokens - cached, prefill_s=prefill_s, due=due)
        prefill = replace(prefill, fetch_from=source)
        return {placed.prefill: prefill, placed.decode: decode}

    def book(self, request_id: str, plan: Plan) -> dict[str, Booked]:
        """By worker; what the ledger would not grant is booked all the same, since the worker has the last word."""
        self._numbers += 1
        key, now = (request_id, self._numbers), self._clock.monotonic()
        if self.ledger.reserve(key, plan.demands, now) is not None:
            self.ledger.charge(key, plan.demands, now)
        if plan.keys is not None and self._policy.name == "predicted":
            self.index.expect(plan.placement.prefill, plan.keys.links(), now)
        return {worker: Booked(self.ledger, key, worker, self._clock) for worker in plan.demands}

    def moving(self, request_id: str, worker: str, tokens: int, left: int) -> Booked | None:
        """Book a running choice of `tokens` known tokens, with `left` to make at most, at the worker it moves to."""
        view = self.ledger.view(worker) if self.active else None
        if view is None:
            return None
        expected = self.speeds.output.expect(tokens, left)
        slots = 1 if view.state_bytes else 0
        demand = Demand(tokens + int(expected), slots, tokens + int(expected / 2), decode=True, landing=True)
        self._numbers += 1
        key = (request_id, self._numbers)
        self.ledger.charge(key, {worker: demand}, self._clock.monotonic())
        return Booked(self.ledger, key, worker, self._clock)

    # --- what is learned

    def prefilled(
        self, worker: str, tokens: int, times: common_pb2.StageTimes, forecast: Forecast, took_s: float
    ) -> None:
        """took_s: from the moment it was sent to the first token."""
        if times.prefill_s > 0 and self._policy.name != "predicted":
            seen_s = min(times.prefill_s, took_s) / max(tokens, 1)
            self._pace_s += (PACE_RATE if self._pace_s else 1.0) * (seen_s - self._pace_s)
        if not self.active:
            return
        cached, now = min(times.cached_tokens, tokens), self._clock.monotonic()
        self.speeds.trust.learn(worker, forecast.said_tokens, cached, now)
        if times.prefill_s > 0:
            said_s = times.fetch_s + times.queue_s + times.prefill_s
            prefill_s = as_seen(times.prefill_s, said_s, took_s)
            if prefill_s == times.prefill_s and took_s > 0:
                self.speeds.learn_passing(took_s - said_s)
            self.speeds.learn_prefill(worker, tokens - cached, cached, prefill_s, forecast.step_s, now)
        if forecast.ttft_s > 0:
            self.speeds.ttft_error.learn(forecast.ttft_s, took_s)

    def fetched(self, source: str, target: str, times: common_pb2.StageTimes, lifted: float = 0.0) -> None:
        """A prefix that was to be brought to `target` first was brought there, or was not. lifted: see Fetch."""
        self._fetches.labels("fetched" if times.fetched_tokens else "missed").inc()
        size, now = float(times.transfer_bytes), self._clock.monotonic()
        if times.fetched_tokens:
            self.speeds.learn_fetch(source, target, size, times.transfer_s, times.fetch_s, now, lifted)
        else:
            self.speeds.missed_fetch(source, target, now)

    def handed_over(self, source: str, target: str, times: common_pb2.StageTimes) -> None:
        if self.active and times.transfer_s > 0:
            size, now = float(times.transfer_bytes), self._clock.monotonic()
            self.speeds.learn_transfer(source, target, size, times.transfer_s, ended=now)

    def decoded(self, worker: str, prompt: int, tokens: int, times: common_pb2.StageTimes) -> None:
        """tokens: generated by this leg; its steps were shared with whoever decodes there now, roughly."""
        if not self.active:
            return
        self.speeds.output.learn(prompt, tokens)
        view = self.ledger.view(worker)
        if view is not None and tokens > 1 and times.decode_s > 0:
            batch, now = max(view.decoding, 1), self._clock.monotonic()
            step_s = times.decode_s / (tokens - 1)
            self.speeds.learn_step(worker, batch, view.context_tokens, step_s, now - times.decode_s, now)

    def reported(self, worker: Worker, load: common_pb2.Load) -> None:
        """What it says of the memory below its device since it last did: how fast things come up from there."""
        if not self.active:
            return
        for tier in load.tiers:
            if tier.tier not in ("host", "disk") or not math.isfinite(tier.seconds_up):
                continue
            size, seconds = self._risen.get((worker.id, tier.tier), (0, 0.0))
            self._risen[(worker.id, tier.tier)] = (tier.bytes_up, tier.seconds_up)
            if tier.bytes_up > size and tier.seconds_up > seconds:
                self.speeds.learn_load(tier.bytes_up - size, tier.seconds_up - seconds, tier.tier)

    # --- caches

    async def _listen(self, worker: Worker) -> None:
        """Follow the worker's cache for ever; after a gap or a new life, from a snapshot. What another router has left
        of it is where a new one begins."""
        if self.shared is not None and worker.facts is not None:
            await self.shared.load(worker.id, worker.group, worker.facts.epoch)
        gaps = 0  # in a row
        while True:
            epoch, sequence = self.index.position(worker.id)
            try:
                async for batch in worker.cache_events(epoch, sequence):
                    if not self.index.apply(worker.id, batch_of(batch)):
                        self._gaps.inc()
                        gaps += 1
                        await asyncio.sleep(_gap_pause_s(gaps))
                        break
                    gaps = 0
                    if self.shared is not None:
                        self.shared.heard(worker.id, worker.group, batch)
                else:
                    await asyncio.sleep(RETRY_S)
            except (grpc.RpcError, PdserveError) as exc:
                _log.debug("cache_feed_lost", worker=worker.id, reason=type(exc).__name__)
                await asyncio.sleep(RETRY_S)
            except Exception as exc:  # noqa: BLE001  supervises: a fault over one message does not end the feed
                _log.error("cache_feed_failed", worker=worker.id, exc_info=exc)
                await asyncio.sleep(RETRY_S)


def _gap_pause_s(gaps: int) -> float:
    """Before the next subscription, after so many in a row that began with a gap. After the first a snapshot is asked
    for, at once; a worker that answers that with a gap answers every one so."""
    return min(RETRY_S * 2.0 ** min(gaps - 2, 16), GAP_PAUSE_S) if gaps > 1 else 0.0


def _made(name: str, speeds: Speeds, hold_s: float) -> Policy:
    policies: dict[str, Callable[[], Policy]] = {
        "round_robin": RoundRobin,
        "power_of_two": PowerOfTwo,
        "session_affinity": SessionAffinity,
        "dynamo": Dynamo,
        "sgl": Sgl,
        "predicted": lambda: Predicted(speeds, CostConfig(hold_s=hold_s)),
        "least_load": RoundRobin,  # not asked: `policy` decides
    }
    return policies[name]()


def _keys_of(request: RequestView) -> PromptKeys | None:
    return request.keys if isinstance(request.keys, PromptKeys) else None


def _sizes(layout: kvsource_pb2.Layout) -> tuple[float, float]:
    """(bytes of a token's KV, bytes of a state)."""
    paged = sum(p.units * p.layers * p.rows * p.token_bytes for p in layout.components if p.paged)
    state = sum(p.units * p.layers * p.rows * p.tokens * p.token_bytes for p in layout.components if not p.paged)
    return float(paged), float(state)
