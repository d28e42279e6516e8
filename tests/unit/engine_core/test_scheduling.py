"""Who runs, who waits, who gives way; and that none of it changes a token."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import Admitted, Event, Failed, Mode, RangeReady, Tokens
from engine.plan import SamplingParams, StepPlan, StepResult
from engine.sequence import LENGTH, STOP
from runtime.errors import DeadlineExceeded, InvalidRequest, TransferFailed
from tests.unit.engine_core.lab import VOCAB, Lab, move, prompt, request, undisturbed


def expected(length: int, max_tokens: int, seed: int = 0) -> list[int]:
    return list(undisturbed(prompt(length, seed), SamplingParams(max_tokens=max_tokens))[0])


def hand_off(p: Lab, d: Lab, name: str, tokens: tuple[int, ...], n: int = 1, **sampling: Any) -> None:
    """The prefill leg at P and the decode leg at D, up to and including the arrival of the pages."""
    source = p.submit(request(name, tokens, Mode.SOURCE, n=n, **sampling))
    remote = d.submit(request(name, tokens, Mode.REMOTE, n=n, **sampling))
    p.run()
    d.turns(1)
    move(p, d, p.admitted(source), d.admitted(remote))
    d.engine.start(remote, p.done(source).first)
    d.admitted(remote).hold.release()
    p.admitted(source).hold.release()


# --- one request --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 100])
def test_a_local_request_says_what_it_says_alone(length: int) -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(length), max_tokens=20))
    lab.run()
    assert lab.tokens(key) == expected(length, 20)
    assert lab.finish(key) == LENGTH
    assert lab.ends(key) == 1
    lab.engine.check_baseline()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("length", [1, 16, 17, 100])
def test_a_handed_off_request_says_what_it_says_alone(length: int, state: bool) -> None:
    p, d = Lab(state=state), Lab(state=state)
    hand_off(p, d, "a", prompt(length), max_tokens=20)
    d.run()
    key = request("a", prompt(length), Mode.REMOTE).key
    first = p.done(request("a", prompt(length), Mode.SOURCE).key).first[0]
    alone = list(undisturbed(prompt(length), SamplingParams(max_tokens=20), 1, state)[0])
    assert [first.token, *d.tokens(key)] == alone
    assert next(e for e in d.of(key) if isinstance(e, Tokens)).first_sequence == 1
    p.engine.check_baseline()
    d.engine.check_baseline()


def test_a_source_announces_its_ranges_chunk_by_chunk() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(100), Mode.SOURCE))
    lab.run()
    ranges = [(e.start, e.end) for e in lab.of(key) if isinstance(e, RangeReady)]
    assert ranges == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert len(lab.admitted(key).pages) == 7
    assert lab.ends(key) == 1


def test_a_page_that_did_not_arrive_changes_what_is_said() -> None:
    """The oracle can tell: without this, the tests above prove nothing."""
    p, d = Lab(), Lab()
    source = p.submit(request("a", prompt(100), Mode.SOURCE, max_tokens=20))
    remote = d.submit(request("a", prompt(100), Mode.REMOTE, max_tokens=20))
    p.run()
    d.run()
    move(p, d, p.admitted(source), d.admitted(remote))
    d.memory()[0][d.admitted(remote).pages[2], 77] ^= 1
    d.engine.start(remote, p.done(source).first)
    d.run()
    assert d.tokens(remote) != expected(100, 20)[1:]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("length", [20, 32])
def test_choices_fork_after_one_prefill_and_each_says_its_own(length: int, state: bool) -> None:
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    lab = Lab(state=state)
    key = lab.submit(request("a", prompt(length), n=3, max_tokens=30, temperature=1.0, seed=5))
    lab.run()
    said = tuple(tuple(lab.tokens(key, choice)) for choice in range(3))
    assert said == undisturbed(prompt(length), sampling, 3, state)
    assert len(set(said)) == 3
    assert lab.ends(key) == 1
    lab.engine.check_baseline()


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 2, 9])
def test_choices_nobody_wants_any_more_stop_and_the_others_say_the_same(turns: int, state: bool) -> None:
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    lab = Lab(state=state)
    key = lab.submit(request("a", prompt(40), n=3, max_tokens=30, temperature=1.0, seed=5))
    lab.turns(turns)
    free_before = lab.engine.load().pages_free

    lab.engine.end_choices(key, [0, 2])
    lab.turns(3)

    assert turns < 9 or lab.engine.load().pages_free > free_before
    lab.run()
    alone = undisturbed(prompt(40), sampling, 3, state)
    assert tuple(lab.tokens(key, 1)) == alone[1]
    assert all(len(lab.tokens(key, choice)) <= turns for choice in (0, 2))
    assert lab.ends(key) == 1
    lab.engine.check_baseline()


def test_ending_every_choice_leaves_nothing_and_says_nothing() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(40), n=2, max_tokens=30, temperature=1.0, seed=5))
    lab.turns(6)
    lab.engine.end_choices(key, [0])
    lab.engine.end_choices(key, [0, 1])
    lab.run()
    assert lab.ends(key) == 0
    lab.engine.cancel(key)
    lab.run()
    lab.engine.check_baseline()


@pytest.mark.parametrize("state", [False, True])
def test_choices_fork_after_a_hand_off_too(state: bool) -> None:
    p, d = Lab(state=state), Lab(state=state)
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    hand_off(p, d, "a", prompt(40), n=3, max_tokens=20, temperature=1.0, seed=5)
    d.run()
    key = request("a", prompt(40), Mode.REMOTE).key
    first = p.done(request("a", prompt(40), Mode.SOURCE).key).first
    said = tuple((first[c].token, *d.tokens(key, c)) for c in range(3))
    assert said == undisturbed(prompt(40), sampling, 3, state)
    assert d.ends(key) == 1
    d.engine.check_baseline()


def test_a_continuation_goes_on_where_the_earlier_output_ended() -> None:
    sampling = SamplingParams(max_tokens=20, temperature=0.8, seed=3)
    whole = undisturbed(prompt(30), sampling, 4)[2]
    lab = Lab()
    tokens = (*prompt(30), *whole[:7])
    key = lab.submit(request("a", tokens, prompt_len=30, choice=2, max_tokens=20, temperature=0.8, seed=3))
    lab.run()
    assert tuple(lab.tokens(key, 2)) == whole[7:]
    assert next(e for e in lab.of(key) if isinstance(e, Tokens)).first_sequence == 7


def test_a_stop_token_ends_a_choice_and_is_its_last_token() -> None:
    alone = expected(20, 20)
    lab = Lab()
    key = lab.submit(request("a", prompt(20), max_tokens=20, stop_token_ids=(alone[5],)))
    lab.run()
    assert lab.tokens(key) == alone[: alone.index(alone[5]) + 1]
    assert lab.finish(key) == STOP


def test_a_choice_that_ends_at_its_first_token_leaves_its_siblings_alone() -> None:
    alone = undisturbed(prompt(20), SamplingParams(temperature=1.0, seed=5, max_tokens=12), 3)
    stop = alone[0][0]
    assert all(stop not in said for said in alone[1:])
    lab = Lab()
    key = lab.submit(request("a", prompt(20), n=3, stop_token_ids=(stop,), temperature=1.0, seed=5, max_tokens=12))
    lab.run()
    assert [tuple(lab.tokens(key, c)) for c in range(3)] == [(stop,), alone[1], alone[2]]
    assert [lab.finish(key, c) for c in range(3)] == [STOP, LENGTH, LENGTH]
    assert lab.ends(key) == 1
    lab.engine.check_baseline()


def test_the_end_of_the_context_ends_a_request_by_length() -> None:
    lab = Lab(max_model_len=40)
    key = lab.submit(request("a", prompt(30), max_tokens=1000))
    lab.run()
    assert len(lab.tokens(key)) == 10
    assert lab.finish(key) == LENGTH


def test_the_end_of_the_pool_ends_a_request_by_length() -> None:
    lab = Lab(pages=4)
    key = lab.submit(request("a", prompt(30), max_tokens=1000))
    lab.run()
    assert len(lab.tokens(key)) == 34
    assert lab.finish(key) == LENGTH
    lab.engine.check_baseline()


def test_a_hand_off_that_ends_at_once_at_d_alone_still_ends_there() -> None:
    """P had more room than D has: P says the choice goes on, D's context is over."""
    p, d = Lab(), Lab(max_model_len=33)
    hand_off(p, d, "a", prompt(32), max_tokens=20)
    d.run()
    key = request("a", prompt(32), Mode.REMOTE).key
    assert d.tokens(key) == []
    assert d.finish(key) == LENGTH
    assert d.ends(key) == 1
    d.engine.check_baseline()


