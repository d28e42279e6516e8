from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.policy.ledger import Demand, Ledger, Refusal, Short
from tests.unit.policy.states import decode, prefill

SOURCE = Demand(tokens=1000, slots=1, prefill_tokens=800, prefill_s=0.4, due=3.0)
TARGET = Demand(tokens=1300, slots=1, context=1150, decode=True, landing=True)


def fleet() -> Ledger:
    ledger = Ledger()
    for view in (
        prefill(1, kv_tokens=3000, slots=4),
        prefill(2, kv_tokens=3000, slots=4),
        decode(3, kv_tokens=2000, slots=4, max_batch=2),
        decode(4, kv_tokens=9000, slots=4, max_batch=2),
    ):
        ledger.add(view)
    return ledger


def test_a_reservation_is_seen_by_the_next_decision_at_once() -> None:
    ledger = fleet()
    assert ledger.reserve(("r", 1), {"p1": SOURCE, "d3": TARGET}, 0.0) is None
    source, target = ledger.view("p1"), ledger.view("d3")
    assert source is not None
    assert target is not None
    assert (source.prefill_tokens, source.held_tokens, source.queue_s(0.0)) == (800, 1000, 0.4)
    assert (target.decoding, target.landing, target.context_tokens, target.room_tokens()) == (1, 1, 1150, 700)


def test_all_of_it_is_booked_or_nothing() -> None:
    ledger = fleet()
    ledger.reserve(("a", 1), {"d3": TARGET}, 0.0)
    assert ledger.reserve(("b", 1), {"p1": SOURCE, "d3": TARGET}, 0.0) == Refusal("d3", Short.KV)
    assert ledger.holds(("b", 1)) == ()
    ledger.check()
    untouched = ledger.view("p1")
    assert untouched is not None
    assert untouched.held_tokens == 0


def test_each_shortage_is_named() -> None:
    ledger = fleet()
    small = Demand(tokens=1, context=1, decode=True)
    assert ledger.reserve(("a", 1), {"d4": small}, 0.0) is None
    assert ledger.reserve(("b", 1), {"d4": small}, 0.0) is None
    assert ledger.reserve(("c", 1), {"d4": small}, 0.0) == Refusal("d4", Short.BATCH)
    assert ledger.reserve(("c", 1), {"p1": Demand(slots=5)}, 0.0) == Refusal("p1", Short.SLOTS)
    assert ledger.reserve(("c", 1), {"p9": SOURCE}, 0.0) == Refusal("p9", Short.GONE)
    assert ledger.reserve(("a", 1), {"d4": small}, 0.0) == Refusal("d4", Short.TWICE)


def test_a_leg_is_released_once_however_often_it_is_told() -> None:
    ledger = fleet()
    ledger.reserve(("r", 1), {"p1": SOURCE, "d3": TARGET}, 0.0)
    assert ledger.release(("r", 1), "p1", 1.0)
    assert not ledger.release(("r", 1), "p1", 1.0)
    assert not ledger.release(("r", 2), "d3", 1.0), "another attempt is another booking"
    assert ledger.holds(("r", 1)) == ("d3",)
    ledger.release_all("r", (1, 2), 1.0)
    assert len(ledger) == 0
    ledger.check()


def test_a_retry_is_booked_beside_what_the_first_attempt_still_holds() -> None:
    ledger = fleet()
    ledger.reserve(("r", 1), {"p1": SOURCE}, 0.0)
    assert ledger.reserve(("r", 2), {"p2": SOURCE}, 0.0) is None
    assert ledger.release(("r", 1), "p1", 0.0)
    assert ledger.holds(("r", 2)) == ("p2",)


def test_a_worker_that_goes_takes_its_bookings_and_leaves_the_other_legs() -> None:
    ledger = fleet()
    ledger.reserve(("r", 1), {"p1": SOURCE, "d3": TARGET}, 0.0)
    assert ledger.remove("p1") == [("r", 1)]
    assert ledger.holds(("r", 1)) == ("d3",)
    assert not ledger.release(("r", 1), "p1", 1.0)
    ledger.check()


def test_the_next_life_of_a_worker_begins_with_an_empty_account() -> None:
    ledger = fleet()
    ledger.reserve(("r", 1), {"p1": SOURCE}, 0.0)
    ledger.add(prefill(1, kv_tokens=3000, slots=4))
    again = ledger.view("p1")
    assert again is not None
    assert again.held_tokens == 0
    assert ledger.holds(("r", 1)) == ()


def test_work_ends_with_the_answer_and_what_is_held_with_the_release() -> None:
    ledger = fleet()
    ledger.reserve(("r", 1), {"p1": SOURCE}, 0.0)
    ledger.prefilled(("r", 1), "p1", 0.5)
    view = ledger.view("p1")
    assert view is not None
    assert (view.prefill_tokens, view.queue_s(0.5), view.held_tokens) == (0, 0.0, 1000)
    ledger.prefilled(("r", 1), "p1", 0.6)
    ledger.check()


