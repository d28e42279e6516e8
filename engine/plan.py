"""The step contract: the scheduler emits a StepPlan, the runner is a function of it and returns a StepResult.

Plain and serialisable. Pages and slots are indices; tensors appear in the runner only. Page 0 and slot 0 are null.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Every field has its final value (see common.proto Sampling)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = 0

    @property
    def plain_greedy(self) -> bool:
        """Greedy over raw logits: no penalty, bias, ban or log-probability asked for."""
        return (
            self.temperature == 0.0
            and self.repetition_penalty == 1.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and not self.logit_bias
            and not self.logprobs
        )


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How one row's logits become a token. The runner keeps nothing between steps: history travels here.

    position: of the token being sampled (its index in the whole sequence); choice: noise stream.
    prompt and output: known tokens, given only when a penalty needs them (else empty).
    banned: token ids that may not be sampled now (stop tokens while below min_tokens).
    """

    params: SamplingParams
    position: int
    choice: int
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: run `tokens` at positions [start, start + len(tokens)).

    pages: page table from position 0, long enough for start + len(tokens). slot: state slot, 0 = none.
    samples: one per token to sample from the LAST position's logits (n of them for the first token of n choices,
    none for a prompt chunk in the middle).
    prompt_targets: for prompt log-probabilities, the token that follows each of `tokens` (its log-probability is
    wanted), empty when not asked for, and shorter than `tokens` where the prompt ends (its last token is followed by
    none); prompt_top: alternatives wanted for each.
    checkpoints: (length, slot): the state after `length` tokens of the sequence is written to `slot` as well, in the
    same forward. start < length <= start + len(tokens), a multiple of 16; models with a state only.
    whole: for a decode row that may leave a record instead of rewriting its state: the length at which its slot was
    last written whole (the records since are in the slot). -1: the slot is whole, and has to be after the row.
    """

    seq: int
    tokens: tuple[int, ...]
    start: int
    pages: tuple[int, ...]
    slot: int = 0
    samples: tuple[SampleSpec, ...] = ()
    prompt_targets: tuple[int, ...] = ()
    prompt_top: int = 0
    checkpoints: tuple[tuple[int, int], ...] = ()
    whole: int = -1

    @property
    def is_decode(self) -> bool:
        return len(self.tokens) == 1 and self.start > 0 and not self.checkpoints


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one page (paged) or slot, before the step's rows run.

    length, whole: of a slot, the tokens in its state and the length at which it was last written whole (see Row). The
    target is whole; the source stays as it is, or becomes whole where it is the target itself.
    """

    paged: bool
    source: int
    target: int
    length: int = 0
    whole: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """decode rows come first, then prefill rows, each in admission order (so the batch order is deterministic)."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class Logprob:
    """rank 1 = most likely; top: (token, log-probability), most likely first. Natural log, of the distribution the
    model gives before temperature and truncation, after nothing (as vLLM's raw_logprobs)."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RowResult:
    """tokens: one per sample spec of the row. logprobs: alike, or empty. prompt: one per prompt target, or empty."""

    seq: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob | None, ...] = ()
    prompt: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    rows: tuple[RowResult, ...] = field(default=())
