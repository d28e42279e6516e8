"""A choice leaves in mid-answer and goes on at another engine, from the same bytes, as if it had never moved."""

from __future__ import annotations

import pytest

from engine.api import Admitted, EngineRequest, HandedOver, Mode
from engine.plan import SamplingParams
from kvtransfer.types import First, LegKey
from runtime.errors import Draining
from tests.unit.engine_core.lab import ROOT, Lab, prompt, request, undisturbed

GREEDY: dict[str, object] = {}
SEEDED: dict[str, object] = {
    "temperature": 0.8,
    "seed": 5,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}
SAMPLED_STEPS = (1, 2, 15, 16, 17, 40)


def steps() -> list[object]:
    return [pytest.param(s, marks=() if s in SAMPLED_STEPS else pytest.mark.slow) for s in range(1, 41)]


def left(lab: Lab, key: LegKey, choice: int = 0) -> HandedOver:
    return next(e for e in lab.of(key) if isinstance(e, HandedOver) and e.choice == choice)


def continuation(made: EngineRequest, said: list[int], event: HandedOver) -> EngineRequest:
    """What the router gives the next worker: everything the state holds, and no more."""
    tokens = (made.tokens + tuple(said))[: event.token_count]
    assert len(made.tokens) + len(said) == event.token_count + 1
    return EngineRequest(
        LegKey(f"{made.key.request_id}.{event.choice}", "decode", 2),
        Mode.REMOTE,
        tokens,
        made.prompt_len,
        made.sampling,
        ROOT,
        1e9,
        choice=event.choice,
    )


def go_on(source: Lab, target: Lab, made: EngineRequest, choice: int = 0) -> LegKey:
    """Submit at the target, read what it lacks, start it; the source's hold ends when it has been read."""
    event = left(source, made.key, choice)
    work = continuation(made, source.tokens(made.key, choice), event)
    key = target.submit(work)
    target.engine.turn()
    to = target.admitted(key)
    copy(source, target, event, to)
    event.hold.release()
    to.hold.release()
    target.engine.start(key, (First(choice, event.token),))
    return key


def copy(source: Lab, target: Lab, event: HandedOver, to: Admitted) -> None:
    held = to.ready // 16
    paged = {c.name: c.paged for c in target.engine.model.components}
    for region, mine, theirs in zip(target.engine.regions(), target.memory(), source.memory(), strict=True):
        into = to.pages[held : len(event.pages)] if paged[region.component] else to.slots
        out_of = event.pages[held:] if paged[region.component] else event.slots
        mine[list(into)] = theirs[list(out_of)]


def turn_until_said(lab: Lab, key: LegKey, count: int, choice: int = 0) -> None:
    for _ in range(500):
        if len(lab.tokens(key, choice)) >= count:
            return
        lab.engine.turn()
    raise AssertionError("it says nothing")


