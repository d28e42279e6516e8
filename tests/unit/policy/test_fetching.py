"""Bringing a prefix to a worker that is short of it, in the same seconds as everything else."""

from __future__ import annotations

from typing import Any

import pytest

from router.policy.cost import CostConfig, Predicted
from router.policy.fetching import holders, offered, on_disk
from router.policy.index import Hit
from router.policy.ledger import Demand, Ledger
from router.policy.speeds import Speeds
from router.policy.view import Placement, RequestView, WorkerView
from tests.unit.policy.states import decode, hit, prefill, request
from tests.unit.policy.test_cost import Known, queued


class Fetching(Known):
    """As Known, and 20 ms a fetch beside its bytes."""

    def fetch_s(self, source: str, target: str, size: float, flows: int = 0) -> float:
        return 0.02 + self.transfer_s(source, target, size, flows)


def choose(question: RequestView, *workers: WorkerView, **config: Any) -> Placement:
    decision = Predicted(Fetching(), CostConfig(**config)).choose(question, workers, 0.0)
    assert isinstance(decision, Placement)
    return decision


def fetching(view: WorkerView, **account: Any) -> WorkerView:
    view.fetches, view.bytes_per_token = 4, 1e3
    for name, value in account.items():
        setattr(view, name, value)
    return view


def busy_decode(bit: int) -> WorkerView:
    return fetching(decode(bit, 200, 200_000))


def test_an_idle_worker_fetches_what_a_busy_one_has() -> None:
    warm, cold = fetching(queued(prefill(1), 2.0)), fetching(prefill(2))
    found = choose(request(10_000, {1: hit(9000)}), warm, cold, busy_decode(3), deflect=False)
    assert found.prefill == "p2"
    assert found.fetch is not None
    assert (found.fetch.source, found.fetch.tokens) == ("p1", 9000)
    assert found.fetch.seconds == pytest.approx(0.02 + 9000 * 1e3 / 1e9)
    assert found.fetch.budget_s == pytest.approx(0.9), "as long as computing it would have taken"
    assert found.forecast.cached_tokens == 9000
    assert found.forecast.ttft_s == pytest.approx(found.fetch.seconds + 0.01 + 0.1)


def test_what_is_only_on_its_way_does_not_shorten_the_budget() -> None:
    """Another prompt brings 8000 tokens there soon, as is believed; should that come to nothing, 9000 are computed."""
    question = request(10_000, {1: hit(9000)}, expected_hits={2: hit(8000)})
    found = choose(question, fetching(queued(prefill(1), 2.0)), fetching(prefill(2)), busy_decode(3), deflect=False)
    assert found.fetch is not None
    assert found.fetch.budget_s == pytest.approx(0.9)


def test_the_end_of_a_turn_comes_back_from_the_decode_worker() -> None:
    """Both prefill workers are cold; what the conversation has so far lies on D, which is busy with others."""
    found = choose(
        request(10_000, {3: hit(9984)}), fetching(prefill(1)), fetching(prefill(2)), busy_decode(3), deflect=False
    )
    assert (found.prefill, found.decode) == ("p1", "d3")
    assert found.fetch is not None
    assert found.fetch.source == "d3"


def test_a_turn_runs_where_it_ended_when_that_disturbs_nobody() -> None:
    found = choose(request(10_000, {3: hit(9984)}), fetching(prefill(1)), fetching(decode(3)))
    assert found.local
    assert found.fetch is None


def test_what_is_computed_sooner_is_not_fetched() -> None:
    """160 tokens take 16 ms; a fetch takes 20 and its bytes."""
    found = choose(request(160, {1: hit(144)}), fetching(queued(prefill(1), 2.0)), fetching(prefill(2)), busy_decode(3))
    assert (found.prefill, found.fetch) == ("p2", None)


