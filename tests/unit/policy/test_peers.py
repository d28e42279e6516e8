"""Golden vectors, worked out by hand from the published formulas and defaults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.policy.index import Hit
from router.policy.peers import Dynamo, DynamoConfig, Sgl, SglConfig, pressure
from router.policy.view import Placement, WorkerView
from tests.unit.policy.states import decode, hit, prefill, request


def pair(decision: object) -> tuple[str, str]:
    assert isinstance(decision, Placement)
    return decision.prefill, decision.decode


# --- Dynamo -------------------------------------------------------------------------------------------------------


def test_dynamo_counts_active_and_incoming_blocks_and_credits_device_blocks_whole() -> None:
    # (1600 active + 3200 incoming) / 16 = 300 blocks; 1600 tokens on device = 100 blocks of credit
    assert Dynamo().prefill_cost(request(3200, {1: hit(1600)}), prefill(1, 1600), 0) == 200.0


def test_dynamo_credits_host_at_three_quarters_and_disk_at_one_quarter() -> None:
    # 3200/16 = 200; 40 device + 0.75 * 40 host + 0.25 * 20 disk = 75
    tiers = {1: Hit(kv=1600, device=640, host=1280, resume=1600)}
    assert Dynamo().prefill_cost(request(3200, tiers), prefill(1), 0) == 125.0


def test_dynamo_never_lets_a_cost_fall_below_zero() -> None:
    assert Dynamo().prefill_cost(request(160, {1: hit(1600)}), prefill(1), 0) == 0.0


def test_dynamo_decay_takes_credit_from_a_worker_that_is_busier_than_the_idlest() -> None:
    # d = 1, request 100 blocks, worker 100 blocks busier: decay 1 / (1 + 100/100) = 0.5; 200 - 0.5 * 50
    policy = Dynamo(config=DynamoConfig(overlap_credit_decay=1.0))
    assert policy.prefill_cost(request(1600, {1: hit(800)}), prefill(1, 1600), 0) == 175.0


def test_dynamo_weighs_active_requests_only_when_told_to() -> None:
    policy = Dynamo(config=DynamoConfig(active_request_weight=7.0, prefill_load_scale=2.0))
    assert policy.prefill_cost(request(160), prefill(1, 160), 0) == 2 * 20 + 7
    assert policy.decode_cost(request(160), decode(1, 3, 320)) == 30 + 21


def test_dynamo_gives_the_decode_pool_no_credit_for_what_it_holds() -> None:
    busy, idle = decode(3, 1, 4000), decode(4, 1, 1000)
    assert pair(Dynamo().choose(request(1600, {3: hit(1600)}), [prefill(1), busy, idle], 0.0)) == ("p1", "d4")
    assert Dynamo().decode_cost(request(1600, {3: hit(1600)}), busy) == 350.0


def test_dynamo_prefers_a_warm_worker_until_its_queue_outweighs_the_overlap() -> None:
    question = request(3200, {1: hit(1600)})
    assert pair(Dynamo().choose(question, [prefill(1, 1500), prefill(2), decode(3)], 0.0))[0] == "p1"
    assert pair(Dynamo().choose(question, [prefill(1, 1700), prefill(2), decode(3)], 0.0))[0] == "p2"


def test_dynamo_breaks_ties_at_random() -> None:
    policy = Dynamo(seed=3)
    workers = [prefill(1), prefill(2), decode(3)]
    assert {pair(policy.choose(request(100), workers, 0.0))[0] for _ in range(50)} == {"p1", "p2"}


def test_dynamo_with_a_temperature_may_take_the_dearer_one() -> None:
    workers = [prefill(1, 1600), prefill(2), decode(3)]
    warm = Dynamo(seed=1, config=DynamoConfig(temperature=1.0))
    assert {pair(warm.choose(request(100), workers, 0.0))[0] for _ in range(200)} == {"p1", "p2"}
    cold = Dynamo(seed=1)
    assert {pair(cold.choose(request(100), workers, 0.0))[0] for _ in range(200)} == {"p2"}


# --- sgl-router ---------------------------------------------------------------------------------------------------


def owner(tokens: int, hits: dict[int, Hit], *workers: object, config: SglConfig | None = None) -> str | None:
    found = Sgl(config=config).owner(request(tokens, hits), list(workers))  # type: ignore[arg-type]
    return found.worker_id if found is not None else None


def test_sgl_calls_a_match_below_1024_tokens_a_miss() -> None:
    assert owner(4000, {1: hit(1023)}, prefill(1), prefill(2)) is None
    assert owner(4000, {1: hit(1024)}, prefill(1), prefill(2)) == "p1"


def test_sgl_takes_the_one_with_less_uncached_work_among_equals_in_pressure() -> None:
    assert owner(8000, {1: hit(4000), 2: hit(4500)}, prefill(1), prefill(2)) == "p2"


def test_sgl_within_the_margin_lets_a_clearly_less_pressed_worker_win() -> None:
    # work 4000 and 3500 differ by 500 <= 1024; pressures 3000 and 1900 differ by 1100 > 1024 and 3000 > 1.5 * 1900
    assert owner(8000, {1: hit(4000), 2: hit(4500)}, prefill(1, 1900), prefill(2, 3000)) == "p1"
    # 2900 is not more than 1.5 * 1950; the gap must break both bounds
    assert owner(8000, {1: hit(4000), 2: hit(4500)}, prefill(1, 1950), prefill(2, 2900)) == "p2"
    # 1800 > 1.5 * 800, but the gap of 1000 is not more than 1024
    assert owner(8000, {1: hit(4000), 2: hit(4500)}, prefill(1, 800), prefill(2, 1800)) == "p2"


def test_sgl_does_not_look_beyond_the_margin_however_pressed_the_owner_is() -> None:
    assert owner(8000, {1: hit(3000), 2: hit(4500)}, prefill(1), prefill(2, 90_000)) == "p2"


def test_sgl_looks_at_eight_owners_in_a_small_pool() -> None:
    # eight longest matches fill the list; the ninth, within the margin and idle, is not seen
    busy = [prefill(bit, 50_000) for bit in range(1, 9)]
    hits = {bit: hit(5000) for bit in range(1, 9)} | {9: hit(4990)}
    assert owner(8000, hits, *busy, prefill(9)) != "p9"
    assert owner(8000, hits, *busy, prefill(9), config=SglConfig(candidates_min=9)) == "p9"


def test_sgl_does_not_count_an_owner_that_cannot_hold_the_request() -> None:
    full = prefill(1, held_tokens=9000, kv_tokens=10_000)
    assert owner(4000, {1: hit(2000)}, full, prefill(2)) is None


def test_sgl_pressure_is_waiting_uncached_and_running_tokens() -> None:
    assert pressure(replace_account(prefill(1, 700), context_tokens=300)) == 1000


def test_sgl_on_a_miss_takes_the_better_of_two() -> None:
    workers = [prefill(1, 900), prefill(2, 10), decode(3, 5, 100), decode(4, 2, 100)]
    assert pair(Sgl().choose(request(400), workers, 0.0)) == ("p2", "d4")


@pytest.mark.parametrize("landing", [0, 2])
def test_sgl_looks_at_waiting_before_running_in_the_decode_pool(landing: int) -> None:
    workers = [prefill(1), decode(3, 1, 10, landing=landing), decode(4, 9, 90, landing=1)]
    assert pair(Sgl().choose(request(400), workers, 0.0))[1] == ("d3" if landing == 0 else "d4")


def replace_account(view: WorkerView, **account: int) -> WorkerView:
    for name, value in account.items():
        setattr(view, name, value)
    return view


def test_the_published_defaults_are_the_defaults() -> None:
    assert replace(DynamoConfig()) == DynamoConfig(16, 1.0, 0.0, 1.0, 0.75, 0.25, 0.0, 0.0)
    assert replace(SglConfig()) == SglConfig(1024, 8, 32, 0.05, 1024, 1024, 1.5)
