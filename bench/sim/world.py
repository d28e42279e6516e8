"""A fleet of simulated workers and a router over them, in virtual time.

The router's decisions are made by the very code a real one runs: index, ledger, speeds and policies, fed with what the
workers report. What is simulated is what lies under them. Other projects' policies get the same books and index; only
ours reserves before it sends, and may keep a request waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.sim.agenda import Agenda
from bench.sim.fabric import Fabric
from bench.sim.fetches import Fetches
from bench.sim.noise import Reader, Tape
from bench.sim.profile import Profile
from bench.sim.store import Store
from bench.sim.trace import Entry, TraceKeys
from bench.sim.worker import Job, Prefilled, Worker
from router.admission.admission import Admission, Ask, Limits
from router.admission.admission import Config as AdmissionConfig
from router.policy.index import NO_HIT, PrefixIndex
from router.policy.ledger import Demand, Ledger, Refusal
from router.policy.pairing import Role
from router.policy.policies import Policy
from router.policy.speeds import Speeds
from router.policy.trust import as_seen
from router.policy.view import Key, Nobody, Placement, RequestView, Wait, WorkerView

EVENT_DELAY_S = 0.01
"""Cache events reach the router this much later."""

TTFT_GOAL_S, TTFT_GOAL_PER_TOKEN_S, TPOT_GOAL_S = 2.0, 1.0 / 8192, 0.05


def ttft_goal(tokens: int) -> float:
    """2 s and 1 s for each 8K of the prompt."""
    return TTFT_GOAL_S + TTFT_GOAL_PER_TOKEN_S * tokens


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of one request. ttft_s, tpot_s: -1 = it never came so far."""

    entry: Entry
    arrived: float
    ttft_s: float = -1.0
    tpot_s: float = -1.0
    cached: int = 0
    local: bool = False
    predicted_s: float = 0.0
    waited_s: float = 0.0
    failed: str = ""
    prefill: str = ""
    decode: str = ""

    @property
    def good(self) -> bool:
        """Both objectives were met."""
        return (
            not self.failed and 0 <= self.ttft_s <= ttft_goal(self.entry.prompt_tokens) and self.tpot_s <= TPOT_GOAL_S
        )


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers of which role, and the seed of their differences and noise. fetches: of cached prefixes, that
    one may read, and that others may read from it, at once."""

    prefill: int
    decode: int
    both: int = 0
    seed: int = 1
    unit_tokens: int = 64
    fetches: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """A request at the router."""

    job: Job
    keys: TraceKeys
    outcome: Outcome
    request: RequestView
    ask: Ask
    placement: Placement | None = None
    handed: bool = False
    prefill_s: float = 0.0
    moved: float = 0.0

    @property
    def key(self) -> Key:
        return (self.request.request_id, 1)


@dataclass(slots=True)
class Counts:
    decisions: int = 0
    locals: int = 0
    moved_bytes: float = 0.0


class World:
    """run() once. reserving: the policy books before it sends and may wait (ours); else it only keeps count. limits: of
    the tenants that the entries name."""

    def __init__(
        self,
        profile: Profile,
        fleet: Fleet,
        policy: Policy,
        speeds: Speeds,
        *,
        reserving: bool,
        limits: Mapping[str, Limits] | None = None,
    ) -> None:
        self.agenda = Agenda()
        self.profile = profile
        self.speeds = speeds
        self.counts = Counts()
        self._policy = policy
        self._reserving = reserving
        self._fabric = Fabric(self.agenda, profile.transfer)
        self._ledger = Ledger()
        self._index = PrefixIndex(8_000_000, stateful=profile.model.kind == "hybrid")
        self._views: list[WorkerView] = []
        self.workers: dict[str, Worker] = {}
        self._flights: dict[int, _Flight] = {}
        self._admission = Admission(AdmissionConfig(max_waiting=1 << 30), limits)
        self._looks_at = -1.0  # when who waits looks again by itself
        self._settled_at = -1.0
        self._build(fleet)
        self.fetches = Fetches(self.agenda, self._fabric, profile, speeds, self.workers, self._feed)

    # --- the fleet ----------------------------------------------------------------------------------------------

    def _build(self, fleet: Fleet) -> None:
        rng = np.random.default_rng([fleet.seed, 0xF1EE7])
        tape = Tape(self.profile.noise, fleet.seed)
        roles = [Role.PREFILL] * fleet.prefill + [Role.DECODE] * fleet.decode + [Role.BOTH] * fleet.both
        for index, role in enumerate(roles):
            name = f"{role.value}-{index:03d}"
            speed = float(np.exp(rng.normal(0.0, self.profile.heterogeneity.speed_sigma)))
            drift = float(rng.uniform(-1, 1)) * self.profile.noise.clock_drift_ppm * 1e-6
            self.workers[name] = Worker(
                name,
                index,
                self.profile,
                Store(self.profile, fleet.unit_tokens, epoch=1),
                Reader(tape, 1000 * fleet.seed + index),
                self.agenda,
                self,
                decodes=role is not Role.PREFILL,
                speed=speed,
                drift=drift,
            )
            self._views.append(self._view(name, role, fleet.fetches))
            self._ledger.add(self._views[-1])

    def _view(self, name: str, role: Role, fetches: int) -> WorkerView:
        model, pool = self.profile.model, self.profile.pool
        return WorkerView(
            name,
            role,
            bit=self._index.bit(name),
            kv_tokens=pool.kv_tokens,
            slots=pool.state_slots,
            max_batch=pool.max_batch,
            bytes_per_token=model.kv_bytes_per_token,
            state_bytes=model.state_bytes,
            fetches=fetches,
        )

    # --- requests -----------------------------------------------------------------------------------------------

    def run(self, entries: Sequence[Entry], keys: Sequence[TraceKeys], speedup: float) -> list[Outcome]:
        """All entries, `speedup` times as fast as they came; returns when the last one is over."""
        outcomes = []
        for number, (entry, names) in enumerate(zip(entries, keys, strict=True)):
            outcome = Outcome(entry, entry.at / speedup)
            outcomes.append(outcome)
            self.agenda.at(outcome.arrived, self._arrive, number, outcome, names)
        self.agenda.run()
        for flight in list(self._flights.values()):
            flight.outcome.failed = flight.outcome.failed or "unfinished"
        return outcomes

    def _arrive(self, number: int, outcome: Outcome, keys: TraceKeys) -> None:
        entry, now = outcome.entry, self.agenda.now
        if entry.prompt_tokens + entry.output_tokens > self.profile.pool.kv_tokens:
            outcome.failed = "context_length_exceeded"
            return
        job = Job(number, entry.prompt_tokens, entry.output_tokens, keys.keys, now)
        request = RequestView(
            str(number),
            entry.prompt_tokens,
            now,
            keys=keys,
            ttft_goal_s=ttft_goal(entry.prompt_tokens),
            tpot_goal_s=TPOT_GOAL_S,
            session=str(entry.blocks[min(1, len(entry.blocks) - 1)]),
        )
        flight = _Flight(job, keys, outcome, request, self._ask(request, entry))
        self._flights[number] = flight
        self._admission.enter(flight.ask, now)
        self._look_again()

    def _ask(self, request: RequestView, entry: Entry) -> Ask:
        return Ask(
            request.request_id,
            entry.tenant,
            request.arrived,
            due=request.arrived + request.ttft_goal_s,
            deadline=float("inf"),
            priority=entry.priority,
            prefill_s=self.speeds.prefill_s("", entry.prompt_tokens, 0),
        )

    def _try(self, flight: _Flight) -> bool:
        """Choose, book and send; False: it has to wait. Who has no room is left out and the rest asked again, as a real
        router does."""
        now = self.agenda.now
        request, views = self._look(flight, now), list(self._views)
        while True:
            self.counts.decisions += 1
            decision = self._policy.choose(request, views, now)
            if isinstance(decision, Nobody):
                if len(views) < len(self._views):
                    return False
                flight.outcome.failed = decision.reason
                self._flights.pop(flight.job.number)
                return True
            if isinstance(decision, Wait):
                self._look_at(now + max(decision.seconds, 0.001))
                return False
            refusal = self._book(flight.key, self._demands(request, decision), now)
            if refusal is None:
                self._send(flight, decision, request.due)
                return True
            views = [view for view in views if view.worker_id != refusal.worker]

    def _book(self, key: Key, demands: dict[str, Demand], now: float) -> Refusal | None:
        if self._reserving:
            return self._ledger.reserve(key, demands, now)
        self._ledger.charge(key, demands, now)
        return None

    def _look(self, flight: _Flight, now: float) -> RequestView:
        return replace(
            flight.request,
            due=self._admission.due(flight.ask) if self._reserving else math.inf,
            behind=len(self._admission) - 1 if self._reserving else 0,
            hits=self._index.match(flight.keys),
            expected_hits=self._index.match(flight.keys, expected=True) if self._reserving else {},
            expected_output=self.speeds.output.expect(flight.job.tokens, 0),
            waited_s=now - flight.request.arrived,
        )

    def _demands(self, request: RequestView, placed: Placement) -> dict[str, Demand]:
        """What both legs book. The context grows to the whole answer; on average half of it counts."""
        bit = next(view.bit for view in self._views if view.worker_id == placed.prefill)
        cached = placed.forecast.cached_tokens or min(request.hits.get(bit, NO_HIT).resume, request.tokens - 1)
        whole = request.tokens + int(request.expected_output)
        context = request.tokens + int(request.expected_output / 2)
        prefill_s = placed.forecast.load_s + placed.forecast.prefill_s
        due = request.due if self._reserving else 0.0
        source = placed.fetch.source if placed.fetch is not None else ""
        work = Demand(request.tokens, 1, 0, False, False, request.tokens - cached, max(prefill_s, 1e-6), due, source)
        if placed.local:
            local = Demand(whole, 1, context, True, False, work.prefill_tokens, work.prefill_s, due, source)
            return {placed.decode: local}
        return {placed.prefill: work, placed.decode: Demand(whole, 1, context, True, True)}

    def _send(self, flight: _Flight, placed: Placement, due: float) -> None:
        job, outcome = flight.job, flight.outcome
        flight.placement = placed
        job.due = due if self._reserving else 0.0
        outcome.local = placed.local
        outcome.predicted_s = placed.forecast.ttft_s
        outcome.waited_s = self.agenda.now - job.arrived
        outcome.prefill, outcome.decode = placed.prefill, placed.decode
        if self._reserving:
            self._index.expect(placed.prefill, flight.keys.links(), self.agenda.now)
        if placed.local:
            self.counts.locals += 1
        if placed.fetch is None:
            self.workers[placed.prefill].submit(job, local=placed.local)
        else:
            self.fetches.bring(job, placed.fetch, placed.prefill, lambda: self._submit(job, placed))
        if not placed.local:
            self.workers[placed.decode].expect(job)

    def _submit(self, job: Job, placed: Placement) -> None:
        self.workers[placed.prefill].submit(job, local=placed.local)

    def _look_at(self, when: float) -> None:
        """Look again then, if not sooner anyhow."""
        if not self.agenda.now < self._looks_at <= when:
            self._looks_at = when
            self.agenda.at(when, self._look_again)

    def _look_again(self) -> None:
        """Place who is next, until somebody has to wait."""
        self._settled_at = -1.0
        while (ask := self._admission.head(self.agenda.now)) is not None:
            flight = self._flights[int(ask.request_id)]
            if not self._try(flight):
                return
            self._admission.start(ask.request_id, self.agenda.now)
            if flight.outcome.failed:
                self._admission.over(ask.request_id)

    # --- what workers say ---------------------------------------------------------------------------------------

    def prefilled(self, worker: Worker, job: Job, report: Prefilled) -> None:
        flight, now = self._flights[job.number], self.agenda.now
        placed = flight.placement
        assert placed is not None
        self._ledger.prefilled(flight.key, worker.name, now)
        self._admission.computed(flight.request.request_id)
        self._learn(worker, job, report, placed)
        if report.load_bytes:
            self.speeds.learn_load(report.load_bytes, report.load_s)
        flight.outcome.ttft_s = now - job.arrived
        flight.outcome.cached = report.cached
        flight.prefill_s = report.load_s + report.prefill_s
        if flight.outcome.predicted_s:
            self.speeds.ttft_error.learn(flight.outcome.predicted_s, now - job.arrived - flight.outcome.waited_s)
        self._feed(worker)
        if placed.local:
            self._settle_soon()
            return
        if job.output == 1:
            self._over_at_first(flight, worker)
        elif job.admitted >= 0:
            self._hand_off(flight)
        self._settle_soon()

    def _learn(self, worker: Worker, job: Job, report: Prefilled, placed: Placement) -> None:
        said_s, now = report.queue_s + report.load_s + report.prefill_s, self.agenda.now
        prefill_s = as_seen(report.prefill_s, said_s, now - job.source_queued)
        self.speeds.trust.learn(worker.name, placed.forecast.said_tokens, report.cached, now)
        tokens = job.tokens - report.cached
        self.speeds.learn_prefill(worker.name, tokens, report.cached, prefill_s, report.step_s, now)

    def admitted(self, worker: Worker, job: Job) -> None:
        flight = self._flights[job.number]
        if job.first >= 0 and not flight.handed:
            self._hand_off(flight)

    def _hand_off(self, flight: _Flight) -> None:
        """The bytes that did not fly while the prompt was computed."""
        job, placed = flight.job, flight.placement
        assert placed is not None
        flight.handed = True
        source, target = self.workers[placed.prefill], self.workers[placed.decode]
        model, chunk = self.profile.model, self.profile.prefill.chunk_tokens
        units = -(-job.tokens // source.store.unit) - job.held
        size = units * source.store.unit * model.kv_bytes_per_token + model.state_bytes
        last = min(chunk * model.kv_bytes_per_token + model.state_bytes, size)
        flew = max(self.agenda.now - max(job.first_chunk, job.admitted), 0.0)
        early = min(flew * self._fabric.share(source.index, target.index), size - last)
        self.counts.moved_bytes += size
        flight.moved = size
        began, flows = self.agenda.now, self._views_of(placed)
        sent = (size - early) * source.noise()
        for view in flows:
            view.flows += 1
        crowd = max(view.flows for view in flows) - 1
        self._fabric.send(source.index, target.index, sent, lambda: self._landed(flight, size - early, began, crowd))

    def _landed(self, flight: _Flight, size: float, began: float, crowd: int) -> None:
        placed, job = flight.placement, flight.job
        assert placed is not None
        for view in self._views_of(placed):
            view.flows -= 1
        now = self.agenda.now
        self.speeds.learn_transfer(placed.prefill, placed.decode, size, now - began, crowd, now)
        self._ledger.landed(flight.key, placed.decode)
        self._ledger.release(flight.key, placed.prefill, self.agenda.now)
        self.workers[placed.prefill].release_source(job)
        self.workers[placed.decode].arrived(job)
        self._feed(self.workers[placed.decode])
        self._settle_soon()

    def _over_at_first(self, flight: _Flight, source: Worker) -> None:
        placed = flight.placement
        assert placed is not None
        source.release_source(flight.job)
        self.workers[placed.decode].drop_expected(flight.job)
        flight.job.last = self.agenda.now
        self._end(flight)

    def finished(self, worker: Worker, job: Job) -> None:
        self._feed(worker)
        self._end(self._flights[job.number])

    def stepped(self, worker: Worker, batch: float, context: float, seconds: float) -> None:
        self.speeds.learn_step(worker.name, batch, context, seconds, self.agenda.now - seconds, self.agenda.now)

    def _end(self, flight: _Flight) -> None:
        job, outcome = flight.job, flight.outcome
        outcome.tpot_s = (job.last - job.first) / (job.output - 1) if job.output > 1 else 0.0
        self.speeds.output.learn(job.tokens, job.output)
        self._ledger.release_all(flight.request.request_id, (1,), self.agenda.now)
        self._admission.used(
            flight.request.request_id,
            prefill_s=flight.prefill_s,
            moved=flight.moved,
            token_seconds=(job.tokens + job.output / 2) * (job.last - job.first),
        )
        self._admission.over(flight.request.request_id)
        del self._flights[job.number]
        self._settle_soon()

    # --- inside -------------------------------------------------------------------------------------------------

    def _views_of(self, placed: Placement) -> list[WorkerView]:
        views = [self._ledger.view(placed.prefill), self._ledger.view(placed.decode)]
        return [view for view in views if view is not None]

    def _feed(self, worker: Worker) -> None:
        batch = worker.store.events()
        if batch is not None:
            self.agenda.at(self.agenda.now + EVENT_DELAY_S, self._index.apply, worker.name, batch)

    def _settle_soon(self) -> None:
        """Room may have come: whoever waits is looked at after what happens now."""
        if len(self._admission) and self._settled_at < self.agenda.now:
            self._settled_at = self.agenda.now
            self.agenda.at(self.agenda.now, self._look_again)

    def check(self) -> None:
        """Assert that everything was given back. Raises AssertionError."""
        assert not self._flights
        assert len(self._ledger) == 0, "a booking was left behind"
        assert not len(self._admission)
        assert not self._admission.running
        self._admission.check()
        self._ledger.check()
        for worker in self.workers.values():
            worker.check_idle()
