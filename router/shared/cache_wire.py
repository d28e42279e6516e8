"""Cache events between their messages and the index's own types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from protos.v1 import worker_pb2
from router.policy.index import Batch, CacheEvent, Export, Kind

KEYS_PER_BATCH = 4096
"""32 bytes each: a message of 140 KB."""

_KINDS = {
    worker_pb2.CacheEvent.KIND_STORED: Kind.STORED,
    worker_pb2.CacheEvent.KIND_REMOVED: Kind.REMOVED,
    worker_pb2.CacheEvent.KIND_TIER_CHANGED: Kind.TIER_CHANGED,
    worker_pb2.CacheEvent.KIND_CHECKPOINT_READY: Kind.CHECKPOINT_READY,
    worker_pb2.CacheEvent.KIND_CHECKPOINT_REMOVED: Kind.CHECKPOINT_REMOVED,
}
_WIRE_KINDS = {kind: wire for wire, kind in _KINDS.items()}


def batch_of(wire: worker_pb2.CacheEventBatch) -> Batch:
    """Events of unknown kinds are kept as nothing, so that sequence numbers stay right."""
    events = [
        CacheEvent(_KINDS.get(event.kind, Kind.REMOVED), list(event.page_keys) if event.kind in _KINDS else (),
                   event.tier or "device", event.state_length)
        for event in wire.events
    ]  # fmt: skip
    return Batch(wire.epoch, wire.first_sequence, events, wire.snapshot, wire.snapshot_end)


def snapshot_of(export: Export) -> Iterator[worker_pb2.CacheEventBatch]:
    """What the index knows of one worker, as a snapshot that worker could have sent. At least one message."""
    batch = worker_pb2.CacheEventBatch(first_sequence=export.sequence, snapshot=True, epoch=export.epoch)
    room = KEYS_PER_BATCH
    for event in export.events:
        for start in range(0, len(event.keys), KEYS_PER_BATCH):
            keys = event.keys[start : start + KEYS_PER_BATCH]
            if room < len(keys):
                yield batch
                batch = worker_pb2.CacheEventBatch(first_sequence=export.sequence, snapshot=True, epoch=export.epoch)
                room = KEYS_PER_BATCH
            batch.events.append(_wire(event, keys))
            room -= len(keys)
    batch.snapshot_end = True
    yield batch


def _wire(event: CacheEvent, keys: Sequence[bytes]) -> worker_pb2.CacheEvent:
    kind = _WIRE_KINDS[event.kind]
    return worker_pb2.CacheEvent(kind=kind, page_keys=keys, tier=event.tier, state_length=event.state_length)
