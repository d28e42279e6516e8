"""What the planner learns of what workers report beside their requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.v1 import common_pb2
from router.workers.planner import Planner
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
