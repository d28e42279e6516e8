"""Recurrent states on the host: down before they are dropped, up with the pages below them, whole or not at all."""

from __future__ import annotations

import pytest

from engine.pages import PagePool, SlotPool
from engine.prefix_cache import PrefixCache
from engine.tiers.index import TierIndex
from engine.tiers.policy import Order
from engine.tiers.states import HostStates, TierState
from kvtransfer.hashing import page_keys, root
from pdserve._worker_admin import WorkerAdmin
from protos.v1 import worker_pb2
from runtime import faults
from tests.unit.engine_core.lab import ROOT, prompt, request, undisturbed
from tests.unit.tiers.lab import Lazy, Manual, TierLab

FIRST = prompt(128)
OTHER = prompt(176, seed=1)


def lab(pages: int = 12, **more: object) -> TierLab:
    return TierLab(pages=pages, state=True, **more)  # type: ignore[arg-type]


def ask(made: TierLab, name: str, tokens: tuple[int, ...], count: int = 4) -> tuple[int, list[int]]:
    """Run one request to its end, copies included: (tokens that came from a cache, answer). It must say what an
    undisturbed one says."""
    asked = request(name, tokens, max_tokens=count)
    key = made.submit(asked)
    for _ in range(200):
        made.run()
        if made.ends(key):
            break
        made.settle()
    said = made.tokens(key)
    assert tuple(said) == undisturbed(tokens, asked.sampling, state=True)[0]
    return next(e.cached_tokens for e in made.of(key) if hasattr(e, "cached_tokens")), said


def pushed_out(made: TierLab, tokens: tuple[int, ...] = FIRST, count: int = 4) -> list[int]:
    """Ask, then ask for so much else that nothing of it is left on the device. The answer."""
    _, said = ask(made, "first", tokens, count)
    made.settle()
    ask(made, "other", OTHER)
    made.settle()
    assert made.engine.cache.match(page_keys(ROOT, tokens)) == []
    return said


def states_of(made: TierLab, tokens: tuple[int, ...]) -> list[int]:
    """Lengths of the states on the host that this prompt can resume."""
    return [s.length for s in made.tiers.states.match(page_keys(ROOT, tokens), tokens, 0)]


def test_a_prompt_whose_pages_and_states_were_evicted_resumes_from_the_host() -> None:
    made = lab()
    pushed_out(made)
    assert states_of(made, FIRST) == [112]

    cached, _ = ask(made, "again", FIRST)

    assert cached == 112
    assert made.tiers.counts.hit_states == 1
    assert made.tiers.counts.hit_pages == 7
    made.baseline()


def test_the_next_turn_resumes_at_the_token_where_the_last_one_ended() -> None:
    """The partial page and its tokens come back with the state: 128 of the prompt and all but the newest of 6."""
    made = lab()
    said = pushed_out(made, count=6)
    turn = (*FIRST, *said, 9, 8, 7)

    cached, _ = ask(made, "turn", turn)

    assert cached == 133
    made.baseline()


def test_a_turn_that_ends_otherwise_resumes_at_the_page_border() -> None:
    made = lab()
    pushed_out(made, count=6)
    cached, _ = ask(made, "turn", (*FIRST, 1, 2, 3, 4, 5, 6, 7))
    assert cached == 112


def test_pages_on_the_device_are_used_with_a_state_from_the_host() -> None:
    made = lab(pages=64)
    ask(made, "first", FIRST)
    made.settle()
    ask(made, "small", prompt(33, seed=2))
    made.settle()
    taken = made.engine.slots.allocate(made.engine.slots.total)
    made.engine.slots.release(taken or [])
    assert made.engine.states is not None
    keys = page_keys(ROOT, FIRST)
    assert len(made.engine.cache.match(keys)) == 8
    assert made.engine.states.match(keys[:7], FIRST).state is None

    assert ask(made, "again", FIRST)[0] == 112

    assert made.tiers.counts.hit_pages == 0
    assert made.tiers.counts.hit_states == 1


def test_a_state_that_came_up_is_on_the_device_for_the_next_one() -> None:
    made = lab()
    pushed_out(made)
    ask(made, "again", FIRST)
    assert ask(made, "third", FIRST)[0] == 112
    assert made.tiers.counts.hit_states == 1
    made.baseline()


def test_a_state_that_was_not_copied_up_shows_because_the_device_is_poisoned() -> None:
    made = lab()
    pushed_out(made)
    object.__setattr__(made.tiers._mover, "carrier", Lazy())
    with pytest.raises(AssertionError):
        ask(made, "again", FIRST)