def test_prompt_log_probabilities_cover_positions_1_to_the_end_once() -> None:
    lab = Lab()
    lab.submit(request("warm", prompt(80), max_tokens=1))
    lab.run()
    key = lab.submit(request("a", prompt(80), max_tokens=2, prompt_logprobs=True, prompt_top_logprobs=2))
    lab.run()
    entries = [(e.offset + i, entry) for e in lab.scores(key) for i, entry in enumerate(e.entries)]
    assert [position for position, _ in entries] == list(range(1, 80))
    assert all(entry.token == prompt(80)[position] for position, entry in entries)
    assert all(len(entry.top) == 2 for _, entry in entries)
    last = next(e for e in lab.of(key) if isinstance(e, Tokens) and e.last)
    assert last.cached_tokens == 0


# --- the cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "hit"), [(16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48)])
def test_a_fully_cached_prompt_runs_at_least_one_token_and_no_more_than_a_page(length: int, hit: int) -> None:
    lab = Lab()
    lab.submit(request("warm", prompt(64), max_tokens=1))
    lab.run()
    key = lab.submit(request("a", prompt(length), Mode.SOURCE))
    lab.run()
    assert lab.done(key).cached_tokens == lab.admitted(key).ready == hit
    lab.admitted(key).hold.release()
    lab.engine.check_baseline()


