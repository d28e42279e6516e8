from __future__ import annotations

import pytest

from protos.v1 import common_pb2
from router.policy.cost import CostConfig, Predicted
from router.policy.trust import Trust, as_seen, sound
from router.policy.view import Placement
from tests.unit.policy.states import hit, prefill, request
from tests.unit.policy.test_cost import Known, busy_decode


def test_a_word_is_worth_what_it_was_of_late_and_can_be_worth_more_again() -> None:
    trust = Trust()
    assert trust.of("w") == 1.0
    for _ in range(15):
        trust.learn("w", 5000, 0)
    assert trust.of("w") < 0.05
    for _ in range(15):
        trust.learn("w", 5000, 6000)
    assert trust.of("w") > 0.95, "more than was said is not better than the truth"
    trust.forget("w")
    assert trust.of("w") == 1.0


def test_nothing_said_is_nothing_learned() -> None:
    trust = Trust()
    trust.learn("w", 0, 0)
    assert trust.of("w") == 1.0


def test_parts_of_a_time_that_is_less_than_was_seen_are_stretched() -> None:
    assert as_seen(0.3, 0.5, 0.55) == 0.3, "what lies between is nobody's fault"
    assert as_seen(0.3, 0.5, 5.0) == pytest.approx(3.0)
    assert as_seen(0.3, 0.5, 0.1) == 0.3
    assert as_seen(0.3, 0.5, 0.0) == 0.3, "not seen"
    assert as_seen(0.0, 0.0, 5.0) == 0.0, "nothing was said"


def test_a_prefix_that_prompts_do_not_find_attracts_nobody_for_long() -> None:
    speeds = Known()
    policy = Predicted(speeds, CostConfig(deflect=False))
    question, workers = request(10_000, {1: hit(9000)}), [prefill(1, served=9), prefill(2), busy_decode(3)]
    chosen = []
    for _ in range(20):
        decision = policy.choose(question, workers, 0.0)
        assert isinstance(decision, Placement)
        chosen.append(decision.prefill)
        speeds.trust.learn(decision.prefill, decision.forecast.said_tokens, 0)
    assert chosen[0] == "p1"
    assert "p2" in chosen[-5:], "p1 is as good as any other"


@pytest.mark.parametrize("said", [float("nan"), float("inf"), -float("inf"), -1.0, 1e300])
def test_seconds_that_no_clock_shows_are_none(said: float) -> None:
    times = common_pb2.StageTimes(prefill_s=said, transfer_s=said, decode_s=0.5, fetch_s=said, cached_tokens=3)
    sound(times)
    assert times == common_pb2.StageTimes(decode_s=0.5, cached_tokens=3)
