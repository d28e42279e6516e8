"""How far a request's answer has come: a pure state machine from worker tokens to text pieces. No I/O, no clock.

Invariants: sequence numbers of a choice are accepted contiguously and once; nothing of a choice comes after its finish;
token ids, log-probabilities and the completion count all end at the token that completed a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.v1 import common_pb2
from router.params import Params
from router.text.detok import Decode, Detokenizer
from router.text.stops import StopMatcher
from runtime.errors import WorkerLost
from runtime.values import value

STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH
GOES_ON = common_pb2.FINISH_REASON_UNSPECIFIED


@value
class Delta:
    """New output of one choice. Text may lag behind its tokens (a held character or possible stop string)."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[common_pb2.TokenLogprob, ...] = ()


@value
class Finish:
    """The end of one choice. stop: the stop string that ended it, if one did; reason STOP or LENGTH."""

    choice: int
    reason: int
    stop: str = ""


@dataclass(slots=True)
class Choice:
    """One choice's answer so far."""

    index: int
    detokenizer: Detokenizer
    matcher: StopMatcher
    tokens: list[int] = field(default_factory=list)  # accepted, in order: what a continuation starts from
    finish: Finish | None = None

    @property
    def next_sequence(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Progress:
    """All choices of one request. accept() turns worker tokens into deltas and finishes, in order."""

    params: Params
    stop_tokens: frozenset[int]
    choices: list[Choice] = field(default_factory=list)

    @classmethod
    def of(cls, params: Params, decode: Decode, prompt: Sequence[int], stop_tokens: frozenset[int]) -> Progress:
        choices = [
            Choice(index, Detokenizer(decode, prompt), StopMatcher(params.stop, include=params.include_stop))
            for index in range(params.n)
        ]
        return cls(params, stop_tokens, choices)

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.next_sequence for choice in self.choices)

    @property
    def started(self) -> bool:
        return any(choice.next_sequence for choice in self.choices)

    def next_sequences(self) -> list[int]:
        return [choice.next_sequence for choice in self.choices]

    def end(self, index: int) -> tuple[Delta | None, Finish]:
        """A choice that has all its tokens and no finish from a worker: it ends by length, with the text held back."""
        delta, finish = self._advance(self.choices[index], [], [], LENGTH)
        assert finish is not None
        return delta, finish

    def accept(
        self,
        index: int,
        first_sequence: int,
        tokens: Sequence[int],
        logprobs: Sequence[common_pb2.TokenLogprob],
        finish: int,
    ) -> tuple[Delta | None, Finish | None]:
        """Tokens of one choice, contiguous from first_sequence. Repeated ones are dropped.

        Raises WorkerLost(reason="sequence_gap") when tokens are missing, (reason="bad_choice") for a foreign choice.
        """
        if index >= len(self.choices):
            raise WorkerLost("the worker answered for a choice that does not exist", reason="bad_choice")
        choice = self.choices[index]
        if choice.finish is not None:
            return None, None
        if first_sequence > choice.next_sequence:
            raise WorkerLost("tokens are missing in the worker's answer", reason="sequence_gap")
        skip = choice.next_sequence - first_sequence
        fresh = list(tokens[skip:])
        scores = list(logprobs[skip:]) if logprobs else []
        if self.params.logprobs is not None and len(scores) != len(fresh):
            raise WorkerLost("the worker's log-probabilities are incomplete", reason="bad_logprobs")
        return self._advance(choice, fresh, scores, finish)

    def _advance(
        self, choice: Choice, fresh: list[int], scores: list[common_pb2.TokenLogprob], finish: int
    ) -> tuple[Delta | None, Finish | None]:
        text, used, stop = self._read(choice, fresh, finish)
        choice.tokens += fresh if used == len(fresh) else fresh[:used]
        if stop:
            choice.finish = Finish(choice.index, STOP, stop)
        elif finish != GOES_ON:
            piece = choice.detokenizer.flush()
            matched = choice.matcher.push(piece) if self._stops_count(choice, 0) else None
            text += matched.text if matched else choice.matcher.pass_through(piece)
            if matched is not None and matched.stop:
                choice.finish = Finish(choice.index, STOP, matched.stop)
            else:
                text += choice.matcher.flush()
                choice.finish = Finish(choice.index, finish)
        delta = None
        if text or used:
            delta = Delta(choice.index, text, tuple(fresh[:used]), tuple(scores[:used]))
        return delta, choice.finish

    def _read(self, choice: Choice, fresh: list[int], finish: int) -> tuple[str, int, str]:
        """(text, tokens used, stop string). With stop strings token by token: the count must end at the stop."""
        silent = 0
        if finish == STOP and fresh and fresh[-1] in self.stop_tokens and not self.params.include_stop:
            silent = 1  # the token that ended the answer is counted, not shown
        shown = fresh[: len(fresh) - silent]
        if not self.params.stop:
            return choice.detokenizer.push(shown) if shown else "", len(fresh), ""
        text = ""
        for used, token in enumerate(shown, start=1):
            piece = choice.detokenizer.push([token])
            if not self._stops_count(choice, used):
                text += choice.matcher.pass_through(piece)
                continue
            matched = choice.matcher.push(piece)
            text += matched.text
            if matched.stop:
                return text, used, matched.stop
        return text, len(fresh), ""

    def _stops_count(self, choice: Choice, used: int) -> bool:
        """Stop strings end an answer only once it has min_tokens."""
        return choice.next_sequence + used >= self.params.min_tokens
