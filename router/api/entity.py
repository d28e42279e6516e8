"""A request's body: whole, in time, within its bound, and not packed."""

from __future__ import annotations

import asyncio

from aiohttp import web

from router.api.lane import BODY_TIMEOUT_S
from router.api.server import MALFORMED, BrokenBody, Protocol
from runtime.errors import InvalidRequest, PayloadTooLarge

__all__ = ["MALFORMED", "read"]


async def read(request: web.Request, max_bytes: int) -> bytes:
    """Raises aiohttp's 413 while reading, InvalidRequest when the body does not come or is packed: what stops in the
    middle could not be told from a whole body once the server library has unpacked it."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest(
            "the body must not be compressed",
            reason="unsupported_media_type",
            field="Content-Encoding",
            limit="identity",
        )
    if request.content.is_eof() and not request.content.exception():  # it is here already, as for most
        whole: bytes = request.content.read_nowait()
        if len(whole) > max_bytes:
            raise PayloadTooLarge("the body is too large", field="body", limit=f"{max_bytes} bytes")
        return whole
    try:
        if isinstance(request.protocol, Protocol) and request.protocol.broken:
            raise BrokenBody
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except BrokenBody as exc:
        raise InvalidRequest("the request is malformed", reason=MALFORMED, field="body") from exc
    except TimeoutError as exc:
        raise InvalidRequest("the body did not come in time", reason="request_timeout", field="body") from exc
