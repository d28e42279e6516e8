"""A booking is a promise: counted against what is free, given once per leg, gone when its time is over."""

from __future__ import annotations

import pytest

from engine.api import Mode, Needs, Refused, Reserved
from kvtransfer.types import LegKey
from runtime.errors import Draining, InvalidRequest, Saturated
from tests.unit.engine_core.lab import Lab, prompt, request


def key(name: str, leg: str = "decode", attempt: int = 1) -> LegKey:
    return LegKey(name, leg, attempt)


def book(lab: Lab, name: str, tokens: int = 48, headroom: int = 16, choices: int = 1) -> Reserved:
    answer = lab.engine.reserve(key(name), Needs(tokens, headroom, choices))
    assert isinstance(answer, Reserved)
    return answer


def test_a_booking_is_counted_against_what_is_free() -> None:
    lab = Lab(pages=10)
    assert book(lab, "a").free.pages == 6
    assert book(lab, "b", choices=2).free.pages == 1
    refused = lab.engine.reserve(key("c"), Needs(48, 16))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Saturated)
    assert (refused.free.pages, refused.free.batch) == (1, 1)
    assert lab.engine.load().pages_reserved == 9
    assert lab.engine.load().pages_free == 10


def test_asking_again_for_the_same_leg_gives_the_same_booking() -> None:
    lab = Lab(pages=10)
    first = book(lab, "a")
    lab.clock.advance(2)
    again = book(lab, "a")
    assert again.reservation_id == first.reservation_id
    assert again.expires_in_s == pytest.approx(first.expires_in_s - 2)
    assert again.free.pages == 6
    assert isinstance(lab.engine.reserve(key("a", attempt=2), Needs(48, 16)), Reserved)


def test_a_late_cancel_for_the_life_before_a_restart_releases_nothing() -> None:
    before, after = Lab(pages=10), Lab(pages=10)
    old, new = book(before, "a"), book(after, "b")
    assert not after.engine.cancel_reservation(old.reservation_id)
    assert after.engine.cancel_reservation(new.reservation_id)


def test_more_than_the_whole_pool_is_refused_for_ever() -> None:
    lab = Lab(pages=10)
    for needs, field in ((Needs(161), "prompt"), (Needs(16, 16, 5), "n"), (Needs(16, 16, 1, slots=1), "n")):
        refused = lab.engine.reserve(key("a"), needs)
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, InvalidRequest)
        assert refused.error.field == field
    lab.engine.check_baseline()


def test_choices_of_a_prefill_leg_cost_nothing_more() -> None:
    lab = Lab(pages=10)
    answer = lab.engine.reserve(key("a", "prefill"), Needs(48, 0, 4, prefill_tokens=48))
    assert isinstance(answer, Reserved)
    assert (answer.free.pages, answer.free.batch, answer.free.queued_prefill_tokens) == (7, 3, 48)


def test_a_cancelled_booking_is_gone_and_cancelling_twice_is_harmless() -> None:
    lab = Lab(pages=10)
    booking = book(lab, "a")
    assert lab.engine.cancel_reservation(booking.reservation_id)
    assert not lab.engine.cancel_reservation(booking.reservation_id)
    assert not lab.engine.cancel_reservation("never was")
    lab.engine.check_baseline()


def test_the_cancel_of_a_request_that_never_came_gives_its_booking_back() -> None:
    """Its prompt was still on its way, or its prefix was being fetched."""
    lab = Lab(pages=10)
    book(lab, "a")
    other = book(lab, "b")
    lab.engine.cancel(key("a", "prefill"))
    lab.engine.cancel(key("a", attempt=2))
    assert lab.engine.load().pages_reserved == 8
    lab.engine.cancel(key("a"))
    lab.engine.cancel(key("a"))
    assert lab.engine.load().pages_reserved == 4
    assert lab.engine.cancel_reservation(other.reservation_id)
    lab.engine.check_baseline()


def test_a_booking_expires_also_in_an_idle_engine() -> None:
    lab = Lab(pages=10)
    booking = book(lab, "a")
    lab.clock.advance(booking.expires_in_s - 0.01)
    lab.engine.turn()
    assert lab.engine.load().pages_reserved == 4
    lab.clock.advance(0.01)
    lab.engine.turn()
    assert lab.engine.load().pages_reserved == 0
    lab.engine.check_baseline()


def test_a_booked_request_finds_its_pages_although_others_wait() -> None:
    lab = Lab(pages=10)
    booking = book(lab, "late", tokens=48)
    greedy = lab.submit(request("greedy", prompt(100, 1), max_tokens=2))
    lab.run()
    assert lab.of(greedy) == []
    late = lab.submit(request("late", prompt(48), max_tokens=2, reservation_id=booking.reservation_id, priority=-1))
    lab.run()
    assert (lab.ends(late), lab.ends(greedy)) == (1, 1)
    lab.engine.check_baseline()


def test_a_waiting_request_is_counted_for_later_bookings() -> None:
    lab = Lab(pages=10)
    lab.submit(request("running", prompt(60), max_tokens=50))
    lab.turns(2)
    lab.submit(request("waiting", prompt(100, 1), max_tokens=2))
    refused = lab.engine.reserve(key("new"), Needs(16, 16))
    assert isinstance(refused, Refused)
    assert refused.free.pages == 0
    lab.run()
    assert isinstance(lab.engine.reserve(key("new"), Needs(16, 16)), Reserved)


def test_an_expired_booking_is_no_error_and_another_ones_is() -> None:
    lab = Lab(pages=10)
    mine, other = book(lab, "a"), book(lab, "b")
    with pytest.raises(InvalidRequest) as refused:
        lab.submit(request("a", prompt(20), max_tokens=2, reservation_id=other.reservation_id))
    assert refused.value.field == "reservation_id"
    lab.clock.advance(60)
    lab.engine.turn()
    done = lab.submit(request("a", prompt(20), max_tokens=2, reservation_id=mine.reservation_id))
    lab.run()
    assert lab.ends(done) == 1


def test_a_live_request_books_nothing_more() -> None:
    lab = Lab(pages=10)
    lab.submit(request("a", prompt(20), Mode.LOCAL, max_tokens=2))
    refused = lab.engine.reserve(key("a"), Needs(20, 16))
    assert isinstance(refused, Refused)
    assert refused.error.reason == "duplicate"


def test_a_draining_engine_takes_nothing_new_and_finishes_what_it_has() -> None:
    lab = Lab()
    running = lab.submit(request("a", prompt(20), max_tokens=9))
    lab.turns(1)
    lab.engine.drain(True)
    refused = lab.engine.reserve(key("b"), Needs(20, 16))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, Draining)
    with pytest.raises(Draining):
        lab.submit(request("b", prompt(20), max_tokens=2))
    lab.run()
    assert lab.ends(running) == 1
    lab.engine.drain(False)
    assert isinstance(lab.engine.reserve(key("b"), Needs(20, 16)), Reserved)


def test_a_full_queue_refuses_what_has_no_booking() -> None:
    lab = Lab(pages=10, changes={"max_queued_requests": 2})
    booking = book(lab, "booked", tokens=16)
    for name in "ab":
        lab.submit(request(name, prompt(20), max_tokens=2))
    with pytest.raises(Saturated):
        lab.submit(request("c", prompt(20), max_tokens=2))
    assert isinstance(lab.engine.reserve(key("c"), Needs(16, 16)), Refused)
    booked = lab.submit(request("booked", prompt(16), max_tokens=2, reservation_id=booking.reservation_id))
    lab.run()
    assert lab.ends(booked) == 1
    lab.engine.check_baseline()
