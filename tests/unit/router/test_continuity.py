"""What is left of a request when a worker fails it, and how often it may be tried."""

from __future__ import annotations

import asyncio

import pytest

from protos.v1 import common_pb2, decode_pb2
from router.dispatch import continuity
from router.dispatch.continuity import Piece, RetryBudget, whole
from router.params import Params
from router.pressure import EASY_SAMPLES, Pressure, joined
from router.text.progress import GOES_ON, LENGTH, Progress
from runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KvLost,
    PdserveError,
    QuotaExceeded,
    WorkerLost,
)

PROMPT = (1, 2, 3)


def progress(*told: str, n: int = 0) -> Progress:
    """Choices that have said these texts; a full stop ends one."""
    made = Progress.of(Params(n=n or len(told)), lambda ids: bytes(ids).decode(), (), frozenset())
    for index, said in enumerate(told):
        text = said.removesuffix(".")
        if said:
            made.accept(index, 0, list(text.encode()), (), LENGTH if said.endswith(".") else GOES_ON)
    return made


def pieces(made: Progress, failed: Piece | None = None) -> list[Piece]:
    failed = failed or whole("r", PROMPT, len(made.choices))
    return continuity.pieces(failed, "r", PROMPT, made.choices)


def test_before_the_first_token_everything_is_done_again_together() -> None:
    assert pieces(progress("", "")) == [Piece("r", PROMPT, 3, (0, 1), retry=1)]


def test_after_it_a_single_choice_goes_on_from_its_tokens_as_the_same_request() -> None:
    (piece,) = pieces(progress("ab"))
    assert piece == Piece("r", (*PROMPT, *b"ab"), 3, (0,), retry=1)
    assert (piece.first_sequence, piece.choice) == (2, 0)


def test_choices_go_on_each_by_itself_under_a_name_of_its_own() -> None:
    found = pieces(progress("ab", "c.", "defg"))
    assert [(piece.request_id, piece.choice, piece.first_sequence) for piece in found] == [("r.0", 0, 2), ("r.2", 2, 4)]
    again = pieces(progress("abx", "c.", "defg"), found[0])
    assert [(piece.request_id, piece.tokens, piece.retry) for piece in again] == [("r.0", (*PROMPT, *b"abx"), 2)]


def test_nothing_is_left_of_what_has_ended() -> None:
    assert pieces(progress("ab.", "c.")) == []


@pytest.mark.parametrize(("room", "expected"), [(100, [1]), (3, [1]), (2, [0, 1])])
def test_a_choice_with_all_its_tokens_is_not_asked_for_again(room: int, expected: list[int]) -> None:
    made = progress("ab", "abcde", "abcde.")
    assert continuity.exhausted(made.choices, (0, 1, 2), max_tokens=5, room=room) == expected


def test_ending_by_length_gives_out_the_text_held_back() -> None:
    made = Progress.of(Params(stop=("bcx",)), lambda ids: bytes(ids).decode(), (), frozenset())
    delta, _ = made.accept(0, 0, list(b"abc"), (), GOES_ON)
    assert delta is not None
    assert delta.text == "a"
    last, finish = made.end(0)
    assert last is not None
    assert (last.text, last.tokens, finish.reason) == ("bc", (), LENGTH)


@pytest.mark.parametrize(
    ("error", "worth"),
    [
        (WorkerLost("x"), True),
        (KvLost("x"), True),
        (Draining("x"), True),
        (QuotaExceeded("x"), True),
        (InvalidRequest("x"), False),
        (Cancelled("x"), False),
        (DeadlineExceeded("x"), False),
        (PdserveError("x"), False),
    ],
)
def test_only_what_another_worker_could_do_better_is_tried_again(error: PdserveError, worth: bool) -> None:
    assert continuity.worth_it(error, whole("r", PROMPT, 1), retries=1) is worth
    assert not continuity.worth_it(error, Piece("r", PROMPT, 3, (0,), retry=1), retries=1)


