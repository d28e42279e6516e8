"""Who is refused because nothing can be in time for it, and who is not."""

from __future__ import annotations

import math

import pytest

from router.admission.admission import Ask
from router.admission.line import Line
from router.policy.pairing import Role
from router.policy.speeds import Speeds
from router.policy.view import Work, WorkerView
from router.workers.deadlines import KNOWN, SURE, too_late_s
from runtime.clock import FakeClock

TOKEN_S = 1e-3


def taught(reports: int = KNOWN, error: float = 0.4) -> Speeds:
    """A millisecond a token, as every worker said. error: the median of predictions'."""
    speeds = Speeds()
    for number in range(10 * reports):
        speeds.learn_prefill("p1", 500 + 100 * (number % 8), 0, (500 + 100 * (number % 8)) * TOKEN_S)
    speeds.ttft_error.median, speeds.ttft_error.count = error, reports
    return speeds


def worker(name: str = "p1", *queue: tuple[float, float]) -> WorkerView:
    """queue: (seconds, due) of the prompts there."""
    view = WorkerView(name, Role.PREFILL)
    for number, (seconds, due) in enumerate(queue):
        view.begin((f"{name}-{number}", 1), Work(seconds, 1000, (due, number)), 0.0)
    return view


def late(*views: WorkerView, speeds: Speeds | None = None, left_s: float, due: float = 100.0, cached: int = 0) -> float:
    return too_late_s(views, speeds or taught(), 1000, left_s, 0.0, lambda: due, lambda: cached)


def test_a_prompt_that_takes_longer_than_its_time_on_an_idle_worker_is_too_late() -> None:
    assert late(worker(), left_s=0.4) == pytest.approx(SURE * 1.0, rel=0.2)
    assert not late(worker(), left_s=2.0)


def test_predictions_count_by_half_so_that_nobody_is_refused_who_might_be_in_time() -> None:
    assert not late(worker(), left_s=0.7)


def test_where_predictions_hardly_err_they_count_for_more() -> None:
    assert late(worker(), left_s=0.7, speeds=taught(error=0.05))
    assert not late(worker(), left_s=1.2, speeds=taught(error=0.0)), "never for as much as was predicted"


def test_what_is_due_sooner_is_ahead_and_what_is_due_later_is_not() -> None:
    assert late(worker("p1", (10.0, 1.0), (10.0, 2.0)), left_s=5.0) > 5.0
    assert not late(worker("p1", (10.0, 1.0), (10.0, 2.0)), left_s=5.0, due=0.5)


def test_one_worker_that_could_is_enough() -> None:
    assert not late(worker("p1", (50.0, 1.0)), worker("p2"), left_s=2.0)


def test_what_anybody_may_have_of_the_prompt_costs_nothing() -> None:
    assert not late(worker(), left_s=0.2, cached=990)
    assert late(worker(), left_s=0.2, cached=100) > 0.2


def test_a_router_that_has_hardly_seen_a_request_refuses_none() -> None:
    assert not late(worker("p1", (50.0, 1.0)), speeds=taught(KNOWN - 1), left_s=0.1)


def test_without_any_worker_it_is_not_the_deadline_that_is_to_blame() -> None:
    assert not late(left_s=0.1)


# --- in line ------------------------------------------------------------------------------------------------------


def ask(name: str, tenant: str = "t", due: float = 10.0) -> Ask:
    return Ask(name, tenant, 0.0, due, deadline=1e6)


async def test_those_ahead_in_line_count_by_how_fast_they_leave() -> None:
    clock = FakeClock()
    line = Line(10, clock)
    assert line.wait_s(ask("new"), 0.0) == 0.0
    async with line.place(ask("a", due=1.0)) as first, line.place(ask("b", due=2.0)), line.place(ask("c", due=3.0)):
        assert line.wait_s(ask("new"), 0.0) == 0.0, "how fast they leave is not known yet"
        clock.advance(4.0)
        first.taken()
        assert line.wait_s(ask("new"), 0.0) == pytest.approx(3 * 4.0), "a's block has not ended"
        assert line.wait_s(ask("new", due=2.5), 0.0) == pytest.approx(2 * 4.0)
        assert line.wait_s(ask("new", "another tenant"), 0.0) == 0.0, "tenants do not stand behind each other"
        assert line.wait_s(ask("new"), 100.0) == 0.0, "not looked at closely"


async def test_how_fast_an_earlier_crowd_left_says_nothing_of_this_one() -> None:
    clock = FakeClock()
    line = Line(10, clock)
    async with line.place(ask("a")) as first, line.place(ask("b")):
        clock.advance(60.0)
        first.taken()
    async with line.place(ask("c")), line.place(ask("d")):
        assert line.wait_s(ask("new", due=20.0), 0.0) == 0.0


async def test_when_the_last_prompt_at_a_worker_is_due_is_known_while_it_is_there() -> None:
    line = Line(10, FakeClock())
    line.passed(ask("a", due=5.0))
    line.passed(ask("b", due=7.0))
    assert line.last_due() >= 7.0
    line.computed("b")
    assert 5.0 <= line.last_due() < 7.0
    line.over("a")
    assert line.last_due() == -math.inf
