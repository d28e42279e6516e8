"""A prefix from one engine's cache to another's: what is offered, what it is given room for, and what is hit then."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TypeVar

import pytest

from engine.api import Mode, Needs, Reserved
from engine.prefixes import Staged
from kvtransfer.hashing import page_keys, root
from kvtransfer.types import LegKey, Prefix, Wanted
from tests.unit.engine_core.lab import ROOT, VOCAB, Lab, prompt, request, undisturbed

T = TypeVar("T")
OTHER_TENANT = root(b"another tenant", "oracle", "1")


def wanted(tokens: tuple[int, ...], first_token: int = 0, *, state: bool = False, root: bytes = ROOT) -> Wanted:
    return Wanted(tuple(page_keys(root, tokens)), tokens, first_token, state)


def answer(lab: Lab, future: Future[T]) -> T:
    lab.run()
    return future.result(timeout=0)


def warm(lab: Lab, tokens: tuple[int, ...], name: str = "first") -> None:
    """A prompt is computed, and what it was read for is over: its pages are the cache's."""
    key = lab.submit(request(name, tokens, Mode.SOURCE))
    lab.run()
    lab.admitted(key).hold.release()


def offered(lab: Lab, want: Wanted) -> Prefix | None:
    return answer(lab, lab.engine.prefixes.offer(want))


def staged(lab: Lab, want: Wanted, count: int, key: LegKey = LegKey("r", "prefill", 1)) -> Staged | None:
    return answer(lab, lab.engine.prefixes.stage(want, count, key, lab.clock.monotonic() + 1))


def copy(source: Lab, target: Lab, prefix: Prefix, room: Staged) -> None:
    """What a pull does: pages the target lacks, and the slots."""
    landed, held = room.destination, room.destination.held // 16
    paged = {c.name: c.paged for c in target.engine.model.components}
    for region, mine, theirs in zip(target.engine.regions(), target.memory(), source.memory(), strict=True):
        into = landed.pages[held:] if paged[region.component] else landed.slots
        out_of = prefix.pages[held:] if paged[region.component] else prefix.slots
        mine[list(into)] = theirs[list(out_of)]
    landed.hold.release()
    prefix.hold.release()


def fetched(source: Lab, target: Lab, want: Wanted) -> int:
    """Tokens that were brought over and published."""
    prefix = offered(source, want)
    assert prefix is not None
    room = staged(target, want, prefix.token_count)
    assert room is not None
    copy(source, target, prefix, room)
    target.engine.prefixes.publish(room)
    target.run()
    return prefix.token_count


def baseline(*labs: Lab) -> None:
    for lab in labs:
        lab.run()
        lab.check()
        lab.engine.check_baseline()