def test_generated_tokens_are_cached_too() -> None:
    lab = Lab()
    first = lab.submit(request("a", prompt(20), max_tokens=30))
    lab.run()
    key = lab.submit(request("b", (*prompt(20), *lab.tokens(first), 5), Mode.SOURCE))
    lab.run()
    assert lab.done(key).cached_tokens == 48


def test_pages_of_a_source_are_cached_although_its_lease_still_holds_them() -> None:
    lab = Lab()
    one = lab.submit(request("a", prompt(50), Mode.SOURCE))
    lab.run()
    two = lab.submit(request("b", prompt(50), Mode.SOURCE))
    lab.run()
    assert lab.done(two).cached_tokens == 48
    assert lab.admitted(two).pages[:3] == lab.admitted(one).pages[:3]
    assert lab.admitted(two).pages[3] != lab.admitted(one).pages[3]
    assert lab.engine.pages.referenced == 5
    lab.admitted(one).hold.release()
    lab.admitted(two).hold.release()
    lab.engine.check_baseline()


def test_pages_on_their_way_are_in_no_cache_before_they_are_verified() -> None:
    d = Lab()
    remote = d.submit(request("a", prompt(50), Mode.REMOTE, max_tokens=5))
    d.run()
    assert len(d.engine.cache) == 0
    other = d.submit(request("b", prompt(50), max_tokens=5))
    d.run()
    assert d.tokens(other) == expected(50, 5)
    d.engine.cancel(remote)
    d.run()
    d.admitted(remote).hold.release()
    d.engine.check_baseline()


def test_a_decode_worker_that_holds_a_prefix_needs_only_the_rest() -> None:
    p, d = Lab(), Lab()
    hand_off(p, d, "a", prompt(64), max_tokens=5)
    d.run()
    hand_off(p, d, "b", prompt(64), max_tokens=5)
    d.run()
    key = request("b", prompt(64), Mode.REMOTE).key
    assert d.admitted(key).ready == 48
    assert d.tokens(key) == expected(64, 5)[1:]


