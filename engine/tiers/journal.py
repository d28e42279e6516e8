"""The index of a disk tier: an append-only file of checksummed records, and what is intact of it after a crash.

A record says that a file slot holds the page of a key (put), or does so no more (drop). A put is appended after its
page was written, a drop before its slot is written again. So whatever moment a process is killed at, every put that can
be read stands for a page that was whole; and the page's own checksum is compared when it is read, in case the machine
and not the process went down. Reading stops at the first record that is torn; what is behind it never counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.tiers.pool import Sums

_MAGIC = b"pdserve-disk-1\0\0"
_RECORD = struct.Struct("<B32sB32sQI")  # kind, key, has parent, parent, slot, depth; then sums, then CRC-32
_CRC = struct.Struct("<I")
_PUT, _DROP = 1, 2
REWRITE_BYTES = 1 << 20
"""A log this long, and twice as long as when it was last written anew, is written anew."""


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    parent: bytes | None
    slot: int
    depth: int
    sums: Sums


class Journal:
    """layout: names everything the pages' bytes depend on; a file of another layout is begun anew. units: checksums
    per page. One thread at a time. Raises OSError."""

    def __init__(self, path: Path, layout: str, units: int) -> None:
        self._path = path
        self._header = _MAGIC + hashlib.sha256(layout.encode()).digest()
        self._sums = struct.Struct(f"<{units}Q")
        self._size = _RECORD.size + self._sums.size + _CRC.size
        self.torn = 0  # bytes behind the last whole record, when it was opened
        self.puts = self._read()
        self._fd = self._rewrite(self.puts)
        self._long = self._limit()

    def append(self, puts: Sequence[Put], drops: Iterable[bytes] = ()) -> None:
        """Drops first. The whole of it is in the file when this returns, or none of it counts."""
        data = b"".join([*map(self._drop_record, drops), *map(self._put_record, puts)])
        end = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, data) < len(data):
                raise OSError("the index could not be written whole")
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        if end + len(data) > self._long:
            self._shorten()

    def close(self) -> None:
        os.close(self._fd)

    # --- inside -------------------------------------------------------------------------------------------------

    def _shorten(self) -> None:
        """Without what has been dropped again: else it would grow for as long as its worker lives. What was appended
        counts, also where there is no room for that."""
        torn = self.torn
        with contextlib.suppress(OSError):
            fresh = self._rewrite(self._read())
            os.close(self._fd)
            self._fd = fresh
        self.torn, self._long = torn, self._limit()

    def _limit(self) -> int:
        return max(REWRITE_BYTES, 2 * os.fstat(self._fd).st_size)

    def _put_record(self, put: Put) -> bytes:
        parent = put.parent or bytes(32)
        head = _RECORD.pack(_PUT, put.key, put.parent is not None, parent, put.slot, put.depth)
        return self._sealed(head + self._sums.pack(*put.sums))

    def _drop_record(self, key: bytes) -> bytes:
        return self._sealed(_RECORD.pack(_DROP, key, 0, bytes(32), 0, 0) + bytes(self._sums.size))

    @staticmethod
    def _sealed(body: bytes) -> bytes:
        return body + _CRC.pack(zlib.crc32(body))

    def _read(self) -> dict[bytes, Put]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return {}
        if data[: len(self._header)] != self._header:
            return {}
        found: dict[bytes, Put] = {}
        at = len(self._header)
        while at + self._size <= len(data) and self._take(data[at : at + self._size], found):
            at += self._size
        self.torn = len(data) - at
        return found

    def _take(self, record: bytes, found: dict[bytes, Put]) -> bool:
        body = record[: -_CRC.size]
        if zlib.crc32(body) != _CRC.unpack(record[-_CRC.size :])[0]:
            return False
        kind, key, has_parent, parent, slot, depth = _RECORD.unpack_from(body)
        found.pop(key, None)
        if kind == _PUT:
            sums = self._sums.unpack_from(body, _RECORD.size)
            found[key] = Put(key, parent if has_parent else None, slot, depth, sums)
        return True

    def _rewrite(self, puts: dict[bytes, Put]) -> int:
        """Write what counts to a new file and put it in the old one's place: the same moment for all of it."""
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(self._header + b"".join(map(self._put_record, puts.values())))
        fresh.replace(self._path)
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
