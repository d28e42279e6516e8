"""Who moves from one decode worker to another, and where to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.dispatch import continuity
from router.dispatch.moving import MARGIN, REST_S, Decoder, Need, Seat, leaving, longest_silent, roomiest
from router.policy.pairing import Role
from tests.unit.router.test_continuity import progress

D = Decoder(
    worker_id="d",
    role=Role.DECODE,
    usable=True,
    draining=False,
    movable=True,
    decoding=3,
    group="g",
    pages=100,
    pages_free=60,
    slots_free=4,
    has_slots=True,
    swapped=0,
    waiting=0,
)
SEAT = Seat("poor", tokens=160, silent_s=1.0)


def worker(name: str, **changes: object) -> Decoder:
    return replace(D, worker_id=name, **changes)  # type: ignore[arg-type]


def test_a_worker_that_drains_or_turns_to_prompts_is_left_and_others_are_not() -> None:
    workers = [
        worker("stays"),
        worker("drains", draining=True, usable=False),
        worker("turns", role=Role.PREFILL),
        worker("both", role=Role.BOTH),
        worker("mute", draining=True, movable=False),
        worker("prompts", role=Role.PREFILL, decoding=0),
    ]
    assert leaving(workers) == {"drains": "drain", "turns": "role"}


def test_need_counts_when_it_has_lasted_and_ends_at_once() -> None:
    need = Need(after_s=2.0)
    short = [worker("a", swapped=1), worker("b")]
    assert need.lasting(short, 10.0) == []
    assert need.lasting(short, 11.9) == []
    assert need.lasting(short, 12.0) == ["a"]
    assert need.lasting([worker("a"), worker("b")], 12.5) == []
    assert need.lasting(short, 13.0) == [], "it began anew"


def test_the_worker_in_need_for_longest_comes_first_and_what_was_just_relieved_waits() -> None:
    need = Need(after_s=1.0)
    need.lasting([worker("b", swapped=1)], 0.0)
    both = [worker("a", swapped=2), worker("b", swapped=1)]
    need.lasting(both, 0.5)
    assert need.lasting(both, 2.0) == ["b", "a"]
    need.relieved("b", 2.0)
    assert need.lasting(both, 2.5) == ["a"]
    assert need.lasting(both, 3.0) == ["a", "b"]


def test_the_choice_that_waits_longest_leaves_but_not_one_that_has_just_come() -> None:
    seats = {
        1: Seat("poor", 100, silent_s=0.1),
        2: Seat("poor", 100, silent_s=3.0),
        3: Seat("poor", 100, silent_s=9.0, here_s=REST_S - 1),
        4: Seat("rich", 100, silent_s=20.0),
        5: Seat("poor", 500, silent_s=3.0, here_s=REST_S),
    }
    assert longest_silent(seats, "poor") == [5, 2, 1]


def test_the_roomiest_worker_takes_it() -> None:
    workers = [worker("poor", pages_free=90), worker("some", pages_free=40), worker("most", pages_free=50)]
    assert roomiest(workers, SEAT, "g", headroom=0) == "most"


@pytest.mark.parametrize(
    "changes",
    [
        {"usable": False},
        {"movable": False},
        {"role": Role.PREFILL},
        {"group": "other"},
        {"swapped": 1},
        {"waiting": 1},
        {"slots_free": 1},
    ],
    ids=str,
)
def test_who_cannot_take_it_well_is_left_out(changes: dict[str, object]) -> None:
    assert roomiest([worker("rich")], SEAT, "g", headroom=0) == "rich"
    assert roomiest([worker("rich", **changes)], SEAT, "g", headroom=0) is None


def test_a_model_without_state_needs_no_slot() -> None:
    assert roomiest([worker("rich", slots_free=0, has_slots=False)], SEAT, "g", headroom=0) == "rich"


def test_a_taker_keeps_a_margin_and_a_share_of_its_pool() -> None:
    """160 tokens and 32 of headroom are 12 pages: 18 with the margin, and a tenth of 100 to spare."""
    assert 12 * MARGIN == 18
    assert roomiest([worker("rich", pages_free=28)], SEAT, "g", headroom=32) == "rich"
    assert roomiest([worker("rich", pages_free=27)], SEAT, "g", headroom=32) is None


def moved(index: int, *told: str) -> continuity.Piece:
    """Of a request whose choices have said `told`: prompt b"hi"."""
    made, prompt = progress(*told), tuple(b"hi")
    return continuity.onward(continuity.whole("r", prompt, len(told)), "r", prompt, made.choices, index)


def test_what_goes_on_knows_all_but_the_newest_token_and_is_no_retry() -> None:
    piece = moved(0, "abc")
    assert (piece.request_id, bytes(piece.tokens), piece.prompt_len) == ("r", b"hiab", 2)
    assert (piece.choices, piece.choice, piece.first_sequence, piece.retry) == ((0,), 0, 2, 0)


def test_one_of_several_choices_goes_on_under_a_name_of_its_own_with_its_own_noise() -> None:
    piece = moved(1, "a", "b")
    assert (piece.request_id, bytes(piece.tokens), piece.choices) == ("r.1", b"hi", (1,))
    assert piece.choice == 1, "right after the prompt, too"
