from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.admission.admission import GONE_KEPT, Admission, Ask, Config, Limits
from runtime.errors import DeadlineExceeded, QuotaExceeded, Saturated

FOREVER = float("inf")


def ask(name: str, tenant: str = "t", due: float = 2.0, **fields: float) -> Ask:
    values = {"arrived": 0.0, "deadline": FOREVER, **fields}
    return Ask(name, tenant, due=due, **values)  # type: ignore[arg-type]


def served(admission: Admission, count: int, now: float = 0.0) -> list[str]:
    names = []
    for _ in range(count):
        head = admission.head(now)
        if head is None:
            break
        admission.start(head.request_id, now)
        names.append(head.request_id)
    return names


# --- order --------------------------------------------------------------------------------------------------------


def test_within_a_tenant_the_earliest_due_goes_first_not_the_first_come() -> None:
    admission = Admission()
    for name, due in (("long", 12.0), ("short", 3.0), ("middle", 5.0)):
        admission.enter(ask(name, due=due), 0.0)
    assert served(admission, 3) == ["short", "middle", "long"]


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    admission, now = Admission(), 0.0
    admission.enter(ask("long", due=10.0), 0.0)
    for number in range(30):
        admission.enter(ask(f"s{number}", due=now + 2.0), now)
        started = served(admission, 1, now)
        if started == ["long"]:
            break
        now += 1.0
    assert 7.0 <= now <= 9.0, "once every newcomer is due later"


def test_a_stream_of_long_prompts_does_not_hold_up_a_short_one() -> None:
    admission = Admission()
    for number in range(50):
        admission.enter(ask(f"l{number}", due=16.0 + number), 0.0)
    admission.enter(ask("short", due=4.0), 2.0)
    assert served(admission, 1) == ["short"]


def test_priority_moves_the_due_time_and_waiting_makes_up_for_it() -> None:
    admission = Admission(Config(priority_step_s=5.0))
    admission.enter(ask("low", due=2.0, priority=1), 0.0)
    admission.enter(ask("normal", due=6.5), 4.5)
    admission.enter(ask("later", due=7.5), 5.5)
    assert served(admission, 3) == ["normal", "low", "later"]


# --- fairness -----------------------------------------------------------------------------------------------------


def test_a_greedy_tenant_does_not_delay_the_other_tenants_one_request() -> None:
    admission = Admission()
    for number in range(100):
        admission.enter(ask(f"g{number}", "greedy", due=0.1 + number / 1000, prefill_s=1.0), 0.0)
    served(admission, 3)
    admission.enter(ask("modest", "other", due=9.0, prefill_s=1.0), 1.0)
    assert "modest" in served(admission, 2, 1.0)


def test_service_is_shared_by_weight() -> None:
    admission = Admission(limits={"gold": Limits(weight=3.0), "iron": Limits(weight=1.0)})
    for number in range(100):
        for tenant in ("gold", "iron"):
            admission.enter(ask(f"{tenant}{number}", tenant, due=float(number), prefill_s=0.5), 0.0)
    first = served(admission, 80)
    assert 56 <= sum(name.startswith("gold") for name in first) <= 64


def test_long_prompts_are_charged_as_what_they_take() -> None:
    admission = Admission()
    for number in range(40):
        admission.enter(ask(f"l{number}", "long", due=float(number), prefill_s=2.0), 0.0)
        admission.enter(ask(f"s{number}", "short", due=float(number), prefill_s=0.5), 0.0)
    first = served(admission, 25)
    assert sum(name.startswith("s") for name in first) >= 19, "four short ones for each long one"


def test_bytes_moved_and_decode_residency_are_charged_too() -> None:
    admission = Admission()
    for tenant in ("a", "b"):
        for number in range(10):
            admission.enter(ask(f"{tenant}{number}", tenant, due=float(number), prefill_s=0.1), 0.0)
    assert served(admission, 2) == ["a0", "b0"]
    admission.used("a0", moved=1e12, token_seconds=1e6)
    assert served(admission, 4) == ["b1", "b2", "b3", "b4"]


def test_the_observed_prefill_replaces_the_predicted_one() -> None:
    admission = Admission()
    for number in range(5):
        for tenant in ("a", "b"):
            admission.enter(ask(f"{tenant}{number}", tenant, due=float(number), prefill_s=1.0), 0.0)
    served(admission, 2)
    admission.used("a0", prefill_s=0.1)
    assert served(admission, 1) == ["a1"]