def test_a_state_is_not_taken_from_pages() -> None:
    lab = Lab(state=True)
    lab.submit(request("warm", prompt(64), max_tokens=1))
    lab.run()
    key = lab.submit(request("a", prompt(64), max_tokens=8))
    lab.run()
    assert tuple(lab.tokens(key)) == undisturbed(prompt(64), SamplingParams(max_tokens=8), 1, True)[0]
    lab.engine.check_baseline()


def test_another_tenant_does_not_hit_and_the_same_one_does() -> None:
    lab = Lab()
    lab.submit(request("warm", prompt(64), max_tokens=1))
    lab.run()
    other = lab.submit(request("a", prompt(64), Mode.SOURCE, root=b"\x05" * 32))
    same = lab.submit(request("b", prompt(64), Mode.SOURCE))
    lab.run()
    assert (lab.done(other).cached_tokens, lab.done(same).cached_tokens) == (0, 48)


# --- the batch ----------------------------------------------------------------------------------------------------


def plans_of(lab: Lab) -> list[StepPlan]:
    plans: list[StepPlan] = []
    run = lab.oracle.run

    def watched(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return run(plan)

    lab.oracle.run = watched  # type: ignore[method-assign]
    return plans


def test_decode_rows_come_first_and_prefill_is_whole_chunks_within_the_budget() -> None:
    lab = Lab(pages=200, changes={"max_batched_tokens": 70})
    plans = plans_of(lab)
    lab.submit(request("old", prompt(10), max_tokens=50))
    lab.turns(1)
    for name in "abc":
        lab.submit(request(name, prompt(100, seed=ord(name)), max_tokens=3))
    lab.run()
    for plan in plans[1:]:
        kinds = [row.is_decode for row in plan.rows]
        assert kinds == sorted(kinds, reverse=True)
        assert sum(len(row.tokens) for row in plan.rows) <= 70
    assert [len(row.tokens) for row in plans[1].rows] == [1, 32, 32]
    assert all(row.start % 32 == 0 for plan in plans for row in plan.rows if not row.is_decode)


def test_a_full_batch_of_decodes_does_not_starve_a_prefill() -> None:
    lab = Lab(changes={"max_batched_tokens": 32})
    for name in "abc":
        lab.submit(request(name, prompt(10, seed=ord(name)), max_tokens=100))
    lab.turns(4)
    late = lab.submit(request("late", prompt(64), max_tokens=1))
    lab.turns(2)
    assert lab.ends(late) == 1


def test_no_more_choices_run_than_the_batch_holds() -> None:
    lab = Lab(pages=200)
    plans = plans_of(lab)
    keys = [lab.submit(request(f"{i}", prompt(20, i), n=2, max_tokens=6, temperature=1.0, seed=i)) for i in range(5)]
    lab.run()
    assert max(len(plan.rows) for plan in plans) == 4
    assert all(lab.ends(key) == 1 for key in keys)


def test_the_same_submissions_make_the_same_plans() -> None:
    made = []
    for _ in range(2):
        lab = Lab(pages=20)
        plans = plans_of(lab)
        for i in range(6):
            lab.submit(request(f"{i}", prompt(30 + 7 * i, i % 2), max_tokens=20, n=1 + i % 2))
        lab.run()
        made.append(plans)
    assert made[0] == made[1]


def test_an_urgent_request_overtakes_those_that_wait() -> None:
    lab = Lab(changes={"max_batch": 1})
    lab.submit(request("running", prompt(10), max_tokens=5))
    lab.turns(1)
    late = lab.submit(request("plain", prompt(10), max_tokens=5))
    urgent = lab.submit(request("urgent", prompt(10), max_tokens=5, priority=-1))
    lab.run()
    order = [e.key for e in lab.events if isinstance(e, Tokens) and e.last]
    assert order[1:] == [urgent, late]


def test_admission_takes_the_decode_headroom_with_it() -> None:
    """Seven pages; A needs 4 and one of headroom, B needs 3 and one: they must not half-admit each other.
    Public report T021 (vllm-project/vllm#57104)."""
    p, d = Lab(), Lab(pages=7)
    a = request("a", prompt(60), Mode.REMOTE, max_tokens=20)
    b = request("b", prompt(44, seed=3), Mode.REMOTE, max_tokens=20)
    sources = [p.submit(request(r.key.request_id, r.tokens, Mode.SOURCE, max_tokens=20)) for r in (a, b)]
    p.run()
    d.submit(a)
    d.submit(b)
    d.run()
    assert d.of(b.key) == []
    for source, r in zip(sources, (a, b), strict=True):
        move(p, d, p.admitted(source), d.admitted(r.key))
        d.engine.start(r.key, p.done(source).first)
        d.admitted(r.key).hold.release()
        d.run()
    assert d.tokens(a.key) == expected(60, 20)[1:]
    assert d.tokens(b.key) == expected(44, 20, seed=3)[1:]
    d.engine.check_baseline()


def test_a_finished_load_runs_although_the_head_of_the_queue_is_stuck() -> None:
    """Public report T123 (vllm-project/vllm#45388)."""
    p, d = Lab(), Lab(pages=12)
    loading = request("b", prompt(100), Mode.REMOTE, max_tokens=10)
    source = p.submit(request("b", prompt(100), Mode.SOURCE, max_tokens=10))
    p.run()
    d.submit(loading)
    d.run()
    stuck = d.submit(request("a", prompt(120, seed=2), max_tokens=10, priority=-5))
    d.run()
    assert d.of(stuck) == []
    move(p, d, p.admitted(source), d.admitted(loading.key))
    d.engine.start(loading.key, p.done(source).first)
    d.admitted(loading.key).hold.release()
    d.run()
    assert d.tokens(loading.key) == expected(100, 10)[1:]
    assert d.tokens(stuck) == expected(120, 10, seed=2)


def test_the_latest_request_gives_way_when_pages_run_out_and_says_the_same() -> None:
    lab = Lab(pages=10)
    keys = [lab.submit(request(f"{i}", prompt(40, i), max_tokens=60)) for i in range(2)]
    lab.run()
    assert [lab.tokens(key) for key in keys] == [expected(40, 60, i) for i in range(2)]
    last = [next(e for e in lab.of(key) if isinstance(e, Tokens) and e.last) for key in keys]
    assert last[0].recomputed_tokens == 0
    assert last[1].recomputed_tokens > 0
    lab.engine.check_baseline()


def test_a_preempted_hand_off_is_recomputed_here_and_waits_for_nothing() -> None:
    """Public report T084 (vllm-project/vllm#53250)."""
    p, d = Lab(), Lab(pages=12, changes={"prefix_cache": False})
    old = d.submit(request("old", prompt(50), max_tokens=90))
    d.turns(2)
    hand_off(p, d, "a", prompt(40, 1), max_tokens=60)
    d.run()
    key = request("a", prompt(40, 1), Mode.REMOTE).key
    last = next(e for e in d.of(key) if isinstance(e, Tokens) and e.last)
    assert last.recomputed_tokens > 60
    assert d.tokens(key) == expected(40, 60, 1)[1:]
    assert d.tokens(old) == expected(50, 90)
    assert sum(isinstance(e, Admitted) for e in d.of(key)) == 1
    d.engine.check_baseline()


def test_forked_choices_are_preempted_one_by_one_and_say_the_same() -> None:
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=9)
    for state in (False, True):
        lab = Lab(pages=11, state=state)
        key = lab.submit(request("a", prompt(40), n=3, max_tokens=60, temperature=1.0, seed=9))
        lab.run()
        assert tuple(tuple(lab.tokens(key, c)) for c in range(3)) == undisturbed(prompt(40), sampling, 3, state)
        last = next(e for e in lab.of(key) if isinstance(e, Tokens) and e.last)
        assert last.recomputed_tokens > 0
        lab.engine.check_baseline()


