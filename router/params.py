"""What a client asks for, as plain values, and every limit on it. HTTP and gRPC both end here: checked once.

Bounds come before anything is allocated or any worker hears of the request; each refusal names the field and the limit.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from protos.v1 import common_pb2
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.values import value

MAX_SEED = 2**64 - 1
MAX_TOP_K = 1 << 20
MAX_COUNT = 1 << 31
SEED_BITS = 63
GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would only overflow."""


MAX_RETENTION_PRIORITY = 10
"""A tenant orders its own entries among others': so far, not further."""

MAX_TTL_MS = 24 * 3600 * 1000
IN_MEMORY_TTL_MS = 3600 * 1000
"""OpenAI's in_memory: at most one hour. Also for how long a raised priority lasts that names no time."""

MAX_SESSION_CHARS = 256


@value
class Retention:
    """How this call would like its cache entries to be kept, see engine.retention. ttl_ms: 0 = no limit."""

    session: str = ""
    priority: int = 0
    ttl_ms: int = 0


@value
class Params:
    """Sampling and output options of one API call. None = not given."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    return_ledger: bool = False
    return_token_ids: bool = False
    cache_salt: str = ""
    retention: Retention = Retention()
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the front door, from the configuration and the model."""

    vocab_size: int
    context: int
    max_prompt_tokens: int
    max_n: int
    max_prompts: int
    max_stop: int
    max_stop_chars: int
    max_top_logprobs: int
    max_logit_bias: int
    max_messages: int

    @classmethod
    def of(cls, config: Config, vocab_size: int, context: int) -> Limits:
        return cls(
            vocab_size=vocab_size,
            context=context,
            max_prompt_tokens=min(config.max_prompt_tokens or context, context),
            max_n=config.max_n,
            max_prompts=config.max_prompts,
            max_stop=config.max_stop,
            max_stop_chars=config.max_stop_chars,
            max_top_logprobs=config.max_top_logprobs,
            max_logit_bias=config.max_logit_bias,
            max_messages=config.max_messages,
        )


