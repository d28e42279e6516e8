"""A checkpoint made inside a step takes the slot of a cached state only when that one is below, or soon will be."""

from __future__ import annotations

import pytest

from engine.tiers.growth import WAIT_S
from kvtransfer.hashing import page_keys
from tests.unit.engine_core.lab import ROOT, prompt, request
from tests.unit.tiers.lab import Manual, TierLab
from tests.unit.tiers.test_states import ask

NEW = prompt(40, seed=77)


def full(lane: Manual, cached: int = 7, **changes: object) -> TierLab:
    """A lab of eight slots: seven hold cached states that are nowhere else, one is free for who comes."""
    made = TierLab(pages=99, state=True, lane=lane, changes={"state_ends": False, **changes})
    for number in range(cached):
        key = made.submit(request(f"r{number}", prompt(40, seed=number), max_tokens=2))
        made.run()
        assert made.ends(key)
    assert made.engine.states is not None
    assert len(made.engine.states) == cached
    assert made.engine.slots.free == 8 - cached
    return made


def known(made: TierLab, seed: int) -> bool:
    """Whether the state that prompt left can be resumed from somewhere."""
    tokens = prompt(40, seed=seed)
    keys = page_keys(ROOT, tokens)[:2]
    assert made.engine.states is not None
    return made.engine.states.match(keys, tokens).state is not None or bool(made.tiers.states.match(keys, tokens, 0))


def test_the_state_that_makes_way_is_copied_first() -> None:
    lane = Manual()
    made = full(lane)
    key = made.submit(request("new", NEW, max_tokens=2))
    made.run()
    assert not made.ends(key), "a copy is under way"
    assert made.engine.pages.referenced > 0, "it has been admitted"

    lane.open()
    made.run()

    assert made.ends(key)
    assert [known(made, seed) for seed in (*range(7), 77)] == [True] * 8
    assert made.tiers.counts.lost_states == 0
    made.baseline()


def test_others_go_on_meanwhile() -> None:
    lane = Manual()
    made = TierLab(pages=99, state=True, lane=lane, changes={"state_ends": False})
    talking = made.submit(request("talking", prompt(20), max_tokens=30))
    made.turns(2)
    for number in range(1, 6):
        made.submit(request(f"r{number}", prompt(40, seed=number), max_tokens=1))
        made.turns(2)
    assert made.engine.slots.free == 1
    said = len(made.tokens(talking))
    new = made.submit(request("new", NEW, max_tokens=2))

    made.turns(3)

    assert made.tokens(new) == []
    assert len(made.tokens(talking)) == said + 3
    lane.open()
    made.run()
    assert made.ends(new)
    assert made.ends(talking)
    made.baseline()


def test_a_prompt_that_waits_takes_no_tokens_of_the_step_from_those_behind_it() -> None:
    lane = Manual()
    made = full(lane, cached=6, max_batched_tokens=32)
    new = made.submit(request("new", prompt(40, seed=77), max_tokens=2))
    behind = made.submit(request("behind", prompt(14, seed=78), max_tokens=30))

    made.turns(5)

    assert made.tokens(new) == []
    assert len(made.tokens(behind)) == 5
    lane.open()
    made.run()
    assert made.ends(new)
    assert made.ends(behind)
    assert made.tiers.counts.lost_states == 0
    made.baseline()


def test_every_row_of_a_prompt_has_its_own_wait() -> None:
    """The first of three is held up until slots come free otherwise; much later the second is held up again."""
    lane = Manual()
    made = full(lane, cached=5, state_interval_tokens=32)
    slots = made.engine.slots
    taken = slots.allocate(2) or []
    key = made.submit(request("new", prompt(70, seed=77), max_tokens=2))
    made.turns(2)
    step = made.engine._scheduler.step
    slots.release(taken)
    made.turns(1)
    assert made.engine._scheduler.step == step + 1, "the first"
    taken = slots.allocate(slots.free) or []
    made.clock.advance(9.0)
    for wait_s in (0.0, WAIT_S - 0.01):
        made.clock.advance(wait_s)
        made.turns(2)
        assert made.engine._scheduler.step == step + 1, "the second is held up"
    assert made.tiers.counts.lost_states == 0
    lane.open()
    made.run()
    assert made.ends(key)
    assert made.tiers.counts.lost_states == 0
    slots.release(taken)
    made.baseline()


