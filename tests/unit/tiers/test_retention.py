"""Hints order what is evicted, on every tier; they keep nothing that must go, and are forgotten with what is gone."""

from __future__ import annotations

import pytest

from engine.api import Retention
from engine.pages import PagePool
from engine.retention import EXPIRED, Retained
from kvtransfer.hashing import page_keys
from tests.unit.engine_core.lab import ROOT, prompt, request
from tests.unit.tiers.lab import TierLab

LOW, HIGH = Retention(priority=-3), Retention(priority=5)
BRIEF = Retention(ttl_s=10.0)


def ask(made: TierLab, name: str, seed: int, hint: Retention = Retention(), length: int = 64) -> None:
    key = made.submit(request(name, prompt(length, seed=seed), max_tokens=2, retention=hint))
    for _ in range(100):
        made.run()
        if made.ends(key):
            return
        made.settle()
    raise AssertionError("it runs for ever")


def kept(made: TierLab, seed: int, length: int = 64) -> int:
    """Pages of this prompt on the device."""
    return len(made.engine.cache.match(page_keys(ROOT, prompt(length, seed=seed))))


def lab(pages: int = 12, **more: object) -> TierLab:
    """Room for two prompts of four pages and what is asked next; no tiers unless asked for."""
    changes: dict[str, object] = {"headroom_tokens": 1, "host_pool_tokens": 0, "host_poison": False}
    return TierLab(pages=pages, changes={**changes, **more})


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (Retention(), Retention(), [0, 4]),
        (HIGH, Retention(), [4, 0]),
        (Retention(), LOW, [4, 0]),
        (LOW, HIGH, [0, 4]),
    ],
)
def test_the_lower_priority_goes_first_then_the_longest_unused(
    first: Retention, second: Retention, left: list[int]
) -> None:
    made = lab()
    ask(made, "first", 1, first)
    ask(made, "second", 2, second)
    ask(made, "more", 3, HIGH, 112)
    assert [kept(made, seed) for seed in (1, 2)] == left
    made.engine.pages.check()


def test_what_has_passed_its_time_goes_first_whatever_its_priority() -> None:
    made = lab()
    ask(made, "plain", 1)
    ask(made, "brief", 2, Retention(priority=9, ttl_s=10.0))
    made.clock.advance(11)
    ask(made, "more", 3, length=112)
    assert [kept(made, seed) for seed in (1, 2)] == [4, 0]


def test_a_use_begins_its_time_anew() -> None:
    made = lab()
    ask(made, "brief", 2, BRIEF)
    made.clock.advance(9)
    ask(made, "again", 2, BRIEF)
    made.clock.advance(9)
    made.engine.turn()
    assert made.engine._scheduler.memory.retained.rank(page_keys(ROOT, prompt(64, seed=2))[0]) == 0
    made.clock.advance(2)
    made.engine.turn()
    assert made.engine._scheduler.memory.retained.rank(page_keys(ROOT, prompt(64, seed=2))[0]) == EXPIRED


def test_a_shared_page_keeps_the_most_anyone_has_asked_for() -> None:
    made = lab(pages=40)
    ask(made, "plain", 1)
    ask(made, "low", 1, LOW)
    rank = made.engine._scheduler.memory.retained.rank
    key = page_keys(ROOT, prompt(64, seed=1))[0]
    assert rank(key) == 0
    ask(made, "high", 1, Retention(priority=5, ttl_s=1.0))
    assert rank(key) == 5
    made.clock.advance(100)
    made.engine.turn()
    assert rank(key) == 5, "one that wanted it without end has used it too"


def test_no_page_outranks_the_one_it_hangs_on() -> None:
    made = lab(pages=60)
    ask(made, "low", 1, LOW, 64)
    ask(made, "high", 1, HIGH, 96)
    ask(made, "brief", 1, Retention(priority=-1, ttl_s=5.0), 128)
    made.clock.advance(6)
    made.engine.turn()
    ranks = [made.engine._scheduler.memory.retained.rank(key) for key in page_keys(ROOT, prompt(128, seed=1))]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[0] == 5
    assert ranks[-1] == EXPIRED


