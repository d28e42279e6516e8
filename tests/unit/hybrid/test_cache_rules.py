"""The hybrid prefix cache on the oracle model, whose state is a digest of every token in order: a state that is stale,
foreign, torn or one token off changes every token after it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.api import Mode, Tokens
from engine.models.oracle import OracleRunner
from engine.plan import SamplingParams, StepPlan, StepResult
from kvtransfer.hashing import page_keys
from tests.unit.engine_core.lab import ROOT, VOCAB, Lab, move, prompt, request, undisturbed


def lab(**changes: object) -> Lab:
    return Lab(pages=128, state=True, changes=changes)


def ask(lab: Lab, name: str, tokens: tuple[int, ...], count: int = 4, mode: Mode = Mode.LOCAL) -> tuple[int, list[int]]:
    """Run one request to its end: (cached tokens, what it said), checked against the undisturbed answer."""
    key = lab.submit(request(name, tokens, mode, max_tokens=count))
    lab.run()
    lab.check()
    lab.engine._scheduler.check_states()
    if mode is Mode.SOURCE:
        lab.admitted(key).hold.release()
        return lab.done(key).cached_tokens, []
    said = lab.tokens(key)
    assert said == list(undisturbed(tokens, SamplingParams(max_tokens=count), state=True)[0])
    return next(e for e in lab.of(key) if isinstance(e, Tokens)).cached_tokens, said


def lengths(lab: Lab, tokens: tuple[int, ...]) -> list[int]:
    """Lengths of the cached states along a path."""
    assert lab.engine.states is not None
    keys = set(page_keys(ROOT, tokens))
    return sorted(length for key, length in lab.engine.states.entries() if key in keys)


# --- where states are left and where prompts land ------------------------------------------------------------------


@pytest.mark.parametrize(("length", "lands"), [(16, 0), (17, 16), (48, 32), (49, 48), (70, 64)])
def test_a_prompt_that_comes_again_lands_at_the_last_page_border_that_leaves_a_token_to_run(
    length: int, lands: int
) -> None:
    """A prompt that ends on a border must not load the state that holds all of it."""
    world, tokens = lab(state_ends=False), prompt(length)
    assert ask(world, "first", tokens)[0] == 0
    assert ask(world, "again", tokens)[0] == lands


def test_one_forward_leaves_the_state_inside_it() -> None:
    """No extra step and no split for the checkpoint: 70 tokens in chunks of 32 take three prefill steps."""
    plans: list[StepPlan] = []

    class Watched(OracleRunner):
        def run(self, plan: StepPlan) -> StepResult:
            plans.append(plan)
            return super().run(plan)

    world = Lab(pages=64, state=True, runner=Watched(VOCAB, 2048, state=True))
    ask(world, "r", prompt(70), 1)
    rows = [row for plan in plans for row in plan.rows]
    assert [(r.start, len(r.tokens)) for r in rows] == [(0, 32), (32, 32), (64, 6)]
    assert [[length for length, _ in r.checkpoints] for r in rows] == [[], [64], []]


def test_the_second_sighting_of_a_shared_prefix_earns_a_state_and_the_third_resumes_there() -> None:
    world, shared = lab(state_ends=False), prompt(160)
    one, two, three = (shared + prompt(100, seed) for seed in (1, 2, 3))
    assert ask(world, "one", one)[0] == 0
    assert ask(world, "two", two)[0] == 0
    assert lengths(world, two) == [160, 256]
    assert ask(world, "three", three)[0] == 160


def test_junctions_can_be_switched_off() -> None:
    world, shared = lab(state_ends=False, state_junctions=False), prompt(160)
    for seed in (1, 2):
        ask(world, str(seed), shared + prompt(100, seed))
    assert lengths(world, shared + prompt(100, 2)) == [256]


def test_a_junction_close_to_another_state_is_not_worth_a_slot() -> None:
    world, shared = lab(state_ends=False), prompt(48)
    ask(world, "one", shared + prompt(100, 1))
    ask(world, "two", shared + prompt(100, 2))
    assert lengths(world, shared + prompt(100, 2)) == [144]


def test_an_interval_bounds_what_a_diverging_prompt_replays() -> None:
    world = lab(state_interval_tokens=64, state_ends=False)
    assert ask(world, "one", prompt(300))[0] == 0
    assert lengths(world, prompt(300)) == [64, 128, 192, 256, 288]
    assert ask(world, "two", prompt(300)[:200] + prompt(50, 5))[0] == 192


@pytest.mark.parametrize("length", [31, 32, 33, 40])
def test_the_next_turn_resumes_where_the_last_one_ended_to_the_token(length: int) -> None:
    """The newest token is in no state, so the state holds one token less than is known."""
    world, first = lab(), prompt(length)
    said = ask(world, "one", first, 6)[1]
    turn = first + tuple(said) + prompt(20, 3)
    assert ask(world, "two", turn)[0] == length + 6 - 1


def test_a_turn_that_ends_otherwise_falls_back_to_the_page_border() -> None:
    """The whole tail must match: one token of it differs, or the prompt stops inside it."""
    world, first = lab(), prompt(40)
    said = ask(world, "one", first, 6)[1]
    assert ask(world, "other", first + tuple(said[:2]) + (96,) + prompt(20, 3))[0] == 32
    assert ask(world, "inside", first + tuple(said[:2]))[0] == 32


def test_a_source_leaves_the_end_of_its_prompt_while_a_lease_still_reads_it() -> None:
    world, tokens = lab(), prompt(40)
    key = world.submit(request("p", tokens, Mode.SOURCE))
    world.run()
    slot = world.admitted(key).slots[0]
    assert world.engine.states is not None
    assert slot in world.engine.states.slots()
    assert world.engine.slots.refs(slot) == 1
    assert ask(world, "next", tokens + prompt(9, 4))[0] == 40
    world.admitted(key).hold.release()
    world.engine.check_baseline()


def test_pages_that_fill_during_decode_are_found_by_the_next_turn() -> None:
    world, first = lab(), prompt(20)
    said = ask(world, "one", first, 60)[1]
    assert ask(world, "two", first + tuple(said) + prompt(5, 2))[0] == 20 + 60 - 1


# --- ownership ----------------------------------------------------------------------------------------------------


def test_a_hit_copies_and_the_cached_state_stays_as_it_is() -> None:
    """Also after the request that hit it has ended: retiring it must not free the cached slot."""
    world, tokens = lab(), prompt(70)
    ask(world, "one", tokens)
    assert world.engine.states is not None
    slots = sorted(world.engine.states.slots())
    before = world.memory()[1][slots].copy()
    for number in range(3):
        assert ask(world, f"again{number}", tokens, 30 + number)[0] == 64
        assert np.array_equal(world.memory()[1][slots], before)


def test_a_step_that_fails_publishes_nothing_and_gives_its_slots_back() -> None:
    class Failing(OracleRunner):
        def run(self, plan: StepPlan) -> StepResult:
            super().run(plan)
            raise RuntimeError("the device is gone")

    world = Lab(pages=64, state=True, runner=Failing(VOCAB, 2048, state=True))
    key = world.submit(request("r", prompt(30), max_tokens=2))
    world.turns(1)
    assert world.failed(key)
    assert world.engine.states is not None
    assert len(world.engine.states) == 0
    world.engine.check_baseline()


def test_a_request_cancelled_while_its_step_runs_publishes_no_state() -> None:
    cancelled: list[Lab] = []

    class Cancelling(OracleRunner):
        def run(self, plan: StepPlan) -> StepResult:
            cancelled[0].engine.cancel(key)
            return super().run(plan)

    world = Lab(pages=64, state=True, runner=Cancelling(VOCAB, 2048, state=True))
    cancelled.append(world)
    key = world.submit(request("r", prompt(100), max_tokens=2))
    world.run()
    world.engine.check_baseline()


def test_a_remote_request_takes_pages_from_its_cache_and_no_state() -> None:
    """The state arrives whole; only KV misses are partial."""
    p, d, tokens = lab(), lab(), prompt(100)
    ask(d, "warm", tokens[:60])
    source, target = (world.submit(request("r", tokens, mode)) for world, mode in ((p, Mode.SOURCE), (d, Mode.REMOTE)))
    p.run()
    d.run()
    assert d.admitted(target).ready == 48
    assert d.engine.slots.referenced == 1
    move(p, d, p.admitted(source), d.admitted(target))
    d.admitted(target).hold.release()
    p.admitted(source).hold.release()
    first = p.done(source).first
    d.engine.start(target, first)
    d.run()
    said = [first[0].token, *d.tokens(target)]
    assert said == list(undisturbed(tokens, SamplingParams(), state=True)[0])
    d.engine.check_baseline()
    p.engine.check_baseline()


def test_after_a_failed_load_the_answer_is_computed_from_whole_states_only() -> None:
    """Junk has landed in the pages and the slot; the recompute takes fresh ones, and a cached state if there is one."""
    world, tokens = lab(), prompt(100)
    ask(world, "warm", tokens[:60])
    key = world.submit(request("r", tokens, Mode.REMOTE, max_tokens=5))
    world.run()
    admitted = world.admitted(key)
    pages, slots = world.memory()
    pages[list(admitted.pages[admitted.ready // 16 :])] = 0xEE
    slots[list(admitted.slots)] = 0xEE
    world.engine.recompute(key)
    world.run()
    admitted.hold.release()
    assert world.tokens(key) == list(undisturbed(tokens, SamplingParams(max_tokens=5), state=True)[0])
    world.engine.check_baseline()


def test_the_wrong_state_is_seen(subtests: pytest.Subtests) -> None:
    """The tests above can fail: a cached state that is zeroed, or the neighbouring slot's, is told."""
    for fault in ("zero", "neighbour"):
        with subtests.test(fault=fault):
            world, tokens = lab(state_ends=False), prompt(70)
            ask(world, "one", tokens)
            ask(world, "two", prompt(70, 9))
            assert world.engine.states is not None
            (slot,) = (s.slot for s in world.engine.states._all() if s.key in page_keys(ROOT, tokens))
            states = world.memory()[1]
            other = next(s for s in world.engine.states.slots() if s != slot)
            states[slot] = 0 if fault == "zero" else states[other]
            with pytest.raises(AssertionError):
                ask(world, "again", tokens)


