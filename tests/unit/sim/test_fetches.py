"""Simulated workers that read cached prefixes from each other: nothing is lost, held or published without its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.sim.experiment import FETCHES, POLICIES
from bench.sim.profile import Profile
from bench.sim.trace import Entry, KeyBook
from bench.sim.world import Fleet, Outcome, World
from router.policy.speeds import Speeds
from tests.unit.sim.test_world import SHIPPED, hot_prefix, profile


def run(entries: list[Entry], terms: Profile, fetches: int = 4, **shape: Any) -> tuple[list[Outcome], World]:
    speeds, book = Speeds(), KeyBook(64)
    fleet = Fleet(**{"prefill": 4, "decode": 4, "seed": 2, "unit_tokens": 64, **shape}, fetches=fetches)
    world = World(terms, fleet, POLICIES["predicted_fetch"](speeds, 1), speeds, reserving=True)
    return world.run(entries, [book.of(entry) for entry in entries], 1.0), world


def slow(name: str = "sim-h100-8b", **changes: Any) -> Profile:
    """Prompts take ten times as long: what one worker has learned is worth more to the others."""
    return profile(name, prefill={"per_token_s": 4e-4}, **changes)


def crowd() -> list[Entry]:
    """Everybody asks about a document that somebody has asked about before."""
    entries = hot_prefix(gap=0.1)
    return [entries[0], *(replace(entry, at=entry.at + 12.0) for entry in entries[1:])]


def computed(outcomes: list[Outcome]) -> int:
    return sum(outcome.entry.prompt_tokens - outcome.cached for outcome in outcomes)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_hot_prefix_is_fetched_instead_of_computed_again_and_all_is_given_back(name: str) -> None:
    alone, _ = run(crowd(), slow(name), fetches=0)
    outcomes, world = run(crowd(), slow(name))
    world.check()
    assert not any(outcome.failed for outcome in outcomes)
    assert world.fetches.counts.fetched > 0
    assert world.fetches.counts.moved_bytes > 0
    assert computed(outcomes) <= computed(alone)
    assert sum(outcome.ttft_s for outcome in outcomes) < 0.9 * sum(outcome.ttft_s for outcome in alone)
    assert all(view.fetching == view.serving == 0 for view in world._views)


def test_nobody_fetches_where_nobody_may() -> None:
    _, world = run(crowd(), slow(), fetches=0)
    assert world.fetches.counts.fetched == world.fetches.counts.absent == world.fetches.counts.late == 0


def test_a_network_that_became_slow_costs_budgets_and_no_request() -> None:
    outcomes, world = run(crowd(), slow(transfer={"bandwidth_Bps": 2e7}))
    world.check()
    assert not any(outcome.failed for outcome in outcomes)
    assert world.fetches.counts.late > 0


def test_full_pools_give_no_room_and_keep_what_they_promised() -> None:
    tight = {"kv_tokens": 40_000, "host_kv_tokens": 20_000, "state_slots": 3}
    outcomes, world = run(crowd(), slow("sim-hybrid-48b", pool=tight))
    world.check()
    assert not any(outcome.failed for outcome in outcomes)


def test_equal_seeds_give_equal_runs() -> None:
    one, two = (run(crowd(), slow())[0] for _ in range(2))
    assert [outcome.ttft_s for outcome in one] == [outcome.ttft_s for outcome in two]
    assert set(FETCHES) <= set(POLICIES)