def test_idle_time_is_no_credit() -> None:
    admission = Admission()
    for number in range(20):
        admission.enter(ask(f"a{number}", "a", due=float(number), prefill_s=1.0), 0.0)
    served(admission, 10)
    for number in range(20):
        admission.enter(ask(f"b{number}", "b", due=100.0 + number, prefill_s=1.0), 0.0)
    assert sum(name.startswith("b") for name in served(admission, 10)) <= 6


def test_a_debt_is_bounded() -> None:
    admission = Admission(Config(max_debt_s=5.0))
    admission.enter(ask("a0", "a", prefill_s=1.0), 0.0)
    served(admission, 1)
    admission.used("a0", prefill_s=1e6)
    for number in range(1, 30):
        admission.enter(ask(f"a{number}", "a", prefill_s=1.0), 0.0)
        admission.enter(ask(f"b{number}", "b", prefill_s=1.0), 0.0)
    assert "a1" in served(admission, 10)


# --- what workers are told ----------------------------------------------------------------------------------------


def test_time_behind_ones_own_requests_is_not_lateness() -> None:
    admission = Admission()
    for number in range(3):
        admission.enter(ask(f"g{number}", "greedy", due=2.0, prefill_s=1.0), 0.0)
    served(admission, 1, now=4.0)
    waits = admission.head(4.0)
    assert waits is not None
    assert admission.due(waits) == 6.0, "two seconds from when its turn came"
    assert admission.due(ask("m", "modest", due=11.0, arrived=9.0)) == 11.0


def test_nobody_is_due_before_the_prompts_of_a_tenant_that_was_served_less() -> None:
    admission = Admission()
    admission.enter(ask("g0", "greedy", due=2.0, prefill_s=5.0), 0.0)
    served(admission, 1)
    admission.enter(ask("long", "modest", due=9.0, prefill_s=1.0), 0.0)
    served(admission, 1)
    assert admission.due(ask("g1", "greedy", due=2.0)) == 9.0
    assert admission.due(ask("m1", "modest", due=2.0)) == 2.0, "one's own are passed as they are due"
    admission.computed("long")
    assert admission.due(ask("g1", "greedy", due=2.0)) == 2.0


def test_what_a_worker_was_told_stays_while_the_prompt_is_there() -> None:
    admission = Admission()
    first = ask("a", due=2.0)
    admission.enter(first, 0.0)
    served(admission, 1, now=1.0)
    admission.enter(ask("b", due=3.0), 1.0)
    served(admission, 1, now=5.0)
    assert admission.due(first) == 2.0


def test_a_priority_counts_between_tenants_as_service_and_is_used_up() -> None:
    admission = Admission(Config(priority_step_s=2.0))
    for number in range(8):
        admission.enter(ask(f"a{number}", "plain", due=float(number), prefill_s=1.0), 0.0)
        admission.enter(ask(f"b{number}", "first", due=float(number), prefill_s=1.0, priority=-1), 0.0)
    first = served(admission, 8)
    assert [name[0] for name in first[:2]] == ["b", "b"]
    assert sum(name.startswith("a") for name in first) == 3


# --- the door -----------------------------------------------------------------------------------------------------


def test_ones_own_limits_give_429_with_the_limit_and_when_to_come_back() -> None:
    admission = Admission(limits={"t": Limits(max_inflight=2), "u": Limits(max_waiting=1)})
    admission.enter(ask("a"), 0.0)
    served(admission, 1)
    admission.enter(ask("b"), 0.0)
    with pytest.raises(QuotaExceeded) as caught:
        admission.enter(ask("c"), 0.0)
    assert caught.value.limit == "2 requests"
    assert caught.value.retry_after_ms > 0
    assert caught.value.row.http_status == 429
    admission.over("a")
    admission.enter(ask("c"), 0.0)
    admission.enter(ask("x", "u"), 0.0)
    with pytest.raises(QuotaExceeded):
        admission.enter(ask("y", "u"), 0.0)


def test_tokens_per_second_are_a_bucket_that_fills_again() -> None:
    admission = Admission(limits={"t": Limits(tokens_per_s=100.0, burst_tokens=500.0)})
    admission.enter(ask("a", tokens=400), 0.0)
    with pytest.raises(QuotaExceeded) as caught:
        admission.enter(ask("b", tokens=300), 0.0)
    assert caught.value.retry_after_ms == 2000
    admission.enter(ask("b", tokens=300), 2.0)
    with pytest.raises(QuotaExceeded):
        admission.enter(ask("huge", tokens=9000), 6.9)
    admission.enter(ask("huge", tokens=9000), 7.0)
    assert admission.refusal(ask("c", tokens=1), 60.0) is not None, "it has overdrawn the bucket"