# --- eviction -----------------------------------------------------------------------------------------------------


def test_states_are_evicted_apart_from_pages_the_one_between_two_others_first() -> None:
    """Slots for one running request and three states: a fourth state costs the one that saves least."""
    world = Lab(pages=128, state=True, changes={"max_batch": 2, "state_interval_tokens": 128, "state_ends": False})
    ask(world, "one", prompt(300))
    assert lengths(world, prompt(300)) == [128, 256, 288]
    ask(world, "two", prompt(40, 5))
    assert lengths(world, prompt(300)) == [128, 256]
    assert len(world.engine.cache.match(page_keys(ROOT, prompt(300)))) == 300 // 16
    assert ask(world, "again", prompt(300))[0] == 256


def test_a_state_that_somebody_reads_is_not_evicted_and_its_slot_goes_to_nobody() -> None:
    """It saves least, so it would go first: 40 tokens beside states of 300."""
    world = Lab(pages=128, state=True, changes={"max_batch": 2, "state_ends": True})
    tokens = prompt(40)
    key = world.submit(request("p", tokens, Mode.SOURCE))
    world.run()
    slot = world.admitted(key).slots[0]
    for seed in range(2, 6):
        ask(world, f"other {seed}", prompt(300, seed))
    assert world.engine.states is not None
    assert 40 in lengths(world, tokens)
    assert slot in world.engine.states.slots()
    assert ask(world, "next", tokens + prompt(9, 4))[0] == 40
    world.admitted(key).hold.release()
    world.engine.check_baseline()