def model_defaults(generation_config: Mapping[str, Any]) -> Params:
    """The model's own sampling defaults, where they are sound; OpenAI's elsewhere."""
    found = {
        name: generation_config[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if type(generation_config.get(name)) in (int, float)
    }
    wide = Limits(1, 1, 1, 1, 1, 0, 0, 0, 0, 0)
    for name in list(found):
        try:
            check(replace(Params(), **{name: found[name]}), wide)
        except InvalidRequest:
            del found[name]
    return replace(Params(), **found)


def check(params: Params, limits: Limits) -> None:
    """Raises InvalidRequest naming the first field that is out of bounds, and its bounds."""
    _between("n", params.n, 1, limits.max_n)
    _between("temperature", params.temperature, 0, 2)
    _between("top_p", params.top_p, 0, 1, open_low=True)
    _between("top_k", params.top_k, -1, MAX_TOP_K)
    _between("min_p", params.min_p, 0, 1)
    _between("repetition_penalty", params.repetition_penalty, 0, 10, open_low=True)
    _between("presence_penalty", params.presence_penalty, -2, 2)
    _between("frequency_penalty", params.frequency_penalty, -2, 2)
    if params.seed is not None:
        _between("seed", params.seed, -(2**63), MAX_SEED)
    if params.max_tokens is not None:
        _between("max_tokens", params.max_tokens, 0 if params.echo else 1, MAX_COUNT)
    _between("min_tokens", params.min_tokens, 0, limits.context)
    for name, top in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if top is not None:
            _between(name, top, 0, limits.max_top_logprobs)
    _check_lists(params, limits)
    _check_retention(params.retention)
    if params.max_tokens == 0 and params.n != 1:
        raise InvalidRequest("max_tokens 0 scores a prompt, once", field="n", limit="1")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens is more than max_tokens", field="min_tokens", limit="<= max_tokens")


def _check_retention(hint: Retention) -> None:
    if len(hint.session) > MAX_SESSION_CHARS:
        raise InvalidRequest(
            "the session's name is too long", field="cache_retention.session", limit=f"{MAX_SESSION_CHARS} characters"
        )
    _between("cache_retention.priority", hint.priority, -MAX_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY)
    _between("cache_retention.ttl_ms", hint.ttl_ms, 0, MAX_TTL_MS)


def wire_retention(hint: Retention, salt: bytes) -> common_pb2.Retention:
    """salt: the call's effective one, so that two tenants' sessions of one name are two, and a worker reads no name. A
    raised priority ends with its time."""
    session = hmac.new(salt, hint.session.encode(), hashlib.sha256).hexdigest() if hint.session else ""
    ttl_ms = hint.ttl_ms or (IN_MEMORY_TTL_MS if hint.priority > 0 else 0)
    return common_pb2.Retention(session=session, priority=hint.priority, ttl_ms=ttl_ms)


def _check_lists(params: Params, limits: Limits) -> None:
    if len(params.stop) > limits.max_stop:
        raise InvalidRequest("too many stop strings", field="stop", limit=f"{limits.max_stop} entries")
    for text in params.stop:
        if not text:
            raise InvalidRequest("a stop string is empty", field="stop", limit="1 character")
        if len(text) > limits.max_stop_chars:
            raise InvalidRequest("a stop string is too long", field="stop", limit=f"{limits.max_stop_chars} characters")
    if len(params.stop_token_ids) > limits.max_stop:
        raise InvalidRequest("too many stop tokens", field="stop_token_ids", limit=f"{limits.max_stop} entries")
    check_tokens("stop_token_ids", params.stop_token_ids, limits)
    if len(params.logit_bias) > limits.max_logit_bias:
        raise InvalidRequest("too many biases", field="logit_bias", limit=f"{limits.max_logit_bias} entries")
    check_tokens("logit_bias", [token for token, _ in params.logit_bias], limits)
    for _, bias in params.logit_bias:
        _between("logit_bias", bias, -100, 100)


def check_tokens(name: str, tokens: list[int] | tuple[int, ...], limits: Limits) -> None:
    """Raises InvalidRequest unless every id is in the vocabulary."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
        raise InvalidRequest(
            f"{name} holds a token id outside the vocabulary", field=name, limit=f"0..{limits.vocab_size - 1}"
        )


def check_prompt(tokens: list[int], limits: Limits, field: str = "prompt") -> None:
    """An empty prompt, a foreign token or one that leaves no room for an answer never reaches a worker."""
    if not tokens:
        raise InvalidRequest("the prompt is empty", field=field, limit="at least 1 token")
    if len(tokens) >= limits.context or len(tokens) > limits.max_prompt_tokens:
        raise too_long(limits, field, len(tokens))
    check_tokens(field, tokens, limits)


def too_long(limits: Limits, field: str, count: int | None = None) -> InvalidRequest:
    most = min(limits.context - 1, limits.max_prompt_tokens)
    what = "the prompt is too long" if count is None else f"the prompt has {count} tokens"
    return InvalidRequest(
        f"{what}; this model's context is {limits.context} tokens and a prompt may have {most}",
        reason="context_length_exceeded",
        field=field,
        limit=f"{most} tokens",
    )


_NAMES = [field.name for field in fields(Params)]
_FIELDS = attrgetter(*_NAMES)
_MAX_TOKENS, _MIN_TOKENS, _SEED = (_NAMES.index(name) for name in ("max_tokens", "min_tokens", "seed"))


def clamp(params: Params, prompt_len: int, limits: Limits) -> Params:
    """max_tokens as it can be honoured: at most the context's room, which is also the default.

    A seed is drawn here when none was given, so that every attempt at the request samples alike.
    """
    room = limits.context - prompt_len
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed % (MAX_SEED + 1)
    values = list(_FIELDS(params))  # what dataclasses.replace does, in a third of its time
    values[_MAX_TOKENS], values[_MIN_TOKENS], values[_SEED] = wanted, min(params.min_tokens, wanted), seed
    return Params(*values)


def sampling(params: Params, eos: tuple[int, ...]) -> common_pb2.Sampling:
    """The wire form for workers; `params` went through clamp()."""
    assert params.max_tokens is not None
    assert params.seed is not None
    stop_ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos)
    scored = params.echo and params.logprobs is not None
    prompt_top = max(params.prompt_logprobs or 0, (params.logprobs or 0) if scored else 0)
    return common_pb2.Sampling(
        temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[common_pb2.LogitBias(token=token, bias=bias) for token, bias in params.logit_bias],
        seed=params.seed,
        max_tokens=max(params.max_tokens, 1),  # scoring a prompt (echo, max_tokens 0) still samples one, unseen
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(set(stop_ids)),
        logprobs=params.logprobs is not None,
        top_logprobs=params.logprobs or 0,
        prompt_logprobs=scored or params.prompt_logprobs is not None,
        prompt_top_logprobs=prompt_top,
    )


def _between(name: str, given: float, low: float, high: float, *, open_low: bool = False) -> None:
    """NaN fails every comparison, so it is refused here too; bounds are finite, so infinities are."""
    inside = (low < given if open_low else low <= given) and given <= high
    if not inside:
        bound = f"({low}, {high}]" if open_low else f"[{low}, {high}]"
        raise InvalidRequest(f"{name} is out of bounds", field=name, limit=bound)
