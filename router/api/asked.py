"""A request as the generating endpoints see it, however it came in, and the way back to its client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from aiohttp import HttpVersion11, web

from router.admission.tenants import Tenant
from router.api import answer, entity


class Asked(Protocol):
    """headers: looked up by names in lower case. plain: the answer may be written by us (see `answer`), to
    transport(); if not, it begins with opened(). chunks: its HTTP knows chunked bodies."""

    @property
    def request_id(self) -> str: ...

    @property
    def tenant(self) -> Tenant: ...

    @property
    def plain(self) -> bool: ...

    @property
    def chunks(self) -> bool: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    async def body(self, max_bytes: int) -> bytes:
        """Whole, in time, within its bound. Raises InvalidRequest and PayloadTooLarge."""
        ...

    def transport(self) -> asyncio.Transport:
        """For the whole answer, once: what is refused after that cannot be answered any more, and ends the connection.
        Raises ConnectionResetError then, and when the client is gone."""
        ...

    def written(self) -> web.StreamResponse | None:
        """What a handler returns when its answer is on the transport; None where nobody asks."""
        ...

    async def drained(self) -> None:
        """A client that does not read is waited for."""
        ...

    async def opened(self, response: web.StreamResponse) -> asyncio.Transport:
        """Send the head of an answer that we do not write. Raises ConnectionResetError."""
        ...


class ServedRequest:
    """One that the server library has read."""

    __slots__ = ("_request", "begun", "chunks", "plain", "request_id", "tenant")

    def __init__(self, request: web.Request, request_id: str, tenant: Tenant) -> None:
        self._request = request
        self.begun = False
        self.request_id = request_id
        self.tenant = tenant
        self.plain = request.version == HttpVersion11 and request.keep_alive
        self.chunks = request.version >= HttpVersion11

    @property
    def headers(self) -> Mapping[str, str]:
        return self._request.headers

    async def body(self, max_bytes: int) -> bytes:
        return await entity.read(self._request, max_bytes)

    def transport(self) -> asyncio.Transport:
        self.begun = answer.once(self.begun)
        return answer.open_transport(self._request.transport)

    def written(self) -> web.StreamResponse:
        return answer.Written(self._request)

    async def drained(self) -> None:
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size():
            await self._request.writer.drain()

    async def opened(self, response: web.StreamResponse) -> asyncio.Transport:
        writer = await response.prepare(self._request)
        if writer is None:
            raise ConnectionResetError("the client is gone")
        writer.send_headers()
        return self.transport()
