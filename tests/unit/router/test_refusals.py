from __future__ import annotations

from protos.v1 import common_pb2
from router.policy.refusals import LONGEST_S, Refusals

IDLE = common_pb2.Load(pages_free=1000)
OTHER = common_pb2.Load(pages_free=1001)


def test_whoever_refused_rests_for_a_moment() -> None:
    refusals = Refusals()
    assert not refusals.rests("w", "prefill", 100, IDLE, 0.0)
    refusals.refused("w", "prefill", 100, IDLE, 0.0)
    assert refusals.rests("w", "prefill", 100, IDLE, 0.01)
    assert not refusals.rests("w", "decode", 100, IDLE, 0.01), "the other leg said nothing"
    assert not refusals.rests("w", "prefill", 100, IDLE, 0.2)


def test_a_smaller_request_may_fit_and_is_tried() -> None:
    refusals = Refusals()
    refusals.refused("w", "prefill", 100, IDLE, 0.0)
    assert not refusals.rests("w", "prefill", 99, IDLE, 0.01)
    refusals.refused("w", "prefill", 50, IDLE, 0.01)
    assert refusals.rests("w", "prefill", 50, IDLE, 0.02)


def test_a_report_that_differs_is_news() -> None:
    refusals = Refusals()
    refusals.refused("w", "prefill", 100, IDLE, 0.0)
    assert not refusals.rests("w", "prefill", 100, OTHER, 0.01)
    again = common_pb2.Load(pages_free=1000, sequence=77)
    assert refusals.rests("w", "prefill", 100, again, 0.01), "saying the same again is none"


def test_the_pause_doubles_to_its_bound_and_a_grant_ends_it() -> None:
    refusals, now, asked = Refusals(), 0.0, 0
    while now < 20.0:
        if not refusals.rests("w", "decode", 100, IDLE, now):
            asked += 1
            refusals.refused("w", "decode", 100, IDLE, now)
        now += 0.01
    assert asked <= 6 + 20.0 / LONGEST_S
    refusals.granted("w", "decode")
    assert not refusals.rests("w", "decode", 100, IDLE, now)
    assert not len(refusals)


def test_refusals_in_one_instant_are_one() -> None:
    refusals = Refusals()
    for _ in range(50):
        refusals.refused("w", "decode", 100, IDLE, 0.0)
    assert not refusals.rests("w", "decode", 100, IDLE, 0.06)


def test_another_life_is_asked_afresh() -> None:
    refusals = Refusals()
    refusals.refused("w", "decode", 100, IDLE, 0.0)
    refusals.forget("w")
    assert not refusals.rests("w", "decode", 100, IDLE, 0.0)