def test_a_fetch_costs_nothing_while_the_prompt_waits_anyhow() -> None:
    slow = 9000 * 1e3 / 1e9 + 0.02
    waits = fetching(queued(prefill(2), 1.0))
    found = choose(request(10_000, {3: hit(9000)}), waits, busy_decode(3), deflect=False)
    assert found.fetch is not None
    assert found.fetch.seconds == pytest.approx(slow)
    assert found.forecast.ttft_s == pytest.approx(1.0 + 0.01 + 0.1), "the longer of queue and fetch"


def test_only_what_is_missing_is_counted() -> None:
    """The target has 4000 tokens itself: 5000 are moved, and all but 1000 are spared."""
    target = fetching(prefill(2))
    found = choose(
        request(10_000, {1: hit(9000), 2: hit(4000)}), fetching(queued(prefill(1), 2.0)), target, busy_decode(3)
    )
    assert found.fetch is not None
    assert found.fetch.seconds == pytest.approx(0.02 + 5000 * 1e3 / 1e9)


@pytest.mark.parametrize("account", [{"serving": 4}, {"fetches": 0}, {"group": "other"}])
def test_a_source_that_serves_enough_or_cannot_is_left_alone(account: dict[str, Any]) -> None:
    warm = fetching(queued(prefill(1), 2.0), **account)
    found = choose(request(10_000, {1: hit(9000)}), warm, fetching(prefill(2)), busy_decode(3), deflect=False)
    assert found.fetch is None


@pytest.mark.parametrize("account", [{"fetching": 4}, {"fetches": 0}])
def test_a_target_that_reads_enough_or_cannot_computes(account: dict[str, Any]) -> None:
    cold = fetching(prefill(2), **account)
    found = choose(
        request(10_000, {1: hit(9000)}), fetching(queued(prefill(1), 2.0)), cold, busy_decode(3), deflect=False
    )
    assert found.fetch is None


def test_what_can_be_had_is_what_is_in_some_tier() -> None:
    dense, hybrid = prefill(1), prefill(2, state_bytes=1e6)
    assert offered(Hit(9000, 4000, 6000, 9000), dense) == 9000
    assert offered(Hit(9000, 4000, 6000, 9000, "disk"), hybrid) == 9000
    assert offered(Hit(6000, 4000, 6000, 6007), hybrid) == 6007, "the end of a turn off the page grid"
    assert offered(Hit(6000, 4000, 6000, 9000), hybrid) == 0, "a state whose pages are not there"
    assert offered(Hit(9000, 9000, 9000, 0), hybrid) == 0, "no state"


@pytest.mark.parametrize(
    ("found", "size"),
    [
        (Hit(9000, 9000, 9000, 9000), 0),
        (Hit(9000, 4000, 6000, 9000), 3000e3),
        (Hit(9000, 4000, 9000, 9000, "disk"), 1e6),
        (Hit(9000, 0, 0, 9000, "disk"), 9000e3 + 1e6),
        (Hit(9000, 9000, 9000, 9007), 0),
    ],
)
def test_what_a_source_reads_from_its_disk(found: Hit, size: float) -> None:
    assert on_disk(found, fetching(prefill(1, state_bytes=1e6)), found.resume) == size


def test_a_prefix_on_disk_costs_what_the_disk_takes_as_well() -> None:
    """Ten megabytes a second: of two holders the one that has it above the disk is the better."""
    cold = fetching(prefill(4))
    low, high = fetching(queued(prefill(1), 2.0)), fetching(queued(prefill(2), 2.0))
    only_low = choose(request(10_000, {1: hit(9000, 1000, 8000)}), low, cold, busy_decode(3), deflect=False)
    assert only_low.fetch is not None
    assert only_low.fetch.lifted == 1000e3
    assert only_low.fetch.seconds == pytest.approx(0.02 + 9000e3 / 1e9 + 0.1)
    hits = {1: hit(9000, 1000, 8000), 2: hit(9000)}
    both = choose(request(10_000, hits), low, high, cold, busy_decode(3), deflect=False)
    assert both.fetch is not None
    assert (both.fetch.source, both.fetch.lifted) == ("p2", 0.0)