def test_a_full_queue_gives_503_with_when_to_come_back() -> None:
    admission = Admission(Config(max_waiting=1))
    admission.enter(ask("a"), 0.0)
    with pytest.raises(Saturated) as caught:
        admission.enter(ask("b", "other"), 0.0)
    assert caught.value.reason == "queue_full"
    assert caught.value.retry_after_ms > 0
    assert caught.value.row.http_status == 503


def test_a_deadline_that_cannot_be_met_is_refused_at_the_door() -> None:
    admission = Admission()
    with pytest.raises(DeadlineExceeded) as caught:
        admission.enter(ask("a", deadline=1.0, first_token_s=1.5), 0.0)
    assert caught.value.reason == "deadline_unmeetable"
    admission.enter(ask("b", deadline=2.0, first_token_s=1.5), 0.0)
    assert len(admission) == 1


def test_a_refused_request_leaves_no_trace() -> None:
    admission = Admission(Config(max_waiting=1), {"t": Limits(tokens_per_s=10.0, burst_tokens=100.0)})
    admission.enter(ask("a", tokens=50), 0.0)
    with pytest.raises(Saturated):
        admission.enter(ask("b", tokens=50), 0.0)
    admission.leave("a")
    admission.enter(ask("c", tokens=50), 0.0)
    admission.check()


def test_who_leaves_is_not_served_and_leaving_twice_is_nothing() -> None:
    admission = Admission()
    for name, due in (("a", 1.0), ("b", 2.0)):
        admission.enter(ask(name, due=due), 0.0)
    assert admission.leave("a")
    assert not admission.leave("a")
    assert served(admission, 5) == ["b"]
    assert admission.over("b")
    assert not admission.over("b")


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(
            Config(max_waiting=6),
            {"b": Limits(weight=2.0, max_inflight=4), "c": Limits(tokens_per_s=5, burst_tokens=40)},
        )
        self.now = 0.0
        self.number = 0
        self.waiting: dict[str, Ask] = {}
        self.running: set[str] = set()

    @rule(seconds=st.sampled_from([0.0, 0.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        tenant=st.sampled_from("abc"),
        goal=st.sampled_from([0.5, 2.0, 9.0]),
        patience=st.sampled_from([0.2, 5.0, FOREVER]),
        priority=st.integers(-1, 1),
        cost=st.sampled_from([0.0, 0.1, 4.0]),
    )
    def enter(self, tenant: str, goal: float, patience: float, priority: int, cost: float) -> None:
        self.number += 1
        name = f"{tenant}{self.number}"
        question = Ask(name, tenant, self.now, self.now + goal, self.now + patience, priority, cost, 10)
        refusal = self.admission.refusal(question, self.now)
        if refusal is None:
            self.admission.enter(question, self.now)
            self.waiting[name] = question
            return
        with pytest.raises(type(refusal)) as caught:
            self.admission.enter(question, self.now)
        assert caught.value.reason == refusal.reason
        assert refusal.retry_after_ms > 0 or isinstance(refusal, DeadlineExceeded)

    @rule()
    def start(self) -> None:
        head = self.admission.head(self.now)
        assert (head is None) == (not self.waiting)
        if head is not None:
            mine = [a for a in self.waiting.values() if a.tenant == head.tenant]
            assert head.due + 5 * head.priority == min(a.due + 5 * a.priority for a in mine)
            self.admission.start(head.request_id, self.now)
            del self.waiting[head.request_id]
            self.running.add(head.request_id)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.waiting, "nobody"]))
        assert self.admission.leave(name) == (name in self.waiting)
        self.waiting.pop(name, None)

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.5, 100.0]))
    def end(self, data: st.DataObject, seconds: float) -> None:
        name = data.draw(st.sampled_from([*sorted(self.running), "nobody"]))
        self.admission.used(name, prefill_s=seconds, moved=1e9, token_seconds=100.0)
        assert self.admission.over(name) == (name in self.running)
        self.running.discard(name)

    @invariant()
    def adds_up(self) -> None:
        self.admission.check()
        assert len(self.admission) == len(self.waiting)
        assert self.admission.running == len(self.running)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_those_who_leave_behind_one_that_is_held_leave_nothing_there() -> None:
    """A client that asks and goes away again and again, while every worker is busy."""
    admission = Admission()
    admission.enter(ask("first", due=1.0), 0.0)
    for number in range(2000):
        admission.enter(ask(f"r{number}", due=2.0), 0.0)
        if number % 10:
            admission.leave(f"r{number}")
    admission.check()
    assert len(admission._tenants["t"].heap) <= 2 * len(admission) + GONE_KEPT + 1
    for number in range(0, 2000, 10):
        admission.leave(f"r{number}")
    assert len(admission._tenants["t"].heap) <= GONE_KEPT + 3
    assert served(admission, 2) == ["first"]
