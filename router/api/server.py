"""The HTTP server's edge: what is refused before any handler runs.

aiohttp answers a malformed request itself, in plain text that repeats what the client sent. Here such an answer has our
JSON body, says 431 for headers over the limit, and repeats nothing. A connection that does not finish its headers is
closed after HEADER_TIMEOUT_S, whatever trickles in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from aiohttp import http_exceptions, web
from aiohttp.http import RawRequestMessage

from router.api.shapes import error_body
from runtime.errors import InvalidRequest

Handler = Callable[[Any], Awaitable[web.StreamResponse]]

HEADER_TIMEOUT_S = 75.0
MAX_HEADER_BYTES = 16 << 10
MAX_LINE_BYTES = 8 << 10
MALFORMED = "malformed_request"


class BrokenBody(Exception):
    """The rest of the body is not HTTP. For whoever reads it."""


class Protocol(web.RequestHandler):
    """One connection. broken: what came last is not HTTP."""

    __slots__ = ("broken",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.broken = False

    def data_received(self, data: bytes) -> None:
        """aiohttp takes a body that turns bad for the next request: the handler that waits for it would never hear."""
        super().data_received(data)
        if self._messages and type(self._messages[-1][0]) is not RawRequestMessage:
            self.broken = True
            if self._current_request is not None and not self._current_request.content.is_eof():
                self._current_request.content.set_exception(BrokenBody())
                self._current_request.content.feed_eof()

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
    def __call__(self) -> web.RequestHandler:
        return Protocol(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """An application on our connections. A client that goes away cancels its handler, at whatever stage it is."""

    def __init__(
        self, app: web.Application, shutdown_s: float, direct: Mapping[tuple[str, str], Handler] | None = None
    ) -> None:
        self._direct = direct or {}
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

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            self._shortened(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )

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
