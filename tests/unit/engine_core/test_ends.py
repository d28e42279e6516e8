"""How requests end: hand-offs that do not arrive, cancels, deadlines, and what is refused at once."""

from __future__ import annotations

import pytest

from engine.api import Admitted, Event, Failed, Mode, Tokens
from runtime.errors import DeadlineExceeded, InvalidRequest, TransferFailed
from tests.unit.engine_core.lab import VOCAB, Lab, expected, hand_off, prompt, request

# --- remote, gone wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admitted_first", [True, False])
def test_a_hand_off_that_did_not_arrive_is_computed_here(admitted_first: bool) -> None:
    d = Lab()
    key = d.submit(request("a", prompt(50), Mode.REMOTE, max_tokens=10))
    if admitted_first:
        d.run()
    d.engine.recompute(key)
    d.run()
    assert d.tokens(key) == expected(50, 10)
    assert next(e for e in d.of(key) if isinstance(e, Tokens)).first_sequence == 0
    assert d.ends(key) == 1
    if admitted_first:
        assert d.engine.pages.referenced == 4
        d.admitted(key).hold.release()
    d.engine.check_baseline()


def test_pages_of_a_cancelled_landing_are_nobodys_until_the_landing_is_over() -> None:
    d = Lab(pages=9)
    key = d.submit(request("a", prompt(60), Mode.REMOTE, max_tokens=10))
    d.run()
    landing = d.admitted(key)
    d.engine.cancel(key)
    other = d.submit(request("b", prompt(44, 1), max_tokens=30))
    d.turns(6)
    d.memory()[0][list(landing.pages)] = 0xEE
    d.run()
    assert d.tokens(other) == expected(44, 30, 1)
    assert d.engine.pages.referenced == 4
    assert d.of(key) == [landing]
    landing.hold.release()
    d.engine.check_baseline()


def test_two_recomputes_of_one_prompt_share_only_what_is_done() -> None:
    """The second one may read the first one's pages, but none before it is written and confirmed.
    Public report T016 (vllm-project/vllm#49250)."""
    d = Lab()
    keys = [d.submit(request(name, prompt(100), Mode.REMOTE, max_tokens=10)) for name in "ab"]
    d.run()
    for key in keys:
        d.memory()[0][list(d.admitted(key).pages)] = 0xEE
        d.engine.recompute(key)
    d.run()
    assert [d.tokens(key) for key in keys] == [expected(100, 10)] * 2
    for key in keys:
        d.admitted(key).hold.release()
    d.engine.check_baseline()


def test_a_source_page_of_a_copy_is_nobodys_until_the_copy_is_made() -> None:
    """A remote load is announced before the step runs, so it must not get a page this step still reads."""
    lab = Lab(pages=8)
    lab.submit(request("a", prompt(20), n=2, max_tokens=30, temperature=1.0))
    lab.turns(1)
    plan = lab.engine._scheduler.schedule(0.0)
    assert plan is not None
    (copy,) = plan.copies
    assert lab.engine.pages.refs(copy.source) == 2
    assert lab.engine.pages.refs(copy.target) == 1
    lab.engine._scheduler.apply(lab.oracle.run(plan), 0.0)
    assert lab.engine.pages.refs(copy.source) == 1


def test_first_tokens_that_do_not_match_end_the_request() -> None:
    p, d = Lab(), Lab()
    hand_off(p, d, "a", prompt(20), max_tokens=10)
    d.run()
    key = d.submit(request("b", prompt(20), Mode.REMOTE, n=2, max_tokens=10))
    d.run()
    d.engine.start(key, p.done(request("a", prompt(20), Mode.SOURCE).key).first)
    d.run()
    assert isinstance(d.failed(key).error, TransferFailed)
    d.admitted(key).hold.release()
    d.engine.check_baseline()


