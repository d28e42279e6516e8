from __future__ import annotations

from dataclasses import replace
from typing import Any

from router.policy.cost import CostConfig, Predicted
from router.policy.index import Hit
from router.policy.keys import PromptKeys
from router.policy.rent import Rents
from router.policy.speeds import Speeds
from router.policy.view import Nobody, Placement, RequestView, Wait, Work, WorkerView
from tests.unit.policy.states import both, decode, hit, prefill, request


class Known(Speeds):
    """Round figures: 10 ms and 0.1 ms a token (a shared step rides along), 10 ms a step, 1 GB/s."""

    def prefill_s(self, worker: str, uncached: int, cached: int, step_s: float = 0.0) -> float:
        return 0.01 + 1e-4 * uncached

    def step_s(self, worker: str, batch: float, context: float) -> float:
        return 0.01

    def transfer_s(self, source: str, target: str, size: float, flows: int = 0) -> float:
        return size * (1 + flows) / 1e9

    def load_s(self, size: float, tier: str = "host") -> float:
        return size / (1e8 if tier == "host" else 1e7)


def choose(question: RequestView, *workers: WorkerView, now: float = 0.0, **config: Any) -> Placement:
    decision = Predicted(Known(), CostConfig(**config)).choose(question, workers, now)
    assert isinstance(decision, Placement)
    return decision


def queued(view: WorkerView, seconds: float) -> WorkerView:
    view.work[(f"q-{view.worker_id}", 1)] = Work(seconds, int(seconds * 1e4), (0.0, 1))
    view.prefill_tokens += int(seconds * 1e4)
    return view


def busy_decode(bit: int) -> WorkerView:
    """So many decode there that nobody is prefilled beside them without need."""
    return decode(bit, 200, 200_000)


def test_the_first_token_is_predicted_as_queue_and_load_and_prefill() -> None:
    warm = queued(prefill(1, bytes_per_token=1e3), 2.0)
    found = choose(request(10_000, {1: Hit(6000, 4000, 6000, 6000)}), warm, busy_decode(2), deflect=False)
    forecast = found.forecast
    assert forecast.queue_s == 2.0
    assert abs(forecast.load_s - 2000 * 1e3 / 1e8) < 1e-9, "what is not on device is loaded"
    assert abs(forecast.prefill_s - 0.41) < 1e-9
    assert forecast.cached_tokens == 6000
    assert forecast.ttft_s == forecast.queue_s + forecast.load_s + forecast.prefill_s


def test_a_warm_worker_is_worth_waiting_for_as_long_as_it_saves() -> None:
    question = request(10_000, {1: hit(9000)})
    assert choose(question, queued(prefill(1), 0.8), prefill(2), busy_decode(3)).prefill == "p1"
    assert choose(question, queued(prefill(1), 2.0), prefill(2), busy_decode(3)).prefill == "p2"


def test_saved_work_counts_beyond_the_request_itself() -> None:
    """Cold and free is 10 ms sooner here; the 0.9 s of work it would take are somebody else's delay."""
    question = request(10_000, {1: hit(9000)})
    workers = queued(prefill(1), 0.91), prefill(2), busy_decode(3)
    assert choose(question, *workers, work_weight=0.0, deflect=False, tie=0.0).prefill == "p2"
    assert choose(question, *workers, work_weight=0.6, busy_s=0.1, deflect=False).prefill == "p1"


def test_a_state_that_is_not_there_makes_matched_pages_worthless() -> None:
    question = request(10_000, {1: Hit(9000, 9000, 9000, resume=0), 2: Hit(4096, 4096, 4096, resume=4096)})
    found = choose(question, prefill(1), prefill(2), busy_decode(3))
    assert (found.prefill, found.forecast.cached_tokens) == ("p2", 4096)


def test_what_is_on_its_way_to_a_worker_counts_as_a_hit() -> None:
    question = request(10_000, expected_hits={2: hit(8000)})
    assert choose(question, prefill(1), prefill(2), busy_decode(3)).prefill == "p2"