@pytest.mark.parametrize("state", [False, True], ids=["pages", "state"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("step", steps())
def test_a_request_that_moves_after_any_token_says_the_same(
    step: int, sampling: dict[str, object], state: bool
) -> None:
    source, target = Lab(state=state), Lab(state=state)
    made = request("a", prompt(70), max_tokens=45, **sampling)  # type: ignore[arg-type]
    key = source.submit(made)
    turn_until_said(source, key, step)

    source.engine.handover(key, 0)
    source.run()
    moved = go_on(source, target, made)
    target.run()

    said = source.tokens(key) + target.tokens(moved)
    assert len(source.tokens(key)) == step, "it left with the step's end"
    assert tuple(said) == undisturbed(made.tokens, made.sampling, state=state)[0]
    assert target.of(moved)[1].first_sequence == step  # type: ignore[union-attr]
    assert source.ends(key) == 0
    assert target.ends(moved) == 1
    for lab in (source, target):
        lab.engine.check_baseline()


def test_it_moves_back_and_forth_and_says_the_same() -> None:
    labs = [Lab(state=True), Lab(state=True)]
    made = request("a", prompt(33), max_tokens=40, temperature=0.9, seed=3)
    key, said, at = labs[0].submit(made), [], 0
    for _ in range(5):
        here, there = labs[at], labs[1 - at]
        turn_until_said(here, key, 6)
        here.engine.handover(key, 0)
        here.run()
        said += here.tokens(key)
        event = left(here, key)
        work = EngineRequest(
            LegKey("a", "decode", len(said) + 1),
            Mode.REMOTE,
            (made.tokens + tuple(said))[: event.token_count],
            made.prompt_len,
            made.sampling,
            ROOT,
            1e9,
        )
        key = there.submit(work)
        there.engine.turn()
        copy(here, there, event, there.admitted(key))
        event.hold.release()
        there.admitted(key).hold.release()
        there.engine.start(key, (First(0, event.token),))
        at = 1 - at
    labs[at].run()

    assert tuple(said + labs[at].tokens(key)) == undisturbed(made.tokens, made.sampling, state=True)[0]
    for lab in labs:
        lab.engine.check_baseline()


def test_one_choice_moves_and_the_others_stay() -> None:
    source, target = Lab(state=True), Lab(state=True)
    made = request("a", prompt(40), n=3, max_tokens=30, temperature=0.8, seed=2)
    key = source.submit(made)
    turn_until_said(source, key, 4, choice=1)

    source.engine.handover(key, 1)
    source.run()
    moved = go_on(source, target, made, choice=1)
    target.run()

    right = undisturbed(made.tokens, made.sampling, 3, state=True)
    assert tuple(source.tokens(key, 1) + target.tokens(moved, 1)) == right[1]
    assert tuple(source.tokens(key, 0)) == right[0]
    assert tuple(source.tokens(key, 2)) == right[2]
    assert (source.ends(key), target.ends(moved)) == (1, 1)
    for lab in (source, target):
        lab.engine.check_baseline()


def test_a_choice_that_leaves_with_its_first_token_keeps_its_noise() -> None:
    source, target = Lab(state=True), Lab(state=True)
    made = request("a", prompt(32), n=2, max_tokens=12, temperature=1.0, seed=8)
    key = source.submit(made)
    source.engine.handover(key, 1)
    source.run()
    assert left(source, key, 1).token_count == 33 - (len(source.tokens(key, 1)) == 1)

    moved = go_on(source, target, made, choice=1)
    target.run()

    right = undisturbed(made.tokens, made.sampling, 2, state=True)
    assert tuple(source.tokens(key, 1) + target.tokens(moved, 1)) == right[1]
    assert tuple(source.tokens(key, 0)) == right[0]


def test_all_choices_leave_and_the_last_one_ends_the_request() -> None:
    lab = Lab()
    made = request("a", prompt(40), n=2, max_tokens=30, temperature=0.8, seed=2)
    key = lab.submit(made)
    turn_until_said(lab, key, 4, choice=1)

    lab.engine.handover(key, 0)
    lab.engine.handover(key, 1)
    lab.run()

    events = [left(lab, key, choice) for choice in (0, 1)]
    assert [event.last for event in events] == [False, True]
    lab.submit(made)  # the key is free again
    for event in events:
        event.hold.release()
    lab.engine.cancel(key)
    lab.run()
    lab.engine.check_baseline()


def test_asked_twice_it_leaves_once() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(40), max_tokens=30))
    turn_until_said(lab, key, 3)
    for _ in range(2):
        lab.engine.handover(key, 0)
    lab.run()
    lab.engine.handover(key, 0)
    lab.run()

    assert sum(isinstance(e, HandedOver) for e in lab.of(key)) == 1
    left(lab, key).hold.release()
    lab.engine.check_baseline()


def test_a_choice_that_has_ended_by_then_does_not_leave() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(20), max_tokens=1))
    lab.engine.handover(key, 0)
    lab.run()
    assert not any(isinstance(e, HandedOver) for e in lab.of(key))
    assert lab.ends(key) == 1
    lab.engine.check_baseline()


def test_a_choice_that_is_not_of_the_request_is_nobodys() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(20), max_tokens=5))
    lab.engine.handover(key, 7)
    lab.run()
    assert lab.ends(key) == 1
    assert len(lab.tokens(key)) == 5