def test_a_damaged_state_is_a_miss_and_is_forgotten() -> None:
    made = lab()
    pushed_out(made)
    with faults.armed("tier.corrupt=count*1"):
        cached, _ = ask(made, "again", FIRST)
    assert cached == 0
    assert made.tiers.counts.corrupt == 1
    assert made.tiers.counts.hit_states == 0
    made.baseline()


def test_a_load_that_fails_is_computed() -> None:
    made = lab()
    pushed_out(made)
    with faults.armed("tier.load=fail"):
        cached, _ = ask(made, "again", FIRST)
    assert cached == 0
    assert made.tiers.counts.failed == 1
    made.baseline()


def test_a_store_that_fails_leaves_nothing_on_the_host() -> None:
    made = lab()
    with faults.armed("tier.store=fail"):
        pushed_out(made)
    assert len(made.tiers.states) == 0
    assert ask(made, "again", FIRST)[0] == 0
    made.baseline()


def test_a_damaged_page_below_a_state_takes_the_state_along() -> None:
    made = lab()
    pushed_out(made)
    keys = page_keys(ROOT, FIRST)
    entry = made.tiers.host.match(keys, 0)[2]
    entry.sums = tuple(s ^ 1 for s in entry.sums)

    cached, _ = ask(made, "again", FIRST)

    assert cached == 0
    assert made.tiers.counts.corrupt == 1
    made.baseline()


def test_nothing_is_found_before_its_copy_is_done_and_its_source_stays() -> None:
    lane = Manual()
    made = lab(pages=64, lane=lane)
    for number in range(4):
        key = made.submit(request(f"r{number}", prompt(33, seed=number), max_tokens=4))
        made.run()
        assert made.ends(key)
    assert lane.waiting, "half of the slots are taken: a copy is under way"
    held = [slot for slot in range(1, made.engine.slots.total + 1) if made.engine.slots.refs(slot)]
    assert len(held) == 1
    assert len(made.tiers.states) == 0
    taken = made.engine.slots.allocate(made.engine.slots.total - 1)
    assert taken is not None
    assert held[0] not in taken
    made.engine.slots.release(taken)

    lane.run_all()
    made.tiers.poll()

    assert len(made.tiers.states) == 1
    made.check()


def test_a_state_whose_pages_went_while_it_was_copied_is_not_published() -> None:
    lane = Manual()
    made = lab(pages=64, lane=lane)
    for number in range(4):
        made.submit(request(f"r{number}", prompt(33, seed=number), max_tokens=4))
        made.run()
    made.engine.cache.clear()
    lane.run_all()
    made.tiers.poll()
    assert len(made.tiers.states) == 0
    made.baseline()


@pytest.mark.parametrize("done", [False, True])
def test_a_cancelled_load_gives_back_both_slots(done: bool) -> None:
    lane = Manual()
    made = lab(lane=lane)
    pushed_out(made)
    key = made.submit(request("again", FIRST, max_tokens=4))
    made.engine.turn()
    assert lane.waiting
    if done:
        lane.run_all()
        made.tiers.poll()
    made.engine.cancel(key)
    made.turns(2)
    lane.run_all()
    made.baseline()


def test_a_fetch_that_takes_longer_than_running_the_tokens_is_not_made() -> None:
    made = lab()
    pushed_out(made)
    made.tiers.costs.copied("host", "up", 1 << 20, seconds=100.0)
    made.tiers.costs.prefill.saw(1000, seconds=0.001)
    assert ask(made, "again", FIRST)[0] == 0
    assert made.tiers.counts.declined > 0


def test_the_lower_state_is_taken_when_only_that_one_pays() -> None:
    """The state at 32 is on the device; 16 tokens more would have to come from the host: that is not worth it."""
    made = lab(pages=64)
    ask(made, "short", FIRST[:50])
    ask(made, "long", FIRST[:66])
    made.settle()
    keys = page_keys(ROOT, FIRST)
    assert made.engine.states is not None
    deep = made.engine.states.match(keys, FIRST).state
    assert deep is not None
    made.tiers.costs.copied("host", "up", 1 << 20, seconds=1.0)
    made.tiers.costs.prefill.saw(1 << 20, seconds=1.0)
    entries, state = made.tiers.hits.state(keys, FIRST, len(made.engine.cache.match(keys)), deep.length)
    assert state is None
    assert entries == []