def test_at_least_one_token_is_always_computed() -> None:
    found = choose(request(1000, {1: hit(1000)}), prefill(1), busy_decode(2))
    assert found.forecast.cached_tokens == 999


def test_a_short_prompt_is_prefilled_where_it_decodes_when_that_disturbs_nobody() -> None:
    found = choose(request(200), queued(prefill(1), 0.5), decode(2))
    assert found.local
    assert found.decode == "d2"


def test_a_prompt_cached_on_a_decode_worker_stays_there() -> None:
    found = choose(request(20_000, {2: hit(19_800)}), prefill(1), decode(2, 3, 60_000), decode(3))
    assert found.local
    assert found.decode == "d2"


def test_long_prefill_queues_deflect_to_a_decode_worker_while_its_step_time_allows() -> None:
    question = request(4000, ttft_goal_s=2.5, tpot_goal_s=0.05)
    assert choose(question, queued(prefill(1), 3.0), decode(2, 4, 40_000)).local
    saturated = decode(2, 4, 40_000, mixed_s=4.5)
    found = choose(question, queued(prefill(1), 1.0), saturated)
    assert not found.local, "the decode worker prefills nine tenths of its time already"


def test_deflection_can_be_switched_off() -> None:
    assert not choose(request(200), queued(prefill(1), 9.0), decode(2), deflect=False).local
    assert choose(request(200), both(1), deflect=False).local, "a worker of both roles still may"


def test_a_missed_objective_outweighs_the_work_it_saves() -> None:
    """Warm but queued: 1.71 s and little work; cold and free: 1.11 s and a second of work at five times its price."""
    workers = queued(prefill(1), 1.6), queued(prefill(2), 0.1), busy_decode(3)
    config = {"work_weight": 5.0, "deflect": False}
    assert choose(request(10_000, {1: hit(9000)}), *workers, **config).prefill == "p1"
    assert choose(request(10_000, {1: hit(9000)}, ttft_goal_s=1.6), *workers, **config).prefill == "p2"


def test_among_hopeless_ways_the_least_late_is_taken() -> None:
    question = request(10_000, ttft_goal_s=0.5)
    assert (
        choose(question, queued(prefill(1), 9.0), queued(prefill(2), 7.0), busy_decode(3), deflect=False).prefill
        == "p2"
    )


def test_a_decode_worker_without_room_costs_the_wait_for_it() -> None:
    full = decode(2, 10, 99_000, kv_tokens=100_000)
    roomy = decode(3, 10, 99_000, kv_tokens=400_000)
    found = choose(request(5000), prefill(1), full, roomy, tie=0.0, deflect=False)
    assert found.decode == "d3"
    assert found.forecast.admit_s == 0.0
    assert choose(request(5000), prefill(1), full).forecast.admit_s > 0.0


def test_the_wait_for_room_is_a_wait_for_the_first_token() -> None:
    """Nothing is dispatched before both sides have room: a worker that is full for a second is no bargain for the
    tenth of a second that a transfer to it saves."""
    full = decode(2, 10, 99_900, kv_tokens=100_000)
    question = request(5000, {2: hit(4800)})
    source, roomy = prefill(1, bytes_per_token=2e5), decode(3, 10, 99_000, kv_tokens=400_000)
    assert choose(question, source, full, roomy, deflect=False).decode == "d3"


def test_prefill_beside_decoding_is_dearer_the_less_room_the_decode_workers_have() -> None:
    """Whoever stands still meanwhile holds his room for longer."""

    def local(held: int, **others: int) -> bool:
        here = decode(2, 10, held, kv_tokens=100_000, max_batch=100)
        busy = queued(prefill(1), 0.3)
        return choose(request(2000), busy, here, *(decode(3, 10, n, kv_tokens=100_000) for n in others.values())).local

    assert local(40_000), "there is room: it costs nobody any"
    assert not local(85_000)
    assert local(85_000, roomy=1_000), "somebody else has room for those who come"
    crowd = decode(2, 90, 9_000, kv_tokens=100_000, max_batch=100)
    assert not choose(request(2000), queued(prefill(1), 0.3), crowd).local, "places are room, too"
    few = replace(crowd, max_batch=0)
    assert choose(request(2000), queued(prefill(1), 0.3), few, disturb_weight=0.0).local


