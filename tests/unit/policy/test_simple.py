from __future__ import annotations

from router.policy.policies import LeastLoad, PowerOfTwo, RoundRobin, SessionAffinity
from router.policy.view import Nobody, Placement
from tests.unit.policy.states import both, decode, prefill, request


def pair(decision: object) -> tuple[str, str]:
    assert isinstance(decision, Placement)
    return decision.prefill, decision.decode


def test_round_robin_takes_the_next_worker_of_each_pool_whatever_the_load() -> None:
    workers = [prefill(1, 90_000), prefill(2), decode(3, 50), decode(4), decode(5)]
    policy = RoundRobin()
    taken = [pair(policy.choose(request(100), workers, 0.0)) for _ in range(4)]
    assert taken == [("p1", "d3"), ("p2", "d4"), ("p1", "d5"), ("p2", "d3")]


def test_least_load_takes_the_shortest_prompt_queue_and_the_smallest_batch() -> None:
    workers = [prefill(1, 9000), prefill(2, 100), decode(3, 5), decode(4, 2)]
    assert pair(LeastLoad().choose(request(100), workers, 0.0)) == ("p2", "d4")


def test_an_idle_fleet_is_spread_over_by_who_served_least() -> None:
    workers = [prefill(1, served=3), prefill(2, served=1), decode(3, served=1), decode(4, served=0)]
    assert pair(LeastLoad().choose(request(100), workers, 0.0)) == ("p2", "d4")


def test_a_decode_worker_without_room_is_taken_only_when_none_has_room() -> None:
    full, roomy = decode(3, 1, 1000, kv_tokens=1050), decode(4, 9, 1000, kv_tokens=90_000)
    assert pair(LeastLoad().choose(request(100), [prefill(1), full, roomy], 0.0)) == ("p1", "d4")
    assert pair(LeastLoad().choose(request(100), [prefill(1), full], 0.0)) == ("p1", "d3")


def test_workers_that_do_both_serve_a_request_alone() -> None:
    decision = LeastLoad().choose(request(100), [both(1, 4), both(2, 1)], 0.0)
    assert isinstance(decision, Placement)
    assert decision.local
    assert decision.decode == "b2"


def test_power_of_two_never_takes_the_most_loaded_of_three() -> None:
    workers = [prefill(1, 9000), prefill(2, 500), prefill(3, 100), decode(4, 9), decode(5, 5), decode(6, 1)]
    policy = PowerOfTwo(seed=7)
    taken = {pair(policy.choose(request(100), workers, 0.0)) for _ in range(100)}
    assert {p for p, _ in taken} == {"p2", "p3"}
    assert {d for _, d in taken} == {"d5", "d6"}


def test_a_session_stays_with_its_pair_and_moves_when_the_pair_cannot_serve_it() -> None:
    first, other = prefill(1), prefill(2, 10)
    workers = [first, other, decode(3), decode(4, 1)]
    policy = SessionAffinity()
    assert pair(policy.choose(request(100, session="s"), workers, 0.0)) == ("p1", "d3")
    first.prefill_tokens = 50_000
    assert pair(policy.choose(request(100, session="s"), workers, 0.0)) == ("p1", "d3")
    assert pair(policy.choose(request(100, session="t"), workers, 0.0)) == ("p2", "d3")
    first.usable = False
    assert pair(policy.choose(request(100, session="s"), workers, 0.0)) == ("p2", "d3")
    first.usable = True
    assert pair(policy.choose(request(100, session="s"), workers, 0.0)) == ("p2", "d3"), "it stays where it moved to"


def test_forgotten_sessions_are_the_least_recently_seen() -> None:
    workers = [prefill(1), prefill(2, 10), decode(3)]
    policy = SessionAffinity(limit=2)
    for session in ("a", "b", "a", "c"):
        policy.choose(request(10, session=session), workers, 0.0)
    workers[0].prefill_tokens = 99
    assert pair(policy.choose(request(10, session="a"), workers, 0.0))[0] == "p1"
    assert pair(policy.choose(request(10, session="b"), workers, 0.0))[0] == "p2"


def test_a_missing_role_is_named_and_strangers_are_never_paired() -> None:
    for policy in (RoundRobin(), LeastLoad(), PowerOfTwo(), SessionAffinity()):
        assert policy.choose(request(10), [decode(1)], 0.0) == Nobody("no_prefill_worker")
        assert policy.choose(request(10), [prefill(1)], 0.0) == Nobody("no_decode_worker")
        apart = [prefill(1, group="a"), decode(2, group="b")]
        assert policy.choose(request(10), apart, 0.0) == Nobody("no_compatible_decode_worker")
        mixed = [*apart, prefill(3, 10, group="b")]
        assert pair(policy.choose(request(10), mixed, 0.0)) == ("p3", "d2")


def test_a_worker_whose_context_is_too_short_or_that_is_not_usable_is_no_candidate() -> None:
    workers = [prefill(1, max_model_len=100), prefill(2, 9000), decode(3, usable=False), decode(4, 9)]
    assert pair(LeastLoad().choose(request(100), workers, 0.0)) == ("p2", "d4")