def test_retries_are_a_tenth_of_the_requests_and_a_small_floor() -> None:
    budget = RetryBudget(share=0.1, floor=3, most=8)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(20):
        budget.request()
    assert [budget.take(0.0) for _ in range(3)] == [True, True, False]
    for _ in range(1000):
        budget.request()
    assert sum(budget.take(0.0) for _ in range(20)) == 8


def test_the_floor_comes_back_in_quiet_times_and_no_more_than_it() -> None:
    budget = RetryBudget(share=0.1, floor=3, refill_s=60)
    assert sum(budget.take(0.0) for _ in range(5)) == 3
    assert not budget.take(10.0)
    assert budget.take(21.0)
    assert sum(budget.take(10_000.0) for _ in range(10)) == 3


# --- pressure


def tokens(choice: int, first: int, text: str, finish: int = GOES_ON) -> decode_pb2.ChoiceTokens:
    reason = common_pb2.FinishReason.ValueType(finish)
    return decode_pb2.ChoiceTokens(choice=choice, first_sequence=first, tokens=text.encode(), finish=reason)


def test_tokens_that_follow_each_other_become_one_and_a_gap_or_an_end_divides() -> None:
    held = [tokens(0, 1, "a"), tokens(1, 1, "x"), tokens(0, 2, "bc"), tokens(1, 3, "z"), tokens(0, 4, "d", LENGTH)]
    assert [(c, first, bytes(ids), finish) for c, first, ids, _, finish in joined(held)] == [
        (0, 1, b"abcd", LENGTH),
        (1, 1, b"x", GOES_ON),
        (1, 3, b"z", GOES_ON),
    ]
    assert held[0] == tokens(0, 1, "a"), "what came is not changed"


def test_pressure_comes_at_once_and_goes_after_a_while_of_ease() -> None:
    pressure = Pressure()

    def after(share: float, late_s: float = 0.0, times: int = 1, worked: float = 0.2) -> bool:
        for _ in range(times):
            pressure.sampled(worked, share, late_s)
        return pressure.on

    assert not after(0.7, times=50)
    assert after(0.8)
    assert after(0.1, times=EASY_SAMPLES - 1)
    assert after(0.7), "not easy: the count begins again"
    assert after(0.1, times=EASY_SAMPLES - 1)
    assert not after(0.1)
    assert after(0.1, late_s=0.05)


def test_whoever_waits_only_while_pressure_lasts_is_told_at_the_next_sample() -> None:
    pressure = Pressure()

    def after(share: float) -> tuple[bool, bool]:
        pressure.sampled(0.2, share, 0.0)
        return pressure.on, pressure.now

    assert after(0.8) == (True, True)
    assert after(0.7) == (True, True), "not easy"
    assert after(0.3) == (True, False)
    assert after(0.7) == (True, False)


def test_a_busy_machine_is_no_pressure_on_a_router_that_hardly_works() -> None:
    pressure = Pressure()

    def after(worked: float, times: int) -> bool:
        for _ in range(times):
            pressure.sampled(worked, 0.99, 0.05)
        return pressure.on

    assert not after(0.05, 10)
    assert after(0.3, 1)
    assert after(0.05, EASY_SAMPLES - 1)
    assert not after(0.05, 1)


async def test_a_flush_that_fails_holds_back_no_others() -> None:
    pressure = Pressure()
    gone = asyncio.Event()

    def fails() -> None:
        raise ZeroDivisionError

    pressure.hold(fails)
    pressure.hold(gone.set)
    await asyncio.wait_for(gone.wait(), 1)
    gone.clear()
    pressure.hold(gone.set)
    await asyncio.wait_for(gone.wait(), 1)


async def test_what_is_held_goes_out_once_at_the_beat_and_not_when_dropped() -> None:
    pressure = Pressure()
    calls: list[str] = []
    gone = asyncio.Event()

    def one() -> None:
        calls.append("one")
        gone.set()

    def two() -> None:
        calls.append("two")

    for flush in (two, one, one, two):
        pressure.hold(flush)
    pressure.drop(two)
    await asyncio.wait_for(gone.wait(), 1)
    assert calls == ["one"]