# --- remote, gone wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admitted_first", [True, False])
def test_a_hand_off_that_did_not_arrive_is_computed_here(admitted_first: bool) -> None:
    d = Lab()
    key = d.submit(request("a", prompt(50), Mode.REMOTE, max_tokens=10))
    if admitted_first:
        d.run()
    d.engine.recompute(key)
    d.run()
    assert d.tokens(key) == expected(50, 10)
    assert next(e for e in d.of(key) if isinstance(e, Tokens)).first_sequence == 0
    assert d.ends(key) == 1
    if admitted_first:
        assert d.engine.pages.referenced == 4
        d.admitted(key).hold.release()
    d.engine.check_baseline()


def test_pages_of_a_cancelled_landing_are_nobodys_until_the_landing_is_over() -> None:
    d = Lab(pages=9)
    key = d.submit(request("a", prompt(60), Mode.REMOTE, max_tokens=10))
    d.run()
    landing = d.admitted(key)
    d.engine.cancel(key)
    other = d.submit(request("b", prompt(44, 1), max_tokens=30))
    d.turns(6)
    d.memory()[0][list(landing.pages)] = 0xEE
    d.run()
    assert d.tokens(other) == expected(44, 30, 1)
    assert d.engine.pages.referenced == 4
    assert d.of(key) == [landing]
    landing.hold.release()
    d.engine.check_baseline()