def test_one_host_slot_serves_many_prompts_in_turn() -> None:
    made = lab(changes={"host_state_slots": 1})
    for turn in range(2):
        for number in range(5):
            ask(made, f"{turn}-{number}", prompt(100, seed=number))
            made.settle()
            made.check()
    assert len(made.tiers.states) == 1
    made.baseline()


@pytest.mark.parametrize(("order", "left"), [("lru", ["new", "shallow"]), ("flops", ["deep", "new"])])
def test_what_goes_first_is_the_longest_unused_or_what_saves_least(order: Order, left: list[str]) -> None:
    """The deep state is the oldest of three."""
    cache = PrefixCache(PagePool(8))
    states = HostStates(SlotPool(4), TierIndex(4), cache, order)
    for name, saving in (("deep", 9.0), ("shallow", 1.0), ("new", 1.0)):
        states._used += 1
        (slot,) = states.slots.allocate(1) or []
        states.add(TierState(name.encode(), 16, (), slot, 0, (1,), (), saving))
        states.slots.release([slot])

    states.slots.release(states.slots.allocate(1) or [])

    assert sorted(key.decode() for key in states._by_key) == left


def test_a_state_is_kept_at_its_second_sighting_when_that_is_asked_for() -> None:
    made = lab(pages=64, changes={"host_store_after": 2, "state_ends": False})
    for number in range(5):
        ask(made, f"once{number}", prompt(40, seed=number))
    made.settle()
    assert len(made.tiers.states) == 0

    ask(made, "twice", prompt(40, seed=4))
    made.settle()

    assert len(made.tiers.states) == 1


def test_states_with_generated_tokens_stay_up_when_only_prompts_are_kept() -> None:
    made = lab(pages=64, changes={"host_store": "prompt"})
    for number in range(4):
        ask(made, f"r{number}", prompt(40, seed=number))
    for _ in range(9):
        made.settle()
    lengths = [s.length for found in made.tiers.states._by_key.values() for s in found]
    assert lengths
    assert set(lengths) == {32}


def test_states_beyond_a_requests_cap_are_not_kept() -> None:
    made = lab(pages=64, changes={"host_tokens_per_request": 32})
    for number in range(4):
        ask(made, f"r{number}", prompt(60, seed=number))
    made.settle()
    assert len(made.tiers.states) == 0


def test_events_follow_a_state_from_the_device_to_the_host_and_away() -> None:
    made = lab()
    ask(made, "first", FIRST)
    made.settle()
    start = made.engine.cache.sequence
    ask(made, "other", OTHER)

    changes = made.engine.cache.changes_after(start) or []
    assert ("host", 112) in {(c.tier, c.state_length) for c in changes if c.stored}
    lower = {tier: {length for _, length in found} for tier, found in made.engine.cache.snapshot().lower_states}
    assert 112 in lower["host"]

    start = made.engine.cache.sequence
    for state in list(made.tiers.states.match(page_keys(ROOT, FIRST), FIRST, 0)):
        made.tiers.states.drop(state)
    changes = made.engine.cache.changes_after(start) or []
    assert [(c.state_length, c.stored) for c in changes] == [(112, False)]


def test_another_tenants_equal_prompt_does_not_resume_there() -> None:
    made = lab()
    pushed_out(made)
    key = made.submit(request("theirs", FIRST, root=root(b"other", "oracle", "1"), max_tokens=4))
    made.run()
    made.settle()
    assert made.ends(key)
    assert made.tiers.counts.hit_states == 0


def test_reports_count_states() -> None:
    made = lab()
    pushed_out(made)
    ask(made, "again", FIRST)
    report = made.tiers.reports()[0]
    assert report.hit_states == 1
    assert report.states_published == len(made.tiers.states) > 0
    assert report.states_total == made.tiers.host_slots.total


def test_a_router_that_takes_a_snapshot_hears_of_states_on_the_host() -> None:
    made = lab()
    pushed_out(made)
    admin = WorkerAdmin(None, None, 1)  # type: ignore[arg-type]
    events = [event for batch in admin._snapshot(made.engine.cache.snapshot()) for event in batch.events]
    ready = {
        (event.tier, event.state_length, event.page_keys[0])
        for event in events
        if event.kind == worker_pb2.CacheEvent.KIND_CHECKPOINT_READY
    }
    assert ("host", 112, page_keys(ROOT, FIRST)[6]) in ready
    assert {tier for tier, _, _ in ready} == {"host", "device"}
