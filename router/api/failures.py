"""Errors on their way to an HTTP answer: the status, and what a client is told of those that are not ours."""

from __future__ import annotations

import structlog
from aiohttp import web

from runtime.errors import InvalidRequest, NotFound, PayloadTooLarge, PdserveError, Unsupported

_log = structlog.get_logger("pdserve.router.http")


def status(error: PdserveError) -> int:
    """HTTP's."""
    return _STATUS.get(error.reason, error.row.http_status)


_STATUS = {"method_not_allowed": 405, "request_timeout": 408, "unsupported_media_type": 415}


def of_library(exc: web.HTTPException, max_body: int) -> PdserveError:
    """The server library's own refusals in our shape."""
    if exc.status == 413:
        return PayloadTooLarge("the body is too large", field="body", limit=f"{max_body} bytes")
    if exc.status == 404:
        return NotFound("there is no such path", reason="unknown_path")
    if exc.status == 405:
        return InvalidRequest("the method is not allowed here", reason="method_not_allowed", field="method")
    if exc.status == 415:
        return Unsupported("the content type is not supported", field="content-type")
    return InvalidRequest("the request is malformed", field="body")


def known(error: BaseException) -> PdserveError:
    """What a client is told of it. A fault of ours goes to the log."""
    if isinstance(error, PdserveError):
        return error
    _log.error("stream_failed", exc_info=error)
    return PdserveError("internal error")
