"""The index of a disk tier: an append-only file of checksummed records, and what is intact of it after a crash.

A record says that a file slot holds the page of a key, or a state, (put), or does so no more (drop), how long a key is
worth keeping (hint), or who has gone on from a state (line). A put is appended after its bytes were written, a drop
before its slot is written again. So whatever moment a process is killed at, every put that can be read stands for bytes
that were whole; and their own checksums are compared when they are read, in case the machine and not the process went
down. Reading stops at the first record that is torn; what is behind it never counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.successors import Line
from engine.tiers.pool import Sums
from kvtransfer.types import PAGE_TOKENS

_MAGIC = b"pdserve-disk-2\0\0"
_PUT, _DROP, _STATE, _HINT, _LINE = 1, 2, 3, 4, 5
_HEAD = struct.Struct("<B32s")  # kind, key (of a state: its name); then one of these, then CRC-32
_PAGE = struct.Struct("<B32sQI")  # has parent, parent, slot, depth; then sums
_TAIL = PAGE_TOKENS - 1
_ON = struct.Struct(f"<32sQQdBB{_TAIL}I")  # page key, slot, length, saving, has partial page, tail's length, tail
_KEPT = struct.Struct("<hdH")  # priority, end, session's length; then session
_PAST = struct.Struct("<8s8sBBB32s")  # maker, resumed, shared, spent, has before, before: see engine.successors
_CRC = struct.Struct("<I")
REWRITE_BYTES = 1 << 20
"""A log this long, and twice as long as when it was last written anew, is written anew."""


@dataclass(frozen=True, slots=True)
class Put:
    key: bytes
    parent: bytes | None
    slot: int
    depth: int
    sums: Sums


@dataclass(frozen=True, slots=True)
class StatePut:
    """As engine.tiers.states.TierState. slot: of the file for states. page_sums: of the partial page, if any."""

    name: bytes
    key: bytes
    length: int
    tail: tuple[int, ...]
    slot: int
    saving: float
    slot_sums: Sums
    page_sums: Sums


@dataclass(frozen=True, slots=True)
class Hint:
    """What is said of a page or state that is here: it orders eviction and promises nothing."""


@dataclass(frozen=True, slots=True)
class Keep(Hint):
    """Of a page, see engine.retention. ends: wall clock, in seconds; infinite = never."""

    priority: int
    ends: float
    session: bytes


@dataclass(frozen=True, slots=True)
class Past(Hint):
    """Of a state, see engine.successors."""

    line: Line


@dataclass(slots=True)
class Found:
    """What an index says. Later records come later in each, a state that was resumed since as if it had been put then.
    Hints go with the page or state they are of."""

    puts: dict[bytes, Put] = field(default_factory=dict)
    states: dict[bytes, StatePut] = field(default_factory=dict)
    hints: dict[bytes, Hint] = field(default_factory=dict)

    def forget(self, key: bytes) -> None:
        for known in (self.puts, self.states, self.hints):
            known.pop(key, None)

    def hints_of(self, puts: Iterable[bytes], states: Iterable[bytes]) -> dict[bytes, Hint]:
        """What is said of these, in their order."""
        kept = {key: self.hints[key] for key in puts if isinstance(self.hints.get(key), Keep)}
        return kept | {name: self.hints[name] for name in states if isinstance(self.hints.get(name), Past)}


class Journal:
    """layout: names everything the bytes depend on; a file of another layout is begun anew. units, state_units:
    checksums per page, per slot. One thread at a time. Raises OSError."""

    def __init__(self, path: Path, layout: str, units: int, state_units: int = 0) -> None:
        self._path = path
        self._header = _MAGIC + hashlib.sha256(layout.encode()).digest()
        self._sums = struct.Struct(f"<{units}Q")
        self._slot_sums = struct.Struct(f"<{state_units}Q")
        self.torn = 0  # bytes behind the last whole record, when it was opened
        self._intact = 0  # bytes of whole records at the last look, the header included
        self.found = self._read()
        self._fd = self._open()
        self._long = self._limit()

    @property
    def puts(self) -> dict[bytes, Put]:
        return self.found.puts

    def append(
        self,
        puts: Sequence[Put] = (),
        drops: Iterable[bytes] = (),
        states: Sequence[StatePut] = (),
        hints: Iterable[tuple[bytes, Hint]] = (),
    ) -> None:
        """Drops first. The whole of it is in the file when this returns, or none of it counts."""
        data = b"".join([*map(self._drop_record, drops), *self._records(puts, states, hints)])
        end = os.fstat(self._fd).st_size
        try:
            _write(self._fd, data)
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

    def _records(
        self, puts: Iterable[Put], states: Iterable[StatePut], hints: Iterable[tuple[bytes, Hint]]
    ) -> list[bytes]:
        return [*map(self._put_record, puts), *map(self._state_record, states), *map(self._hint_record, hints)]

    def _all_records(self, found: Found) -> list[bytes]:
        """Each state with what is said of it, so that their order stays."""
        kept = [(key, hint) for key, hint in found.hints.items() if key not in found.states]
        records = self._records(found.puts.values(), (), kept)
        for name, state in found.states.items():
            records += self._records((), [state], [(name, found.hints[name])] if name in found.hints else ())
        return records

    def _put_record(self, put: Put) -> bytes:
        body = _PAGE.pack(put.parent is not None, put.parent or bytes(32), put.slot, put.depth)
        return _sealed(_PUT, put.key, body + self._sums.pack(*put.sums))

    def _state_record(self, put: StatePut) -> bytes:
        tail = (*put.tail, *(0 for _ in range(_TAIL - len(put.tail))))
        body = _ON.pack(put.key, put.slot, put.length, put.saving, bool(put.page_sums), len(put.tail), *tail)
        page_sums = put.page_sums or (0,) * (self._sums.size // 8)
        return _sealed(_STATE, put.name, body + self._slot_sums.pack(*put.slot_sums) + self._sums.pack(*page_sums))

    @staticmethod
    def _hint_record(one: tuple[bytes, Hint]) -> bytes:
        key, hint = one
        if isinstance(hint, Past):
            line = hint.line
            before = line.before or bytes(32)
            body = _PAST.pack(line.maker, line.resumed, line.shared, line.spent, line.before is not None, before)
            return _sealed(_LINE, key, body)
        assert isinstance(hint, Keep)
        return _sealed(_HINT, key, _KEPT.pack(hint.priority, hint.ends, len(hint.session)) + hint.session)

    @staticmethod
    def _drop_record(key: bytes) -> bytes:
        return _sealed(_DROP, key, b"")

    def _read(self) -> Found:
        found, self._intact = Found(), 0
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return found
        if data[: len(self._header)] != self._header:
            return found
        at = len(self._header)
        while size := self._whole(data, at):
            self._take(data[at : at + size - _CRC.size], found)
            at += size
        self.torn, self._intact = len(data) - at, at
        found.hints = found.hints_of(found.puts, found.states)
        return found

    def _whole(self, data: bytes, at: int) -> int:
        """Bytes of the record that begins there; 0 = there is no whole one."""
        size = _HEAD.size + _CRC.size
        if at + size > len(data):
            return 0
        kind = data[at]
        if kind == _HINT:
            head = at + _HEAD.size
            if head + _KEPT.size > len(data):
                return 0
            size += _KEPT.size + _KEPT.unpack_from(data, head)[2]
        else:
            page = self._sums.size
            state = _ON.size + self._slot_sums.size + page
            bodies = {_PUT: _PAGE.size + page, _DROP: 0, _STATE: state, _LINE: _PAST.size}
            if kind not in bodies:
                return 0
            size += bodies[kind]
        end = at + size
        if end > len(data):
            return 0
        return size if zlib.crc32(data[at : end - _CRC.size]) == _CRC.unpack_from(data, end - _CRC.size)[0] else 0

    def _take(self, record: bytes, found: Found) -> None:
        kind, key = _HEAD.unpack_from(record)
        body = record[_HEAD.size :]
        if kind == _HINT:
            priority, ends, length = _KEPT.unpack_from(body)
            found.hints[key] = Keep(priority, ends, body[_KEPT.size : _KEPT.size + length])
            return
        if kind == _LINE:
            maker, resumed, shared, spent, led, before = _PAST.unpack(body)
            line = Line(maker, before if led else None, resumed, bool(shared), bool(spent))
            found.hints[key] = Past(line)
            if key in found.states and not line.spent:  # it was resumed
                found.states[key] = found.states.pop(key)
            return
        found.forget(key)
        if kind == _PUT:
            has_parent, parent, slot, depth = _PAGE.unpack_from(body)
            sums = self._sums.unpack_from(body, _PAGE.size)
            found.puts[key] = Put(key, parent if has_parent else None, slot, depth, sums)
        elif kind == _STATE:
            found.states[key] = self._state(key, body)

    def _state(self, name: bytes, body: bytes) -> StatePut:
        key, slot, length, saving, partial, count, *tail = _ON.unpack_from(body)
        slot_sums = self._slot_sums.unpack_from(body, _ON.size)
        page_sums = self._sums.unpack_from(body, _ON.size + self._slot_sums.size) if partial else ()
        return StatePut(name, key, length, tuple(tail[:count]), slot, saving, slot_sums, page_sums)

    def _open(self) -> int:
        """Written anew; or, where there is no room for that, the one that is there without what is torn."""
        try:
            return self._rewrite(self.found)
        except OSError:
            if not self._intact:
                raise
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(fd, self._intact)
            return fd

    def _rewrite(self, found: Found) -> int:
        """Write what counts to a new file and put it in the old one's place: the same moment for all of it."""
        fresh = self._path.with_suffix(".new")
        fd = os.open(fresh, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write(fd, self._header + b"".join(self._all_records(found)))
            fresh.replace(self._path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):  # its room is wanted
                fresh.unlink()
            raise
        return fd


def _write(fd: int, data: bytes) -> None:
    """All of it, or OSError."""
    left = memoryview(data)
    while left.nbytes:
        left = left[os.write(fd, left) :]


def _sealed(kind: int, key: bytes, more: bytes) -> bytes:
    body = _HEAD.pack(kind, key) + more
    return body + _CRC.pack(zlib.crc32(body))
