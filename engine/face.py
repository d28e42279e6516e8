"""What both services share between the wire and the engine: requests in, amounts and log-probabilities out.

Wire types stop here. Whatever a router sends that can never work is refused with the field's name before the engine
sees it; a router is trusted, but one broken request must fail alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from engine.api import EngineLoad, EnginePort, EngineRequest, Free, Mode, Needs, Refused, Retention
from engine.fetch import Fetcher
from engine.meter import Meter
from engine.plan import Logprob, SamplingParams
from engine.tiers.stats import TierReport
from kvtransfer.types import First, LegKey
from protos.v1 import common_pb2
from runtime.clock import Clock
from runtime.errors import DeadlineExceeded, InvalidRequest, Unsupported

MAX_SALT_BYTES = 1024
MAX_ID_CHARS = 256
MAX_RETENTION_PRIORITY = 10
MAX_RETENTION_MS = 24 * 3600 * 1000
MAX_DUE_MS = 24 * 3600 * 1000
LOGPROB_CHUNK_BYTES = 1 << 19
"""Prompt log-probabilities travel in messages of about this size, well under the 1 MiB bound."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one worker. Counts of tokens, choices and alternatives."""

    vocab_size: int
    max_model_len: int
    max_n: int
    max_top_logprobs: int
    max_logit_bias: int


@dataclass(frozen=True, slots=True)
class Worker:
    """The worker a service speaks for. root_of: effective salt -> 32-byte hash root of its model. load: a report of
    now, with the next sequence number. address: where KvSource is served. fetcher: of prefixes other workers have."""

    worker_id: str
    epoch: int
    address: str
    pid: int
    transport: str
    engine: EnginePort
    clock: Clock
    limits: Limits
    root_of: Callable[[bytes], bytes]
    load: Callable[[], common_pb2.Load]
    meter: Meter = field(default_factory=Meter)
    fetcher: Fetcher | None = None


def reserve(worker: Worker, leg: str, request: common_pb2.ReserveRequest) -> common_pb2.ReserveReply:
    """Book capacity for a leg. Raises InvalidRequest and DeadlineExceeded; a refusal is an answer, not an error."""
    key = leg_key(request.ref, leg)
    if request.remaining_ms == 0:
        raise DeadlineExceeded("the request has no time left")
    if request.needs.prefill_tokens > worker.limits.max_model_len:  # it would be told to every router as this queue
        limit = str(worker.limits.max_model_len)
        raise InvalidRequest("no prompt is that long here", field="needs.prefill_tokens", limit=limit)
    needs = Needs(
        prompt_tokens=request.needs.prompt_tokens,
        headroom_tokens=request.needs.headroom_tokens,
        choices=max(1, request.needs.choices),
        prefill_tokens=request.needs.prefill_tokens,
        slots=request.needs.slots,
    )
    answer = worker.engine.reserve(key, needs)
    if isinstance(answer, Refused):
        return common_pb2.ReserveReply(refusal=answer.error.detail(), free=free_amounts(answer.free))
    return common_pb2.ReserveReply(
        reservation_id=answer.reservation_id,
        expires_in_ms=max(1, round(1000 * answer.expires_in_s)),
        free=free_amounts(answer.free),
    )


def leg_key(ref: common_pb2.AttemptRef, leg: str) -> LegKey:
    """Raises InvalidRequest."""
    if not ref.request_id or len(ref.request_id) > MAX_ID_CHARS:
        raise InvalidRequest("request_id is missing or too long", field="ref.request_id", limit=str(MAX_ID_CHARS))
    if ref.attempt == 0:
        raise InvalidRequest("attempts are numbered from 1", field="ref.attempt")
    return LegKey(ref.request_id, leg, ref.attempt)


def ref_of(key: LegKey) -> common_pb2.AttemptRef:
    return common_pb2.AttemptRef(request_id=key.request_id, attempt=key.attempt)


class Assembly:
    """A request whose tokens come in several messages. Bounded by the model's context."""

    def __init__(self, request: common_pb2.WorkRequest, max_tokens: int) -> None:
        self.request = request
        self._max = max_tokens
        self._bound(len(request.tokens))

    def add(self, chunk: common_pb2.TokenChunk) -> bool:
        """Append a chunk; True when it was the last one. Raises InvalidRequest for a gap or too many tokens."""
        if chunk.offset != len(self.request.tokens):
            raise InvalidRequest(
                f"tokens continue at {len(self.request.tokens)}, not at {chunk.offset}", field="tokens.offset"
            )
        self._bound(len(self.request.tokens) + len(chunk.tokens))
        self.request.tokens.extend(chunk.tokens)
        self.request.more_tokens = chunk.more
        return not chunk.more

    def _bound(self, count: int) -> None:
        if count > self._max:
            raise InvalidRequest(
                "the prompt is longer than the context", reason="context_length_exceeded", field="tokens",
                limit=str(self._max),
            )  # fmt: skip