def test_two_recomputes_of_one_prompt_share_only_what_is_done() -> None:
    """The second one may read the first one's pages, but none before it is written and confirmed.
    Public report T016 (vllm-project/vllm#49250)."""
    d = Lab()
    keys = [d.submit(request(name, prompt(100), Mode.REMOTE, max_tokens=10)) for name in "ab"]
    d.run()
    for key in keys:
        d.memory()[0][list(d.admitted(key).pages)] = 0xEE
        d.engine.recompute(key)
    d.run()
    assert [d.tokens(key) for key in keys] == [expected(100, 10)] * 2
    for key in keys:
        d.admitted(key).hold.release()
    d.engine.check_baseline()


def test_a_source_page_of_a_copy_is_nobodys_until_the_copy_is_made() -> None:
    """A remote load is announced before the step runs, so it must not get a page this step still reads."""
    lab = Lab(pages=8)
    lab.submit(request("a", prompt(20), n=2, max_tokens=30, temperature=1.0))
    lab.turns(1)
    plan = lab.engine._scheduler.schedule(0.0)
    assert plan is not None
    (copy,) = plan.copies
    assert lab.engine.pages.refs(copy.source) == 2
    assert lab.engine.pages.refs(copy.target) == 1
    lab.engine._scheduler.apply(lab.oracle.run(plan), 0.0)
    assert lab.engine.pages.refs(copy.source) == 1


def test_first_tokens_that_do_not_match_end_the_request() -> None:
    p, d = Lab(), Lab()
    hand_off(p, d, "a", prompt(20), max_tokens=10)
    d.run()
    key = d.submit(request("b", prompt(20), Mode.REMOTE, n=2, max_tokens=10))
    d.run()
    d.engine.start(key, p.done(request("a", prompt(20), Mode.SOURCE).key).first)
    d.run()
    assert isinstance(d.failed(key).error, TransferFailed)
    d.admitted(key).hold.release()
    d.engine.check_baseline()


def test_commands_for_a_request_that_is_gone_do_nothing() -> None:
    d = Lab()
    key = d.submit(request("a", prompt(20), max_tokens=3))
    d.run()
    before = list(d.events)
    d.engine.start(key, ())
    d.engine.recompute(key)
    d.engine.cancel(key)
    d.run()
    assert d.events == before


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("mode", list(Mode))
def test_a_cancel_at_any_stage_is_silent_and_gives_everything_back(mode: Mode, turns: int) -> None:
    lab = Lab(state=True)
    key = lab.submit(request("a", prompt(100), mode, n=2, max_tokens=3))
    lab.turns(turns)
    seen = list(lab.events)
    over = lab.ends(key)
    lab.engine.cancel(key)
    lab.engine.cancel(key)
    lab.run()
    assert lab.events == seen
    assert lab.ends(key) == over
    for event in lab.of(key):
        if isinstance(event, Admitted):
            event.hold.release()
    lab.engine.check_baseline()


