"""The HTTP server's edge: what is refused before any handler runs.

aiohttp answers a malformed request itself, in plain text that repeats what the client sent. Here such an answer has our
JSON body, says 431 for headers over the limit, and repeats nothing. A connection that does not finish its headers is
closed after HEADER_TIMEOUT_S, whatever trickles in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import http_exceptions, web
from aiohttp.http import RawRequestMessage

from router.api.lane import Endpoint, Taken
from router.api.plain import Head, read_head
from router.api.shapes import error_body
from runtime.errors import InvalidRequest

Handler = Callable[[Any], Awaitable[web.StreamResponse]]
Factory = Callable[..., web.BaseRequest]

HEADER_TIMEOUT_S = 75.0
MAX_HEADER_BYTES = 16 << 10
MAX_LINE_BYTES = 8 << 10
MALFORMED = "malformed_request"


class BrokenBody(Exception):
    """The rest of the body is not HTTP. For whoever reads it."""


READ_AHEAD_BYTES = 64 << 10
"""What a client may send behind a request of the lane before it is answered; then reading pauses."""

PARTS_AHEAD = 64
"""As so many parts as it came in: the library answers what is sound before it looks at what is not, as long as they did
not come together."""

LOOK_S = 0.05
"""Between two looks at the connections of a server that leaves."""

_UNKNOWN = -1


class Protocol(web.RequestHandler):
    """One connection. broken: what came last is not HTTP."""

    __slots__ = ("_ahead", "_endpoints", "_owed", "_silent_at", "_taken", "_task", "broken")

    def __init__(self, *args: Any, endpoints: Mapping[str, Endpoint], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.broken = False
        self._endpoints = endpoints
        self._owed = 0  # bytes the library has yet to be given of the request it has begun; _UNKNOWN: who can say
        self._taken: Taken | None = None  # a request of the lane
        self._task: asyncio.Task[None] | None = None  # which answers it
        self._ahead: list[bytearray] = []  # what came behind it
        self._silent_at: float | None = None  # when it was first seen to wait, by a server that leaves

    def data_received(self, data: bytes) -> None:
        """aiohttp takes a body that turns bad for the next request: the handler that waits for it would never hear."""
        if self._taken is not None:
            self._more(self._taken, data)
            return
        if data and self._owed != _UNKNOWN and self._took(data):
            return
        super().data_received(data)
        if self._messages and type(self._messages[-1][0]) is not RawRequestMessage:
            self.broken = True
            if self._current_request is not None and not self._current_request.content.is_eof():
                self._current_request.content.set_exception(BrokenBody())
                self._current_request.content.feed_eof()

    # the lane

    def _took(self, data: bytes) -> bool:
        """Whether this is for the lane. If not, it is given to the library, and known how much of it is to come."""
        if self._owed:
            self._owed = max(self._owed - len(data), _UNKNOWN)
            return False
        head = read_head(data)
        if head is None:
            self._owed = _UNKNOWN
            return False
        total = head.size + head.length
        endpoint = self._endpoints.get(head.path) if head.method == "POST" else None
        if endpoint is None or len(data) > total or not self._waits:
            self._owed = max(total - len(data), _UNKNOWN)
            return False
        self._take(head, data, endpoint)
        return True

    @property
    def _waits(self) -> bool:
        """The library waits for a request, and may."""
        waiter = self._waiter
        return waiter is not None and not waiter.done() and not (self._messages or self._close or self._force_close)

    def _take(self, head: Head, data: bytes, endpoint: Endpoint) -> None:
        assert self._manager is not None
        self._manager.requests_count += 1
        self._request_count += 1
        taken = self._taken = Taken(self, head, data[head.size :])
        self._task = self._loop.create_task(self._answer(taken, endpoint))

    def _more(self, taken: Taken, data: bytes) -> None:
        rest = taken.feed(data) if taken.missing else data
        if rest and len(self._ahead) < PARTS_AHEAD:
            self._ahead.append(bytearray(rest))
        elif rest:
            self._ahead[-1] += rest
        if self._task is None and not taken.missing:
            self._over(True)
        elif sum(map(len, self._ahead)) > READ_AHEAD_BYTES and not self._buffer_paused:
            self._pause_reading_for_buffer()

    async def _answer(self, taken: Taken, endpoint: Endpoint) -> None:
        answered = False
        try:
            await endpoint(taken)
            if taken.missing:  # nobody reads the rest, however long the answer takes to leave
                taken.discard()
            await taken.drained()  # its next request is not looked at before it has read this answer
            answered = True
        except ConnectionError:
            pass
        finally:
            self._task = None
            if answered and taken.missing:
                self._linger(taken)
            else:
                self._over(answered)

    def _linger(self, taken: Taken) -> None:
        """Who was refused in the middle of what it says will not read the answer before it has said it all."""
        self._loop.call_later(self._lingering_time, self._lingered, taken)

    def _lingered(self, taken: Taken) -> None:
        if self._taken is taken:
            self._over(False)

    def _over(self, goes_on: bool) -> None:
        self._taken = None
        if not goes_on or self._close or self._force_close:
            self.force_close()
            return
        self._next_keepalive_close_time = close_at = self._loop.time() + self._keepalive_timeout
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(close_at, self._process_keepalive)
        ahead, self._ahead = self._ahead, []
        if self._buffer_paused:
            self._resume_reading_for_buffer()
        for part in ahead:
            self.data_received(bytes(part))

    def _process_keepalive(self) -> None:
        """The library does not know that a request of the lane is being answered."""
        if self._taken is None:
            super()._process_keepalive()
        else:
            self._keepalive_handle = None  # set again when it has been

    def connection_lost(self, exc: BaseException | None) -> None:
        task = self._task
        super().connection_lost(exc)
        if task is not None:
            task.cancel()
        else:
            self._taken = None

    def close(self) -> None:
        """No further request: a connection that waits for one is closed, a busy one after its answer."""
        waits = self._taken is None and self._waits
        super().close()
        if waits and self.transport is not None:
            self.transport.close()

    def last(self, factory: Factory) -> None:
        """The next request is the last one here: its answer says so. factory: makes it."""
        self._owed = _UNKNOWN  # no more of the lane
        self._request_factory = factory

    def close_silent(self, silence_s: float) -> None:
        """Close if nothing was asked for so long, as seen by those who call this again and again."""
        now = self._loop.time()
        if self._taken is not None or not self._waits:
            self._silent_at = None
        elif self._silent_at is None:
            self._silent_at = now
        elif now - self._silent_at >= silence_s:
            self.close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Wait so long for an answer that is being made, then cut it off."""
        task = self._task
        if task is not None:
            self._force_close = True
            await asyncio.wait((task,), timeout=timeout)
            if task.cancel():
                await asyncio.wait((task,), timeout=timeout)
        await super().shutdown(timeout)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun already")
        error = InvalidRequest("the request is malformed", reason=MALFORMED)
        if isinstance(exc, http_exceptions.LineTooLong):
            status = 431
            error = InvalidRequest("a header is too long", reason="header_too_large", limit=f"{MAX_HEADER_BYTES} bytes")
        response = web.Response(status=status, body=orjson.dumps(error_body(error)), content_type="application/json")
        response.headers["x-pd-reason"] = error.reason
        response.force_close()
        return response