def test_states_go_with_the_pages_they_hang_on() -> None:
    world = Lab(pages=24, state=True)
    ask(world, "one", prompt(200))
    ask(world, "two", prompt(300, 5))
    assert world.engine.states is not None
    world.engine.states.check()
    assert lengths(world, prompt(200)) == []


def test_a_lone_request_gets_on_although_the_state_it_hits_takes_the_last_slot() -> None:
    world = Lab(pages=64, state=True, changes={"max_batch": 1})
    for name in "abcd":
        ask(world, name, prompt(50))
    world.engine.slots.check()


def test_without_the_prefix_cache_no_state_is_kept() -> None:
    world = lab(prefix_cache=False)
    ask(world, "one", prompt(70))
    assert world.engine.states is not None
    assert len(world.engine.states) == 0
    assert ask(world, "two", prompt(70))[0] == 0


def test_states_are_journalled_when_they_come_and_when_they_go() -> None:
    world = lab()
    ask(world, "one", prompt(70), 3)
    changes = world.engine.cache.changes_after(0) or []
    ready = [(c.state_length, c.stored) for c in changes if c.state_length]
    assert ready == [(64, True), (72, True)]
    assert sorted(length for _, length in world.engine.cache.snapshot().states) == [64, 72]
    world.engine.cache.clear()
    changes = world.engine.cache.changes_after(0) or []
    gone = sorted(c.state_length for c in changes if c.state_length and not c.stored)
    assert gone == [64, 72]
    assert not world.engine.cache.snapshot().states


def test_a_prompt_that_is_exactly_a_kept_turn_does_not_resume_at_its_end() -> None:
    """One token must be left to run: 40 tokens whose state is kept to the token land at the page border below."""
    world, tokens = lab(), prompt(40)
    ask(world, "source", tokens, mode=Mode.SOURCE)
    assert lengths(world, tokens) == [32, 40]
    assert ask(world, "again", tokens)[0] == 32
    assert ask(world, "longer", (*tokens, 5))[0] == 40
