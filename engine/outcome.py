"""What a finished step means for its requests: state confirmed, pages published, tokens accepted, events made.

Torch-free. Collects (request, event) pairs; the scheduler hands them out. A sequence that ends gives back its memory
here, and nowhere later.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.api import Event, Mode, PromptScores, RangeReady, SourceDone, Tokens
from engine.memory import Memory
from engine.plan import Logprob, Row, RowResult
from engine.sequence import Phase, Request, Sequence, accept
from kvtransfer.types import PAGE_TOKENS, First
from protos.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A choice's first token."""

    choice: int
    token: int
    finish: int
    logprob: Logprob | None


class Outcome:
    """forked: sequences made since the scheduler last took them."""

    def __init__(self, memory: Memory, ids: itertools.count[int]) -> None:
        self._memory = memory
        self._ids = ids
        self._events: list[tuple[Request, Event]] = []
        self.forked: list[Sequence] = []

    def emit(self, request: Request, event: Event) -> None:
        assert not request.over, "an event after the end"
        self._events.append((request, event))

    def take(self) -> list[tuple[Request, Event]]:
        events, self._events = self._events, []
        return events

    def ran(self, seq: Sequence, row: Row, result: RowResult, now: float) -> None:
        """One row is done: its tokens are in the state, and what it sampled is known."""
        request = seq.request
        seq.computed = row.start + len(row.tokens)
        if row.whole < 0:
            seq.whole = seq.computed
        self._memory.publish(seq)
        self._memory.publish_checkpoints(seq, row)
        if result.prompt:
            request.scored = row.start + len(result.prompt)
            self.emit(request, PromptScores(request.spec.key, row.start + 1, result.prompt))
        if request.spec.mode is Mode.SOURCE:
            # a row that resumes inside a page announces the page from its border: the rest of it was copied
            border = row.start // PAGE_TOKENS * PAGE_TOKENS
            self.emit(request, RangeReady(request.spec.key, border, seq.computed))
        if not row.samples:
            return
        assert len(result.tokens) == len(row.samples), "one token per sample"
        if request.prefilled < 0:
            request.prefilled = now
        if request.spec.mode is Mode.SOURCE:
            self._source_done(seq, result)
        elif seq.fanout > 1:
            self._fan_out(seq, self._sampled(seq, result), now, emit=True)
        else:
            self._extend(seq, result.tokens, result.logprobs, now)

    def started(self, lead: Sequence, firsts: Seq[First], now: float) -> None:
        """The state of a whole prompt has arrived with the first tokens sampled elsewhere (and delivered there)."""
        request = lead.request
        sampled = [
            _Sampled(f.choice, f.token, f.finish or self._finish_of(lead, (f.token,)), logprob=None) for f in firsts
        ]
        self._fan_out(lead, sampled, now, emit=False)
        over = all(s.finish for s in sampled)
        for s, given in zip(sampled, firsts, strict=True):
            if s.choice in request.unwanted:
                continue
            last = over and s is sampled[-1]
            # A choice that ended where it was sampled has had its last event there; one that only ends here has not.
            if s.finish and (last or not given.finish):
                number = request.first_sequence + 1
                self.emit(request, self._tokens(request, s.choice, number, (), (), s.finish, last, now))

    # --- first tokens -----------------------------------------------------------------------------------------------

    def _sampled(self, seq: Sequence, result: RowResult) -> list[_Sampled]:
        logprobs = result.logprobs or (None,) * len(result.tokens)
        return [
            _Sampled(choice, token, self._finish_of(seq, (token,)), logprob)
            for choice, token, logprob in zip(seq.request.choices(), result.tokens, logprobs, strict=True)
        ]

    def _source_done(self, seq: Sequence, result: RowResult) -> None:
        request = seq.request
        first = tuple(First(s.choice, s.token, s.finish, logprob_bytes(s.logprob)) for s in self._sampled(seq, result))
        done = SourceDone(request.spec.key, first, request.cached_tokens, request.queue_s, request.prefill_s)
        self.emit(request, done)
        self._close(seq)

    def _fan_out(self, lead: Sequence, sampled: Seq[_Sampled], now: float, emit: bool) -> None:
        """Every choice gets its first token. The first one that goes on keeps the prompt's own partial page."""
        request = lead.request
        going = [s for s in sampled if not s.finish and s.choice not in request.unwanted]
        heirs = {s.choice: lead if s is going[0] else self._fork(lead, s.choice) for s in going}
        self._memory.drop_spares(lead)
        lead.fanout = 1
        for s in going:
            heirs[s.choice].choice = s.choice
            heirs[s.choice].tokens.append(s.token)
        if not going:
            self._close(lead)
        if not emit:
            return
        for s in sampled:
            if s.choice in request.unwanted:
                continue
            last = not going and s is sampled[-1]
            number = request.first_sequence
            event = self._tokens(request, s.choice, number, (s.token,), (s.logprob,), s.finish, last, now)
            self.emit(request, event)

    def _fork(self, lead: Sequence, choice: int) -> Sequence:
        other = self._memory.fork(lead, choice, next(self._ids))
        lead.request.sequences.append(other)
        self.forked.append(other)
        return other

    # --- later tokens -----------------------------------------------------------------------------------------------

    def _extend(self, seq: Sequence, run: tuple[int, ...], logprobs: tuple[Logprob | None, ...], now: float) -> None:
        request = seq.request
        taken, finish = self._accept(seq, run)
        number = len(seq.tokens) - request.spec.prompt_len
        seq.tokens.extend(taken)
        if finish:
            self._close(seq)
        last = bool(finish) and all(s.phase is Phase.DONE for s in request.sequences)
        kept = logprobs[: len(taken)] if logprobs else (None,) * len(taken)
        self.emit(request, self._tokens(request, seq.choice, number, taken, kept, finish, last, now))

    def _accept(self, seq: Sequence, run: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        spec = seq.request.spec
        return accept(run, len(seq.tokens), spec.prompt_len, spec.sampling, seq.request.limit)

    def _finish_of(self, seq: Sequence, run: tuple[int, ...]) -> int:
        return self._accept(seq, run)[1]

    def _close(self, seq: Sequence) -> None:
        seq.phase = Phase.DONE
        self._memory.keep_end(seq)
        self._memory.release(seq)

    @staticmethod
    def _tokens(
        request: Request,
        choice: int,
        number: int,
        tokens: tuple[int, ...],
        logprobs: tuple[Logprob | None, ...],
        finish: int,
        last: bool,
        now: float,
    ) -> Tokens:
        return Tokens(
            request.spec.key,
            choice,
            number,
            tokens,
            logprobs,
            finish,
            last,
            cached_tokens=request.cached_tokens,
            queue_s=request.queue_s,
            prefill_s=request.prefill_s,
            decode_s=now - request.prefilled,
            recomputed_tokens=request.recomputed_tokens,
        )


def charge(rows: Iterable[tuple[Sequence, Row]], seconds: float) -> None:
    """What a step took, to the prompts in it by their tokens: one that waits for another's chunk does not compute, and
    who learns from these figures how long a prompt takes must not learn how many others there were."""
    prompts = [(seq.request, len(row.tokens)) for seq, row in rows if seq.request.prefilled < 0]
    tokens = sum(count for _, count in prompts)
    for request, count in prompts:
        request.computing_s += seconds * count / tokens


def logprob_bytes(logprob: Logprob | None) -> bytes:
    """A serialised common.TokenLogprob, b"" for none."""
    if logprob is None:
        return b""
    top = [common_pb2.TopLogprob(token=token, logprob=value) for token, value in logprob.top]
    wire = common_pb2.TokenLogprob(token=logprob.token, logprob=logprob.logprob, rank=logprob.rank, top=top)
    return wire.SerializeToString(deterministic=True)
