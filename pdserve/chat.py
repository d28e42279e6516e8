"""`pdserve chat`: a conversation on the terminal, streamed. No event loop, so that Ctrl-C works while it reads."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Any, cast

from pdserve.client import Client
from pdserve.results import Delta
from pdserve.status import router_address
from runtime.config import Config
from runtime.errors import PdserveError


def run(config: Config, router: str, api_key: str, *, max_tokens: int, temperature: float) -> None:
    """Until an empty line or the end of input. An error ends the turn, not the conversation; so does Ctrl-C while the
    model speaks (what it said so far is kept)."""
    tls = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    messages: list[dict[str, str]] = []
    with Client(router_address(config, router), api_key=api_key, **tls) as client:
        while text := _read():
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(client, messages, max_tokens, temperature)
            except PdserveError as error:
                print(f"error: {error.line}", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


def _answer(client: Client, messages: list[dict[str, str]], max_tokens: int, temperature: float) -> str:
    parts: list[str] = []
    try:
        with closing(cast(Any, client.chat_stream(messages, max_tokens=max_tokens, temperature=temperature))) as events:
            for event in events:
                if isinstance(event, Delta):
                    parts.append(event.text)
                    print(event.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print()
    return "".join(parts)


def _read() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""
