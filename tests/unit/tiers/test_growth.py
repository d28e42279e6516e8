"""A decode that needs a page while all idle ones carry states: it costs none that could have been kept."""

from __future__ import annotations

import pytest

from engine.tiers.growth import WAIT_S
from kvtransfer.hashing import page_keys
from kvtransfer.types import LegKey
from tests.unit.engine_core.lab import ROOT, prompt, request, undisturbed
from tests.unit.tiers.lab import Manual, TierLab
from tests.unit.tiers.test_states import ask

FIRST, LONG = prompt(40), prompt(20, seed=1)
COUNT = 40


def grown(monkeypatch: pytest.MonkeyPatch, pages: int, lane: Manual, **changes: object) -> tuple[TierLab, LegKey]:
    """One prompt has left two pages, a state on the last; another decodes until its next page has to be one of them.
    Nothing has gone down ahead of that."""
    made = TierLab(pages=pages, state=True, lane=lane, changes={"state_ends": False, **changes})
    monkeypatch.setattr(made.tiers, "store", lambda: None)
    ask(made, "first", FIRST, 2)
    key = made.submit(request("long", LONG, max_tokens=COUNT))
    for _ in range(99):
        if made.engine.pages.free == 0 and (lane.waiting or made.ends(key)):
            break
        made.turns(1)
    return made, key


def resumes(made: TierLab, tokens: tuple[int, ...]) -> bool:
    keys = page_keys(ROOT, tokens)[:2]
    assert made.engine.states is not None
    return made.engine.states.match(keys, tokens).state is not None or bool(made.tiers.states.match(keys, tokens, 0))


def said(made: TierLab, key: LegKey) -> bool:
    asked = request("long", LONG, max_tokens=COUNT)
    return tuple(made.tokens(key)) == undisturbed(LONG, asked.sampling, state=True)[0]


def test_the_page_and_its_state_go_down_before_the_decode_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Manual()
    made, key = grown(monkeypatch, 5, lane)
    before = len(made.tokens(key))
    made.turns(3)
    assert len(made.tokens(key)) == before, "it waits for the copies"

    lane.open()
    made.run()

    assert said(made, key)
    assert made.tiers.counts.lost_states == 0
    assert resumes(made, FIRST)
    made.baseline()


def test_it_waits_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Manual()
    made, key = grown(monkeypatch, 5, lane)
    made.turns(2)
    made.clock.advance(WAIT_S)
    made.turns(2)
    assert len(made.tokens(key)) > 17
    lane.open()
    made.run()
    assert said(made, key)
    made.baseline()


def inverted(monkeypatch: pytest.MonkeyPatch, pages: int, lane: Manual) -> TierLab:
    """One prompt has left two pages, a state on the second. Both have gone down, one copy after the other, so the first
    one is the next to be evicted: but what hangs on it goes before it."""
    made = TierLab(pages=pages, state=True, lane=lane, changes={"state_ends": False})
    monkeypatch.setattr(made.tiers, "store", lambda: None)
    ask(made, "first", FIRST, 2)
    for count in (1, 2):
        made.tiers._stores.make_room(count, ())
        lane.run_all()
        made.tiers.poll()
    first, second = made.engine.cache.match(page_keys(ROOT, FIRST)[:2])
    assert made.engine.pages.oldest(2) == [first, second]
    return made


def test_the_state_that_goes_down_is_that_of_the_page_that_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Manual()
    made = inverted(monkeypatch, 5, lane)
    key = made.submit(request("long", LONG, max_tokens=COUNT))
    while not (lane.waiting or made.ends(key)):
        made.turns(1)
    lane.open()
    made.run()

    assert said(made, key)
    assert made.tiers.counts.lost_states == 0
    assert resumes(made, FIRST)
    made.baseline()


def test_so_it_is_when_a_prompt_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Manual()
    made = inverted(monkeypatch, 5, lane)
    key = made.submit(request("new", prompt(48, seed=3), max_tokens=2))
    made.run()
    assert not made.ends(key), "it waits for a copy"
    lane.open()
    made.run()

    assert made.ends(key)
    assert made.tiers.counts.lost_states == 0
    assert resumes(made, FIRST)
    made.baseline()


def test_a_page_that_hangs_on_the_oldest_goes_down_before_it_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that come back make their pages recent, and not those of a prompt that all of them share."""
    lane = Manual()
    made = TierLab(pages=5, state=True, lane=lane, changes={"state_ends": False})
    monkeypatch.setattr(made.tiers, "store", lambda: None)
    ask(made, "first", FIRST, 2)
    first, second = made.engine.cache.match(page_keys(ROOT, FIRST)[:2])
    made.engine.pages.used_again([second])
    assert made.engine.pages.oldest(2) == [first, second]
    key = made.submit(request("long", LONG, max_tokens=COUNT))
    while not (lane.waiting or made.ends(key)):
        made.turns(1)
    lane.open()
    made.run()

    assert said(made, key)
    assert made.tiers.counts.lost_states == made.tiers.counts.lost == 0
    assert resumes(made, FIRST)
    made.baseline()


def test_an_idle_page_that_carries_no_state_goes_before_older_ones_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Manual()
    made = TierLab(pages=7, state=True, lane=lane, changes={"state_ends": False})
    monkeypatch.setattr(made.tiers, "store", lambda: None)
    ask(made, "first", FIRST, 2)
    ask(made, "bare", prompt(40, seed=2), 2)
    assert made.engine.states is not None
    made.engine.states.give_up(next(s for s in made.engine.states._all() if s.key not in page_keys(ROOT, FIRST)))
    key = made.submit(request("long", LONG, max_tokens=COUNT))

    made.run()

    assert said(made, key)
    assert not lane.waiting
    assert made.engine.states.match(page_keys(ROOT, FIRST)[:2], FIRST).state is not None
    assert made.tiers.counts.lost_states == 1, "the one that was given up here"
    made.baseline()