@pytest.fixture(params=[False, True], ids=["dense", "hybrid"])
def state(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_fetched_prefix_is_hit_and_the_answer_is_that_of_a_cold_run(state: bool) -> None:
    source, target = Lab(state=state), Lab(state=state)
    tokens = prompt(100)
    warm(source, tokens)
    assert fetched(source, target, wanted(tokens, state=state)) == 96
    key = target.submit(request("r", tokens, max_tokens=6))
    target.run()
    assert target.tokens(key) == list(undisturbed(tokens, request("r", tokens, max_tokens=6).sampling, state=state)[0])
    assert target.events[-1].cached_tokens == 96  # type: ignore[union-attr]
    baseline(source, target)


def test_the_end_of_a_turn_off_the_page_grid_comes_back_with_its_partial_page(state: bool) -> None:
    source, target = Lab(state=state), Lab(state=state)
    tokens = prompt(50)
    key = source.submit(request("turn 1", tokens, max_tokens=8))
    source.run()
    turn = (*tokens, *source.tokens(key), 5, 6, 7, 8, 9, 10, 11)
    count = fetched(source, target, wanted(turn, state=state))
    assert count == (57 if state else 48)
    second = target.submit(request("turn 2", turn, max_tokens=6))
    target.run()
    expected = undisturbed(turn, request("r", turn, max_tokens=6).sampling, state=state)[0]
    assert target.tokens(second) == list(expected)
    assert target.events[-1].cached_tokens == count  # type: ignore[union-attr]
    baseline(source, target)


def test_only_what_the_target_lacks_is_staged(state: bool) -> None:
    source, target = Lab(state=state), Lab(state=state)
    tokens = prompt(130)
    warm(source, tokens)
    warm(target, tokens[:64])
    want = wanted(tokens, target.engine.prefixes.held(wanted(tokens)), state=state)
    assert want.first_token == 64
    room = staged(target, want, 128)
    assert room is not None
    assert room.destination.held == 64
    prefix = offered(source, want)
    assert prefix is not None
    copy(source, target, prefix, room)
    target.engine.prefixes.publish(room)
    key = target.submit(request("r", tokens, max_tokens=4))
    target.run()
    expected = undisturbed(tokens, request("r", tokens, max_tokens=4).sampling, state=state)[0]
    assert target.tokens(key) == list(expected)
    baseline(source, target)


def test_nothing_is_offered_to_who_has_as_much_or_names_it_under_another_salt(state: bool) -> None:
    source = Lab(state=state)
    tokens = prompt(100)
    warm(source, tokens)
    assert offered(source, wanted(tokens, 96, state=state)) is None
    assert offered(source, wanted(tokens, state=state, root=OTHER_TENANT)) is None
    assert offered(source, wanted(prompt(100, seed=3), state=state)) is None
    assert offered(source, wanted(tokens, state=not state)) is None
    baseline(source)


def test_a_tail_that_differs_is_no_state_to_offer() -> None:
    source = Lab(state=True)
    key = source.submit(request("turn 1", prompt(50), max_tokens=8))
    source.run()
    turn = [*prompt(50), *source.tokens(key), 5, 6, 7]
    turn[55] = (turn[55] + 1) % VOCAB
    prefix = offered(source, wanted(tuple(turn), state=True))
    assert prefix is not None
    assert prefix.token_count == 48, "the state at the prompt's own checkpoint is the deepest that fits"
    prefix.hold.release()
    baseline(source)


def test_offered_pages_stay_while_everything_else_is_evicted(state: bool) -> None:
    source, target = Lab(pages=16, state=state), Lab(state=state)
    tokens = prompt(100)
    warm(source, tokens)
    want = wanted(tokens, state=state)
    prefix = offered(source, want)
    assert prefix is not None
    for seed in range(1, 6):
        warm(source, prompt(100, seed), f"other {seed}")
    room = staged(target, want, prefix.token_count)
    assert room is not None
    copy(source, target, prefix, room)
    target.engine.prefixes.publish(room)
    key = target.submit(request("r", tokens, max_tokens=4))
    target.run()
    assert target.tokens(key) == list(undisturbed(tokens, request("r", tokens, max_tokens=4).sampling, state=state)[0])
    baseline(source, target)


def test_pages_that_somebody_here_was_promised_are_not_pinned_for_a_peer(state: bool) -> None:
    source = Lab(pages=16, state=state)
    tokens = prompt(100)
    warm(source, tokens)
    booked = source.engine.reserve(LegKey("soon", "prefill", 1), Needs(prompt_tokens=176, slots=int(state)))
    assert isinstance(booked, Reserved)
    assert offered(source, wanted(tokens, state=state)) is None
    source.engine.cancel_reservation(booked.reservation_id)
    prefix = offered(source, wanted(tokens, state=state))
    assert prefix is not None
    prefix.hold.release()
    baseline(source)


def test_there_is_no_room_for_a_prefix_that_others_were_promised(state: bool) -> None:
    target = Lab(pages=16, state=state)
    want, mine = wanted(prompt(100), state=state), LegKey("r", "prefill", 1)
    other = target.engine.reserve(LegKey("other", "prefill", 1), Needs(prompt_tokens=176, slots=int(state)))
    assert isinstance(other, Reserved)
    assert staged(target, want, 96, mine) is None, "five pages are left for a prefix of six"
    target.engine.cancel_reservation(other.reservation_id)
    own = target.engine.reserve(mine, Needs(prompt_tokens=256, slots=int(state)))
    assert isinstance(own, Reserved)
    room = staged(target, want, 96, mine)
    assert room is not None, "the request's own booking is room for its own prefix"
    target.engine.prefixes.drop(room)
    room.destination.hold.release()
    target.engine.cancel_reservation(own.reservation_id)
    baseline(target)


def test_a_dropped_staging_leaves_its_pages_to_the_read_that_may_still_land(state: bool) -> None:
    target = Lab(state=state)
    room = staged(target, wanted(prompt(100), state=state), 96)
    assert room is not None
    target.engine.prefixes.drop(room)
    assert target.engine.pages.referenced == 6
    room.destination.hold.release()
    assert target.engine.pages.referenced == 0
    assert target.engine.prefixes.held(wanted(prompt(100), state=state)) == 0, "nothing was published"
    baseline(target)


def full_of_cache(state: bool) -> Lab:
    """Room is to be had by evicting only, which is the engine thread's."""
    lab = Lab(pages=16, state=state)
    warm(lab, prompt(230))
    return lab


def test_who_stopped_waiting_is_given_nothing(state: bool) -> None:
    lab = full_of_cache(state)
    room = lab.engine.prefixes.stage(wanted(prompt(90, 2), state=state), 80, LegKey("r", "prefill", 1), 1e9)
    assert room.cancel()
    baseline(lab)


def test_an_engine_that_has_ended_gives_no_room_and_publishes_nothing(state: bool) -> None:
    lab = full_of_cache(state)
    soon = lab.engine.prefixes.stage(wanted(prompt(20, 4), state=state), 16, LegKey("s", "prefill", 1), 1e9).result()
    assert soon is not None, "at once: a page is free"
    waiting = lab.engine.prefixes.stage(wanted(prompt(90, 2), state=state), 80, LegKey("r", "prefill", 1), 1e9)
    lab.engine.stop()
    assert waiting.result(timeout=0) is None
    lab.engine.prefixes.publish(soon)
    soon.destination.hold.release()
    late = lab.engine.prefixes.stage(wanted(prompt(90, 2), state=state), 80, LegKey("r", "prefill", 1), 1e9)
    assert late.result(timeout=0) is None
    lab.engine.check_baseline()


def test_what_needs_no_step_is_answered_during_one(state: bool) -> None:
    source, target = Lab(state=state), Lab(state=state)
    warm(source, prompt(100))
    prefix = source.engine.prefixes.offer(wanted(prompt(100), state=state)).result(timeout=0)
    assert prefix is not None
    room = target.engine.prefixes.stage(wanted(prompt(100), state=state), 96, LegKey("r", "prefill", 1), 1e9)
    given = room.result(timeout=0)
    assert given is not None
    copy(source, target, prefix, given)
    target.engine.prefixes.publish(given)
    baseline(source, target)


def test_a_state_with_records_is_folded_before_it_is_offered() -> None:
    source = Lab(state=True)
    tokens = prompt(40)
    key = source.submit(request("turn", tokens, max_tokens=5))
    source.run()
    assert source.engine.states is not None
    turn = (*tokens, *source.tokens(key), 3, 4)
    match = source.engine.states.match(page_keys(ROOT, turn), turn)
    assert match.state is not None
    match.state.whole = 40  # as if the last steps had left records
    folded: list[tuple[int, int]] = []
    source.engine.prefixes._memory.settle = lambda c: folded.append((c.source, c.whole))
    prefix = offered(source, wanted(turn, state=True))
    assert prefix is not None
    assert folded == [(prefix.slots[0], 40)]
    prefix.hold.release()


def still_serves(lab: Lab) -> None:
    asked = request("other", prompt(30, 9), max_tokens=4)
    lab.submit(asked)
    lab.run()
    assert lab.tokens(asked.key) == list(undisturbed(prompt(30, 9), asked.sampling, state=lab.state)[0])
    baseline(lab)


def test_a_fault_in_a_question_is_the_askers_and_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(state=True)
    warm(lab, prompt(100))

    def broken(_: object) -> None:
        raise RuntimeError("the records could not be folded")

    monkeypatch.setattr(lab.engine.prefixes, "_has_records", lambda state: True)
    monkeypatch.setattr(lab.engine.prefixes, "_settle", broken)
    asked = lab.engine.prefixes.offer(wanted(prompt(100), state=True))
    lab.run()
    assert isinstance(asked.exception(timeout=0), RuntimeError)
    still_serves(lab)


@pytest.mark.parametrize("gone", [False, True])
def test_a_fault_in_making_room_is_the_askers_and_not_the_engines(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    lab = full_of_cache(False)
    asked = lab.engine.prefixes.stage(wanted(prompt(90, 2)), 80, LegKey("r", "prefill", 1), 1e9)

    def broken(_: object) -> None:
        if gone:
            asked.cancel()
        raise RuntimeError("no room can be made")

    monkeypatch.setattr(lab.engine.prefixes, "_taken", broken)
    lab.run()
    assert asked.cancelled() if gone else isinstance(asked.exception(timeout=0), RuntimeError)
    still_serves(lab)


def test_a_prefix_that_cannot_be_cached_is_dropped_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    room = staged(lab, wanted(prompt(100)), 96)
    assert room is not None
    room.destination.hold.release()

    def broken(*_: object) -> None:
        raise RuntimeError("the cache is broken")

    with monkeypatch.context() as patch:
        patch.setattr(lab.engine.cache, "publish", broken)
        lab.engine.prefixes.publish(room)
        lab.run()
    assert lab.engine.pages.referenced == 0
    still_serves(lab)