def test_commands_for_a_request_that_is_gone_do_nothing() -> None:
    d = Lab()
    key = d.submit(request("a", prompt(20), max_tokens=3))
    d.run()
    before = list(d.events)
    d.engine.start(key, ())
    d.engine.recompute(key)
    d.engine.cancel(key)
    d.run()
    assert d.events == before


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("mode", list(Mode))
def test_a_cancel_at_any_stage_is_silent_and_gives_everything_back(mode: Mode, turns: int) -> None:
    lab = Lab(state=True)
    key = lab.submit(request("a", prompt(100), mode, n=2, max_tokens=3))
    lab.turns(turns)
    seen = list(lab.events)
    over = lab.ends(key)
    lab.engine.cancel(key)
    lab.engine.cancel(key)
    lab.run()
    assert lab.events == seen
    assert lab.ends(key) == over
    for event in lab.of(key):
        if isinstance(event, Admitted):
            event.hold.release()
    lab.engine.check_baseline()


def test_a_cancelled_key_may_come_again() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(20), max_tokens=3))
    lab.engine.cancel(key)
    lab.submit(request("a", prompt(20), max_tokens=3))
    lab.run()
    assert lab.tokens(key) == expected(20, 3)


def test_a_live_key_does_not() -> None:
    lab = Lab()
    lab.submit(request("a", prompt(20), max_tokens=3))
    with pytest.raises(InvalidRequest) as refused:
        lab.submit(request("a", prompt(20), max_tokens=3))
    assert refused.value.reason == "duplicate"


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("mode", list(Mode))
def test_a_deadline_ends_a_request_at_any_stage(mode: Mode, turns: int) -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(100), mode, max_tokens=10, deadline=lab.clock.monotonic() + 5))
    lab.turns(turns)
    lab.clock.advance(5)
    over = lab.ends(key)
    lab.run()
    assert lab.ends(key) == 1
    if not over:
        assert isinstance(lab.failed(key).error, DeadlineExceeded)
        assert lab.failed(key).error.reason == "deadline_exceeded"
    for event in lab.of(key):
        if isinstance(event, Admitted):
            event.hold.release()
    lab.engine.check_baseline()


@pytest.mark.parametrize("chunk", [2, 4])
@pytest.mark.parametrize("state", [False, True])
def test_an_abort_while_a_chunk_is_in_flight_leaves_nothing(chunk: int, state: bool) -> None:
    """The step's pages are not given back before it lands, and its result counts for nothing.
    Public report T088 (sgl-project/sglang#36926)."""
    lab = Lab(state=state)
    scheduler = lab.engine._scheduler
    events: list[Event] = []
    request_ = scheduler.prepare(request("a", prompt(128), max_tokens=4), events.extend, 0.0)
    scheduler.add(request_)
    for _ in range(chunk - 1):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.apply(lab.oracle.run(plan), 0.0)
    known = len(lab.engine.cache)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.cancel(request_.spec.key)
    held = lab.engine.pages.referenced
    scheduler.apply(lab.oracle.run(plan), 0.0)
    assert held == 9
    assert len(lab.engine.cache) == known
    assert scheduler.take_events() == []
    lab.engine.check_baseline()


# --- input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "field"), [
    ({"tokens": ()}, "tokens"),
    ({"tokens": (VOCAB,)}, "tokens"),
    ({"tokens": (-1,)}, "tokens"),
    ({"tokens": (1,) * 2048}, "tokens"),
    ({"prompt_len": 11}, "tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**12}, "n"),
    ({"n": 5}, "n"),
    ({"n": 2, "choice": 1}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"root": b""}, "root"),
    ({"stop_token_ids": (VOCAB,)}, "sampling"),
    ({"logit_bias": ((191222, -100.0),)}, "sampling"),
])  # fmt: skip
def test_what_can_never_run_is_refused_by_name_and_takes_nothing(change: dict[str, object], field: str) -> None:
    lab = Lab()
    made: dict[str, object] = {"tokens": prompt(10), "max_tokens": 3, **change}
    with pytest.raises(InvalidRequest) as refused:
        lab.submit(request("a", **made))  # type: ignore[arg-type]
    assert refused.value.field == field
    lab.engine.check_baseline()
    key = lab.submit(request("b", prompt(10), max_tokens=3))
    lab.run()
    assert lab.tokens(key) == expected(10, 3)


def test_a_prompt_larger_than_the_pool_is_refused_for_ever() -> None:
    lab = Lab(pages=4)
    with pytest.raises(InvalidRequest) as refused:
        lab.submit(request("a", prompt(70), max_tokens=3))
    assert (refused.value.reason, refused.value.limit) == ("exceeds_capacity", "64 tokens")
    assert not any(isinstance(e, Failed) for e in lab.events)
