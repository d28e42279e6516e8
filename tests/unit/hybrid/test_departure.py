"""A request of a model with state moves in mid-answer: records are folded, and what goes on says the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.engine_core.lab import request
from tests.unit.engine_core.test_departure import go_on, left, turn_until_said
from tests.unit.hybrid.models import slot_bytes, tokens_of
from tests.unit.hybrid.test_fuzz import Chat
from tests.unit.hybrid.test_replay import floats, gap

SEEDED: dict[str, object] = {"temperature": 0.9, "seed": 4, "presence_penalty": 0.4}


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("steps", "count"),
    [((1, 16, 17), 20), pytest.param(tuple(range(1, 41)), 45, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_with_records_it_moves_after_any_token_and_says_the_same(
    steps: tuple[int, ...], count: int, sampling: dict[str, object]
) -> None:
    source, target = Chat("kimi_linear", replay_ssm=True).lab, Chat("kimi_linear", replay_ssm=True).lab
    alone = source.submit(request("alone", tokens_of(50), max_tokens=count, **sampling))  # type: ignore[arg-type]
    source.run()
    for step in steps:
        source.engine.cache.clear()
        target.engine.cache.clear()
        made = request(f"r{step}", tokens_of(50), max_tokens=count, **sampling)  # type: ignore[arg-type]
        key = source.submit(made)
        turn_until_said(source, key, step)

        source.engine.handover(key, 0)
        source.run()
        moved = go_on(source, target, made)
        target.run()

        assert len(source.tokens(key)) == step
        assert source.tokens(key) + target.tokens(moved) == source.tokens(alone), f"moved after {step}"
    for lab in (source, target):
        lab.engine.check_baseline()


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "granitemoehybrid", "kimi_k3"])
def test_the_state_that_leaves_is_whole_and_that_of_plain_decoding(name: str) -> None:
    replay, plain = Chat(name, replay_ssm=True).lab, Chat(name).lab
    states = []
    for lab in (replay, plain):
        key = lab.submit(request("a", tokens_of(50), max_tokens=40))
        turn_until_said(lab, key, 9)
        lab.engine.handover(key, 0)
        lab.run()
        event = left(lab, key)
        assert event.token_count == 58
        states.append(floats(slot_bytes(lab.engine._runner, event.slots[0])))  # type: ignore[arg-type]
        event.hold.release()
        lab.engine.check_baseline()
    mine, right = states
    assert mine.keys() == right.keys()
    for part, values in right.items():
        assert np.abs(values).max() > 0
        assert gap(mine[part], values) < 1e-5, part
