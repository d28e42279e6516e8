"""Decoding through records: what the engine says, caches, forks, swaps and hands over is what plain decoding gives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from engine.api import Mode
from engine.loop import EngineSpec
from engine.plan import Copy, StepPlan
from engine.runner import RunnerOptions, TorchRunner
from engine.runner_api import ModelSpec
from engine.weights import RandomWeights
from runtime.config import Config
from runtime.errors import InvalidRequest, Unsupported
from tests.unit.engine_core.lab import Lab, move, request
from tests.unit.hybrid.models import CONFIGS, VOCAB, Walk, config_of, runner_of, slot_bytes, tokens_of
from tests.unit.hybrid.test_fuzz import Chat, Said, agree
from tests.unit.tiers.lab import TierLab
from tests.unit.tiers.test_swap import swap

MODELS = [name for name in CONFIGS if "-" not in name]


def floats(slot: dict[str, bytes]) -> dict[str, npt.NDArray[np.float32]]:
    return {name: np.frombuffer(data, np.float32) for name, data in slot.items()}


def gap(mine: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> float:
    return float(np.abs(mine - right).max() / np.abs(right).max())


def walked(name: str, count: int, replay_len: int, slot: int = 1) -> Walk:
    """A prompt of 50 tokens and `count` decode steps on top."""
    runner = runner_of(name, replay_len=replay_len)
    walk = Walk(runner, tokens_of(50), slot)
    walk.decode(count, walk.run(50))
    return walk


# --- the runner ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_ring_of_one_is_plain_decoding_bit_for_bit(name: str) -> None:
    plain, one = walked(name, 20, 0), walked(name, 20, 1)
    assert one.tokens == plain.tokens
    assert all(np.array_equal(a, b) for a, b in zip(one.scores, plain.scores, strict=True))
    assert one.state == plain.state


@pytest.mark.parametrize(("ring", "slot"), [(2, 1), (7, 3), (16, 2), (32, 5)])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_the_copied_state_are_those_of_plain_decoding(name: str, ring: int, slot: int) -> None:
    """The copy at several lengths, with few records and many; it leaves its source as it was. A ring of 32 is too long
    for keys stored with their decay."""
    plain, replay = walked(name, 0, 0, slot), walked(name, 0, ring, slot)
    token = int(plain.scores[-1].argmax())
    replay.whole = 50
    for _ in range(37):
        for walk in (plain, replay):
            walk.tokens.append(token)
            walk.run(len(walk.tokens))
        reference = plain.scores[-1]
        assert np.abs(replay.scores[-1] - reference).max() <= 1e-4 * np.abs(reference).max()
        token = int(reference.argmax())
        before = replay.state
        replay.runner.run(StepPlan(1, (), (Copy(False, slot, 7, replay.computed, 50),)))
        assert replay.state == before
        copied, right = floats(slot_bytes(replay.runner, 7)), floats(plain.state)
        assert all(gap(copied[c], right[c]) <= 1e-5 for c in right)


def test_a_copy_onto_itself_makes_the_slot_whole_and_decoding_goes_on_from_it() -> None:
    plain, replay = walked("kimi_linear", 12, 0), walked("kimi_linear", 12, 16)
    assert gap(floats(replay.state)["recurrent"], floats(plain.state)["recurrent"]) > 1e-3, "records are held"
    replay.runner.run(StepPlan(1, (), (Copy(False, 1, 1, replay.computed, 50),)))
    assert gap(floats(replay.state)["recurrent"], floats(plain.state)["recurrent"]) <= 1e-5
    token = int(plain.scores[-1].argmax())
    assert replay.decode(9, token) == plain.decode(9, token)


def test_a_row_that_must_leave_a_whole_state_does() -> None:
    plain, replay = walked("qwen3_next", 0, 0), walked("qwen3_next", 0, 16)
    for walk in (plain, replay):
        walk.whole = -1
        walk.tokens.append(5)
        walk.run(51)
    assert replay.state == plain.state


# --- the engine -----------------------------------------------------------------------------------------------------


def both(name: str, **changes: object) -> tuple[Chat, Chat]:
    return Chat(name, replay_ssm=True, **changes), Chat(name, prefix_cache=False)


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "granitemoehybrid", "kimi_k3"])
def test_turns_resume_from_the_end_of_the_last_one_whatever_records_its_slot_holds(name: str) -> None:
    replay, cold = both(name)
    known = tokens_of(50)
    for turn, count in enumerate((1, 4, 9, 18)):
        mine, right = replay.say(known, count), cold.say(known, count)
        assert agree(mine, right) == count
        assert not turn or mine.cached == len(known) - 6
        known = known + tuple(right.tokens) + tokens_of(5, turn)


def test_two_requests_resume_from_one_end_and_it_stays_as_it_is() -> None:
    replay, cold = both("kimi_linear")
    known = tokens_of(50)
    known += tuple(replay.say(known, 9).tokens)
    for seed in (1, 2, 1):
        turn = known + tokens_of(20, seed)
        mine = replay.say(turn, 12)
        assert mine.cached >= 58
        agree(mine, cold.say(turn, 12))


@pytest.mark.parametrize("length", [48, 49, 50])
def test_choices_fork_from_whole_states(length: int) -> None:
    """Also when the prompt's last token ran alone and left a record (49: a hit at 48)."""
    replay, cold = both("kimi_linear")
    text = tokens_of(length)
    replay.say(text, 1)
    said = []
    for chat in (replay, cold):
        made = request("n", text, n=3, max_tokens=20, temperature=1.0, seed=3, logprobs=True, top_logprobs=VOCAB)
        key = chat.lab.submit(made)
        chat.lab.run()
        chat.lab.engine.check_baseline()
        said.append([chat.lab.tokens(key, choice) for choice in range(3)])
    assert said[0] == said[1]
    assert len({tuple(s) for s in said[0]}) == 3


