"""States that a conversation has left behind, on host and disk: they make way first, and take no room below."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.pages import PagePool, SlotPool
from engine.prefix_cache import PrefixCache
from engine.tiers.disk_states import DiskStates
from engine.tiers.index import TierIndex
from engine.tiers.policy import Order
from engine.tiers.states import HostStates, TierState, TierStates
from tests.unit.engine_core.lab import prompt
from tests.unit.tiers.lab import TierLab
from tests.unit.tiers.test_states import ask

TALKS, TURNS = 5, 4


def talk(made: TierLab, talks: int = TALKS, turns: int = TURNS) -> list[int]:
    """Conversations in turn: tokens that each turn after the first did not have to run."""
    said = [prompt(48, seed=number) for number in range(talks)]
    found = []
    for turn in range(turns):
        for number in range(talks):
            asked = said[number] + prompt(20, seed=100 + 10 * turn + number)
            hit, answer = ask(made, f"{turn}-{number}", asked, 18)
            made.settle()
            made.check()
            said[number] = asked + tuple(answer)
            if turn:
                found.append(hit)
    return found


def host(order: Order, rank: Callable[[bytes], int]) -> TierStates:
    return HostStates(SlotPool(4), TierIndex(4), PrefixCache(PagePool(8)), order, rank)


def disk(order: Order, rank: Callable[[bytes], int]) -> TierStates:
    return DiskStates(SlotPool(4), TierIndex(4), PrefixCache(PagePool(8)), order, rank, lambda _: None)


@pytest.mark.parametrize("tier", [host, disk])
@pytest.mark.parametrize("order", ["lru", "flops"])
def test_a_spent_state_goes_before_older_ones_that_save_less_and_are_worth_less(
    tier: Callable[[Order, Callable[[bytes], int]], TierStates], order: Order
) -> None:
    states = tier(order, lambda key: 5 if key == b"spent" else 0)
    names = {}
    for key, saving in ((b"old", 1.0), (b"new", 1.0), (b"spent", 9.0)):
        states._used += 1
        (slot,) = states.slots.allocate(1) or []
        state = TierState(key, 16, (), slot, 0, (1,), (), saving)
        states.add(state)
        states.slots.release([slot])
        names[key] = state.name
    states.spent = lambda name: name == names[b"spent"]

    states.slots.release(states.slots.allocate(1) or [])

    assert sorted(states._by_key) == [b"new", b"old"]


def conversations(*, rule: bool) -> tuple[list[int], TierLab]:
    """Every turn leaves two states, before its last page and where it ends: as many slots as are of use to anybody. The
    device has room for one conversation."""
    made = TierLab(pages=14, host_pages=200, state=True, changes={"host_state_slots": 2 * TALKS})
    if not rule:
        made.tiers.states.spent = lambda _: False
    return talk(made), made


def test_on_the_host_conversations_in_turn_need_no_room_for_what_they_have_left_behind() -> None:
    found, made = conversations(rule=True)
    assert 0 not in found
    made.baseline()


def test_without_the_rule_they_push_each_other_out() -> None:
    found, _ = conversations(rule=False)
    assert found.count(0) >= TALKS


def test_a_spent_state_is_not_copied_down_and_its_end_is_no_loss() -> None:
    made = TierLab(pages=128, state=True)
    _, answer = ask(made, "first", prompt(48), 18)
    ask(made, "second", (*prompt(48), *answer, *prompt(20, seed=1)), 18)
    made.settle()
    assert made.engine.states is not None
    spent = [s for s in made.engine.states.victims(8) if made.engine.states.successors.spent(s.name)]
    assert len(spent) == 2
    for number in range(6):
        ask(made, f"more{number}", prompt(48, seed=number + 2), 18)
        made.settle()

    assert not any(made.tiers.states.has(state.key, state.tail) for state in spent)
    assert not any(made.engine.states.has(state.key, state.tail) for state in spent)
    assert made.tiers.counts.stored_states > 0
    assert made.tiers.counts.lost_states == 0
