"""The HTTP bodies: parsed strictly, unknown and unsupported fields refused by name, turned into plain values.

Every field is honoured or refused. A refusal names the field and never repeats what the client sent. Bounds that depend
on the configuration are in params.check(), which gRPC shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from router.api.front import Chat, Prompt
from router.params import IN_MEMORY_TTL_MS, MAX_TTL_MS, Limits, Params, Retention
from router.text.codec import Message, plain_content
from runtime.errors import InvalidRequest, Unsupported

MAX_COMPLETION_LOGPROBS = 5
MAX_TEXT_FIELD = 256
MAX_FIELD_NAME = 64
ROLES = ("system", "user", "assistant")

UNSUPPORTED = frozenset({
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "audio", "modalities", "prediction",
    "reasoning_effort", "reasoning", "service_tier", "web_search_options", "verbosity", "store", "metadata", "suffix",
    "chat_template", "chat_template_kwargs", "documents", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structured_outputs", "use_beam_search", "length_penalty", "bad_words", "allowed_token_ids",
    "logits_processors", "truncate_prompt_tokens", "mm_processor_kwargs", "continue_final_message", "priority",
    "kv_transfer_params", "safety_identifier", "vllm_xargs",
})  # fmt: skip


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False


class ResponseFormat(_Body):
    type: Literal["text"]


class CacheRetention(_Body):
    session: str = ""
    priority: int = 0
    ttl_ms: int = 0


class _Generation(_Body):
    """Fields of both generating endpoints. None = not given."""

    model: str | None = None
    n: int = 1
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = Field(default_factory=dict)  # a default value would be copied deeply, in Python
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str = ""
    cache_salt: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_retention: CacheRetention | None = None
    return_ledger: bool = False
    return_token_ids: bool = False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(_Generation):
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True


class CompletionBody(_Generation):
    prompt: Any
    logprobs: int | None = None
    echo: bool = False


class RenderChatBody(_Body):
    model: str | None = None
    messages: list[Any]
    add_generation_prompt: bool = True


class RenderCompletionBody(_Body):
    model: str | None = None
    prompt: Any


class DerenderBody(_Body):
    """The list is checked by token_list()."""

    model: str | None = None
    token_ids: Any
    skip_special_tokens: bool = True


class DetokenizeBody(_Body):
    model: str | None = None
    tokens: Any
    skip_special_tokens: bool = False


class TokenizeBody(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


B = TypeVar("B", bound=_Body)


def parse(raw: bytes, body: type[B]) -> B:
    """Raises InvalidRequest or Unsupported, naming the field; never anything else."""
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest("the body is not valid JSON", reason="invalid_json", field="body") from exc
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object", field="body")
    given = {name: value for name, value in content.items() if value is not None}
    _refuse_foreign(given, body)
    try:
        return body.model_validate(given)
    except ValidationError as exc:
        raise _first_error(exc) from exc


def _refuse_foreign(given: Mapping[str, Any], body: type[_Body]) -> None:
    known = body.model_fields  # asking for them is not free
    for name in given:
        if name in known:
            continue
        shown = name[:MAX_FIELD_NAME] if name.isidentifier() else "body"
        if name in UNSUPPORTED:
            raise Unsupported(f"{shown} is not supported here", field=shown)
        text = "the body holds an unknown field" + (f": {shown}" if name.isidentifier() else "")
        raise InvalidRequest(text, reason="unknown_field", field=shown)
    response_format = given.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") != "text":
        raise Unsupported("only response_format {type: text} is supported", field="response_format")


def _first_error(exc: ValidationError) -> InvalidRequest:
    """The first of possibly many; the input itself is never part of it."""
    error = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in error["loc"] if isinstance(part, int) or str(part).isidentifier()]
    name = ".".join(path[:3])[:MAX_FIELD_NAME] or "body"
    return InvalidRequest(f"{name}: {error['msg'][:200]}", field=name)


def chat_of(messages: Sequence[Any], add_generation_prompt: bool, limits: Limits) -> Chat:
    """Raises InvalidRequest and Unsupported for roles, contents and keys that are not honoured."""
    if len(messages) > limits.max_messages:
        raise InvalidRequest("there are too many messages", field="messages", limit=f"{limits.max_messages} messages")
    if not messages:
        raise InvalidRequest("there are no messages", field="messages", limit="at least 1")
    return Chat([_message(index, message) for index, message in enumerate(messages)], add_generation_prompt)


def _message(index: int, message: Any) -> Message:
    where = f"messages.{index}"
    if not isinstance(message, dict):
        raise InvalidRequest("a message must be an object", field=where)
    given = {name: value for name, value in message.items() if value is not None}
    if given.get("role") not in ROLES:
        raise InvalidRequest(f"role must be one of {', '.join(ROLES)}", field=f"{where}.role")
    extra = set(given) - {"role", "content", "name"}
    if extra:
        raise Unsupported("a message may hold role, content and name", field=where)
    content = given.get("content")
    if not isinstance(content, str | list):
        raise InvalidRequest("content must be a text or a list of text parts", field=f"{where}.content")
    built: Message = {"role": given["role"], "content": plain_content(content)}
    if "name" in given:
        if not isinstance(given["name"], str) or len(given["name"]) > MAX_TEXT_FIELD:
            raise InvalidRequest(
                "name must be a short text", field=f"{where}.name", limit=f"{MAX_TEXT_FIELD} characters"
            )
        built["name"] = given["name"]
    return built


def prompts_of(value: Any, limits: Limits) -> list[Prompt]:
    """A text, texts, token ids or lists of token ids. Raises InvalidRequest for empty ones of every kind."""
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "prompt must be a text, texts, token ids or lists of token ids, and not empty", field="prompt"
        )
    if all(isinstance(item, str) for item in value):
        _count(value, limits)
        return [_text(item) for item in value]
    if all(isinstance(item, list) for item in value):
        _count(value, limits)
        return [token_list(item, "prompt", limits) for item in value]
    return [token_list(value, "prompt", limits)]


def _count(value: list[Any], limits: Limits) -> None:
    if len(value) > limits.max_prompts:
        raise InvalidRequest("there are too many prompts", field="prompt", limit=f"{limits.max_prompts} prompts")


def _text(value: str) -> str:
    if not value:
        raise InvalidRequest("the prompt is empty", field="prompt", limit="at least 1 token")
    return value


def token_list(value: Any, name: str, limits: Limits) -> list[int]:
    """Real integers inside the vocabulary: no booleans, no floats."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{name} must be a list of token ids, and not empty", field=name)
    if any(type(item) is not int for item in value):
        raise InvalidRequest(f"{name} must hold integers only", field=name)
    if min(value) < 0 or max(value) >= limits.vocab_size:
        raise InvalidRequest(
            f"{name} holds a token id outside the vocabulary", field=name, limit=f"0..{limits.vocab_size - 1}"
        )
    return value