def test_a_row_that_has_waited_in_vain_leaves_the_next_one_its_own_wait() -> None:
    lane = Manual()
    made = full(lane, state_interval_tokens=32)
    key = made.submit(request("new", prompt(70, seed=77), max_tokens=2))
    made.run()
    step = made.engine._scheduler.step
    made.clock.advance(WAIT_S)
    made.turns(3)
    assert made.engine._scheduler.step == step + 1, "the first goes on without, the second is held up"
    assert made.tiers.counts.lost_states == 1
    lane.open()
    made.run()
    assert made.ends(key)
    assert made.tiers.counts.lost_states == 1
    made.baseline()


def test_one_that_was_preempted_while_it_waited_waits_anew() -> None:
    lane = Manual()
    made = full(lane)
    key = made.submit(request("new", NEW, max_tokens=2))
    made.run()
    (seq,) = made.engine._scheduler._running
    made.engine._scheduler._preempt(seq)
    made.clock.advance(9.0)

    made.turns(3)

    assert not made.ends(key)
    assert made.tiers.counts.lost_states == 0
    lane.open()
    made.run()
    assert made.ends(key)
    assert made.tiers.counts.lost_states == 0
    made.baseline()


def test_nobody_waits_for_a_copy_for_longer_than_that() -> None:
    lane = Manual()
    made = full(lane)
    key = made.submit(request("new", NEW, max_tokens=2))
    made.run()
    made.clock.advance(WAIT_S)

    made.run()

    assert made.ends(key)
    assert made.tiers.counts.lost_states == 1
    lane.open()
    made.baseline()


def test_with_no_room_below_a_state_is_dropped_and_counted() -> None:
    lane = Manual()
    lane.open()
    made = TierLab(pages=99, state=True, lane=lane, changes={"state_ends": False, "host_state_slots": 1})
    (slot,) = made.tiers.host_slots.allocate(1) or [0]  # as a swapped request's would be
    for number in range(8):
        assert ask(made, f"r{number}", prompt(40, seed=number), 2)[0] == 0
    assert made.tiers.counts.lost_states == 1
    made.tiers.host_slots.release([slot])
    made.baseline()


def test_what_is_below_makes_way_before_what_is_not() -> None:
    lane = Manual()
    made = full(lane)
    assert len(lane.waiting) == 1
    lane.run_all()
    made.tiers.poll()
    assert len(made.tiers.states) == 1
    (kept,) = [state for found in made.tiers.states._by_key.values() for state in found]
    assert made.engine.states is not None
    (there,) = made.engine.states._by_key[kept.key]
    there.used += 99  # now it is the last in line
    assert made.engine.states.victims(9)[-1] is there

    key = made.submit(request("new", NEW, max_tokens=2))
    made.run()

    assert made.ends(key)
    assert kept.key not in made.engine.states._by_key
    assert [known(made, seed) for seed in range(7)] == [True] * 7
    lane.open()
    made.baseline()


def test_two_prompts_of_one_step_do_not_count_on_the_same_slot() -> None:
    lane = Manual()
    made = TierLab(pages=99, state=True, lane=lane, changes={"state_ends": False})
    for number in range(6):
        made.submit(request(f"r{number}", prompt(40, seed=number), max_tokens=1))
        made.run()
    keys = [made.submit(request(f"new{seed}", prompt(30, seed=seed), max_tokens=2)) for seed in (70, 71)]
    for _ in range(8):
        made.run()
        lane.run_all()
    assert all(made.ends(key) for key in keys)
    assert all(known(made, seed) for seed in range(6))
    assert made.tiers.counts.lost_states == 0
    lane.open()
    made.baseline()


def test_the_next_chunks_checkpoint_is_prepared_while_this_one_runs() -> None:
    """A prompt of two chunks; its checkpoint is in the second."""
    lane = Manual()
    made = full(lane)
    lane.run_all()
    made.tiers.poll()
    made.tiers.states.drop(next(iter(made.tiers.states._by_key.values()))[0])
    made.tiers.state_stores._ahead.clear()  # type: ignore[union-attr]
    key = made.submit(request("new", prompt(60, seed=77), max_tokens=2))

    made.engine.turn()

    assert len(lane.waiting) == 1
    assert made.engine._scheduler.step > 7, "the first chunk was not held up"
    lane.open()
    made.run()
    assert made.ends(key)
    made.baseline()


@pytest.mark.parametrize("store", ["prompt", "all"])
def test_a_state_nobody_wants_below_makes_way_at_once(store: str) -> None:
    lane = Manual()
    made = full(lane, host_tokens_per_request=16, host_store=store)
    key = made.submit(request("new", NEW, max_tokens=2))
    made.run()
    assert made.ends(key)
    assert not lane.waiting
    assert made.tiers.counts.lost_states == 0
    made.baseline()
