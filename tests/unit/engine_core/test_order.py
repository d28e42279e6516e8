"""Who is due first is computed first: short prompts behind a long one, a long one among short ones, priorities."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.api import Mode, SourceDone
from engine.order import PRIORITY_STEP_S, chosen, due_at
from kvtransfer.types import LegKey
from tests.unit.engine_core.lab import Lab, expected, prompt, request

ONE_CHUNK: dict[str, object] = {"max_batched_tokens": 32, "max_batch": 16}


def finished(lab: Lab) -> list[LegKey]:
    return [event.key for event in lab.events if isinstance(event, SourceDone)]


def source(lab: Lab, name: str, length: int, due: float | None = None, priority: int = 0) -> LegKey:
    return lab.submit(request(name, prompt(length, ord(name[0])), Mode.SOURCE, due=due, priority=priority))


def test_short_prompts_pass_a_long_one_between_its_chunks_when_they_are_due_sooner() -> None:
    lab = Lab(pages=200, changes=ONE_CHUNK)
    long = source(lab, "long", 32 * 30, due=6.0)
    lab.turns(3)
    shorts = [source(lab, f"short{n}", 20, due=2.0) for n in range(3)]
    lab.turns(3)
    assert finished(lab) == shorts, "each takes one step, and the long one is in the middle of its own"
    lab.run()
    assert finished(lab)[-1] == long


def test_a_long_prompt_is_passed_by_nobody_who_comes_after_its_due_time() -> None:
    """A worker that short prompts keep busy for ever: one comes for every step there is."""
    lab = Lab(pages=400, changes=ONE_CHUNK)
    long = source(lab, "long", 32 * 4, due=lab.clock.monotonic() + 8.0)
    for step in range(40):
        source(lab, f"s{step}", 20, due=lab.clock.monotonic() + 2.0)
        lab.turns(1)
        lab.clock.advance(1.0)
        if long in finished(lab):
            break
    done = finished(lab)
    assert done[-1] == long
    assert 6 <= len(done) - 1 <= 8, "those that came at least two seconds before it was due, and no others"


def test_requests_without_a_due_time_are_served_as_they_come() -> None:
    lab = Lab(pages=200, changes=ONE_CHUNK)
    keys = []
    for number, length in enumerate((100, 20, 60, 10)):
        keys.append(source(lab, f"{number}", length))
        lab.clock.advance(0.001)
    lab.run()
    assert finished(lab) == keys


def test_a_priority_moves_a_prompt_forward_and_wears_off() -> None:
    lab = Lab(pages=200, changes=ONE_CHUNK)
    low = source(lab, "low", 64, priority=1)
    lab.clock.advance(PRIORITY_STEP_S - 1)
    before = source(lab, "before", 64)
    lab.clock.advance(2)
    after = source(lab, "after", 64)
    lab.run()
    assert finished(lab) == [before, low, after]


def test_who_gives_way_between_chunks_says_the_same_tokens() -> None:
    lab = Lab(pages=200, changes=ONE_CHUNK)
    long = lab.submit(request("long", prompt(200, 1), max_tokens=6, due=9.0))
    lab.turns(2)
    short = lab.submit(request("short", prompt(70, 2), max_tokens=6, due=1.0))
    lab.run()
    assert lab.tokens(long) == expected(200, 6, 1)
    assert lab.tokens(short) == expected(70, 6, 2)
    lab.engine.check_baseline()


def test_prompts_share_a_step_in_the_order_they_are_due_and_stay_in_the_order_of_the_batch() -> None:
    chunks = [((5.0, 0, 0), 32), ((1.0, 1, 1), 32), ((3.0, 2, 2), 32)]
    assert chosen(chunks, 32) == [1]
    assert chosen(chunks, 64) == [1, 2]
    assert chosen(chunks, 100) == [0, 1, 2]


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 64)), min_size=1, max_size=8),
    st.integers(1, 200),
)
def test_the_first_always_gets_on_and_nobody_passes_one_that_finds_no_room(
    prompts: list[tuple[float, int]], budget: int
) -> None:
    chunks = [((due, place, place), tokens) for place, (due, tokens) in enumerate(prompts)]
    places = chosen(chunks, budget)
    ranked = sorted(range(len(chunks)), key=lambda place: chunks[place][0])
    assert sorted(places) == sorted(ranked[: len(places)]), "a beginning of the line"
    assert list(places) == sorted(places)
    assert len(places) == 1 or sum(chunks[place][1] for place in places) <= budget


def test_a_due_time_of_its_own_is_the_routers_word() -> None:
    assert due_at(3.0, 7, 100.0) == 3.0
    assert due_at(None, -1, 100.0) == 100.0 - PRIORITY_STEP_S
