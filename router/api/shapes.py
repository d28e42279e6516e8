"""OpenAI's JSON shapes: built from plain values, no I/O."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from protos.v1 import common_pb2
from router.request import Outcome
from router.text.codec import Codec
from router.text.progress import STOP, Finish
from runtime.errors import PdserveError

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
TYPES |= {413: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error"}
MAX_MESSAGE = 1024


def error_body(error: PdserveError) -> dict[str, Any]:
    """The body of every error answer, under 64 KB whatever the client sent."""
    message = error.message[:MAX_MESSAGE]
    if error.limit:
        message = f"{message} (limit: {error.limit[:MAX_MESSAGE]})"
    kind = TYPES.get(error.row.http_status, "server_error")
    return {"error": {"message": message, "type": kind, "param": error.field[:256] or None, "code": error.reason}}


def finish_reason(finish: Finish | None) -> str | None:
    if finish is None:
        return None
    return "stop" if finish.reason == STOP else "length"


def usage(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Summed over the prompts of a call."""
    prompt = completion = cached = 0
    for outcome in outcomes:
        prompt += outcome.prompt_tokens
        completion += outcome.completion_tokens
        cached += outcome.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def token_name(codec: Codec, token: int) -> str:
    """A token's text; the bytes of a part of a character as OpenAI spells them."""
    text, raw = codec.piece(token)
    if "\ufffd" in text and raw != text.encode():
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def chat_logprobs(codec: Codec, entries: Sequence[common_pb2.TokenLogprob]) -> list[dict[str, Any]]:
    return [
        _chat_entry(codec, entry.token, entry.logprob)
        | {"top_logprobs": [_chat_entry(codec, top.token, top.logprob) for top in entry.top]}
        for entry in entries
    ]


def _chat_entry(codec: Codec, token: int, logprob: float) -> dict[str, Any]:
    text, raw = codec.piece(token)
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    """JSON has no -Infinity: OpenAI's floor."""
    return max(logprob, -9999.0)


class CompletionLogprobs:
    """The legacy shape of /v1/completions: parallel lists, with offsets of each token in the text."""

    def __init__(self, codec: Codec, top: int, *, skip_special: bool, offset: int = 0) -> None:
        self._codec = codec
        self._top = top
        self._skip_special = skip_special
        self._chars = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def take(self, entries: Iterable[common_pb2.TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """The lists for these tokens, after those taken before. first: a token that has no log-probability (the
        prompt's first)."""
        tokens: list[str] = []
        scores: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if first is not None:
            self._add(first, tokens, offsets)
            scores.append(None)
            tops.append(None)
        for entry in entries:
            self._add(entry.token, tokens, offsets)
            scores.append(finite(entry.logprob))
            alternatives = {token_name(self._codec, top.token): finite(top.logprob) for top in entry.top[: self._top]}
            alternatives.setdefault(token_name(self._codec, entry.token), finite(entry.logprob))
            tops.append(alternatives)
        return {"tokens": tokens, "token_logprobs": scores, "top_logprobs": tops, "text_offset": offsets}

    def _add(self, token: int, tokens: list[str], offsets: list[int]) -> None:
        tokens.append(token_name(self._codec, token))
        offsets.append(self._offset)
        if not (self._skip_special and self._codec.is_special(token)):
            self._offset += len(self._chars.decode(self._codec.piece(token)[1]))


def prompt_logprobs(codec: Codec, entries: Sequence[common_pb2.TokenLogprob]) -> list[dict[str, Any] | None]:
    """vLLM's shape: one entry per prompt token, null for the first, token id -> scores."""
    found: list[dict[str, Any] | None] = [None]
    for entry in entries:
        scores = {
            str(top.token): {
                "logprob": finite(top.logprob),
                "rank": rank,
                "decoded_token": codec.piece(top.token)[0],
            }
            for rank, top in enumerate(entry.top, start=1)
        }
        scores[str(entry.token)] = {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": codec.piece(entry.token)[0],
        }
        found.append(scores)
    return found