def test_pages_already_on_the_decode_worker_need_not_fly() -> None:
    source = prefill(1, bytes_per_token=1e5)
    cold, warm = busy_decode(2), busy_decode(3)
    found = choose(request(30_000, {3: hit(29_000)}), source, cold, warm, tie=0.0, deflect=False)
    assert found.decode == "d3"


def test_the_transfer_that_flies_during_the_prefill_costs_nothing_but_its_last_chunk() -> None:
    source = prefill(1, bytes_per_token=1e4)
    found = choose(request(40_960), source, busy_decode(2), chunk_tokens=4096, deflect=False)
    assert abs(found.forecast.transfer_s - 4096 * 1e4 / 1e9) < 1e-6


def test_near_ties_go_to_the_worker_used_less() -> None:
    workers = prefill(1, served=5), prefill(2, served=1), busy_decode(3)
    assert choose(request(1000), *workers).prefill == "p2"


def test_with_a_hold_a_request_waits_for_a_busy_fleet_instead_of_queueing_at_a_worker() -> None:
    policy = Predicted(Known(), CostConfig(hold_s=1.0, deflect=False))
    workers = [queued(prefill(1), 3.0), queued(prefill(2), 2.5), decode(3)]
    assert policy.choose(request(100), workers, 0.0) == Wait(1.5, "workers_busy")
    assert isinstance(policy.choose(request(100), workers, 1.9), Placement), "the one that runs has aged"


def test_only_pairs_of_one_group_are_formed() -> None:
    fast, slow = prefill(1, group="a"), queued(prefill(2, group="b"), 5.0)
    found = choose(request(1000), fast, slow, decode(3, 200, 1000, group="b"), deflect=False)
    assert (found.prefill, found.decode) == ("p2", "d3")
    alone = Predicted(Known()).choose(request(10), [prefill(1, group="a"), decode(2, group="b")], 0.0)
    assert alone == Nobody("no_compatible_decode_worker")


def test_the_same_state_gives_the_same_decision_and_is_left_as_it_was() -> None:
    workers = [queued(prefill(1), 1.0), prefill(2), decode(3, 2, 500), decode(4)]
    before = repr([(w.work, w.prefill_tokens, w.decoding, w.served) for w in workers])
    policy = Predicted(Known())
    question = request(3000, {1: hit(1000)}, ttft_goal_s=2.0, tpot_goal_s=0.05)
    assert policy.choose(question, workers, 0.0) == policy.choose(question, workers, 0.0)
    assert repr([(w.work, w.prefill_tokens, w.decoding, w.served) for w in workers]) == before


# --- rent or buy ----------------------------------------------------------------------------------------------------


def crowd(number: int, **fields: Any) -> RequestView:
    """One of many who want the first 8960 tokens that p1 holds. Each has a question of its own behind them."""
    keys = PromptKeys(b"r" * 32, [*range(8960), *range(100_000 * number, 100_000 * number + 1040)])
    return replace(request(10_000, {1: hit(8960)}, keys=keys, **fields), request_id=f"r{number}")


def test_waiting_for_a_hot_prefix_pays_for_its_next_copy() -> None:
    """Warm: 0.5 s of queue; cold: 0.9 s of work more, on workers half of which are busy. The price is 0.396 + 0.448."""
    policy = Predicted(Known(), CostConfig(deflect=False))
    workers = [queued(prefill(1), 0.5), prefill(2), busy_decode(3)]
    chosen = [policy.choose(crowd(number), workers, 0.0) for number in range(6)]
    assert [decision.prefill for decision in chosen if isinstance(decision, Placement)] == ["p1", "p2"] * 3