def test_a_slow_disk_is_computed_past() -> None:
    low, cold = fetching(queued(prefill(1), 2.0)), fetching(prefill(2))
    found = choose(request(10_000, {1: hit(9000, 0, 0)}), low, cold, busy_decode(3), deflect=False)
    assert (found.prefill, found.fetch) == ("p2", None)


def test_what_a_disk_took_is_not_learned_as_the_ways() -> None:
    speeds = Speeds()
    disk = speeds.load_s(2e7, "disk")
    for size in (1e7, 2e7, 4e7) * 40:
        speeds.learn_fetch("a", "b", size, 0.002 + size / 1e9, 0.03 + 2 * size / 1e9)
    before = speeds.fetch_s("a", "b", 2e7)
    for size in (1e7, 2e7, 4e7) * 40:
        speeds.learn_fetch("a", "b", size, 0.002 + size / 1e9, 0.03 + 2 * size / 1e9 + size / 2e8, lifted=size)
    assert speeds.fetch_s("a", "b", 2e7) == pytest.approx(before, rel=0.05)
    assert speeds.load_s(2e7, "disk") == disk, "workers report that"


def test_who_has_most_comes_first_and_few_are_looked_at() -> None:
    workers = [fetching(prefill(bit)) for bit in range(1, 7)]
    question = request(10_000, {bit: hit(1000 * bit) for bit in range(1, 7)})
    assert [tokens for tokens, _ in holders(question, workers)] == [6000, 5000, 4000]
    assert holders(request(10_000), workers) == []


def test_a_booked_fetch_counts_at_both_ends_until_the_prompt_is_done() -> None:
    ledger = Ledger()
    source, target = prefill(1), prefill(2)
    ledger.add(source)
    ledger.add(target)
    demand = Demand(1000, prefill_tokens=100, prefill_s=0.1, fetch_from="p1")
    assert ledger.reserve(("r", 1), {"p2": demand}, 0.0) is None
    assert (source.serving, target.fetching) == (1, 1)
    ledger.check()
    ledger.prefilled(("r", 1), "p2", 1.0)
    assert (source.serving, target.fetching) == (0, 0)
    ledger.release(("r", 1), "p2", 2.0)
    ledger.check()


def test_a_source_that_leaves_takes_its_account_along() -> None:
    ledger = Ledger()
    ledger.add(prefill(1))
    ledger.add(prefill(2))
    ledger.reserve(("r", 1), {"p2": Demand(1000, prefill_tokens=100, prefill_s=0.1, fetch_from="p1")}, 0.0)
    ledger.remove("p1")
    ledger.add(prefill(1))
    ledger.release(("r", 1), "p2", 2.0)
    ledger.check()


def test_a_path_on_which_fetches_bring_nothing_is_tried_less_and_less_and_comes_back() -> None:
    """20 ms and 9 beside 0.9 s: worth it until what it brings is worth less than 58 ms."""
    speeds = Fetching()
    policy = Predicted(speeds, CostConfig(deflect=False))

    def fetches() -> bool:
        warm, cold = fetching(queued(prefill(1), 2.0)), fetching(prefill(2))
        found = policy.choose(request(10_000, {1: hit(9000)}), [warm, cold, busy_decode(3)], 0.0)
        assert isinstance(found, Placement)
        return found.fetch is not None

    tries = 0
    while fetches():
        speeds.missed_fetch("p1", "p2")
        tries += 1
    assert 5 < tries < 20
    speeds.learn_fetch("p1", "p2", 9e6, 0.01, 0.03)
    assert fetches()


def test_fetches_are_learned_apart_from_hand_offs_on_the_same_path() -> None:
    speeds = Speeds()
    for size in (1e7, 2e7, 4e7, 8e7) * 30:
        speeds.learn_fetch("a", "b", size, moved_s=0.002 + size / 1e9, seconds=0.03 + 2 * size / 1e9)
    assert speeds.fetch_s("a", "b", 5e7) == pytest.approx(0.03 + 2 * 5e7 / 1e9, rel=0.1)
    assert speeds.transfer_s("a", "b", 5e7) == pytest.approx(0.002 + 5e7 / 1e9, rel=0.1)