class _Server(web.Server):
    endpoints: Mapping[str, Endpoint]
    leaving = False

    def __call__(self) -> web.RequestHandler:
        made = Protocol(self, endpoints=self.endpoints, loop=self._loop, **self._kwargs)
        if self.leaving:
            made.last(self._last)
        return made

    def leave(self) -> None:
        """Whoever is connected, or still comes, may ask once more."""
        self.leaving = True
        for connection in self.connections:
            assert isinstance(connection, Protocol)
            connection.last(self._last)

    def _last(self, message: Any, *more: Any) -> web.BaseRequest:
        if isinstance(message, RawRequestMessage):
            message = message._replace(should_close=True)
        return self.request_factory(message, *more)


class Runner(web.AppRunner):
    """An application on our connections. A client that goes away cancels its handler, at whatever stage it is."""

    def __init__(
        self,
        app: web.Application,
        shutdown_s: float,
        direct: Mapping[tuple[str, str], Handler] | None = None,
        endpoints: Mapping[str, Endpoint] | None = None,
    ) -> None:
        """direct: by method and path. endpoints: what answers plain POSTs to a path (see `lane`)."""
        self._direct = direct or {}
        self._endpoints = endpoints or {}
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=shutdown_s,
            keepalive_timeout=HEADER_TIMEOUT_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            auto_decompress=False,  # packed bodies are refused; reading one to its end must not fail
        )

    def leave(self) -> None:
        """From now on the next request on each connection is answered as its last."""
        if isinstance(self.server, _Server):
            self.server.leave()

    async def left(self, silence_s: float) -> None:
        """Returns when there is no connection left, whatever that takes: nobody is cut off. One on which nothing is
        asked for silence_s is closed: whoever thinks longer than that is hardly asking just then."""
        while self.server is not None and self.server.connections:
            for connection in self.server.connections:
                assert isinstance(connection, Protocol)
                connection.close_silent(silence_s)
            await asyncio.sleep(LOOK_S)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        server = _Server(
            self._shortened(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        server.endpoints = self._endpoints
        return server

    def _shortened(self, usual: Handler) -> Handler:
        """Straight to the handlers of the paths that matter: resolving and matching costs a third of aiohttp's own
        time. Everything else, and every oddity, goes the usual way."""
        direct = self._direct

        async def handle(request: web.Request) -> web.StreamResponse:
            handler = direct.get((request.method, request.path))
            if handler is None or "Expect" in request.headers:
                return await usual(request)
            return await handler(request)

        return handle if direct else usual