def test_a_request_that_is_asked_for_while_its_prompt_runs_leaves_with_its_first_token() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(100), max_tokens=30))
    lab.engine.turn()
    assert not lab.tokens(key), "the prompt has several chunks"
    lab.engine.handover(key, 0)
    lab.run()
    assert (len(lab.tokens(key)), left(lab, key).token_count) == (1, 100)
    left(lab, key).hold.release()
    lab.engine.check_baseline()


def test_one_that_waits_for_its_kv_leaves_when_it_has_come() -> None:
    source, lab = Lab(), Lab()
    made = request("a", prompt(50), Mode.SOURCE, max_tokens=30)
    source.submit(made)
    source.run()
    key = lab.submit(request("a", prompt(50), Mode.REMOTE, max_tokens=30))
    lab.engine.turn()
    lab.engine.handover(key, 0)
    lab.run()
    assert not any(isinstance(e, HandedOver) for e in lab.of(key))

    lab.engine.start(key, source.done(made.key).first)
    lab.run()

    event = left(lab, key)
    assert (event.token_count, event.token) == (50, source.done(made.key).first[0].token)
    event.hold.release()
    lab.admitted(key).hold.release()
    lab.engine.check_baseline()


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.REMOTE])
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_of_which_nothing_is_computed_fails_so_that_another_worker_gets_it(mode: Mode, n: int) -> None:
    lab = Lab(pages=10)
    first = lab.submit(request("first", prompt(90), max_tokens=20))
    waits = lab.submit(request("waits", prompt(90, seed=3), mode, n=n, max_tokens=20))
    lab.engine.turn()
    for choice in range(n):
        lab.engine.handover(waits, choice)
    lab.run()

    error = lab.failed(waits).error
    assert isinstance(error, Draining)
    assert error.reason == "draining"
    assert len(lab.tokens(first)) == 20
    lab.engine.check_baseline()


def test_one_choice_of_a_request_that_waits_does_not_end_the_others() -> None:
    lab = Lab(pages=9)
    lab.submit(request("first", prompt(90), max_tokens=20))
    waits = lab.submit(request("waits", prompt(64, seed=3), n=2, max_tokens=20, temperature=0.7))
    lab.engine.turn()
    lab.engine.handover(waits, 1)
    lab.run()

    assert len(lab.tokens(waits, 0)) == 20
    assert len(lab.tokens(waits, 1)) == 1, "it left as soon as it was one"
    left(lab, waits, 1).hold.release()
    lab.engine.check_baseline()


def test_the_pages_stay_until_the_hold_ends_and_in_the_cache_after_it() -> None:
    lab = Lab(pages=20)
    made = request("a", prompt(70), max_tokens=60)
    key = lab.submit(made)
    turn_until_said(lab, key, 30)
    lab.engine.handover(key, 0)
    lab.run()

    event = left(lab, key)
    assert lab.engine.pages.referenced == len(event.pages) == 7
    event.hold.release()
    assert lab.engine.pages.referenced == 0
    assert lab.engine.pages.cached == event.token_count // 16
    lab.engine.check_baseline()


def test_a_cancelled_request_takes_what_it_left_along_if_nobody_was_told() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(40), max_tokens=30))
    turn_until_said(lab, key, 3)
    scheduler = lab.engine._scheduler
    scheduler.handover(key, 0)
    scheduler.schedule(lab.clock.monotonic())
    lab.engine.cancel(key)
    lab.run()
    assert not any(isinstance(e, HandedOver) for e in lab.of(key))
    lab.engine.check_baseline()


def test_the_end_of_what_has_left_is_a_state_of_the_cache() -> None:
    lab = Lab(state=True)
    made = request("a", prompt(40), max_tokens=30)
    key = lab.submit(made)
    turn_until_said(lab, key, 9)
    lab.engine.handover(key, 0)
    lab.run()
    event = left(lab, key)
    event.hold.release()

    again = lab.submit(request("b", made.tokens + tuple(lab.tokens(key)), max_tokens=5))
    lab.run()

    assert lab.of(again)[0].cached_tokens == event.token_count  # type: ignore[union-attr]
    right = undisturbed(made.tokens, SamplingParams(max_tokens=30), state=True)[0]
    assert tuple(lab.tokens(again)) == right[9:14]
