"""Per-request state and the rules that need nothing else: finish, chunk grid, what a sampler must be told. Torch-free.

State length convention: `computed` tokens are in the state; the newest token is in no state until it is run.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from engine.api import EngineRequest, Mode, Sink
from engine.pages import PagePool, pages_for
from engine.plan import Copy, SampleSpec, SamplingParams
from engine.reservations import Amount, needed_pages
from kvtransfer.hashing import PageHasher
from kvtransfer.types import PAGE_TOKENS
from protos.v1 import common_pb2

STOP = int(common_pb2.FINISH_REASON_STOP)
LENGTH = int(common_pb2.FINISH_REASON_LENGTH)


class Phase(Enum):
    """waiting: owns nothing. loading: owns pages somebody else is filling. running: is in every step it can be."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Request:
    """What the choices of one request share. `remote`: its KV is still to come from a prefill worker."""

    spec: EngineRequest
    sink: Sink
    arrival: int
    submitted: float
    due: float  # see engine.order
    limit: int  # tokens known at which every choice ends, whatever it says
    remote: bool
    sequences: list[Sequence] = field(default_factory=list)
    over: bool = False
    silenced: bool = False  # cancelled: nothing more is delivered, whatever is under way
    unwanted: frozenset[int] = frozenset()  # choices the receiver has seen the end of
    leaving: frozenset[int] = frozenset()  # choices to be given away as soon as they can be
    scored: int = 0  # prompt positions whose log-probabilities are out
    admitted: float = -1.0
    prefilled: float = -1.0
    computing_s: float = 0.0  # its share of the steps that ran its prompt
    cached_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def decodes(self) -> bool:
        return self.spec.mode is not Mode.SOURCE

    @property
    def first_sequence(self) -> int:
        """Sequence number of the first token sampled here."""
        return len(self.spec.tokens) - self.spec.prompt_len

    @property
    def queue_s(self) -> float:
        """Until its first token: the wait for room, and for the chunks of others."""
        return max(self.prefilled - self.submitted - self.prefill_s, 0.0)

    @property
    def prefill_s(self) -> float:
        """What its prompt took to compute; of one whose pages come from elsewhere, the time until they were here."""
        return self.computing_s or self.prefilled - self.admitted

    def choices(self) -> tuple[int, ...]:
        """Choice indices this request makes."""
        return tuple(range(self.spec.n)) if self.spec.n > 1 else (self.spec.choice,)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice; before the first token, the one run of the prompt for all of them (`fanout` choices).

    pages: page table from position 0, with the decode headroom. spare: for each choice to fork, its own pages.
    pending: copies the next step must make, each with a count on its source.
    """

    id: int
    request: Request
    choice: int
    fanout: int
    tokens: list[int]
    hasher: PageHasher
    phase: Phase = Phase.WAITING
    computed: int = 0
    published: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    whole: int = 0  # tokens in the slot when its state was last written whole, see engine.plan.Row
    spare: list[list[int]] = field(default_factory=list)
    spare_slots: list[int] = field(default_factory=list)
    pending: list[tuple[PagePool, Copy]] = field(default_factory=list)
    booked: Amount = field(default_factory=Amount)
    lost: int = 0  # tokens that were computed before a preemption
    checkpoints: tuple[int, ...] = ()  # lengths at which the prefill exports its state
    held_up: float = -1.0  # since when its next row waits for slots for them
    came_by: bytes | None = None  # the state it has resumed, or left last
    kept_until: float = 0.0  # when its cache entries pass their time, as of its admission

    @property
    def order(self) -> tuple[float, int, int]:
        """Who is due first goes first; then first come first served."""
        return (self.request.due, self.request.arrival, self.id)

    @property
    def rows(self) -> int:
        """Places in the running batch."""
        return self.fanout if self.request.decodes else 1

    @property
    def decoding(self) -> bool:
        """Only the newest token is not in the state, and it is not the first chunk of anything."""
        return len(self.tokens) - self.computed == 1 and self.computed > 0

    @property
    def records(self) -> bool:
        """Its steps may leave records in its slot. A source's may not: its slot is read as it is."""
        return self.decoding and self.request.decodes

    def need(self, headroom: int, with_slots: bool) -> Amount:
        """What admission takes, were nothing cached: known tokens, decode headroom, and all of it per choice."""
        room = min(headroom, max(self.request.limit - 1 - len(self.tokens), 0)) if self.request.decodes else 0
        pages = needed_pages(len(self.tokens), room, self.rows)
        prefill = 0 if self.request.remote else len(self.tokens)
        return Amount(pages, self.rows if with_slots else 0, self.rows, prefill)

    def own_pages(self, headroom: int) -> int:
        """Length of this sequence's page table at admission."""
        room = min(headroom, max(self.request.limit - 1 - len(self.tokens), 0)) if self.request.decodes else 0
        return pages_for(len(self.tokens) + room)

    def chunk_end(self, chunk_tokens: int) -> int:
        """Where the next row of this sequence ends."""
        return chunk_end(self.computed, len(self.tokens), chunk_tokens)

    def full_keys(self) -> list[bytes]:
        """Keys of the pages whose content is in the state."""
        return self.hasher.page_keys(self.tokens)[: self.computed // PAGE_TOKENS]


def chunk_end(start: int, end: int, chunk_tokens: int) -> int:
    """Both grids are absolute: a chunk ends at a multiple of chunk_tokens or at `end`; a start off the page grid
    first runs to the next page border."""
    if start % PAGE_TOKENS:
        return min(-(-start // PAGE_TOKENS) * PAGE_TOKENS, end)
    return min((start // chunk_tokens + 1) * chunk_tokens, end)


def usable_hit(tokens: int) -> int:
    """Most pages of a prompt of `tokens` tokens that may come from a cache: at least one token is left to run."""
    return max(tokens - 1, 0) // PAGE_TOKENS


def accept(
    run: Seq[int], known: int, prompt_len: int, sampling: SamplingParams, limit: int
) -> tuple[tuple[int, ...], int]:
    """Take sampled tokens one by one until one ends the choice: (tokens taken, finish reason or 0).

    known: tokens before the run. limit: the context's end, in known tokens. A stop token counts at its own position,
    so it wins over a length limit it comes before or falls together with.
    """
    for index, token in enumerate(run):
        output = known + index - prompt_len
        if token in sampling.stop_token_ids and output >= sampling.min_tokens:
            return tuple(run[: index + 1]), STOP
        if output + 1 >= sampling.max_tokens or known + index + 1 >= limit:
            return tuple(run[: index + 1]), LENGTH
    return tuple(run), 0


def sample_spec(tokens: Seq[int], prompt_len: int, sampling: SamplingParams, choice: int) -> SampleSpec:
    """What the runner needs for the token after `tokens`. History travels only when a penalty looks at it."""
    repeats = sampling.repetition_penalty != 1.0
    counts = repeats or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    return SampleSpec(
        params=sampling,
        position=len(tokens),
        choice=choice,
        prompt=tuple(tokens[:prompt_len]) if repeats else (),
        output=tuple(tokens[prompt_len:]) if counts else (),
        banned=sampling.stop_token_ids if len(tokens) - prompt_len < sampling.min_tokens else (),
    )


def samples_of(seq: Sequence) -> tuple[SampleSpec, ...]:
    """What to sample after the known tokens: the next one, or the first one of every choice."""
    spec = seq.request.spec
    ids = seq.request.choices() if seq.fanout > 1 else (seq.choice,)
    return tuple(sample_spec(seq.tokens, spec.prompt_len, spec.sampling, choice) for choice in ids)


def targets_of(seq: Sequence, start: int, end: int) -> tuple[int, ...]:
    """The prompt tokens whose log-probabilities a row [start, end) can tell and nobody knows yet."""
    spec = seq.request.spec
    if not spec.sampling.prompt_logprobs or seq.request.remote or start < seq.request.scored:
        return ()
    return tuple(seq.tokens[start + 1 : min(end + 1, spec.prompt_len)])
