"""Waiting for a place: how often it is looked, and who need not wait at all."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protos.v1 import common_pb2
from router.admission.line import Place
from router.dispatch import booking
from router.dispatch.booking import Booking, Choice, Wish
from router.params import Params
from router.policy.pairing import Pair
from router.policy.speeds import Speeds
from router.policy.view import Placement, Wait
from router.request import Work
from router.workers.planner import Plan
from runtime.clock import FakeClock
from runtime.config import Config
from runtime.errors import DeadlineExceeded, Saturated
from runtime.metrics import Metrics


class Busy(Booking):
    """Workers are there, and only busy: waiting is no want of room, and no time of it runs."""

    def __init__(self, timeout_s: float) -> None:
        fleet = SimpleNamespace(changed_event=asyncio.Event)
        planner = SimpleNamespace(speeds=Speeds(), busy=lambda hold_s: True, too_late_s=lambda *_: 0.0)
        config = Config().model_copy(update={"queue_timeout_s": timeout_s})
        super().__init__(cast(Any, fleet), cast(Any, planner), config, FakeClock(), Metrics())
        self.looks = 0

    async def _round(self, wish: Wish) -> Choice | Wait | None:
        self.looks += 1
        return Wait(1e-9, "workers_busy")


async def never(*_: Any) -> dict[str, Any]:
    raise AssertionError("nobody is asked")


def wish(name: str) -> Wish:
    work = Work(name, (1, 2), Params(), common_pb2.Sampling(max_tokens=1), b"", 1e6, 0.0, "default")
    return Wish(work, work.tokens, 3, never)


async def test_those_whose_time_stands_still_just_before_its_end_do_not_look_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, turns = Busy(timeout_s=1e-6), 0
    usual = Place.turn

    async def turn(place: Place, patience_s: float | None = None) -> bool:
        nonlocal turns
        turns += 1
        return await usual(place, patience_s)

    monkeypatch.setattr(Place, "turn", turn)
    began = time.monotonic()
    waiting = [asyncio.create_task(made.book(wish(f"r{number}"))) for number in range(5)]
    await asyncio.sleep(0.1)
    most = (time.monotonic() - began) / booking.LOOK_S + 5
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert made.looks <= most
    assert turns <= len(waiting) * most
    assert len(made.line) == 0


async def test_one_whose_deadline_passes_while_it_is_held_hears_that_and_not_that_there_was_no_room() -> None:
    made, asked = Busy(timeout_s=30.0), wish("r")
    asked = replace(asked, work=replace(asked.work, deadline=made._now() + 0.02))
    with pytest.raises(DeadlineExceeded, match="passed"):
        await asyncio.wait_for(made.book(asked), 5)
    assert made.looks
    assert len(made.line) == 0


async def test_a_role_that_is_not_there_is_named_at_once_although_the_other_is_busy() -> None:
    fleet = SimpleNamespace(states=list, workers=list, returning=lambda role: False)
    planner = SimpleNamespace(speeds=Speeds(), busy=lambda hold_s: True, too_late_s=lambda *_: 0.0)
    made = Booking(cast(Any, fleet), cast(Any, planner), Config(), FakeClock(), Metrics())
    with pytest.raises(Saturated) as refused:
        await asyncio.wait_for(made.book(wish("r")), 5)
    assert refused.value.reason == "no_prefill_worker"


async def test_where_it_would_be_sent_is_too_late_so_it_is_not_sent() -> None:
    plan = Plan(Pair("p", "d"), {}, Placement("p", "d"), None, surely_s=5.0)
    fleet = SimpleNamespace(states=list, workers=list, changed_event=asyncio.Event)
    planner = SimpleNamespace(
        speeds=Speeds(), busy=lambda hold_s: False, too_late_s=lambda *_: 0.0, active=True, plan=lambda *_: plan
    )
    made, asked = Booking(cast(Any, fleet), cast(Any, planner), Config(), FakeClock(), Metrics()), wish("r")
    asked = replace(asked, work=replace(asked.work, deadline=made._now() + 4.0))
    with pytest.raises(DeadlineExceeded) as refused:
        await asyncio.wait_for(made.book(asked), 5)
    assert refused.value.reason == "deadline_unmeetable"
    assert len(made.line) == 0