def params_of(body: ChatBody | CompletionBody, defaults: Params) -> Params:
    """`defaults`: the model's own sampling defaults. Raises InvalidRequest for combinations that make no sense."""
    if body.best_of is not None and body.best_of != body.n:
        raise Unsupported("best_of is supported only when equal to n", field="best_of")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", field="prompt_logprobs")
    short("user", body.user)
    short("cache_salt", body.cache_salt)
    chat = isinstance(body, ChatBody)
    return Params(
        n=body.n,
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=int(_or(body.top_k, defaults.top_k)),
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_bias(body.logit_bias),
        seed=body.seed,
        max_tokens=_chat_max_tokens(body) if chat else _completion_max_tokens(body),
        min_tokens=body.min_tokens,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        include_stop=body.include_stop_str_in_output,
        skip_special=body.skip_special_tokens,
        logprobs=_chat_logprobs(body) if isinstance(body, ChatBody) else _completion_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        echo=isinstance(body, CompletionBody) and body.echo,
        return_ledger=body.return_ledger,
        return_token_ids=body.return_token_ids,
        cache_salt=body.cache_salt,
        retention=_retention(body),
        stream=body.stream,
    )


_USUAL_RETENTION = CacheRetention()


def _retention(body: _Generation) -> Retention:
    """OpenAI's two fields, or our one object; each value once."""
    own = body.cache_retention or _USUAL_RETENTION
    if body.prompt_cache_key and own.session:
        raise InvalidRequest("prompt_cache_key and cache_retention.session are one thing", field="prompt_cache_key")
    if body.prompt_cache_retention and own.ttl_ms:
        raise InvalidRequest(
            "prompt_cache_retention and cache_retention.ttl_ms are one thing", field="prompt_cache_retention"
        )
    short("prompt_cache_key", body.prompt_cache_key)
    times = {"in_memory": IN_MEMORY_TTL_MS, "in-memory": IN_MEMORY_TTL_MS, "24h": MAX_TTL_MS}
    ttl_ms = times[body.prompt_cache_retention] if body.prompt_cache_retention else own.ttl_ms
    return Retention(body.prompt_cache_key or own.session, own.priority, ttl_ms)


DEFAULT_COMPLETION_TOKENS = 16


def _completion_max_tokens(body: ChatBody | CompletionBody) -> int | None:
    return DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def _chat_max_tokens(body: ChatBody | CompletionBody) -> int | None:
    assert isinstance(body, ChatBody)
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", field="top_logprobs")
    if not body.logprobs:
        return None
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_CHAT_LOGPROBS:
        raise InvalidRequest("top_logprobs is out of bounds", field="top_logprobs", limit=f"[0, {MAX_CHAT_LOGPROBS}]")
    return top


MAX_CHAT_LOGPROBS = 20


def _completion_logprobs(body: CompletionBody) -> int | None:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_COMPLETION_LOGPROBS:
        raise InvalidRequest("logprobs is out of bounds", field="logprobs", limit=f"[0, {MAX_COMPLETION_LOGPROBS}]")
    return body.logprobs


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise InvalidRequest("logit_bias maps token ids to biases", field="logit_bias")
        found[int(key)] = value
    return tuple(found.items())


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def short(name: str, value: str) -> None:
    if len(value) > MAX_TEXT_FIELD:
        raise InvalidRequest(f"{name} is too long", field=name, limit=f"{MAX_TEXT_FIELD} characters")
