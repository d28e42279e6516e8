"""The Worker service: what one worker is, its drain and role, and the feed of its prefix cache.

A reader of the cache feed that fell behind, or comes from another epoch, gets a snapshot and then the changes after it;
it is never given changes with a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from engine.prefix_cache import CacheChange, CacheSnapshot, PrefixCache
from protos.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from runtime.errors import InvalidRequest
from runtime.rpc_errors import ServicerContext

KEYS_PER_BATCH = 8192  # 32 bytes each: 256 KiB a message


class CacheFeed:
    """Wakes every reader of the journal; made on the event loop."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Event] = set()
        cache.set_change_listener(self._changed)

    async def wait_beyond(self, sequence: int) -> None:
        """Return when the journal is past `sequence`."""
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            while self.cache.sequence <= sequence:
                await news.wait()
                news.clear()
        finally:
            self._waiting.discard(news)

    def _changed(self) -> None:
        """On the engine's thread, under its lock."""
        if self._waiting:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        for news in self._waiting:
            news.set()


@dataclass(frozen=True, slots=True)
class Actions:
    """What the service may do to its worker. drain: (on, seconds to wait) -> (running, leases) left."""

    describe: Callable[[], worker_pb2.DescribeReply]
    drain: Callable[[bool, float], Awaitable[tuple[int, int]]]
    set_role: Callable[[common_pb2.Role.ValueType], None]


class WorkerAdmin(worker_pb2_grpc.WorkerServicer):
    """Describe, Drain, SetRole and CacheEvents of protos/v1/worker.proto."""

    def __init__(self, actions: Actions, feed: CacheFeed, epoch: int) -> None:
        self._actions = actions
        self._feed = feed
        self._epoch = epoch

    async def Describe(  # noqa: N802
        self, request: worker_pb2.DescribeRequest, context: ServicerContext
    ) -> worker_pb2.DescribeReply:
        return self._actions.describe()

    async def Drain(  # noqa: N802
        self, request: worker_pb2.DrainRequest, context: ServicerContext
    ) -> worker_pb2.DrainReply:
        """Empty this worker, and answer when that is done or the time is over. With drain = true nothing new comes, and
        every router moves what decodes here to other decode workers, pages and state with it (feature `handover`,
        router option `moves`), a few at a time; what nobody has room for finishes here. So whoever wants a worker gone,
        or in another role, calls this and looks at the answer; SetRole(PREFILL) alone makes routers move it all, too,
        without refusing anything that was promised. drain = false takes it back; what has left does not return."""
        running, leases = await self._actions.drain(request.drain, request.timeout_ms / 1000)
        return worker_pb2.DrainReply(running=running, leases=leases)

    async def SetRole(  # noqa: N802
        self, request: worker_pb2.SetRoleRequest, context: ServicerContext
    ) -> worker_pb2.SetRoleReply:
        if request.role not in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE, common_pb2.ROLE_BOTH):
            raise InvalidRequest("the role is unknown", field="role", limit="prefill, decode, both")
        self._actions.set_role(request.role)
        return worker_pb2.SetRoleReply(role=request.role)

    async def CacheEvents(  # noqa: N802
        self, request: worker_pb2.CacheEventsRequest, context: ServicerContext
    ) -> AsyncIterator[worker_pb2.CacheEventBatch]:
        cache = self._feed.cache
        position = request.after_sequence if request.epoch == self._epoch else 0
        fresh = position == 0
        while True:
            changes = None if fresh else cache.changes_after(position)
            if changes is None:
                snapshot = cache.snapshot()
                for batch in self._snapshot(snapshot):
                    yield batch
                position = snapshot.sequence
            elif changes:
                for batch in self._changes(changes):
                    yield batch
                position = changes[-1].sequence
            fresh = False
            await self._feed.wait_beyond(position)

    def _snapshot(self, snapshot: CacheSnapshot) -> list[worker_pb2.CacheEventBatch]:
        keys, states = snapshot.keys, snapshot.states
        pieces = [[_event(True, keys[i : i + KEYS_PER_BATCH])] for i in range(0, len(keys), KEYS_PER_BATCH)]
        ready = [_event(True, (key,), length) for key, length in states]
        ready += [_event(True, (k,), length, tier) for tier, lower in snapshot.lower_states for k, length in lower]
        pieces += [
            [_event(True, lower[i : i + KEYS_PER_BATCH], tier=tier)]
            for tier, lower in snapshot.lower
            for i in range(0, len(lower), KEYS_PER_BATCH)
        ]
        pieces += [ready[i : i + KEYS_PER_BATCH] for i in range(0, len(ready), KEYS_PER_BATCH)]
        pieces = pieces or [[]]
        return [
            worker_pb2.CacheEventBatch(
                first_sequence=snapshot.sequence,
                events=events,
                snapshot=True,
                snapshot_end=index == len(pieces) - 1,
                epoch=self._epoch,
            )
            for index, events in enumerate(pieces)
        ]

    def _changes(self, changes: Sequence[CacheChange]) -> list[worker_pb2.CacheEventBatch]:
        """Contiguous changes in messages of bounded size; event i of a batch has sequence first_sequence + i."""
        batches: list[worker_pb2.CacheEventBatch] = []
        room = 0
        for change in changes:
            if not batches or room < len(change.keys):
                batches.append(worker_pb2.CacheEventBatch(first_sequence=change.sequence, epoch=self._epoch))
                room = KEYS_PER_BATCH
            batches[-1].events.append(_event(change.stored, change.keys, change.state_length, change.tier))
            room -= len(change.keys) + 1
        return batches


def _event(stored: bool, keys: Sequence[bytes], state_length: int = 0, tier: str = "device") -> worker_pb2.CacheEvent:
    """state_length > 0: of the state after so many tokens, which hangs on the one key; else of pages, which are in
    `tier` now and nowhere above it."""
    event = worker_pb2.CacheEvent
    if state_length:
        kind = event.KIND_CHECKPOINT_READY if stored else event.KIND_CHECKPOINT_REMOVED
    elif stored:
        kind = event.KIND_STORED if tier == "device" else event.KIND_TIER_CHANGED
    else:
        kind = event.KIND_REMOVED
    return event(kind=kind, page_keys=keys, tier=tier, state_length=state_length)
