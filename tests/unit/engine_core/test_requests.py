"""One request at a time: what it says is what it says alone, cached, forked, handed off or continued."""

from __future__ import annotations

import pytest

from engine.api import Mode, RangeReady, Tokens
from engine.plan import SamplingParams
from engine.sequence import LENGTH, STOP
from tests.unit.engine_core.lab import Lab, expected, hand_off, move, prompt, request, undisturbed


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
