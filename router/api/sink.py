"""Server-sent events, written straight to the transport from the worker stream's callback.

Skipping a queue and a task wake-up per token is half of the router's cost per token. What a queue would have given is
done here: the frames of one step go out in one write, a client that stops reading is bounded (then cut off), a closed
transport is noticed before it is written to, and the response is opened by the first frame, so that an error before it
still has its HTTP status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from router.api import answer
from router.api.asked import Asked

COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
LAST_CHUNK = b"0\r\n\r\n"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Sink:
    """One client's stream. write() and flush() are plain calls and never raise; open() and finish() are the handler's.

    wanted: done when the response should be opened. on_slow: called once when the client reads too slowly, after which
    nothing more is written.
    """

    def __init__(self, limit_bytes: int, on_slow: Callable[[], None]) -> None:
        self._limit = limit_bytes
        self._on_slow = on_slow
        self._frames: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._asked: Asked | None = None
        self._response: web.StreamResponse | None = None  # one that is not ours to write
        self._head = b""  # not sent yet
        self._tail = b""  # sent with the last frames
        self._chunked = True
        self._cut = False
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self.wanted: asyncio.Future[None] = self._loop.create_future()
        self.wrote_at = 0.0

    @property
    def waits(self) -> bool:
        """Something is there to send."""
        return bool(self._frames)

    @property
    def slow(self) -> bool:
        """The client was cut off."""
        return self._cut

    def want(self) -> None:
        """Open the response, whether there is anything to send or not."""
        if not self.wanted.done():
            self.wanted.set_result(None)

    @property
    def opened(self) -> bool:
        return self._asked is not None

    def write(self, frame: bytes) -> None:
        if not self._ended and not self._cut:
            self._frames.append(frame)

    def flush(self) -> None:
        """Everything since the last flush, in one write."""
        if not self._frames:
            return
        if self._transport is None:
            self.want()
            return
        self._send()

    def comment(self) -> None:
        self.write(COMMENT)
        self.flush()

    async def open(self, asked: Asked, headers: dict[str, str]) -> None:
        """Send the head and what waits. Raises ConnectionError when the client is gone."""
        headers = HEADERS | headers
        if asked.plain:
            self._transport = asked.transport()
            self._asked = asked
            self._head = answer.head(EVENT_STREAM, headers) + b"Transfer-Encoding: chunked\r\n\r\n"
            self._send()
            return
        response = web.StreamResponse(headers=headers | {"Content-Type": EVENT_STREAM, "Server": "pdserve"})
        self._chunked = asked.chunks
        if self._chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()
        self._transport = await asked.opened(response)
        self._asked, self._response = asked, response
        self.flush()

    async def finish(self) -> web.StreamResponse | None:
        """End the response after what waits. Called once, after open()."""
        asked, response = self._asked, self._response
        assert asked is not None
        if response is not None:
            self.flush()
            self._ended = True
            if not self._cut:
                await response.write_eof()
            return response
        self._tail = LAST_CHUNK
        self._send()
        self._ended = True
        if not self._cut:
            await asked.drained()
        return asked.written()

    def _send(self) -> None:
        data = b"".join(self._frames)
        self._frames.clear()
        transport = self._transport
        if transport is None or self._cut or transport.is_closing():
            return
        self.wrote_at = self._loop.time()
        if self._chunked and data:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._head or self._tail:
            data = self._head + data + self._tail
            self._head = b""
        transport.write(data)
        if transport.get_write_buffer_size() > self._limit:
            self._cut = True
            transport.abort()  # an orderly end would wait for the client to read
            self._on_slow()


class KeepAlive:
    """A sign of life whenever a stream was silent for `pause_s`: the response is opened, then comments follow."""

    def __init__(self, sink: Sink, pause_s: float) -> None:
        self._sink = sink
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(pause_s, sink.want)

    def opened(self) -> None:
        """Comments from now on."""
        self._timer.cancel()
        self._timer = self._loop.call_later(0.0 if not self._sink.wrote_at else self._pause_s, self._look)

    def _look(self) -> None:
        silent = self._loop.time() - self._sink.wrote_at
        if silent >= self._pause_s:
            self._sink.comment()
            silent = 0.0
        self._timer = self._loop.call_later(self._pause_s - silent, self._look)

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