def test_entries_of_a_session_are_recent_together() -> None:
    """The first prompt of the session is the oldest entry, but its session has just been used."""
    made = lab(pages=14)
    talk = Retention(session=b"talk")
    ask(made, "talk", 1, talk)
    ask(made, "stranger", 2)
    ask(made, "talk2", 3, talk)
    ask(made, "more", 4, length=80)
    assert [kept(made, seed) for seed in (1, 2, 3)] == [4, 0, 4]


def test_nothing_is_remembered_of_what_is_gone() -> None:
    made = lab()
    ask(made, "a", 1, Retention(b"talk", 3, 5.0))
    retained = made.engine._scheduler.memory.retained
    assert len(retained) == 4
    made.engine.cache.clear()
    assert len(retained) == 0
    assert retained._sessions == {}
    made.clock.advance(6)
    made.engine.turn()


def test_hints_go_down_with_the_pages() -> None:
    """Two prompts on a host of eight pages: the third pushes out the lower one, not the older one."""
    made = TierLab(pages=12, host_pages=8, changes={"headroom_tokens": 1})
    ask(made, "high", 1, HIGH)
    ask(made, "low", 2, LOW)
    made.settle()
    ask(made, "more", 3, length=128)
    made.settle()
    host = made.tiers.host
    there = [sum(key in host for key in page_keys(ROOT, prompt(64, seed=seed))) for seed in (1, 2)]
    assert there == [4, 0]
    made.baseline()


def test_states_of_a_higher_priority_stay() -> None:
    made = TierLab(pages=64, state=True, changes={"host_pool_tokens": 0, "max_batch": 2, "state_ends": False})
    ask(made, "high", 1, HIGH)
    for seed in range(2, 8):
        ask(made, f"plain{seed}", seed)
    states = made.engine.states
    assert states is not None
    assert states.match(page_keys(ROOT, prompt(64, seed=1))[:3], prompt(64, seed=1)).state is not None
    assert states.match(page_keys(ROOT, prompt(64, seed=2))[:3], prompt(64, seed=2)).state is None


def test_an_idle_page_moves_when_its_rank_does() -> None:
    pool = PagePool(5)
    pool.set_evictor(pool.unkeep)
    pages = pool.allocate(4) or []
    for page in pages:
        pool.keep(page)
        pool.release([page])
    pool.rank(pages[0], 2)
    pool.rank(pages[2], -1)
    assert pool.oldest(9) == [pages[2], pages[1], pages[3], pages[0]]
    pool.used_again([pages[1]])
    assert pool.oldest(9) == [pages[2], pages[3], pages[1], pages[0]]
    pool.share([pages[2]])
    pool.rank(pages[2], 7)
    pool.release([pages[2]])
    assert pool.oldest(9) == [pages[3], pages[1], pages[0], pages[2]]
    pool.allocate(4)
    pool.check()
    assert not pool.cached


def test_one_place_in_the_queue_of_ends_whatever_a_key_is_asked_for() -> None:
    retained = Retained()
    key = bytes(32)
    for now in range(1000):
        retained.tick(float(now))
        retained.touch([key], BRIEF, 0, retained.until(BRIEF))
    assert len(retained._ends) == 1
    retained.tick(1008.9)
    assert retained.rank(key) == 0
    retained.tick(1009.0)
    assert retained.rank(key) == EXPIRED


def test_ends_a_day_ahead_are_not_remembered_of_what_is_gone() -> None:
    retained = Retained()
    day = Retention(ttl_s=86_400.0)
    stays = [bytes([1, number]) for number in range(10)]
    retained.touch(stays, day, 0, retained.until(day))
    for number in range(2_000):  # comes and goes, also the same again
        keys = [b"%d" % (number % 1_000)]
        retained.tick(number / 100)
        retained.touch(keys, day, 0, retained.until(day))
        retained.forget(keys)
    assert len(retained) == 10
    assert len(retained._ends) < 200

    retained.tick(86_401.0)
    assert {retained.rank(key) for key in stays} == {EXPIRED}


def test_a_name_that_everything_has_costs_a_request_no_walk_through_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.retention.MOST_TOGETHER", 5)
    retained, told = Retained(), list[bytes]()
    retained.serve(lambda key, rank: None, told.extend)
    keys = [bytes([number]) for number in range(100)]
    hint = Retention(session=b"everything")
    retained.touch(keys, hint, 0, retained.until(hint))
    retained.used(hint.session)
    assert told == keys[:-6:-1], "the newest, the deepest first"
    retained.used(b"another")
    assert len(told) == 5
