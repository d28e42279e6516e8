"""Plain requests: heads that can be read in one way only.

This is no HTTP parser. It knows the form in which nearly every client sends nearly every request, and says None to
everything else, which is then the server library's to understand or to refuse: folded lines, bare line ends, repeated
or empty names, transfer codings, upgrades, expectations, other versions. Nothing is repaired, so what is taken here
ends where any proxy in front of us thinks it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_HEAD_BYTES = 8 << 10
MAX_HEADERS = 64
MAX_LENGTH_DIGITS = 10

_END = b"\r\n\r\n"
_NEVER = frozenset({
    "transfer-encoding", "expect", "upgrade", "http2-settings", "content-encoding", "te", "trailer", "proxy-connection",
    "keep-alive", "sec-websocket-key1",
})  # fmt: skip
"""Headers that change where a request ends, or what becomes of its connection."""


@dataclass(slots=True)
class Head:
    """Of a request for HTTP/1.1 on a connection that goes on. headers: names in lower case, each once, values without
    the white space around them. size: bytes up to the body; length: bytes of the body."""

    method: str
    path: str
    headers: Mapping[str, str]
    size: int
    length: int


def read_head(data: bytes) -> Head | None:
    """The head that `data` begins with, if it is plain and whole."""
    end = data.find(_END, 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    raw = data[:end]
    if not raw.isascii():
        return None
    first, *lines = raw.decode("ascii").split("\r\n")
    # One look at all of it: no control characters, so no other line ends, and no tabs.
    if len(lines) > MAX_HEADERS or not "".join(lines).isprintable() or not first.isprintable():
        return None
    request = first.split(" ")
    if len(request) != 3 or request[2] != "HTTP/1.1" or request[0] not in ("POST", "GET"):
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name:
            return None
        headers[name.lower()] = value.strip(" ")
    if len(headers) != len(lines) or not "".join(headers).replace("-", "").isalnum() or not _NEVER.isdisjoint(headers):
        return None
    if not headers.get("host") or headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    length = headers.get("content-length")
    if (length is None) is not (request[0] == "GET"):
        return None
    if length is not None and not (length.isdigit() and len(length) <= MAX_LENGTH_DIGITS):
        return None
    return Head(request[0], request[1], headers, end + len(_END), int(length or 0))