def tier_lab(replay_len: int) -> TierLab:
    options = RunnerOptions(dtype="float32", device="cpu", threads=1, replay_len=replay_len)
    runner = TorchRunner(config_of("kimi_linear"), RandomWeights(0), options)
    changes: dict[str, object] = {"host_pool_tokens": 1024}
    return TierLab(pages=24, runner=runner, state=True, max_model_len=256, changes=changes)


def test_a_request_swapped_at_any_step_says_the_same() -> None:
    alone = tier_lab(0)
    right = alone.submit(request("a", tokens_of(50), max_tokens=40))
    alone.run()
    made = tier_lab(16)
    for step in (1, 2, 3, 8, 15, 16, 17, 30):
        key = made.submit(request(f"r{step}", tokens_of(50), max_tokens=40))
        made.engine.cache.clear()
        made.turns(step)
        swap(made, f"r{step}")
        made.run()
        assert made.tokens(key) == alone.tokens(right), f"swapped at step {step}"
    assert made.tiers.counts.swapped_in == 8
    made.baseline()


@pytest.mark.parametrize("length", [49, 60])
def test_a_handed_over_slot_is_whole_and_the_reader_goes_on_with_records(length: int) -> None:
    """The source decodes with records as well, has said the prompt before and runs its last token alone (49)."""
    p, d = Chat("kimi_linear", replay_ssm=True), Chat("kimi_linear", replay_ssm=True)
    text = tokens_of(length)
    p.say(text, 30)
    source = p.lab.submit(request("r", text, Mode.SOURCE))
    target = d.lab.submit(request("r", text, Mode.REMOTE, max_tokens=30, logprobs=True, top_logprobs=VOCAB))
    p.lab.run()
    d.lab.run()
    move(p.lab, d.lab, p.lab.admitted(source), d.lab.admitted(target))
    d.lab.admitted(target).hold.release()
    p.lab.admitted(source).hold.release()
    first = p.lab.done(source).first
    d.lab.engine.start(target, first)
    d.lab.run()
    said = [first[0].token, *d.lab.tokens(target)]
    right: Said = Chat("kimi_linear", prefix_cache=False).say(text, 30)
    assert said == right.tokens
    for lab in (p.lab, d.lab):
        lab.engine.check_baseline()


# --- configuration ----------------------------------------------------------------------------------------------------


def test_replay_is_refused_where_it_cannot_be_honoured() -> None:
    with pytest.raises(Unsupported):
        runner_of("kimi_linear", replay_len=16, deterministic=True)
    stateless = Lab().engine.model
    with pytest.raises(Unsupported):
        EngineSpec.of(stateless, Config(replay_ssm=True))


# --- sizes ------------------------------------------------------------------------------------------------------------


def sized(replay_len: int = 0, **changes: object) -> tuple[ModelSpec, EngineSpec]:
    model = TorchRunner(
        config_of("kimi_linear"), RandomWeights(0), RunnerOptions(device="cpu", threads=1, replay_len=replay_len)
    ).spec()
    return model, EngineSpec.of(model, Config(**{"max_batch": 4, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("replay_len", [0, 16])
def test_slots_and_their_records_count_in_the_pool_like_pages(replay_len: int) -> None:
    model, spec = sized(replay_len, kv_pool_bytes=4 << 20)
    used = (spec.pages - 1) * model.page_bytes + spec.slots * model.slot_memory
    assert (4 << 20) - model.page_bytes < used <= 4 << 20
    assert spec.slots == 9
    assert model.record_bytes == (3 * 4 * 16 * (16 + 16 + 16) * 4 if replay_len else 0)


def test_slots_take_at_most_half_a_pool_unless_their_number_is_given() -> None:
    model, spec = sized(kv_pool_bytes=10 * model_slot() + 1)
    assert spec.slots == 5
    assert spec.pages > 2
    assert sized(kv_pool_bytes=10 * model.slot_memory, state_slots=7)[1].slots == 8
    with pytest.raises(InvalidRequest):
        sized(kv_pool_bytes=10 * model.slot_memory, state_slots=10)


def model_slot() -> int:
    return sized()[0].slot_memory
