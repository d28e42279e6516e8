"""Least-loaded, as a pure function."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.pairing import AllRefused, Local, NoWorker, Pair, Role, WorkerState, choose, choose_decode

NOBODY: frozenset[str] = frozenset()


def worker(name: str, role: Role, *, prefill: int = 0, decode: int = 0, group: str = "g") -> WorkerState:
    return WorkerState(name, role, True, prefill, decode, 100, 1000, group)


def pick(
    *workers: WorkerState, length: int = 10, no_p: frozenset[str] = NOBODY, no_d: frozenset[str] = NOBODY
) -> object:
    return choose(workers, length, no_p, no_d)


def test_the_least_loaded_of_each_role_make_the_pair() -> None:
    found = pick(
        worker("p1", Role.PREFILL, prefill=500),
        worker("p2", Role.PREFILL, prefill=100),
        worker("d1", Role.DECODE, decode=3),
        worker("d2", Role.DECODE, decode=2),
    )

    assert found == Pair("p2", "d2")


def test_only_workers_that_do_both_means_local() -> None:
    assert pick(worker("b1", Role.BOTH, decode=1), worker("b2", Role.BOTH)) == Local("b2")


def test_the_same_worker_for_both_legs_means_local() -> None:
    found = pick(worker("b", Role.BOTH), worker("p", Role.PREFILL, prefill=9), worker("d", Role.DECODE, decode=9))

    assert found == Local("b")


def test_one_that_does_both_helps_out_for_either_role() -> None:
    assert pick(worker("b", Role.BOTH), worker("p", Role.PREFILL)) == Local("b")
    assert pick(worker("b", Role.BOTH, prefill=9), worker("p", Role.PREFILL)) == Pair("p", "b")
    assert pick(worker("b", Role.BOTH, decode=9), worker("d", Role.DECODE)) == Pair("b", "d")


@pytest.mark.parametrize(("present", "missing"), [(Role.PREFILL, "decode"), (Role.DECODE, "prefill")])
def test_a_missing_role_is_named(present: Role, missing: str) -> None:
    assert pick(worker("w", present)) == NoWorker(missing)
    assert pick() == NoWorker("prefill")


def test_unusable_workers_do_not_exist() -> None:
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)

    assert pick(replace(p, usable=False), d) == NoWorker("prefill")


def test_workers_too_small_for_the_request_are_passed_over() -> None:
    """Public report T053 (sgl-project/sglang#30233; sgl-project/sglang#34208)."""
    p, d = worker("p", Role.PREFILL), worker("d", Role.DECODE)

    assert pick(p, d, replace(worker("d2", Role.DECODE), max_model_len=5000), length=1000) == Pair("p", "d")
    assert pick(p, d, length=1001) == NoWorker("prefill", too_small=True)


def test_only_workers_of_one_group_are_paired() -> None:
    p, d = worker("p", Role.PREFILL, group="a"), worker("d", Role.DECODE, group="b")

    assert pick(p, d) == NoWorker("decode", incompatible=True)
    assert pick(p, d, worker("d2", Role.DECODE, decode=99, group="a")) == Pair("p", "d2")


def test_those_who_refused_are_not_asked_again_this_round() -> None:
    p1, p2 = worker("p1", Role.PREFILL), worker("p2", Role.PREFILL, prefill=50)
    d = worker("d", Role.DECODE)

    assert pick(p1, p2, d, no_p=frozenset({"p1"})) == Pair("p2", "d")
    assert pick(p1, p2, d, no_p=frozenset({"p1", "p2"})) == AllRefused()
    assert pick(p1, d, no_d=frozenset({"d"})) == AllRefused()


def test_a_ticket_goes_only_to_decode_workers_that_can_read_it() -> None:
    workers = [worker("p", Role.PREFILL), worker("d1", Role.DECODE, group="x"), worker("d2", Role.DECODE, decode=5)]

    assert choose_decode(workers, 10, "g", NOBODY) == "d2"
    assert choose_decode(workers, 10, "g", frozenset({"d2"})) is None


STATES = st.lists(
    st.builds(
        WorkerState,
        worker_id=st.sampled_from("abcdef"),
        role=st.sampled_from(Role),
        usable=st.booleans(),
        prefill_load=st.integers(0, 5),
        decode_load=st.integers(0, 5),
        pages_free=st.integers(0, 9),
        max_model_len=st.sampled_from([5, 50]),
        group=st.sampled_from(["g", "h"]),
        served=st.integers(0, 3),
    ),
    max_size=6,
    unique_by=lambda state: state.worker_id,
)


@given(workers=STATES, no_p=st.frozensets(st.sampled_from("abcdef")), no_d=st.frozensets(st.sampled_from("abcdef")))
def test_whoever_is_chosen_may_be_chosen(
    workers: list[WorkerState], no_p: frozenset[str], no_d: frozenset[str]
) -> None:
    found = choose(workers, 10, no_p, no_d)

    by_id = {state.worker_id: state for state in workers}
    if isinstance(found, Pair):
        p, d = by_id[found.prefill], by_id[found.decode]
        assert p.worker_id != d.worker_id
        assert p.group == d.group
        assert p.role is not Role.DECODE
        assert d.role is not Role.PREFILL
        assert p.worker_id not in no_p
        assert d.worker_id not in no_d
        assert all(state.usable and state.max_model_len >= 10 for state in (p, d))
    elif isinstance(found, Local):
        assert by_id[found.worker].role is Role.BOTH
        assert by_id[found.worker].usable
