"""The OpenAI API: completions of token ids or text, chats of text, as streams of server-sent events."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from bench.load.plan import Tokens, Turn
from bench.load.results import FAILED, PARTS, REFUSED
from bench.load.target import Address, Answer, Card, Unanswered
from runtime.errors import InvalidRequest, PdserveError, Unauthenticated, WorkerLost

LOOK_S = 10.0
KEEP_S = 3.0
"""An idle connection is not used again after this. Servers close theirs after 5 s or more, and what is sent at that
moment fails."""

_DATA, _DONE = b"data:", b"[DONE]"
_KINDS = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Of what a delta of a chat may carry: all of it is made of tokens that usage counts."""

_LOST = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)


class HttpTarget:
    def __init__(self, address: Address, session: aiohttp.ClientSession, base: str) -> None:
        self._address, self._session, self._base = address, session, base
        self._url = f"{base}/{'chat/completions' if address.chat else 'completions'}"
        self._common: dict[str, Any] = {
            "model": address.model,
            "temperature": address.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for key, wanted in (
            ("ignore_eos", address.ignore_eos),
            ("return_token_ids", address.token_ids),
            ("return_ledger", address.ledger),
        ):
            if wanted:
                self._common[key] = True

    @classmethod
    @asynccontextmanager
    async def opened(cls, address: Address) -> AsyncIterator[HttpTarget]:
        base = _base(address.address)
        headers = {"Content-Type": "application/json"}
        if address.api_key:
            headers["Authorization"] = f"Bearer {address.api_key}"
        tls = _tls(address) if base.startswith("https") else True
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S, ssl=tls)
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        ) as session:
            yield cls(address, session, base)

    async def cards(self) -> list[Card]:
        try:
            async with asyncio.timeout(LOOK_S), self._session.get(f"{self._base}/models") as reply:
                data = await reply.read()
        except (*_LOST, TimeoutError) as exc:
            raise WorkerLost(f"no server answers at {self._base}") from exc
        if reply.status in (401, 403):
            raise Unauthenticated(f"the server refuses the key ({_reason(reply.status, data)})", field="api_key")
        try:
            return [_card(one) for one in orjson.loads(data)["data"]]
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise PdserveError(f"what answers at {self._base} is no OpenAI API: /models is {reply.status}") from exc

    def request(self, turn: Turn, tokens: Tokens, key: str) -> Any:
        body = dict(self._common)
        if self._address.chat:
            body["messages"] = [{"role": "user", "content": turn.text}]
        else:
            body["prompt"] = turn.text or tokens
        if turn.output:
            body["max_tokens"] = turn.output
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), key

    async def ask(self, request: Any, answer: Answer) -> None:
        data, key = request
        try:
            async with self._session.post(self._url, data=data, headers={"x-session-id": key}) as reply:
                if reply.status != 200:
                    raise Unanswered(REFUSED, _reason(reply.status, await reply.read()))
                await self._read(reply.content, answer)
        except aiohttp.ClientConnectorError as exc:
            raise Unanswered(FAILED, "unreachable") from exc
        except _LOST as exc:
            raise Unanswered(FAILED, "connection_lost") from exc

    async def _read(self, content: aiohttp.StreamReader, answer: Answer) -> None:
        kept = b""
        done = False
        async for data in content.iter_any():
            *lines, kept = (kept + data).split(b"\n")
            for line in lines:
                text = _said(line)
                if text == _DONE:
                    done = True
                elif text:
                    _take(text, answer)
        if not done and _said(kept) != _DONE:
            raise Unanswered(FAILED, "stream_lost")


def _said(line: bytes) -> bytes:
    """A line of a stream without its name; b"" for what is no data."""
    return line[len(_DATA) :].strip() if line.startswith(_DATA) else b""


def _take(text: bytes, answer: Answer) -> None:
    """One event of a stream, from a server of any make: what is none ends its request, and nothing else."""
    try:
        event = orjson.loads(text)
        if error := event.get("error"):
            reason = error.get("code") or error.get("type") if isinstance(error, dict) else error
            raise Unanswered(FAILED, str(reason or "error")[:80])
        for choice in event.get("choices") or ():
            _choice(choice, answer)
        if usage := event.get("usage"):
            _usage(usage, answer)
        if ledger := event.get("ledger"):
            answer.parts = tuple(float(ledger[name]) for name in PARTS)
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise Unanswered(FAILED, "not_understood") from exc


def _choice(choice: dict[str, Any], answer: Answer) -> None:
    tokens, delta = choice.get("token_ids") or (), choice.get("delta") or {}
    text = choice.get("text")
    silent = text == "" and choice.get("finish_reason") is None  # a token without a text, or with a part of a character
    if tokens or text or silent or any(delta.get(kind) for kind in _KINDS):
        answer.chunk()
        answer.tokens += tokens
        answer.output += len(tokens) or 1


def _usage(usage: dict[str, Any], answer: Answer) -> None:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    counts = (usage["prompt_tokens"], usage["completion_tokens"], -1 if cached is None else cached)
    if any(type(count) is not int for count in counts):
        raise TypeError("a count of tokens is a whole number")
    answer.prompt, answer.output, answer.cached = counts


def _card(one: dict[str, Any]) -> Card:
    ours = one.get("owned_by") == "pdserve"
    return Card(str(one["id"]), int(one.get("max_model_len") or 0), int(one.get("vocab_size") or 0), ours)


def _reason(status: int, data: bytes) -> str:
    """The status, and the code of an error body in OpenAI's shape."""
    try:
        error = orjson.loads(data)["error"]
        text = str(error.get("code") or error.get("type") or "")
    except (ValueError, TypeError, KeyError, AttributeError):
        text = ""
    return f"{status} {text[:80]}".strip()


def _base(url: str) -> str:
    parts = urlsplit(url)
    try:
        fine = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fine = False
    if not fine or parts.query or parts.fragment:
        raise InvalidRequest(f"{url} is no address of a server", field="url", limit="http://HOST:PORT[/v1]")
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def _tls(address: Address) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=address.tls_ca or None)
        if address.tls_cert:
            context.load_cert_chain(address.tls_cert, address.tls_key or None)
    except (OSError, ssl.SSLError) as exc:
        raise InvalidRequest("the TLS files cannot be read", field="tls_ca") from exc
    return context