def test_a_cancelled_key_may_come_again() -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(20), max_tokens=3))
    lab.engine.cancel(key)
    lab.submit(request("a", prompt(20), max_tokens=3))
    lab.run()
    assert lab.tokens(key) == expected(20, 3)


def test_a_live_key_does_not() -> None:
    lab = Lab()
    lab.submit(request("a", prompt(20), max_tokens=3))
    with pytest.raises(InvalidRequest) as refused:
        lab.submit(request("a", prompt(20), max_tokens=3))
    assert refused.value.reason == "duplicate"


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("mode", list(Mode))
def test_a_deadline_ends_a_request_at_any_stage(mode: Mode, turns: int) -> None:
    lab = Lab()
    key = lab.submit(request("a", prompt(100), mode, max_tokens=10, deadline=lab.clock.monotonic() + 5))
    lab.turns(turns)
    lab.clock.advance(5)
    over = lab.ends(key)
    lab.run()
    assert lab.ends(key) == 1
    if not over:
        assert isinstance(lab.failed(key).error, DeadlineExceeded)
        assert lab.failed(key).error.reason == "deadline_exceeded"
    for event in lab.of(key):
        if isinstance(event, Admitted):
            event.hold.release()
    lab.engine.check_baseline()


@pytest.mark.parametrize("chunk", [2, 4])
@pytest.mark.parametrize("state", [False, True])
def test_an_abort_while_a_chunk_is_in_flight_leaves_nothing(chunk: int, state: bool) -> None:
    """The step's pages are not given back before it lands, and its result counts for nothing.
    Public report T088 (sgl-project/sglang#36926)."""
    lab = Lab(state=state)
    scheduler = lab.engine._scheduler
    events: list[Event] = []
    request_ = scheduler.prepare(request("a", prompt(128), max_tokens=4), events.extend, 0.0)
    scheduler.add(request_)
    for _ in range(chunk - 1):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.apply(lab.oracle.run(plan), 0.0)
    known = len(lab.engine.cache)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.cancel(request_.spec.key)
    held = lab.engine.pages.referenced
    scheduler.apply(lab.oracle.run(plan), 0.0)
    assert held == 9
    assert len(lab.engine.cache) == known
    assert scheduler.take_events() == []
    lab.engine.check_baseline()


# --- input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "field"), [
    ({"tokens": ()}, "tokens"),
    ({"tokens": (VOCAB,)}, "tokens"),
    ({"tokens": (-1,)}, "tokens"),
    ({"tokens": (1,) * 2048}, "tokens"),
    ({"prompt_len": 11}, "tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**12}, "n"),
    ({"n": 5}, "n"),
    ({"n": 2, "choice": 1}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"root": b""}, "root"),
    ({"stop_token_ids": (VOCAB,)}, "sampling"),
    ({"logit_bias": ((191222, -100.0),)}, "sampling"),
])  # fmt: skip
def test_what_can_never_run_is_refused_by_name_and_takes_nothing(change: dict[str, object], field: str) -> None:
    lab = Lab()
    made: dict[str, object] = {"tokens": prompt(10), "max_tokens": 3, **change}
    with pytest.raises(InvalidRequest) as refused:
        lab.submit(request("a", **made))  # type: ignore[arg-type]
    assert refused.value.field == field
    lab.engine.check_baseline()
    key = lab.submit(request("b", prompt(10), max_tokens=3))
    lab.run()
    assert lab.tokens(key) == expected(10, 3)


def test_a_prompt_larger_than_the_pool_is_refused_for_ever() -> None:
    lab = Lab(pages=4)
    with pytest.raises(InvalidRequest) as refused:
        lab.submit(request("a", prompt(70), max_tokens=3))
    assert (refused.value.reason, refused.value.limit) == ("exceeds_capacity", "64 tokens")
    assert not any(isinstance(e, Failed) for e in lab.events)
