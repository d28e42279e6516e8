"""Cached prefixes on their way from one simulated worker to another, before the prompt that wants them is submitted.

As real workers do it: the source holds what it offers until it was read, the target takes room and publishes, and who
has waited for the whole budget computes; the bytes that are on their way then are moved for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.sim.agenda import Agenda
from bench.sim.fabric import Fabric
from bench.sim.profile import Profile
from bench.sim.worker import Job, Worker
from router.policy.speeds import Speeds
from router.policy.view import Fetch

ASK_S = 0.002
"""A question and its answer, and room at the target."""


@dataclass(slots=True)
class FetchCounts:
    fetched: int = 0
    absent: int = 0
    late: int = 0
    moved_bytes: float = 0.0


@dataclass(slots=True, eq=False)
class _Flight:
    job: Job
    source: Worker
    target: Worker
    then: Callable[[], None]
    began: float
    over: bool = False


class Fetches:
    """fed: told a worker whose cache has changed."""

    def __init__(
        self,
        agenda: Agenda,
        fabric: Fabric,
        profile: Profile,
        speeds: Speeds,
        workers: Mapping[str, Worker],
        fed: Callable[[Worker], None],
    ) -> None:
        self.counts = FetchCounts()
        self._agenda, self._fabric, self._profile, self._speeds = agenda, fabric, profile, speeds
        self._workers, self._fed = workers, fed

    def bring(self, job: Job, fetch: Fetch, target: str, then: Callable[[], None]) -> None:
        """then() is called once: when the prefix is there, or at the latest when the budget is spent."""
        flight = _Flight(job, self._workers[fetch.source], self._workers[target], then, self._agenda.now)
        self._agenda.at(self._agenda.now + max(fetch.budget_s, ASK_S), self._late, flight)
        self._agenda.at(self._agenda.now + ASK_S, self._ask, flight, fetch.tokens)

    def _ask(self, flight: _Flight, tokens: int) -> None:
        if flight.over:
            return
        source, target, job = flight.source.store, flight.target.store, flight.job
        found = source.find(job.keys, job.tokens)
        units = 0 if found.disk and source.stateful else min(len(found.pages) + found.host, tokens // source.unit)
        held = len(target.cache.match(job.keys))
        if units <= held:
            self._missed(flight)
            return
        pinned = found.pages[:units]
        source.pool.share(pinned)
        model = self._profile.model
        size = (units - held) * source.unit * model.kv_bytes_per_token + model.state_bytes
        posted = self._agenda.now

        def landed() -> None:
            flight.source.let_go(pinned)
            self._landed(flight, units, size, posted)

        sent = size * flight.source.noise()
        self.counts.moved_bytes += sent
        self._fabric.send(flight.source.index, flight.target.index, sent, landed)

    def _landed(self, flight: _Flight, units: int, size: float, posted: float) -> None:
        now = self._agenda.now
        self._speeds.learn_fetch(flight.source.name, flight.target.name, size, now - posted, now - flight.began, now)
        if flight.over:
            return
        if flight.target.take_prefix(flight.job.keys, units):
            self.counts.fetched += 1
            self._fed(flight.target)
            self._over(flight)
        else:
            self._missed(flight)

    def _missed(self, flight: _Flight) -> None:
        self.counts.absent += 1
        self._speeds.missed_fetch(flight.source.name, flight.target.name, self._agenda.now)
        self._over(flight)

    def _late(self, flight: _Flight) -> None:
        if not flight.over:
            self.counts.late += 1
            self._speeds.missed_fetch(flight.source.name, flight.target.name, self._agenda.now)
            self._over(flight)

    @staticmethod
    def _over(flight: _Flight) -> None:
        flight.over = True
        flight.then()
