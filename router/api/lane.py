"""The short way of a plain request (see `plain`) through a connection of the server library.

aiohttp makes a dozen objects, two tasks and four wake-ups of a request, a sixth of what a short one costs altogether.
Here it is one object and one task. Only a plain request to an endpoint that has a handler here goes this way, and only
on a connection where the library waits for a request and its parser stands between two; whatever else comes is the
library's, byte for byte. For that the bytes it was given are counted: a plain head says how many belong to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from router.admission.tenants import OPEN, Tenant
from router.api import answer
from router.api.plain import Head
from runtime.errors import InvalidRequest, PayloadTooLarge
from runtime.ids import new_request_id

BODY_TIMEOUT_S = 60.0


class Taken:
    """A request of the lane (asked.Asked). Its body may still be on its way."""

    __slots__ = ("_begun", "_come", "_protocol", "_waiter", "_wanted", "headers", "missing", "request_id", "tenant")

    plain = True
    chunks = True

    def __init__(self, protocol: web.RequestHandler, head: Head, start: bytes) -> None:
        """start: what has come of the body."""
        self.headers: Mapping[str, str] = head.headers
        self.request_id = new_request_id()
        self.tenant: Tenant = OPEN
        self.missing = head.length - len(start)
        self._come: bytes | bytearray = start
        self._wanted = True
        self._begun = False
        self._protocol = protocol
        self._waiter: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> bytes:
        """More bytes of the connection. Returns what comes after the body."""
        part = data[: self.missing]
        if self._wanted:
            if type(self._come) is bytes:  # in one piece, however small the packets are
                self._come = bytearray(self._come)
            self._come += part
        self.missing -= len(part)
        if not self.missing and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return data[len(part) :]

    def discard(self) -> None:
        """It was answered before all of it had come: nobody reads the rest."""
        self._wanted = False
        self._come = b""

    async def body(self, max_bytes: int) -> bytes:
        """Raises InvalidRequest when it does not come, PayloadTooLarge at once for one that will be."""
        if self.missing + len(self._come) > max_bytes:
            raise PayloadTooLarge("the body is too large", field="body", limit=f"{max_bytes} bytes")
        if self.missing:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await self._waiter
            except TimeoutError as exc:
                raise InvalidRequest("the body did not come in time", reason="request_timeout", field="body") from exc
        whole, self._come = bytes(self._come), b""
        return whole

    def transport(self) -> asyncio.Transport:
        self._begun = answer.once(self._begun)
        return answer.open_transport(self._protocol.transport)

    def written(self) -> None:
        return None

    async def drained(self) -> None:
        transport = self._protocol.transport
        if transport is not None and transport.get_write_buffer_size():
            await self._protocol._drain_helper()

    async def opened(self, response: web.StreamResponse) -> asyncio.Transport:
        raise AssertionError("its answers are ours to write")


Endpoint = Callable[[Taken], Awaitable[None]]
"""Answers, errors included. Raises ConnectionError when the client is gone or must go."""