def test_the_queue_shortens_as_its_head_ages_but_a_late_head_is_not_done() -> None:
    ledger = fleet()
    for name in ("a", "b"):
        ledger.reserve((name, 1), {"p1": SOURCE}, 0.0)
    view = ledger.view("p1")
    assert view is not None
    assert abs(view.queue_s(0.1) - 0.7) < 1e-9
    assert abs(view.queue_s(0.42) - 0.44) < 1e-9
    assert abs(view.queue_s(9.4) - 9.4) < 1e-9, "nine seconds late: as many more, and then the other one"
    ledger.prefilled(("a", 1), "p1", 2.0)
    assert abs(view.queue_s(2.1) - 0.3) < 1e-9


def test_generated_tokens_use_up_the_headroom_before_they_take_more_room() -> None:
    ledger = fleet()
    ledger.reserve(("r", 1), {"d3": TARGET}, 0.0)
    view = ledger.view("d3")
    assert view is not None
    ledger.grown(("r", 1), "d3", 150)
    assert (view.context_tokens, view.held_tokens) == (1300, 1300)
    ledger.grown(("r", 1), "d3", 10)
    assert view.held_tokens == 1310
    ledger.release(("r", 1), "d3", 0.0)
    assert (view.context_tokens, view.held_tokens) == (0, 0)


def test_what_was_sent_without_asking_is_counted_even_beyond_what_there_is() -> None:
    ledger = fleet()
    for number in range(3):
        ledger.charge((str(number), 1), {"d3": TARGET}, 0.0)
    view = ledger.view("d3")
    assert view is not None
    assert view.room_tokens() < 0
    ledger.check()


def test_prefill_beside_decoding_is_remembered_for_a_while() -> None:
    ledger = fleet()
    local = Demand(tokens=1000, context=900, decode=True, prefill_tokens=800, prefill_s=2.5)
    ledger.reserve(("r", 1), {"d3": local}, 10.0)
    view = ledger.view("d3")
    assert view is not None
    assert view.mixed_share(10.0, 5.0) == 0.5
    assert view.mixed_share(30.0, 5.0) < 0.01


class LedgerMachine(RuleBasedStateMachine):
    workers = st.sampled_from(["p1", "p2", "d3", "d4"])
    keys = st.tuples(st.sampled_from("abcd"), st.integers(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.ledger = fleet()
        self.held: set[tuple[tuple[str, int], str]] = set()
        self.now = 0.0

    @rule(key=keys, source=st.sampled_from(["p1", "p2"]), sink=st.sampled_from(["d3", "d4"]), size=st.integers(0, 1500))
    def reserve(self, key: tuple[str, int], source: str, sink: str, size: int) -> None:
        self.now += 0.1
        before = {name: self.ledger.view(name).held_tokens for name in ("p1", "p2", "d3", "d4")}  # type: ignore[union-attr]
        demands = {
            source: Demand(size, 1, prefill_tokens=size, prefill_s=size * 1e-4),
            sink: Demand(size + 100, 1, size, True, True),
        }
        refusal = self.ledger.reserve(key, demands, self.now)
        if refusal is None:
            self.held |= {(key, source), (key, sink)}
        else:
            after = {name: self.ledger.view(name).held_tokens for name in before}  # type: ignore[union-attr]
            assert after == before

    @rule(key=keys, worker=workers)
    def release(self, key: tuple[str, int], worker: str) -> None:
        assert self.ledger.release(key, worker, self.now) == ((key, worker) in self.held)
        self.held.discard((key, worker))

    @rule(key=keys, worker=workers)
    def report(self, key: tuple[str, int], worker: str) -> None:
        self.ledger.prefilled(key, worker, self.now)
        self.ledger.landed(key, worker)
        self.ledger.grown(key, worker, 7)

    @rule(request=st.sampled_from("abcd"))
    def end(self, request: str) -> None:
        self.ledger.release_all(request, (1, 2), self.now)
        self.held = {entry for entry in self.held if entry[0][0] != request}

    @rule(worker=workers)
    def restart(self, worker: str) -> None:
        old = self.ledger.view(worker)
        assert old is not None
        self.ledger.add(
            type(old)(worker, old.role, old.bit, kv_tokens=old.kv_tokens, slots=old.slots, max_batch=old.max_batch)
        )
        self.held = {entry for entry in self.held if entry[1] != worker}

    @invariant()
    def adds_up(self) -> None:
        self.ledger.check()
        assert {(key, w) for key in {k for k, _ in self.held} for w in self.ledger.holds(key)} == self.held
        assert len(self.ledger) == len(self.held)
        for view in self.ledger.views():
            assert view.held_slots <= view.slots
            assert not view.max_batch or view.decoding <= view.max_batch
            if not any(worker == view.worker_id for _, worker in self.held):
                account = (view.held_tokens, view.prefill_tokens, view.decoding, view.landing, view.context_tokens)
                assert account == (0, 0, 0, 0, 0)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
