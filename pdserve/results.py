"""What the client returns: frozen values made from the wire once. Times in seconds, sizes in bytes and tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from protos.v1 import common_pb2, inference_pb2

_FINISH = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    common_pb2.FINISH_REASON_DEADLINE: "deadline",
    common_pb2.FINISH_REASON_FAILED: "failed",
}


class Retention(TypedDict, total=False):
    """How the cache entries of a request should be kept, see common.proto."""

    session: str
    priority: int
    ttl_ms: int


class Options(TypedDict, total=False):
    """How to generate. What is left out has the server's default; see inference.proto for ranges.

    timeout: seconds for the whole request, enforced by every process that works on it.
    """

    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    skip_special_tokens_off: bool
    cache_salt: str
    retention: Retention
    return_ledger: bool
    return_token_ids: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural-log probability; rank 1 is the most likely. top: alternatives, most likely first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, wire: common_pb2.TokenLogprob) -> Logprob:
        return cls(wire.token, wire.logprob, wire.rank, tuple((one.token, one.logprob) for one in wire.top))


@dataclass(frozen=True, slots=True)
class Usage:
    """cached_tokens: prompt tokens that did not have to be computed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, wire: inference_pb2.Usage) -> Usage:
        return cls(wire.prompt_tokens, wire.completion_tokens, wire.total_tokens, wire.cached_tokens)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where a request's time went, and who worked on it. first_token_s counts from arrival, as total_s does."""

    render_s: float
    queue_s: float
    route_s: float
    prefill_s: float
    handoff_wait_s: float
    transfer_s: float
    checksum_s: float
    first_token_s: float
    decode_s: float
    total_s: float
    prefill_worker: str
    decode_worker: str
    prefill_pid: int
    decode_pid: int
    transfer_bytes: int
    transfer_pages: int
    recomputed_tokens: int
    transport: str
    prefill_attempts: int
    decode_attempts: int

    @classmethod
    def of(cls, wire: inference_pb2.Ledger) -> Ledger:
        return cls(**{name: getattr(wire, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a stream."""

    request_id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. text may be empty while a character is incomplete."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens from position `offset` on."""

    offset: int
    entries: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice ended. reason: stop, length, cancelled, deadline or failed; stop_reason: the stop string, if one."""

    index: int
    reason: str
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class Completed:
    """Last event of a stream. ledger: when asked for (return_ledger)."""

    usage: Usage
    ledger: Ledger | None = None


Event = Started | Delta | PromptScores | Finished | Completed


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    finish_reason: str
    stop_reason: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. text: of the first choice."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    ledger: Ledger | None = None
    prompt_logprobs: tuple[Logprob, ...] = ()

    @property
    def text(self) -> str:
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    fingerprint: str
    vocab_size: int

    @classmethod
    def of(cls, wire: inference_pb2.ModelCard) -> Model:
        return cls(wire.id, wire.max_model_len, wire.fingerprint, wire.vocab_size)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as the model will see it."""

    text: str
    token_ids: tuple[int, ...]


def event_of(wire: inference_pb2.GenerateEvent) -> Event | common_pb2.ErrorDetail:
    """One message of the stream as a value; an ErrorDetail is the failed end."""
    kind = wire.WhichOneof("event")
    if kind == "started":
        return Started(wire.started.request_id, wire.started.model, wire.started.prompt_tokens)
    if kind == "delta":
        delta = wire.delta
        return Delta(delta.index, delta.text, tuple(delta.token_ids), tuple(map(Logprob.of, delta.logprobs)))
    if kind == "finished":
        return Finished(wire.finished.index, finish_name(wire.finished.reason), wire.finished.stop_reason)
    if kind == "completed":
        has_ledger = wire.completed.HasField("ledger")
        return Completed(Usage.of(wire.completed.usage), Ledger.of(wire.completed.ledger) if has_ledger else None)
    if kind == "prompt_logprobs":
        scores = wire.prompt_logprobs
        return PromptScores(scores.offset, tuple(map(Logprob.of, scores.entries)))
    return wire.failed


def finish_name(reason: int) -> str:
    return _FINISH.get(reason, "failed")  # type: ignore[call-overload, no-any-return]


class Gathering:
    """Collects the events of one stream into a Generation."""

    def __init__(self) -> None:
        self._started = Started("", "", 0)
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}
        self._scores: list[Logprob] = []
        self._completed: Completed | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Delta):
            self._deltas.setdefault(event.index, []).append(event)
        elif isinstance(event, Finished):
            self._finished[event.index] = event
        elif isinstance(event, PromptScores):
            self._scores += event.entries
        else:
            self._completed = event

    def result(self) -> Generation:
        assert self._completed is not None, "a stream that has not failed has its completed event"
        return Generation(
            request_id=self._started.request_id,
            model=self._started.model,
            choices=tuple(self._choice(index) for index in sorted(self._finished)),
            usage=self._completed.usage,
            ledger=self._completed.ledger,
            prompt_logprobs=tuple(self._scores),
        )

    def _choice(self, index: int) -> Choice:
        deltas, finished = self._deltas.get(index, []), self._finished[index]
        return Choice(
            index=index,
            text="".join(delta.text for delta in deltas),
            finish_reason=finished.reason,
            stop_reason=finished.stop_reason,
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        )