def engine_request(
    worker: Worker, request: common_pb2.WorkRequest, leg: str, mode: Mode, deadline: float
) -> EngineRequest:
    """The engine's form of a complete request. deadline: counted from the arrival of its first message, however long
    the rest took. Raises InvalidRequest, Unsupported, DeadlineExceeded."""
    limits = worker.limits
    tokens = tuple(request.tokens)
    _check_tokens(tokens, request.prompt_len, limits)
    done = len(tokens) - request.prompt_len
    _check_choices(request, done, limits)
    sampling = sampling_params(request.sampling, limits)
    if sampling.max_tokens <= done:
        raise InvalidRequest("max_tokens leaves nothing to generate", field="sampling.max_tokens")
    if request.adapter.id or request.adapter.version:
        raise Unsupported("this worker serves no adapters", field="adapter")
    if request.multimodal:
        raise Unsupported("this model takes text only", field="multimodal")
    if len(request.salt) > MAX_SALT_BYTES:
        raise InvalidRequest("the salt is too long", field="salt", limit=str(MAX_SALT_BYTES))
    if request.remaining_ms == 0 or worker.clock.monotonic() >= deadline:
        raise DeadlineExceeded("the request has no time left")
    return EngineRequest(
        key=leg_key(request.ref, leg),
        mode=mode,
        tokens=tokens,
        prompt_len=request.prompt_len,
        sampling=sampling,
        root=worker.root_of(request.salt),
        deadline=deadline,
        n=request.n,
        choice=request.choice,
        reservation_id=request.reservation_id,
        priority=request.priority,
        retention=retention_of(request.retention),
        due=due_of(worker, request),
    )


def due_of(worker: Worker, request: common_pb2.WorkRequest) -> float | None:
    """On the engine's clock. A router in a hurry, or out of its mind, is at most a day off."""
    if not request.HasField("due_ms"):
        return None
    return worker.clock.monotonic() + min(max(request.due_ms, -MAX_DUE_MS), MAX_DUE_MS) / 1000


def retention_of(wire: common_pb2.Retention) -> Retention:
    """Raises InvalidRequest."""
    if len(wire.session) > MAX_ID_CHARS:
        raise InvalidRequest("the session's name is too long", field="retention.session", limit=str(MAX_ID_CHARS))
    if abs(wire.priority) > MAX_RETENTION_PRIORITY:
        limit = f"-{MAX_RETENTION_PRIORITY}..{MAX_RETENTION_PRIORITY}"
        raise InvalidRequest("retention.priority is out of range", field="retention.priority", limit=limit)
    if wire.ttl_ms > MAX_RETENTION_MS:
        raise InvalidRequest("retention.ttl_ms is too long", field="retention.ttl_ms", limit=f"{MAX_RETENTION_MS}")
    return Retention(wire.session.encode(), wire.priority, wire.ttl_ms / 1000)


def _check_tokens(tokens: tuple[int, ...], prompt_len: int, limits: Limits) -> None:
    if not tokens:
        raise InvalidRequest("the prompt is empty", field="tokens")
    if not 1 <= prompt_len <= len(tokens):
        raise InvalidRequest("prompt_len must be between 1 and the number of tokens", field="prompt_len")
    if len(tokens) >= limits.max_model_len:
        raise InvalidRequest(
            "the prompt fills the context", reason="context_length_exceeded", field="tokens",
            limit=str(limits.max_model_len - 1),
        )  # fmt: skip
    if max(tokens) >= limits.vocab_size:
        raise InvalidRequest("a token id is not in the vocabulary", field="tokens", limit=str(limits.vocab_size - 1))


def _check_choices(request: common_pb2.WorkRequest, done: int, limits: Limits) -> None:
    if not 1 <= request.n <= limits.max_n:
        raise InvalidRequest("n is out of range", field="n", limit=f"1..{limits.max_n}")
    if done and request.n > 1:
        raise InvalidRequest("a continuation has one choice", field="n", limit="1")
    if request.choice and request.n > 1:
        raise InvalidRequest("only one choice alone is named", field="choice", limit="0")


