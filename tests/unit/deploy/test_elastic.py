"""The rules of the elastic controller, each as what a small fleet does."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.elastic import ORPHAN_S
from deploy.elastic_state import POOLS, Add, Bounds, Drain, Remove, SetRole
from runtime.config import RoleName
from tests.unit.deploy.elastic_lab import Lab, rules

TWO_BY_TWO: dict[RoleName, int] = {"prefill": 2, "decode": 2}


def fleet(prefill: int = 2, decode: int = 2, both: int = 0, **fields: object) -> Lab:
    return Lab(rules({"prefill": prefill, "decode": decode, "both": both}), **fields)  # type: ignore[arg-type]


def test_a_burst_of_prompts_moves_one_decode_worker_over_and_back() -> None:
    lab = fleet(2, 3, work=(0.6, 0.9)).run(120)
    assert lab.done == [], "a fleet that is neither hot nor cold stays as it is"
    lab.work = (2.4, 0.9)
    lab.run(60)
    assert lab.roles == {"decode": 2, "prefill": 3}
    lab.work = (0.6, 0.9)
    lab.run(150)
    assert lab.roles == {"decode": 3, "prefill": 2}
    assert len(lab.changes) == 2


def test_many_answers_move_one_prefill_worker_over() -> None:
    lab = fleet(3, 2, work=(0.3, 2.2)).run(60)
    assert lab.roles == {"decode": 3, "prefill": 2}


def test_a_worker_is_drained_before_its_role_changes_and_put_back_after() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5), holds=3).run(40)
    assert [action for _, action in lab.done] == [
        *[Drain("decode-0", on=True)] * 4,
        SetRole("decode-0", "prefill"),
        Drain("decode-0", on=False),
    ]


def test_a_drain_that_takes_too_long_ends_in_the_new_role_with_what_still_runs() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5), holds=1000).run(60)
    drained = [at for at, action in lab.done if action == Drain("decode-0", on=True)]
    assert drained[-1] - drained[0] <= lab.rules.drain_s
    assert lab.roles == {"decode": 2, "prefill": 3}
    assert not lab.members["decode-0"].draining


def test_pressure_that_does_not_last_moves_nobody() -> None:
    lab = fleet(2, 3)
    for _ in range(40):
        lab.work = (3.0, 0.3)
        lab.run(4)
        lab.work = (0.2, 0.3)
        lab.run(8)
    assert lab.done == []


def test_pressure_that_lasts_but_for_short_dips_counts() -> None:
    lab = fleet(2, 3)
    for _ in range(6):
        lab.work = (2.6, 0.5)
        lab.run(9)
        lab.work = (0.0, 0.5)
        lab.run(1)
    assert lab.roles == {"decode": 2, "prefill": 3}


def test_a_burst_beyond_all_measure_is_forgotten_as_soon_as_any_other() -> None:
    lab = fleet(2, 3, work=(1.0, 0.5)).run(20)
    lab.work = (500.0, 0.5)
    lab.run(6)
    lab.work = (0.5, 0.5)
    lab.run(200)
    assert lab.done == []


@pytest.mark.parametrize("period", [20, 60, 200])
def test_load_that_swings_between_the_pools_does_not_make_the_fleet_flap(period: int) -> None:
    lab = fleet(3, 3)
    for turn in range(3600 // period):
        lab.work = (3.2, 0.5) if turn % 2 else (0.5, 3.2)
        lab.run(period)
    assert len(lab.changes) <= 3600 / (lab.rules.cooldown_s + lab.rules.dwell_s)
    assert min(lab.roles.values()) >= 1


def test_a_giver_that_would_get_hot_by_it_gives_nobody() -> None:
    lab = fleet(2, 2, work=(2.4, 0.78)).run(300)  # decode is cold at 0.39, and would be at 0.78 alone
    assert lab.roles["decode"] == 1 or SetRole("decode-0", "prefill") not in [action for _, action in lab.done]
    assert SetRole("decode-0", "both") in [action for _, action in lab.done], "it lends a hand instead"


def test_a_fleet_of_one_and_one_goes_through_both_without_a_drain_and_comes_back() -> None:
    lab = fleet(1, 1, work=(1.2, 0.1)).run(40)
    assert [action for _, action in lab.done] == [SetRole("decode-0", "both")]
    lab.work = (0.1, 0.1)
    lab.run(120)
    assert [action for _, action in lab.changes] == [SetRole("decode-0", "both"), SetRole("decode-0", "decode")]
    assert not any(isinstance(action, Drain) for _, action in lab.done)


def test_the_minimum_of_a_role_is_never_given_away() -> None:
    lab = Lab(rules({"prefill": 2, "decode": 3}, decode=Bounds(3, 0)), work=(4.0, 0.1)).run(200)
    assert lab.roles == {"both": 3, "prefill": 2}, "all still decode"


def test_a_role_gets_no_more_than_its_maximum() -> None:
    lab = Lab(rules({"prefill": 2, "decode": 4}, prefill=Bounds(1, 3)), work=(9.0, 0.1)).run(600)
    assert sum(one.serves("prefill") for one in lab.members.values()) == 3


def test_when_both_pools_are_hot_one_more_is_asked_for_up_to_the_maximum() -> None:
    lab = Lab(rules(TWO_BY_TWO, Bounds(1, 3), Bounds(1, 4)), work=(3.0, 3.6)).run(600)
    assert lab.roles == {"decode": 4, "prefill": 3}
    assert [action for _, action in lab.done] == [Add("decode"), Add("prefill"), Add("decode")]


def test_without_a_maximum_nobody_is_asked_for() -> None:
    assert fleet(work=(9.0, 9.0)).run(300).done == []


def test_a_move_is_preferred_to_one_more() -> None:
    lab = Lab(rules({"prefill": 2, "decode": 3}, Bounds(1, 4), Bounds(1, 4)), work=(2.0, 0.5)).run(45)
    assert lab.roles == {"decode": 2, "prefill": 3}


def test_a_long_idle_fleet_gives_workers_back_down_to_the_minimum() -> None:
    lab = Lab(rules({"prefill": 1, "decode": 3}, decode=Bounds(2, 4)), work=(0.1, 0.1)).run(300)
    assert lab.roles == {"decode": 2, "prefill": 1}
    assert [action for _, action in lab.changes] == [Remove("decode-2")]


def test_one_that_was_asked_for_and_does_not_come_is_taken_back() -> None:
    lab = Lab(rules(TWO_BY_TWO, Bounds(1, 3), Bounds(1, 2)), work=(5.0, 5.0), ray=False).run(95)
    assert [action for _, action in lab.done] == [Add("prefill"), Remove("prefill-4")]
    lab.run(10)
    assert len(lab.done) == 2, "and not asked for again at once"
    lab.run(60)
    assert lab.done[-1][1] == Add("prefill"), "but later"


def test_a_worker_that_refuses_is_put_back_and_another_one_asked() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5), deaf={"decode-0"}).run(100)
    assert lab.roles == {"decode": 2, "prefill": 3}
    assert lab.members["decode-0"].role == "decode"
    assert Drain("decode-0", on=False) in [action for _, action in lab.done]
    tried = [at for at, action in lab.done if action == Drain("decode-0", on=True)]
    assert len(tried) == 1


def test_a_worker_that_dies_while_it_drains_is_forgotten() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5), holds=1000)
    while not lab.done:
        lab.run(1)
    del lab.members["decode-0"]
    lab.run(1)
    assert (lab.elastic.move, lab.why) == (None, "decode-0 has gone")


def test_a_move_is_called_off_when_another_worker_of_the_pool_dies_meanwhile() -> None:
    lab = fleet(2, 2, work=(2.4, 0.3), holds=1000)
    while not lab.done:
        lab.run(1)
    del lab.members["decode-1"]
    lab.run(2)
    assert lab.members["decode-0"].usable
    assert lab.roles == {"decode": 1, "prefill": 2}


def test_a_new_life_of_the_worker_is_not_the_one_that_was_drained() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5), holds=1000)
    while not lab.done:
        lab.run(1)
    lab.change("decode-0", epoch=2, draining=False)
    lab.run(5)
    assert lab.members["decode-0"].usable
    assert lab.elastic.move is None


def test_silent_workers_are_neither_moved_nor_believed() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5))
    lab.change("decode-0", fresh=False)
    lab.run(60)
    assert lab.roles == {"decode": 2, "prefill": 3}
    assert lab.members["decode-0"].role == "decode"

    lab = fleet(2, 3, work=(2.2, 0.5))
    for name in ("decode-0", "decode-1"):
        lab.change(name, fresh=False)
    lab.run(200)
    assert lab.done == []
    assert lab.why == "most decode workers are silent"


def test_a_gap_in_the_looks_proves_no_duration() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5)).run(8)
    lab.now += 60
    lab.run(9)
    assert lab.done == []


def test_while_somebody_else_drains_a_worker_nothing_is_done() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5))
    lab.change("prefill-0", draining=True)
    lab.run(40)
    assert lab.done == []
    assert lab.why == "somebody drains prefill-0"


def test_a_drain_that_was_forgotten_is_taken_back() -> None:
    lab = fleet()
    lab.change("prefill-0", draining=True)
    lab.run(int(lab.rules.drain_s + ORPHAN_S) + 2)
    assert lab.done[0][1] == Drain("prefill-0", on=False)
    assert lab.members["prefill-0"].usable


def test_a_new_controller_goes_on_where_another_one_died() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5), holds=1000)
    while not lab.done:
        lab.run(1)
    again = fleet(2, 3, work=(2.2, 0.5))
    again.members = lab.members
    again.run(200)
    assert again.roles == {"decode": 2, "prefill": 3}
    assert all(one.usable for one in again.members.values())


def test_a_move_that_proves_wrong_is_taken_back_and_the_need_must_last_longer_then() -> None:
    lab = fleet(2, 3, work=(1.9, 0.3))
    while not lab.changes:
        lab.run(1)
    lab.work = (1.0, 2.6)  # the answers come after the prompts
    lab.run(int(2 * lab.rules.dwell_s) + 8)
    assert [action for _, action in lab.changes] == [SetRole("decode-0", "prefill"), SetRole("decode-0", "decode")]
    lab.run(200)
    lab.work, lab.done = (1.9, 0.3), []
    start = lab.now
    while not lab.done:
        lab.run(1)
    assert lab.now - start > 2 * lab.rules.dwell_s


def test_who_lends_a_hand_goes_home_before_anybody_is_drained_and_whoever_was_asked_for_is_given_back() -> None:
    lab = Lab(rules({"prefill": 1, "decode": 1}, prefill=Bounds(1, 3)), work=(3.0, 0.1)).run(60)
    assert {one.name: one.role for one in lab.members.values()} == {
        "prefill-0": "prefill",
        "prefill-2": "prefill",
        "decode-0": "both",
    }
    lab.work = (0.1, 0.1)
    lab.run(200)
    assert {one.name: one.role for one in lab.members.values()} == {"prefill-0": "prefill", "decode-0": "decode"}
    assert Remove("prefill-2") in [action for _, action in lab.changes]


def test_a_short_quiet_spell_calls_nobody_home() -> None:
    lab = fleet(2, 3, work=(2.2, 0.5)).run(120)
    assert lab.roles == {"decode": 2, "prefill": 3}
    lab.work, lab.done = (0.5, 0.5), []
    lab.run(int(2 * lab.rules.dwell_s))
    lab.work = (2.2, 0.5)
    lab.run(100)
    assert lab.done == []


def test_a_fleet_of_workers_that_do_both_lends_one_to_prompts_until_they_have_gone() -> None:
    lab = fleet(0, 0, 4, work=(1.9, 0.2)).run(40)
    assert lab.roles == {"both": 3, "prefill": 1}
    lab.work = (1.2, 0.2)
    lab.run(400)
    assert lab.roles == {"both": 3, "prefill": 1}, "there is still enough for it to do"
    lab.work = (0.2, 0.2)
    lab.run(100)
    assert lab.roles == {"both": 4}


def test_a_worker_keeps_its_new_role_for_a_while() -> None:
    lab = fleet(2, 3, work=(2.4, 0.3))
    while lab.roles != {"decode": 2, "prefill": 3}:
        lab.run(1)
    at = lab.now
    lab.work = (0.1, 0.3)
    while lab.roles != {"decode": 3, "prefill": 2}:
        lab.run(1)
    moved = lab.changes[-1][1]
    assert lab.now - at >= lab.rules.cooldown_s
    assert moved != SetRole("decode-0", "decode") or lab.now - at >= 2 * lab.rules.cooldown_s


WORK = st.tuples(st.floats(0, 6), st.floats(0, 6))
EVENT = st.sampled_from(["", "", "", "die", "deaf", "silent", "back"])


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)),
    st.sampled_from([Bounds(), Bounds(1, 3), Bounds(2, 4)]),
    st.lists(st.tuples(WORK, st.integers(1, 90), EVENT, st.integers(0, 5)), max_size=12),
)
def test_whatever_comes_one_at_a_time_and_never_below_the_minimum(
    counts: tuple[int, int, int], bounds: Bounds, story: list[tuple[tuple[float, float], int, str, int]]
) -> None:
    prefill, decode, both = counts
    lab = Lab(rules({"prefill": prefill, "decode": decode, "both": both}, decode=bounds))
    least = {pool: lab.rules.bounds[pool].least for pool in POOLS}

    def check(lab: Lab) -> None:
        assert sum(one.draining for one in lab.members.values()) <= 1
        for pool in POOLS:
            serving = len(lab.view().serving(pool))
            fell = serving < before[pool] and serving < least[pool]
            assert not fell, f"{pool} fell to {serving}"
            before[pool] = serving
            most = lab.rules.bounds[pool].most
            total = sum(one.serves(pool) for one in lab.members.values())
            assert not most or total <= max(most, first[pool])

    first = {pool: len(lab.view().serving(pool)) for pool in POOLS}
    for work, seconds, event, which in story:
        lab.work = work
        if event and lab.members:
            name = sorted(lab.members)[which % len(lab.members)]
            if event == "die":
                del lab.members[name]
            elif event == "deaf":
                lab.deaf.add(name)
            else:
                lab.deaf.discard(name)
                lab.change(name, fresh=event == "back")
        before = {pool: len(lab.view().serving(pool)) for pool in POOLS}
        lab.run(seconds, check)
    times = [at for at, action in lab.changes if isinstance(action, SetRole)]
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert all(pause >= min(lab.rules.cooldown_s, lab.rules.dwell_s) for pause in pauses)


@settings(max_examples=15, deadline=None)
@given(WORK, st.integers(1, 4), st.integers(1, 4))
def test_under_constant_load_the_fleet_comes_to_rest(work: tuple[float, float], prefill: int, decode: int) -> None:
    lab = fleet(prefill, decode, work=work).run(1000)
    lab.done = []
    assert lab.run(600).changes == []
