"""The bytes in which routers hand each other what they know of one worker's cache.

A log is a row of frames: a snapshot in pieces, then what changed since. Every frame proves that a router of this
deployment made it for this worker (an HMAC over its place), that it belongs to the same writing as its neighbours and
that none is missing between them (generation and number). A log is untrusted input: one wrong byte and none of it is
taken, since a router can always ask the worker itself.

    u32 length of what follows | 16 bytes HMAC-SHA256 of place and body | body = 8 bytes generation, u32 number, message
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator

GENERATION_BYTES = 8
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<I")
_MAC_BYTES = 16
_HEAD_BYTES = _MAC_BYTES + GENERATION_BYTES + _NUMBER.size


class Unreadable(Exception):
    """Not a log that a router of this deployment wrote for this place, or one that changed while it was read."""


class Frames:
    """Makes and checks the frames of one place. secret: what all routers of a deployment know, and nobody else.
    namespace: whatever makes two caches different (model, revision, layout); a worker's keys mean nothing outside."""

    def __init__(self, secret: bytes, namespace: tuple[str, ...], worker_id: str) -> None:
        fields = [part.encode("utf-8", "surrogatepass") for part in (*namespace, worker_id)]
        self._place = b"".join(_LENGTH.pack(len(part)) + part for part in fields)
        self._key = hmac.digest(secret, b"pdserve index log v1", "sha256")
        self.name = hmac.digest(self._key, b"name" + self._place, "sha256").hex()[:32]
        """Of the log: other deployments in the same Redis have others. It has no odd characters."""

    def seal(self, generation: bytes, number: int, message: bytes) -> bytes:
        body = generation + _NUMBER.pack(number) + message
        return _LENGTH.pack(_MAC_BYTES + len(body)) + self._mac(body) + body

    def messages(self, log: bytes) -> Iterator[bytes]:
        """The messages of a whole log, in order. Raises Unreadable, perhaps after some."""
        at, number, generation = 0, 0, b""
        while at < len(log):
            end, frame = _frame(log, at)
            mac, body = frame[:_MAC_BYTES], frame[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(body)):
                raise Unreadable("a frame is not ours")
            generation = generation or body[:GENERATION_BYTES]
            place = body[:GENERATION_BYTES] + _NUMBER.pack(number)
            if body[: len(place)] != place or not body.startswith(generation):
                raise Unreadable("a frame is out of place")
            yield body[len(place) :]
            at, number = end, number + 1

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, self._place + body, "sha256")[:_MAC_BYTES]


def _frame(log: bytes, at: int) -> tuple[int, bytes]:
    """(where the next one begins, what follows the length)."""
    start = at + _LENGTH.size
    if start > len(log):
        raise Unreadable("a frame is cut off")
    (size,) = _LENGTH.unpack_from(log, at)
    if not _HEAD_BYTES <= size <= MAX_FRAME_BYTES or start + size > len(log):
        raise Unreadable("a frame is cut off or too long")
    return start + size, log[start : start + size]
