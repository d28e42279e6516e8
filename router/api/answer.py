"""Answers as bytes on the transport, for the requests that count.

aiohttp builds a response in eight steps, which take longer than choosing the workers, and sends its head by itself. An
answer of ours has a head that is known beforehand: it leaves with the body, or with the first frames of a stream, in
one write. Whatever is not HTTP/1.1 on a connection that goes on is left to aiohttp.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

JSON = "application/json"


def head(content_type: str, headers: Mapping[str, str]) -> bytes:
    """Of a 200, up to the headers that say how long the body is. Names and values are ours, or were compared with
    ours: nothing here repeats what a client sent."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    date = _date(int(time.time()))
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nDate: {date}\r\nServer: pdserve\r\n{lines}".encode()


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


class Written(web.StreamResponse):
    """An answer that aiohttp need not send: it is on its transport already."""

    def __init__(self, request: web.Request) -> None:
        super().__init__()
        self._request = request
        self._keep_alive = True

    @property
    def prepared(self) -> bool:
        """No header can be added any more."""
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """A client that does not read is waited for here: its next request is not looked at before."""
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size():
            await self._request.writer.drain()


def whole(body: bytes, headers: Mapping[str, str]) -> bytes:
    """An answer with a JSON body."""
    return b"%bContent-Length: %d\r\n\r\n%b" % (head(JSON, headers), len(body), body)


def refusal(response: web.Response) -> bytes:
    """An answer that was made for the server library, as it would write it on a connection that goes on; or that ends,
    if the answer says so."""
    body = response.body
    assert isinstance(body, bytes)
    headers = {"Content-Length": str(len(body)), **response.headers, "Date": _date(int(time.time()))}
    if response.keep_alive is False:
        headers["Connection"] = "close"
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"HTTP/1.1 {response.status} {response.reason}\r\n{lines}\r\n".encode() + body


def once(begun: bool) -> bool:
    """An answer begins. Raises ConnectionResetError when it has begun before: a second one in the middle of the first
    would be read as part of it, or as the next request's."""
    if begun:
        raise ConnectionResetError("the answer has begun already")
    return True


def open_transport(transport: asyncio.Transport | None) -> asyncio.Transport:
    """Raises ConnectionResetError when the client is gone."""
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client is gone")
    return transport
