"""What is taken for a plain request is one to the server library, too, and the same one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import HttpVersion11
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.api.plain import read_head

BODY = b'{"prompt": "x"}'
LINES = [b"POST /v1/completions HTTP/1.1", b"Host: a", b"Content-Type: application/json", b"Content-Length: 15"]
PLAIN = b"\r\n".join([*LINES, b"", b""])


def head(*more: bytes, first: bytes = LINES[0], without: bytes = b"\0") -> bytes:
    lines = [first, *(line for line in LINES[1:] if not line.startswith(without)), *more]
    return b"\r\n".join([*lines, b"", b""])


def test_a_plain_head_is_read_whole() -> None:
    found = read_head(head(b"Authorization:Bearer k  ", b"X-Empty:", b"Connection: Keep-Alive") + BODY)

    assert found is not None
    assert (found.method, found.path, found.length) == ("POST", "/v1/completions", 15)
    assert found.size == len(head(b"Authorization:Bearer k  ", b"X-Empty:", b"Connection: Keep-Alive"))
    assert found.headers["authorization"] == "Bearer k"
    assert found.headers["x-empty"] == ""
    get = read_head(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
    assert get is not None
    assert get.length == 0


@pytest.mark.parametrize(
    "data",
    [
        PLAIN[:-1],
        head(b"Transfer-Encoding: chunked"),
        head(b"transfer-encoding: identity"),
        head(b"Content-Length: 15"),
        head(b"content-length: 16"),
        head(b"Content-Length: +15", without=b"Content-Length"),
        head(b"Content-Length: 15, 15", without=b"Content-Length"),
        head(b"Content-Length: 1_5", without=b"Content-Length"),
        head(b"Content-Length: 0x0f", without=b"Content-Length"),
        head(b"Content-Length: ", without=b"Content-Length"),
        head(b"Content-Length: 99999999999", without=b"Content-Length"),
        head(b"Content-Length : 15", without=b"Content-Length"),
        head(b"Content_Length: 15"),
        head(b"Content-Length: \xb2\xb3", without=b"Content-Length"),
        head(without=b"Content-Length"),
        head(without=b"Host"),
        head(b"Host: b"),
        head(b"Host:", without=b"Host"),
        head(b"Connection: close"),
        head(b"Connection: keep-alive, upgrade"),
        head(b"Upgrade: websocket"),
        head(b"Proxy-Connection: close"),
        head(b"Expect: 100-continue"),
        head(b"Content-Encoding: gzip"),
        head(b"Content-Type: text/plain"),
        head(b" folded: yes"),
        head(b"\tfolded"),
        head(b"X: a\tb"),
        head(b"X: a\rY: b"),
        head(b"X: a\nTransfer-Encoding: chunked"),
        head(b"X: \0"),
        head(b"X: \xff"),
        head(b": x"),
        head(b"no colon"),
        head(*(b"X-%d: y" % number for number in range(70))),
        head(b"X: " + b"y" * 9000),
        head(first=b"post /v1/completions HTTP/1.1"),
        head(first=b"PUT /v1/completions HTTP/1.1"),
        head(first=b"GET /v1/completions HTTP/1.1"),
        head(first=b"POST /v1/completions HTTP/1.0"),
        head(first=b"POST /v1/completions HTTP/1.1 "),
        head(first=b"POST  /v1/completions HTTP/1.1"),
        head(first=b"POST\t/v1/completions HTTP/1.1"),
        head(first=b"\r\nPOST /v1/completions HTTP/1.1"),
        PLAIN.replace(b"\r\n", b"\n"),
        PLAIN.replace(b"Host: a\r\n", b"Host: a\n"),
    ],
)
def test_whatever_can_be_read_in_another_way_is_not_plain(data: bytes) -> None:
    assert read_head(data + BODY) is None


def as_the_library_reads(data: bytes) -> Any:
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(
            BaseProtocol(loop), loop, 2**16, max_line_size=8 << 10, max_field_size=16 << 10, auto_decompress=False
        )
        messages, upgraded, tail = parser.feed_data(data)
        assert (upgraded, tail) == (False, b"")
        return messages
    finally:
        loop.close()


PIECES = [
    b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b"\0", b"\xe9", b"0", b"5", b"+", b"-", b"_", b",", b";", b"/", b"?",
    b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"Host: b\r\n", b"HTTP/1.0",
    b"http://h", b"GET ", b"Upgrade: h2c\r\n", b"X: y\r\n", b"\r\n\r\n",
]  # fmt: skip


@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(PLAIN)), st.integers(0, 3), st.sampled_from([b"", *PIECES])),
        min_size=1,
        max_size=3,
    )
)
@example(edits=[(5, 0, b"?")])
@settings(max_examples=400, deadline=None)
def test_a_damaged_head_that_is_still_plain_is_the_same_to_the_library(edits: list[tuple[int, int, bytes]]) -> None:
    data = PLAIN
    for place, cut, piece in edits:
        data = data[:place] + piece + data[place + cut :]
    found = read_head(data)
    if found is None or not found.path.startswith("/"):  # only paths that are known go on
        return

    ((message, payload),) = as_the_library_reads(data[: found.size] + b"b" * found.length)

    assert (message.method, message.path, message.version) == (found.method, found.path, HttpVersion11)
    assert (message.should_close, message.upgrade, message.chunked) == (False, False, False)
    assert {name.lower(): value for name, value in message.headers.items()} == dict(found.headers)
    assert payload.is_eof()
    assert payload.total_bytes == found.length
