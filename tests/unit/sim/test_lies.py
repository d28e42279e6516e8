"""A fleet one of whose workers is slow, stopped, or says what is not so. Virtual time, the router's own policy code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from bench.sim.experiment import POLICIES
from bench.sim.trace import Entry, KeyBook, TraceKeys
from bench.sim.worker import Job, Prefilled, Worker
from bench.sim.world import Fleet, Outcome, World
from router.policy.index import Batch, CacheEvent, Kind
from router.policy.speeds import Speeds
from tests.unit.sim.test_world import QUIET, chats, profile

OURS = ("predicted", "predicted_pairs")
BAD = "prefill-000"
SINCE = 4.0
"""When it begins."""


class Healthy(World):
    """begin() is called once at SINCE."""

    keys: Sequence[TraceKeys] = ()

    def begin(self) -> None:
        """Nothing is wrong."""


class Slow(Healthy):
    """Ten times slower than the moment before."""

    def begin(self) -> None:
        self.workers[BAD]._speed *= 10


class Stopped(Healthy):
    """Neither answers nor dies, for a while: its next chunk takes minutes."""

    def begin(self) -> None:
        worker = self.workers[BAD]
        speed, worker._speed = worker._speed, worker._speed * 1e4
        self.agenda.at(SINCE + 3.0, setattr, worker, "_speed", speed)


class Silent(Healthy):
    """Its cache events are lost: what is known of it grows old."""

    def _feed(self, worker: Worker) -> None:
        if worker.name != BAD or self.agenda.now < SINCE:
            super()._feed(worker)
        else:
            worker.store.events()


class Claiming(Silent):
    """Says it has every prompt there will be, and has what it has."""

    def begin(self) -> None:
        everything = [key for names in self.keys for key in names.keys]
        self._index.apply(BAD, Batch(99, 1, [CacheEvent(Kind.STORED, everything)]))


class Boasting(Healthy):
    """Reports a tenth of the seconds it takes."""

    def prefilled(self, worker: Worker, job: Job, report: Prefilled) -> None:
        if worker.name == BAD:
            report = replace(report, prefill_s=report.prefill_s / 10, queue_s=report.queue_s / 10)
        super().prefilled(worker, job, report)


def play(kind: type[Healthy], policy: str, prefills: int = 4) -> list[Outcome]:
    """What came after it began, on three fleets: a single one is luck by a fifth."""
    return [outcome for seed in (3, 4, 5) for outcome in _play(kind.__name__, policy, prefills, seed)]


KINDS = {kind.__name__: kind for kind in (Healthy, Slow, Stopped, Silent, Claiming, Boasting)}


@cache
def _play(kind: str, policy: str, prefills: int, seed: int) -> list[Outcome]:
    entries, book, speeds = chats(240, gap=0.09, turns=4), KeyBook(256), Speeds()
    keys = [book.of(entry) for entry in entries]
    world = KINDS[kind](
        profile(),
        Fleet(prefills, 4, seed=seed, unit_tokens=256),
        POLICIES[policy](speeds, 1),
        speeds,
        reserving=True,
    )
    world.keys = keys
    world.agenda.at(SINCE, world.begin)
    outcomes = world.run(entries, keys, 1.0)
    world.check()
    assert not any(outcome.failed for outcome in outcomes)
    return [outcome for outcome in outcomes if outcome.arrived >= SINCE]


def mean(outcomes: Sequence[Outcome]) -> float:
    return float(np.mean([outcome.ttft_s for outcome in outcomes]))


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize(("kind", "most"), [(Silent, 1.2), (Claiming, 1.5), (Boasting, 1.2)])
def test_what_one_worker_says_wrongly_costs_the_fleet_little(kind: type[Healthy], most: float, policy: str) -> None:
    assert mean(play(kind, policy)) < most * mean(play(Healthy, policy))


@pytest.mark.parametrize("policy", OURS)
@pytest.mark.parametrize("kind", [Slow, Stopped])
def test_a_worker_that_is_slow_or_has_stopped_is_soon_as_good_as_not_there(kind: type[Healthy], policy: str) -> None:
    outcomes = play(kind, policy)
    caught = [outcome for outcome in outcomes if outcome.prefill == BAD and outcome.ttft_s > 2.0]
    assert len(caught) <= 3 * 6, "who was there, and who came before it was noticed"
    others = [outcome for outcome in outcomes if outcome not in caught]
    assert mean(others) < 1.35 * mean(play(Healthy, policy, prefills=3))


# --- crowds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", OURS)
def test_two_hundred_at_once_on_a_cold_fleet_spread_evenly(policy: str) -> None:
    herd = [Entry(0.0, 4000, 10, tuple(range(50 * n, 50 * n + 8))) for n in range(200)]
    speeds, book = Speeds(), KeyBook(256)
    world = World(profile(**QUIET), Fleet(10, 10, unit_tokens=256), POLICIES[policy](speeds, 1), speeds, reserving=True)
    outcomes = world.run(herd, [book.of(entry) for entry in herd], 1.0)
    world.check()
    used = [outcome.prefill for outcome in outcomes]
    counts = [used.count(name) for name in world.workers if policy == "predicted" or name.startswith("prefill")]
    assert max(counts) <= 2 * min(counts) + 4
    assert max(outcome.ttft_s for outcome in outcomes) < 1.3 * 4000 * 3.7e-5 * 200 / len(counts) + 0.5


@pytest.mark.parametrize("policy", OURS)
def test_a_stream_of_long_prompts_does_not_starve_short_ones(policy: str) -> None:
    """Long ones keep the fleet full; short ones wait for little more than one of them."""
    long = [Entry(0.7 * n, 60_000, 20, tuple(range(1000 * n, 1000 * n + 118))) for n in range(24)]
    short = [Entry(0.21 + 0.25 * n, 300, 20, (10**6 + n,)) for n in range(64)]
    entries = sorted([*long, *short], key=lambda entry: entry.at)
    speeds, book = Speeds(), KeyBook(256)
    world = World(profile(), Fleet(8, 8, seed=2, unit_tokens=256), POLICIES[policy](speeds, 1), speeds, reserving=True)
    outcomes = world.run(entries, [book.of(entry) for entry in entries], 1.0)
    world.check()
    waits = [outcome.ttft_s for outcome in outcomes if outcome.entry.prompt_tokens == 300]
    assert np.percentile(waits, 90) < 1.0
    assert sum(outcome.good for outcome in outcomes) == len(outcomes)