def sampling_params(wire: common_pb2.Sampling, limits: Limits) -> SamplingParams:
    """Every value in its range, or InvalidRequest naming the field."""
    _number("temperature", wire.temperature, 0.0, 1e4)
    _number("top_p", wire.top_p, 0.0, 1.0, above=True)
    _number("min_p", wire.min_p, 0.0, 1.0)
    _number("repetition_penalty", wire.repetition_penalty, 0.0, 1e4, above=True)
    _number("presence_penalty", wire.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", wire.frequency_penalty, -2.0, 2.0)
    _number("max_tokens", wire.max_tokens, 1, limits.max_model_len)
    _number("min_tokens", wire.min_tokens, 0, wire.max_tokens)
    _number("top_logprobs", wire.top_logprobs, 0, limits.max_top_logprobs)
    _number("prompt_top_logprobs", wire.prompt_top_logprobs, 0, limits.max_top_logprobs)
    _number("logit_bias", len(wire.logit_bias), 0, limits.max_logit_bias)
    for bias in wire.logit_bias:
        _number("logit_bias", bias.bias, -100.0, 100.0)
        _number("logit_bias", bias.token, 0, limits.vocab_size - 1)
    for token in wire.stop_token_ids:
        _number("stop_token_ids", token, 0, limits.vocab_size - 1)
    return SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=tuple((b.token, b.bias) for b in wire.logit_bias),
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        stop_token_ids=tuple(wire.stop_token_ids),
        logprobs=wire.logprobs,
        top_logprobs=wire.top_logprobs,
        prompt_logprobs=wire.prompt_logprobs,
        prompt_top_logprobs=wire.prompt_top_logprobs,
    )


def _number(field: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """low <= value <= high (low < value when `above`); NaN is in no range."""
    if math.isnan(value) or not low <= value <= high or (above and value == low):
        raise InvalidRequest(f"{field} is out of range", field=f"sampling.{field}", limit=f"{low:g}..{high:g}")


def free_amounts(free: Free) -> common_pb2.FreeAmounts:
    return common_pb2.FreeAmounts(
        pages=free.pages, slots=free.slots, batch=free.batch, queued_prefill_tokens=free.queued_prefill_tokens
    )


def load_of(engine: EngineLoad, *, leases: int, quarantined_pages: int, sequence: int) -> common_pb2.Load:
    return common_pb2.Load(
        running=engine.running,
        waiting=engine.waiting,
        queued_prefill_tokens=engine.queued_prefill_tokens,
        pages_total=engine.pages_total,
        pages_free=engine.pages_free,
        pages_cached=engine.pages_cached,
        pages_reserved=engine.pages_reserved,
        slots_total=engine.slots_total,
        slots_free=engine.slots_free,
        leases=leases,
        quarantined_pages=quarantined_pages,
        sequence=sequence,
        swapped=engine.swapped,
    )


def tier_load(tier: TierReport) -> common_pb2.TierLoad:
    return common_pb2.TierLoad(**{f.name: getattr(tier, f.name) for f in fields(tier)})


def wire_logprob(value: Logprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token=value.token,
        logprob=value.logprob,
        rank=value.rank,
        top=[common_pb2.TopLogprob(token=t, logprob=p) for t, p in value.top],
    )


def wire_logprobs(values: Iterable[Logprob | None]) -> list[common_pb2.TokenLogprob]:
    """One per token, or empty when none was asked for."""
    return [wire_logprob(v) for v in values if v is not None]


def wire_first(first: Sequence[First]) -> list[common_pb2.FirstToken]:
    out = []
    for one in first:
        wire = common_pb2.FirstToken(choice=one.choice, token=one.token, finish=finish_of(one.finish))
        if one.logprob:
            wire.logprob.ParseFromString(one.logprob)
        out.append(wire)
    return out


def score_chunks(offset: int, entries: Sequence[Logprob]) -> Iterator[tuple[int, list[common_pb2.TokenLogprob]]]:
    """Prompt log-probabilities in pieces of bounded size: (position of the first, entries)."""
    piece: list[common_pb2.TokenLogprob] = []
    start, size = offset, 0
    for entry in entries:
        wire = wire_logprob(entry)
        wire_size = wire.ByteSize() + 4
        if piece and size + wire_size > LOGPROB_CHUNK_BYTES:
            yield start, piece
            start, piece, size = start + len(piece), [], 0
        piece.append(wire)
        size += wire_size
    if piece:
        yield start, piece


def finish_of(value: int) -> common_pb2.FinishReason.ValueType:
    """The engine counts finish reasons as the wire does; 0 = it goes on."""
    assert value in common_pb2.FinishReason.values()
    return common_pb2.FinishReason.ValueType(value)
