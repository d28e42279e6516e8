from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.workers.breaker import Breaker, Breakers, Config, Result, State, result_of
from runtime.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvLost, QuotaExceeded, Saturated, WorkerLost

SOON = Config(failures=3, window_s=10.0, open_s=2.0, open_max_s=8.0, probe_s=5.0)


def failing(breaker: Breaker, count: int, at: float = 0.0) -> None:
    for number in range(count):
        assert breaker.send(number, at)
        breaker.heard(number, Result.BAD, at)


def test_failures_within_the_window_open_it_and_spread_out_ones_do_not() -> None:
    breaker = Breaker(SOON)
    failing(breaker, 2, at=0.0)
    failing(breaker, 2, at=11.0)
    assert breaker.state(11.0) is State.CLOSED
    failing(breaker, 1, at=12.0)
    assert breaker.state(12.0) is State.OPEN
    assert not breaker.allows(12.0)


def test_a_few_failures_among_many_successes_do_not_open_it() -> None:
    breaker = Breaker(SOON)
    for number in range(20):
        breaker.heard(number, Result.GOOD, 0.0)
    failing(breaker, 5)
    assert breaker.state(0.0) is State.CLOSED


def test_half_open_lets_exactly_one_request_through() -> None:
    breaker = Breaker(SOON)
    failing(breaker, 3)
    assert breaker.state(2.0) is State.HALF_OPEN
    assert breaker.send("probe", 2.0)
    assert not breaker.send("second", 2.0)
    assert not breaker.allows(2.0)


def test_a_good_probe_closes_it_and_a_bad_one_opens_it_for_twice_as_long() -> None:
    breaker = Breaker(SOON)
    failing(breaker, 3)
    breaker.send("probe", 2.0)
    breaker.heard("probe", Result.BAD, 2.0)
    assert breaker.state(5.9) is State.OPEN
    breaker.send("probe", 6.0)
    breaker.heard("probe", Result.GOOD, 6.0)
    assert breaker.state(6.0) is State.CLOSED
    failing(breaker, 3, at=7.0)
    assert breaker.state(9.0) is State.HALF_OPEN, "it begins again with the short pause"


def test_the_pause_is_bounded() -> None:
    breaker, now = Breaker(SOON), 0.0
    failing(breaker, 3)
    for _ in range(6):
        now += 8.0
        assert breaker.send("probe", now)
        breaker.heard("probe", Result.BAD, now)
    assert breaker.allows(now + 8.0)


def test_a_neutral_probe_leaves_its_place_to_another() -> None:
    breaker = Breaker(SOON)
    failing(breaker, 3)
    breaker.send("probe", 2.0)
    breaker.heard("probe", Result.NEUTRAL, 2.5)
    assert breaker.state(2.5) is State.HALF_OPEN
    assert breaker.send("another", 2.5)


def test_the_slot_of_a_probe_that_is_never_heard_of_is_reclaimed() -> None:
    breaker = Breaker(SOON)
    failing(breaker, 3)
    breaker.send("lost", 2.0)
    assert not breaker.send("next", 6.9)
    assert breaker.send("next", 7.0)
    breaker.heard("lost", Result.BAD, 7.1)
    assert breaker.state(7.1) is State.HALF_OPEN, "the lost one's late answer is not the probe's"
    breaker.heard("next", Result.GOOD, 7.2)
    assert breaker.state(7.2) is State.CLOSED


def test_late_results_of_requests_sent_before_it_opened_do_not_keep_it_open() -> None:
    breaker = Breaker(SOON)
    failing(breaker, 3)
    for number in range(10, 20):
        breaker.heard(number, Result.BAD, 1.0)
    assert breaker.state(2.0) is State.HALF_OPEN


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, Result.GOOD),
        (WorkerLost("gone"), Result.BAD),
        (InvalidRequest("no"), Result.NEUTRAL),
        (QuotaExceeded("no"), Result.NEUTRAL),
        (Saturated("full"), Result.NEUTRAL),
        (Cancelled("by the client"), Result.NEUTRAL),
        (DeadlineExceeded("late"), Result.NEUTRAL),
        (KvLost("gone"), Result.NEUTRAL),
    ],
)
def test_only_the_workers_own_failures_count(error: Exception | None, result: Result) -> None:
    assert result_of(error) is result  # type: ignore[arg-type]


def test_no_room_after_all_is_the_fault_of_whoever_had_agreed() -> None:
    assert result_of(Saturated("full")) is Result.NEUTRAL
    assert result_of(Saturated("full"), granted=True) is Result.BAD
    assert result_of(Cancelled("the client left"), granted=True) is Result.NEUTRAL


def test_legs_and_workers_are_judged_apart_and_a_new_epoch_starts_clean() -> None:
    breakers = Breakers(SOON)
    failing(breakers.of("w", "prefill"), 3)
    assert not breakers.of("w", "prefill").allows(0.0)
    assert breakers.of("w", "decode").allows(0.0)
    assert breakers.of("v", "prefill").allows(0.0)
    breakers.forget("w")
    assert breakers.of("w", "prefill").allows(0.0)


class BreakerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(SOON)
        self.now = 0.0
        self.sent: list[int] = []
        self.number = 0
        self.probes: list[float] = []

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def send(self) -> None:
        state, allowed = self.breaker.state(self.now), self.breaker.allows(self.now)
        self.number += 1
        assert self.breaker.send(self.number, self.now) == allowed
        if allowed:
            self.sent.append(self.number)
        if state is State.OPEN:
            assert not allowed
        if state is State.HALF_OPEN and allowed:
            assert all(self.now - at >= SOON.probe_s for at in self.probes)
            self.probes.append(self.now)

    @rule(result=st.sampled_from(list(Result)), data=st.data())
    def hear(self, result: Result, data: st.DataObject) -> None:
        if not self.sent:
            return
        key = data.draw(st.sampled_from(self.sent))
        self.sent.remove(key)
        was = self.breaker.state(self.now)
        self.breaker.heard(key, result, self.now)
        if self.breaker._probe is None:  # its answer was taken, or there was none
            self.probes.clear()
        if result is Result.NEUTRAL:
            assert self.breaker.state(self.now) is was
        if was is State.OPEN and result is not Result.GOOD:
            assert self.breaker.state(self.now) is State.OPEN

    @invariant()
    def it_never_stays_out_for_ever(self) -> None:
        assert self.breaker.allows(self.now + SOON.open_max_s + SOON.probe_s)


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