def test_a_request_that_asks_again_pays_once() -> None:
    policy = Predicted(Known(), CostConfig(deflect=False))
    workers = [queued(prefill(1), 0.5), prefill(2), busy_decode(3)]
    again = [policy.choose(crowd(1), workers, 0.0) for _ in range(5)]
    assert {decision.prefill for decision in again if isinstance(decision, Placement)} == {"p1"}


def test_without_an_idle_worker_no_copy_is_made() -> None:
    policy = Predicted(Known(), CostConfig(deflect=False))
    workers = [queued(prefill(1), 0.5), queued(prefill(2), 0.2), busy_decode(3)]
    chosen = [policy.choose(crowd(number), workers, 0.0) for number in range(20)]
    assert {decision.prefill for decision in chosen if isinstance(decision, Placement)} == {"p1"}


def test_a_copy_that_would_miss_the_objective_is_left_to_others() -> None:
    policy = Predicted(Known(), CostConfig(deflect=False))
    workers = [queued(prefill(1), 0.3), prefill(2), busy_decode(3)]
    chosen = [policy.choose(crowd(number, ttft_goal_s=0.9), workers, 0.0) for number in range(10)]
    assert {decision.prefill for decision in chosen if isinstance(decision, Placement)} == {"p1"}


def test_rent_of_prefixes_nobody_waits_for_any_more_is_forgotten() -> None:
    rents = Rents(limit=3)
    assert not any(rents.due(bytes([number]), f"r{number}", 1.0, 1.5) for number in range(5))
    assert len(rents) == 3
    assert not rents.due(b"\x00", "later", 1.0, 1.5), "the first one's rent is gone"
    assert rents.due(b"\x04", "later", 1.0, 1.5)


def test_while_every_prefill_worker_is_away_those_that_decode_do_both() -> None:
    policy, question = Predicted(Known(), CostConfig()), request(500)
    crowd = (busy_decode(1), decode(2))
    assert policy.choose(question, crowd, 0.0) == Nobody("no_prefill_worker")
    found = policy.alone(question, crowd, 0.0)
    assert isinstance(found, Placement)
    assert (found.prefill, found.decode) == ("d2", "d2")


def test_alone_they_may_queue_for_a_prefix_like_any_others() -> None:
    keys = PromptKeys(b"r" * 32, tuple(range(1200)))
    holder, idle = queued(decode(1), 0.01), decode(2)
    question = request(1200, {1: hit(1024)}, keys=keys, behind=3)
    found = Predicted(Known()).alone(question, [holder, idle], 0.0)
    assert isinstance(found, Placement)
    assert (found.prefill, found.forecast.cached_tokens) == ("d1", 1024)


def test_nobody_does_both_alone_where_that_is_not_allowed_or_a_prefill_worker_is_there() -> None:
    question = request(500)
    assert Predicted(Known(), CostConfig(deflect=False)).alone(question, [decode(1)], 0.0) == Nobody(
        "no_prefill_worker"
    )
    assert Predicted(Known()).alone(question, [prefill(1), decode(2)], 0.0) == Nobody("no_prefill_worker")
    assert Predicted(Known()).alone(question, [], 0.0) == Nobody("no_prefill_worker")


def test_a_state_below_the_device_costs_its_bytes_and_pages_on_the_disk_the_disks_seconds() -> None:
    warm = prefill(1, bytes_per_token=1e3, state_bytes=5e7)

    def load_s(one: Hit) -> float:
        return choose(request(10_000, {1: one}), warm, busy_decode(2), deflect=False).forecast.load_s

    assert load_s(Hit(6000, 6000, 6000, 6000)) == 0.0
    assert abs(load_s(Hit(6000, 6000, 6000, 6000, "host")) - 0.5) < 1e-9
    assert abs(load_s(Hit(6000, 4000, 5000, 6000, "disk")) - (1e6 / 1e8 + (1e6 + 5e7) / 1e7)) < 1e-9
    assert abs(load_s(Hit(6000, 4000, 6000, 3000, "host")) - 0.5) < 1e-9, "pages past the state are not wanted"
