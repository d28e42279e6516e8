"""What the planner learns of what workers report beside their requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.v1 import common_pb2, worker_pb2
from router.params import Params
from router.policy import pairing
from router.policy.pairing import Role
from router.policy.view import Work as Booked
from router.policy.view import WorkerView
from router.request import Work
from router.workers.planner import Plan, Planner, Standing, _gap_pause_s
from runtime.clock import FakeClock
from runtime.config import Config
from runtime.metrics import Metrics


def planner(policy: str = "predicted") -> Planner:
    return Planner(Config().model_copy(update={"policy": policy}), "m", "r", FakeClock(), Metrics(), list)


def says(made: Planner, size: int, seconds: float, tier: str = "host", worker: str = "a") -> None:
    load = common_pb2.Load(tiers=[common_pb2.TierLoad(tier=tier, bytes_up=size, seconds_up=seconds)])
    made.reported(cast(Any, SimpleNamespace(id=worker)), load)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_comes_up_from_below_is_learned_from_how_its_sums_grow(tier: str) -> None:
    made, size, seconds = planner(), 0, 0.0
    for _ in range(30):
        size, seconds = size + 10**9, seconds + 0.5
        says(made, size, seconds, tier)
        says(made, size, seconds, tier)  # nothing new
    assert made.speeds.load_s(2e9, tier) == pytest.approx(1.0, rel=0.15)


def test_a_tier_that_begins_anew_or_is_none_or_has_no_sound_sum_teaches_nothing() -> None:
    made = planner()
    for _ in range(5):
        says(made, 10**9, 0.5)
    before = made.speeds.load_s(1e9)
    says(made, 10, 0.1)
    says(made, 10**12, 0.0)
    says(made, 10**12, float("nan"))
    says(made, 10**9, 100.0, "peers")
    assert made.speeds.load_s(1e9) == before


def test_a_policy_that_asks_for_no_seconds_learns_none() -> None:
    made = planner("least_load")
    says(made, 10**9, 50.0)
    assert made.speeds.load_s(1e9) < 1.0


class Feed:
    """A worker whose cache's events never begin where they were asked for, but for one subscription. asked: when."""

    def __init__(self, sound: int, last: int) -> None:
        self.id, self.facts, self.group = "w", None, "g"
        self.asked: list[float] = []
        self.over = asyncio.Event()
        self._sound, self._last = sound, last

    async def cache_events(self, epoch: int, sequence: int) -> AsyncIterator[worker_pb2.CacheEventBatch]:
        self.asked.append(asyncio.get_running_loop().time())
        if len(self.asked) == self._last:
            self.over.set()
        if len(self.asked) == self._sound:
            yield worker_pb2.CacheEventBatch(epoch=1, first_sequence=4, snapshot=True, snapshot_end=True)
        yield worker_pb2.CacheEventBatch(epoch=1, first_sequence=9)


async def test_a_cache_feed_that_never_fits_is_asked_less_and_less_and_one_that_fitted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.workers.planner.RETRY_S", 0.02)
    monkeypatch.setattr("router.workers.planner.GAP_PAUSE_S", 0.4)
    feed = Feed(sound=8, last=10)
    listening = asyncio.create_task(planner()._listen(cast(Any, feed)))
    async with asyncio.timeout(30):
        await feed.over.wait()
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    pauses = [later - earlier for earlier, later in itertools.pairwise(feed.asked)]
    least = [0.0, 0.02, 0.04, 0.08, 0.16, 0.32, 0.4, 0.0, 0.02]
    assert all(pause >= wanted - 0.001 for pause, wanted in zip(pauses, least, strict=True)), pauses
    assert pauses[7] < 0.4, "what fitted has ended the row"


def test_the_pause_of_a_feed_that_never_fits_is_bounded_however_long_it_does_not() -> None:
    assert [_gap_pause_s(gaps) for gaps in (1, 2, 3, 8, 9, 10**6)] == [0.0, 0.5, 1.0, 30.0, 30.0, 30.0]


def with_queues(**queues: tuple[Role, list[tuple[float, float]]]) -> Planner:
    """Workers whose prompts take (seconds, due in so many seconds), at a millisecond a token."""
    workers = [
        SimpleNamespace(
            id=name,
            role=role,
            usable=True,
            group="g",
            load=common_pb2.Load(),
            room=lambda: (0, 0),
            can=lambda feature: False,
        )
        for name, (role, _) in queues.items()
    ]
    config = Config().model_copy(update={"policy": "predicted"})
    made = Planner(config, "m", "r", FakeClock(), Metrics(), lambda: cast(Any, workers))
    for number in range(100):
        tokens = 200 + 100 * (number % 8)
        made.speeds.learn_prefill("p1", tokens, 0, tokens / 1000)
    now = FakeClock().monotonic()
    for name, (role, prompts) in queues.items():
        view = WorkerView(name, role, bit=made.index.bit(name), group="g")
        made.ledger.add(view)
        for number, (seconds, due) in enumerate(prompts):
            view.begin((f"{name}-{number}", 1), Booked(seconds, 300, (now + due, number)), now)
    return made


@pytest.mark.parametrize(("deadline_s", "chosen"), [(60.0, "p2"), (1.0, "p1")])
def test_a_deadline_sooner_than_the_objective_is_the_objective(deadline_s: float, chosen: str) -> None:
    """Who would be in time must pass ten others at p1, which is dear; at p2 it is behind nine tenths of a second."""
    made = with_queues(
        p1=(Role.PREFILL, [(0.3, 50.0)] * 10), p2=(Role.PREFILL, [(0.9, 0.5)]), d1=(Role.DECODE, [(10.0, 0.5)])
    )
    now, tokens = FakeClock().monotonic(), tuple(range(300))
    sampling = common_pb2.Sampling(max_tokens=256)
    work = Work("r", tokens, Params(), sampling, b"", now + deadline_s, now, "default")
    decision = made.plan(work, tokens, lambda worker, role: role, Standing(due=now + 2.0))
    assert isinstance(decision, Plan)
    assert decision.choice == pairing.Pair(chosen, "d1")
