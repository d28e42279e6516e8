"""Conversations that share prefixes, in pools too small for all of them: every hit says what a cold run says.

On the oracle exactly, whatever the order of turns, cancels and evictions; on a real hybrid model within the tolerances
of a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import Mode, Tokens
from engine.plan import Logprob, SamplingParams
from engine.runner import RunnerOptions, TorchRunner
from engine.weights import RandomWeights
from kvtransfer.types import LegKey
from tests.unit.engine_core.lab import Lab, config, prompt, request, undisturbed
from tests.unit.hybrid.models import VOCAB, config_of, tokens_of

COUNTS = st.sampled_from([1, 2, 5, 17, 33])
PIECES = st.sampled_from([1, 3, 15, 16, 17, 40, 70])


@dataclass
class Turn:
    key: LegKey
    tokens: tuple[int, ...]
    count: int
    cancelled: bool = False


@dataclass
class Talk:
    """A conversation: what is known when its last turn has ended."""

    known: tuple[int, ...]
    turns: list[Turn] = field(default_factory=list)


class Conversations(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lab = Lab(pages=34, state=True, max_model_len=400, changes={"state_interval_tokens": 64})
        self.talks: list[Talk] = []
        self.numbers = iter(range(10**6))

    @rule(system=st.integers(0, 1), length=PIECES)
    def begin(self, system: int, length: int) -> None:
        """One of two shared system prompts of 80 tokens, and something of its own."""
        self.talks.append(Talk(prompt(80, system) + prompt(length, 10 + len(self.talks))))

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), length=PIECES, count=COUNTS, source=st.booleans())
    def speak(self, data: st.DataObject, length: int, count: int, source: bool) -> None:
        talk = data.draw(st.sampled_from(self.talks))
        tokens = talk.known + prompt(length, next(self.numbers) + 100)
        if len(tokens) + count >= 400:
            return
        mode = Mode.SOURCE if source else Mode.LOCAL
        made = request(f"turn{next(self.numbers)}", tokens, mode, max_tokens=count)
        talk.turns.append(Turn(self.lab.submit(made), tokens, count))

    @rule(turns=st.integers(1, 30))
    def run_some(self, turns: int) -> None:
        self.lab.turns(turns)

    @precondition(lambda self: any(t.turns for t in self.talks))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from([turn for talk in self.talks for turn in talk.turns]))
        turn.cancelled = True
        self.lab.engine.cancel(turn.key)

    @rule()
    def finish(self) -> None:
        """Everything said so far is what a cold run says; the conversations go on from it."""
        for key in [e.key for e in self.lab.events if not isinstance(e, Tokens)]:
            self._release(key)
        for _ in range(3000):
            if not self.lab.engine.turn():
                break
            for talk in self.talks:
                for turn in talk.turns:
                    self._release(turn.key)
        for talk in self.talks:
            for turn in talk.turns:
                self._check(talk, turn)
            talk.turns = []
        self.lab.engine.check_baseline()

    def _release(self, key: LegKey) -> None:
        for event in self.lab.of(key):
            if hasattr(event, "hold"):
                event.hold.release()

    def _check(self, talk: Talk, turn: Turn) -> None:
        expected = undisturbed(turn.tokens, SamplingParams(max_tokens=turn.count), state=True)[0]
        if turn.key.leg == "prefill":
            if not turn.cancelled:
                assert [f.token for f in self.lab.done(turn.key).first] == [expected[0]]
            return
        said = tuple(self.lab.tokens(turn.key))
        assert said == expected[: len(said)]
        if not turn.cancelled:
            assert said == expected
            talk.known = turn.tokens + said

    @invariant()
    def pools_agree(self) -> None:
        self.lab.check()
        self.lab.engine._scheduler.check_states()

    def teardown(self) -> None:
        self.finish()


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


# --- a real model ----------------------------------------------------------------------------------------------------


@dataclass
class Said:
    cached: int
    tokens: list[int]
    logprobs: list[Logprob]


class Chat:
    def __init__(self, name: str, **changes: object) -> None:
        cfg = config(**changes)
        replay = cfg.replay_len if cfg.replay_ssm else 0
        options = RunnerOptions(dtype="float32", device="cpu", threads=1, replay_len=replay)
        runner = TorchRunner(config_of(name), RandomWeights(0), options)
        self.lab = Lab(pages=26, runner=runner, max_model_len=400, state=True, changes=changes)
        self.numbers = iter(range(10**6))

    def say(self, tokens: tuple[int, ...], count: int) -> Said:
        key = self.lab.submit(
            request(f"r{next(self.numbers)}", tokens, max_tokens=count, logprobs=True, top_logprobs=VOCAB)
        )
        self.lab.run()
        self.lab.engine.check_baseline()
        events = [e for e in self.lab.of(key) if isinstance(e, Tokens)]
        probs = [p for e in events for p in e.logprobs if p is not None]
        return Said(events[0].cached_tokens, self.lab.tokens(key), probs)


def agree(hit: Said, cold: Said) -> int:
    """Positions compared: until the tokens part, which they may only where the cold run could not decide."""
    for at, (mine, theirs) in enumerate(zip(hit.logprobs, cold.logprobs, strict=True)):
        scores, reference = dict(mine.top), dict(theirs.top)
        gap = max(abs(scores[t] - reference[t]) for t in reference)
        assert gap <= 1e-4 * max(abs(v) for v in reference.values())
        if hit.tokens[at] != cold.tokens[at]:
            best = sorted(reference.values())[-2:]
            assert best[1] - best[0] <= 1e-3
            return at
    return len(cold.tokens)


@settings(max_examples=6, deadline=None)
@given(
    name=st.sampled_from(["kimi_linear", "qwen3_next", "granitemoehybrid"]),
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([2, 15, 16, 17, 33]), st.sampled_from([1, 4, 9])), max_size=7
    ),
)
def test_every_hit_of_a_real_model_agrees_with_a_cold_run(name: str, steps: list[tuple[int, int, int]]) -> None:
    warm, cold = Chat(name), Chat(name, prefix_cache=False)
    talks = {i: tokens_of(50, 0) + tokens_of(20, i + 1) for i in range(3)}
    compared = hits = 0
    for seed, (which, length, count) in enumerate([(0, 2, 9), (0, 5, 4), (1, 17, 4), *steps]):
        tokens = talks[which] + tokens_of(length, 100 + seed)
        if len(tokens) + count >= 300:
            continue
        hit, alone = warm.say(tokens, count), cold.say(tokens, count)
        compared += agree(hit, alone)
        hits += hit.cached > 0
        assert alone.cached == 0
        talks[which] = tokens + tuple(alone.tokens)
    assert hits >= 1
    assert compared >= 13


def test_states_after_a_hit_are_near_those_of_a_cold_run() -> None:
    """1e-5 of the state's own size, for every component; the pages alike."""
    warm, cold = Chat("kimi_linear"), Chat("kimi_linear", prefix_cache=False)
    first = tokens_of(70)
    said = warm.say(first, 6)
    turn = first + tuple(said.tokens) + tokens_of(30, 2)
    held = []
    for chat in (warm, cold):
        key = chat.lab.submit(request("p", turn, Mode.SOURCE))
        chat.lab.run()
        admitted = chat.lab.admitted(key)
        pages, *slots = chat.lab.memory()
        held.append([pages[list(admitted.pages)].copy(), *(s[list(admitted.slots)].copy() for s in slots)])
        admitted.hold.release()
    for mine, theirs in zip(*held, strict=True):
        a, b = mine.view(np.float32), theirs.view(np.float32)
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()
