"""What a registry must be able to do: records that expire, and what several routers share beside them: logs of bytes,
shares of limits, counters.

Two implementations (memory, Redis) pass the same tests. Nobody reads its answer as truth about a worker: records are
hints for discovery, and what a store returns is untrusted input that was already parsed and bounded here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from protos.v1 import registry_pb2
from runtime.errors import InvalidRequest
from runtime.registry.pools import Claim, Wish

MAX_RECORD_BYTES = 64 << 10
MAX_READ_BYTES = 1 << 20
MAX_WORKERS = 4096
MAX_LOG_BYTES = 32 << 20
"""Of one log; whoever writes one starts it anew before that."""

_MAX_TEXT = 512

WorkerRecord = registry_pb2.WorkerRecord


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every live record, by worker id. `cursor` is for wait(): anything later than this view moves it. `incarnation`
    changes when the store has lost its memory: then what is missing may only not have come back yet. `unreadable`: ids
    whose record is not one; that says nothing about the worker."""

    records: dict[str, WorkerRecord]
    cursor: str
    incarnation: str = ""
    unreadable: frozenset[str] = frozenset()


class Store(Protocol):
    """Every method raises RegistryUnavailable when the store does not answer within about a second."""

    async def put(self, record: WorkerRecord, ttl_s: float) -> None:
        """Write or renew. Raises InvalidRequest: malformed or too large a record, or (reason "superseded") one of an
        older epoch than the store holds for this worker id."""
        ...

    async def remove(self, worker_id: str, epoch: int) -> bool:
        """Forget a worker, unless a newer epoch is registered. True if something was removed."""
        ...

    async def snapshot(self) -> Snapshot: ...

    async def wait(self, cursor: str, timeout_s: float) -> None:
        """Return when workers came, went or changed more than their load after `cursor`, or after timeout_s.
        A hint only: it may return early, and an expiry may be seen by the timeout alone."""
        ...

    async def write_log(self, log: str, parts: Sequence[bytes], ttl_s: float) -> None:
        """Replace a named log by these parts, at once for every reader; it is forgotten ttl_s after its last change.
        Raises InvalidRequest beyond MAX_LOG_BYTES."""
        ...

    async def append_logs(self, items: Mapping[str, bytes], ttl_s: float) -> Mapping[str, int]:
        """Add to the end of several logs; how long each is now. One that was forgotten meanwhile begins with this."""
        ...

    async def read_log(self, log: str, start: int) -> bytes:
        """At most MAX_READ_BYTES from `start` on; less means the end."""
        ...

    async def claim(self, pool: str, holder: str, wishes: Mapping[str, Wish], ttl_s: float) -> Claim:
        """See pools.Pool.claim. Nobody holds anything that was not renewed within ttl_s."""
        ...

    async def add(self, deltas: Mapping[str, int], ttl_s: float) -> Mapping[str, int]:
        """Add to counters and return their values. Each is forgotten ttl_s after its last change. One whose value is
        no number any more is left out, and begins anew."""
        ...

    async def close(self) -> None: ...


def checked(record: WorkerRecord) -> WorkerRecord:
    """The record, if a worker may register it. Raises InvalidRequest naming the field."""
    if not record.worker_id or len(record.worker_id) > _MAX_TEXT:
        raise InvalidRequest("a worker needs an id", field="worker_id", limit=f"1..{_MAX_TEXT} characters")
    if not record.epoch:
        raise InvalidRequest("a worker needs an epoch", field="epoch", limit="> 0")
    if not record.gone and (not record.address or len(record.address) > _MAX_TEXT):
        raise InvalidRequest("a worker needs an address", field="address", limit=f"1..{_MAX_TEXT} characters")
    if record.ByteSize() > MAX_RECORD_BYTES:
        raise InvalidRequest("the worker record is too large", field="record", limit=f"{MAX_RECORD_BYTES} bytes")
    return record


def parsed(data: bytes) -> WorkerRecord:
    """A record from stored bytes. Raises InvalidRequest for whatever a worker could not have registered."""
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidRequest("the stored record is too large", field="record", limit=f"{MAX_RECORD_BYTES} bytes")
    try:
        return checked(WorkerRecord.FromString(data))
    except DecodeError as exc:
        raise InvalidRequest("the stored record is not a WorkerRecord", field="record") from exc


def bounded(parts: Sequence[bytes]) -> Sequence[bytes]:
    """The parts of a log, if they are not too much. Raises InvalidRequest."""
    if sum(map(len, parts)) > MAX_LOG_BYTES:
        raise InvalidRequest("the log is too large", field="log", limit=f"{MAX_LOG_BYTES} bytes")
    return parts


def superseded() -> InvalidRequest:
    return InvalidRequest("a newer epoch of this worker is registered", reason="superseded", field="epoch")


def differs(old: WorkerRecord | None, new: WorkerRecord) -> bool:
    """Whether watchers should be woken: anything but the load changed."""
    if old is None:
        return True
    a, b = WorkerRecord(), WorkerRecord()
    a.CopyFrom(old)
    b.CopyFrom(new)
    a.ClearField("load")
    b.ClearField("load")
    return a != b
