"""Which states a conversation leaves behind it, and which it shares: the rule alone, then on the oracle engine."""

from __future__ import annotations

import pytest

from engine.api import Tokens
from engine.plan import SamplingParams
from engine.successors import Successors
from tests.unit.engine_core.lab import Lab, hand_off, prompt, request, undisturbed

OLD, OLD_END, NEW, NEW_END, OTHER = (bytes([number]) for number in range(5))


class Story:
    """Requests by name; a state hangs on a key of its own name."""

    def __init__(self, **more: int) -> None:
        self.ways: dict[bytes, int] = {}
        self.rule = Successors(lambda key: self.ways.get(key, 1), **more)

    def turn(self, by: str, came_by: bytes | None, *left: bytes) -> None:
        if came_by is not None:
            self.rule.resumed(came_by, came_by, by)
        for name in left:
            self.rule.left(name, name, by, came_by)
            came_by = name

    def spent(self) -> list[bytes]:
        return [name for name in (OLD, OLD_END, NEW, NEW_END, OTHER) if self.rule.spent(name)]


def two_turns(**more: int) -> Story:
    story = Story(**more)
    story.turn("first", None, OLD, OLD_END)
    story.turn("second", OLD_END, NEW, NEW_END)
    return story


def test_the_next_turn_spends_what_the_last_one_left_and_nothing_of_its_own() -> None:
    assert two_turns().spent() == [OLD, OLD_END]


def test_a_state_is_spent_when_a_deeper_one_is_there_and_not_when_it_is_resumed() -> None:
    story = Story()
    story.turn("first", None, OLD, OLD_END)
    story.rule.resumed(OLD_END, OLD_END, "second")
    assert story.spent() == []


def test_a_state_that_two_requests_resumed_is_shared_for_ever() -> None:
    story = two_turns()
    story.turn("other", OLD_END, OTHER)
    assert story.spent() == [OLD]
    story.turn("other", OLD_END, OTHER)
    assert story.spent() == [OLD]


def test_two_that_resume_it_at_once_share_it() -> None:
    story = Story()
    story.turn("first", None, OLD)
    story.rule.resumed(OLD, OLD, "one")
    story.rule.resumed(OLD, OLD, "two")
    story.rule.left(NEW, NEW, "one", OLD)
    story.rule.left(OTHER, OTHER, "two", OLD)
    assert story.spent() == []


def test_a_state_that_several_pages_follow_is_not_spent_nor_is_what_leads_to_it() -> None:
    story = Story()
    story.turn("first", None, OLD, OLD_END)
    story.ways[OLD_END] = 2
    story.turn("second", OLD_END, NEW)
    assert story.spent() == []


def test_a_junction_is_not_spent_by_the_first_that_goes_on_from_it() -> None:
    story = Story()
    story.rule.left(OLD, OLD, "first", None, junction=True)
    story.turn("second", OLD, NEW)
    assert story.spent() == []


def test_one_that_comes_back_to_its_own_state_after_a_preemption_does_not_spend_it() -> None:
    story = Story()
    story.turn("first", None, OLD)
    story.turn("first", OLD, OLD_END)
    assert story.spent() == []


def test_an_attempt_that_is_made_again_is_no_second_sighting() -> None:
    story = Story()
    story.turn("first", None, OLD_END)
    story.rule.resumed(OLD_END, OLD_END, "second")
    story.turn("second", OLD_END, NEW)
    assert story.spent() == [OLD_END]


def test_what_is_remembered_is_bounded_and_the_forgotten_is_not_spent() -> None:
    story = two_turns(bound=4)
    assert story.spent() == [OLD, OLD_END]
    story.rule.left(OTHER, OTHER, "else", None)
    assert len(story.rule._lines) == 4
    assert story.spent() == [OLD_END]


# --- on an engine ---------------------------------------------------------------------------------------------------


def lab(**changes: object) -> Lab:
    return Lab(pages=256, state=True, changes=changes)


def cached(made: Lab, name: str, tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    key = made.submit(request(name, tokens, max_tokens=18))
    made.run()
    made.check()
    first = next(event for event in made.of(key) if isinstance(event, Tokens))
    return first.cached_tokens, tokens + tuple(made.tokens(key))


def talk(made: Lab, talks: int, turns: int) -> list[int]:
    """Conversations in turn: tokens that each turn after the first did not have to run."""
    said = [prompt(48, seed=number) for number in range(talks)]
    found = []
    for turn in range(turns):
        for number in range(talks):
            asked = said[number] + prompt(20, seed=100 + 10 * turn + number)
            hit, said[number] = cached(made, f"{turn}-{number}", asked)
            if turn:
                found.append(hit)
    return found


def test_conversations_in_turn_are_served_with_little_more_than_a_state_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight slots: one is the running request's and one is of the state being written, so six for five of them."""
    made = lab()
    found = talk(made, 5, 4)
    assert min(found[5:]) > 0

    monkeypatch.setattr(Successors, "spent", lambda *_: False)
    made = lab()
    assert talk(made, 5, 4)[5:].count(0) >= 5


def test_what_is_spent_can_be_resumed_until_its_slot_is_needed() -> None:
    made = lab()
    _, said = cached(made, "first", prompt(48))
    cached(made, "second", said + prompt(20, seed=1))
    assert made.engine.states is not None
    assert sum(made.engine.states.successors.spent(state.name) for state in made.engine.states._all()) == 2

    again, _ = cached(made, "aside", said + prompt(20, seed=2))

    assert again == len(said) - 1
    assert sum(made.engine.states.successors.spent(state.name) for state in made.engine.states._all()) == 1


def test_the_state_of_a_system_prompt_outlives_the_conversations_that_share_it() -> None:
    """Its slot is the oldest, and each conversation has gone on from it."""
    made, system = lab(), prompt(96)
    for number in range(3):
        _, said = cached(made, f"{number}", system + prompt(80, seed=50 + number))
        cached(made, f"{number}-on", said + prompt(20, seed=60 + number))
    for number in range(4):
        cached(made, f"else-{number}", prompt(48, seed=70 + number))

    assert cached(made, "late", system + prompt(80, seed=99))[0] == 96


def test_where_prompts_arrive_whole_the_next_turn_spends_the_last_one_too() -> None:
    """A decode worker resumes nothing itself: turns are computed elsewhere, on what it left."""
    made, said = lab(), prompt(48)
    assert made.engine.states is not None
    for turn in range(3):
        source = lab()
        hand_off(source, made, f"{turn}", said, max_tokens=18)
        made.run()
        (answer,) = undisturbed(said, SamplingParams(max_tokens=18), state=True)
        said += (*answer, *prompt(20, seed=turn))
    states = sorted(made.engine.states._all(), key=lambda state: state.length)
    assert [made.engine.states.successors.spent(state.name) for state in states] == [True, True, False]
