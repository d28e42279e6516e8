"""Streams of servers of other makes: what they say is measured, and what is no stream costs its request alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from bench.load.drive import Drive
from bench.load.plan import Plan, Turn
from bench.load.results import COMPLETED, FAILED, Result
from bench.load.target import Address, Answer, Unanswered, opened

LOOP = Plan("random", "closed", requests=3, concurrency=1, input=(5, 5), output=(4, 4), vocab=50)
DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(said: str) -> bytes:
    return event({"choices": [{"index": 0, "text": said}]})


def delta(**said: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": said}]})


def usage(prompt: Any = 5, output: Any = 2, **more: Any) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **more}})


@asynccontextmanager
async def server(first: bytes, others: bytes, *, piece: int = 1 << 20) -> AsyncIterator[str]:
    """Answers its first request with these bytes, and all others with those, so many at a time."""
    left = [first]

    async def completions(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        body = left.pop() if left else others
        for at in range(0, len(body), piece):
            await reply.write(body[at : at + piece])
        return reply

    app = web.Application()
    app.add_routes([web.post("/v1/completions", completions), web.post("/v1/chat/completions", completions)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def asked(body: bytes, *, piece: int = 1 << 20, chat: bool = False) -> Answer:
    answer = Answer(time.perf_counter)
    async with (
        server(body, b"", piece=piece) as url,
        opened(Address("http", url, "m", chat=chat, token_ids=True)) as target,
    ):
        await target.ask(target.request(Turn(0, (), 4, "hi"), np.zeros(0, np.uint32), "k"), answer)
    return answer


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"data: {no json\n\n" + DONE, "not_understood"),
        (event([1, 2]) + DONE, "not_understood"),
        (event("words") + DONE, "not_understood"),
        (event({"choices": ["a"]}) + DONE, "not_understood"),
        (event({"choices": 3}) + DONE, "not_understood"),
        (event({"choices": [{"token_ids": 3}]}) + DONE, "not_understood"),
        (text("x") + usage(None) + DONE, "not_understood"),
        (text("x") + usage("5") + DONE, "not_understood"),
        (text("x") + usage(prompt_tokens_details={"cached_tokens": "all"}) + DONE, "not_understood"),
        (text("x") + event({"usage": {}, "ledger": {"queue_s": 1}}) + DONE, "not_understood"),
        (event({"error": "out of memory"}), "out of memory"),
        (event({"error": {"code": 400}}), "400"),
        (event({"error": {"message": "no"}}), "error"),
        (b"<html>", "stream_lost"),
        (text("x") + b'data: {"choi', "stream_lost"),
        (b"", "stream_lost"),
    ],
)
async def test_what_is_no_answer_fails_its_request_and_the_next_ones_go_on(body: bytes, reason: str) -> None:
    async with (
        server(body, text("x") + usage() + DONE) as url,
        opened(Address("http", url, "m", token_ids=True)) as target,
    ):
        drive = Drive(target, LOOP, 0, 1, 20, time.perf_counter)
        await drive.run(asyncio.Event())
    assert [(one.state, one.reason) for one in drive.results] == [(FAILED, reason), *[(COMPLETED, "")] * 2]


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]\n", b"data: [DONE]"])
async def test_the_last_word_ends_an_answer_with_or_without_a_line_of_its_own(end: bytes) -> None:
    assert (await asked(text("x") + usage() + end)).output == 2


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
async def test_an_answer_is_the_same_however_its_bytes_come(piece: int) -> None:
    """With comments, names of events and the line ends of another system in between."""
    body = (
        b": ping\n\nevent: message\n"
        + text("Gr\u00fc\u00dfe")
        + event({"choices": [{"token_ids": [7, 8]}]})
        + usage()
        + DONE
    )
    for stream in (body, body.replace(b"\n", b"\r\n")):
        answer = await asked(stream, piece=piece)
        assert (len(answer.gaps), answer.tokens) == (1, [7, 8])
        assert (answer.prompt, answer.output, answer.cached) == (5, 2, -1)


async def test_a_token_without_a_text_is_a_token_and_the_end_of_an_answer_is_none() -> None:
    """Part of a character, or a special token: the first one, too."""
    end = event({"choices": [{"text": "", "finish_reason": "length"}]})
    answer = await asked(text("") + text("") + text("x") + end + DONE)
    assert (answer.output, len(answer.gaps)) == (3, 2)


async def test_all_a_model_says_counts_be_it_thought_or_a_call() -> None:
    """The first token is the first that usage counts: thinking, too."""
    body = delta(role="assistant", content="") + delta(reasoning_content="hm") + delta(reasoning="hm")
    body += delta(tool_calls=[{"index": 0}]) + delta(content="yes") + delta(content=None) + usage(output=9) + DONE
    answer = await asked(body, chat=True)
    assert (len(answer.gaps), answer.output) == (3, 9)


async def test_a_server_that_says_null_says_nothing() -> None:
    nothing = event({"choices": [{"text": None, "delta": None, "token_ids": None}], "usage": None, "error": None})
    for details in (None, {}, {"cached_tokens": None}):
        answer = await asked(nothing + text("x") + usage(prompt_tokens_details=details) + DONE)
        assert (answer.output, answer.cached, answer.gaps) == (2, -1, [])
    assert (await asked(usage(prompt_tokens_details={"cached_tokens": 3}) + DONE)).cached == 3


async def test_several_tokens_in_a_chunk_are_one_gap_and_all_of_them_tokens() -> None:
    """TPOT is over tokens, ITL over chunks."""
    body = event({"choices": [{"token_ids": [1, 2]}]}) + event({"choices": [{"token_ids": [3, 4, 5]}]}) + DONE
    answer = await asked(body)
    assert (answer.output, len(answer.gaps)) == (5, 1)
    one = Result(0, COMPLETED, first=1.0, last=3.0, output=answer.output)
    assert one.tpot == 0.5


async def test_an_answer_that_breaks_off_is_none() -> None:
    with pytest.raises(Unanswered):
        await asked(text("x") + usage())
