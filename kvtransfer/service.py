"""The KvSource service: says where bytes are and when they are final. It moves none itself.

A watcher's stream is: accepted, ranges as they become ready (with their checksums), then final or failed. Checksums
are computed on an executor thread, one range ahead of the wire at most, and only for what the watcher lacks; they are
sent only if the pages were still promised to it afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from grpc.aio import ServicerContext

from kvtransfer.layout import layout_from_proto, layout_to_proto, rank_to_proto, require_compatible, require_ranks
from kvtransfer.source import Caller, Final, HandoffStore
from kvtransfer.source import Watch as Watching
from kvtransfer.transport import LocalRank
from kvtransfer.types import Component, First, Layout
from protos.v1 import common_pb2, kvsource_pb2_grpc
from protos.v1 import kvsource_pb2 as pb
from runtime import faults
from runtime.errors import TicketInvalid
from runtime.rpc import peer_identity

log = logging.getLogger(__name__)

_FINISH = cast("Callable[[int], common_pb2.FinishReason.ValueType]", int)  # enum values are plain ints at run time

EVENT_CHECKSUMS = 16384
"""Checksums per event at most: 128 KiB, far below the size limit of a message."""


class KvSourceService(kvsource_pb2_grpc.KvSourceServicer):
    """Serves one worker's hand-offs. Call start() once the loop runs, close() before the pools go away."""

    def __init__(
        self, worker_id: str, epoch: int, layout: Layout, ranks: Sequence[LocalRank], store: HandoffStore
    ) -> None:
        require_ranks(layout, [r.info for r in ranks])
        self._worker_id = worker_id
        self._epoch = epoch
        self._layout = layout
        self._ranks = tuple(ranks)
        self._store = store
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-source-checksum")
        self._reaper: asyncio.Task[None] | None = None
        per_page = sum(len(r.info.regions) * max((g.units for g in r.info.regions), default=1) for r in ranks)
        pages = min(layout.chunk_tokens // layout.page_tokens, EVENT_CHECKSUMS // max(1, per_page))
        self._event_tokens = max(1, pages) * layout.page_tokens

    def start(self) -> None:
        """Start the reaper: leases end on a tick, whatever else happens."""
        self._reaper = asyncio.create_task(self._reap(), name="kv-lease-reaper")

    async def close(self) -> None:
        """End every hand-off and stop."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        self._store.close()
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    # --- RPCs -------------------------------------------------------------------------------------------------

    async def Handshake(  # noqa: N802
        self, request: pb.HandshakeRequest, context: ServicerContext[pb.HandshakeRequest, pb.HandshakeReply]
    ) -> pb.HandshakeReply:
        require_compatible(self._layout, layout_from_proto(request.layout))
        return pb.HandshakeReply(
            worker_id=self._worker_id,
            epoch=self._epoch,
            layout=layout_to_proto(self._layout),
            ranks=[rank_to_proto(r.info) for r in self._ranks],
        )

    async def Watch(  # noqa: N802
        self, request: pb.WatchRequest, context: ServicerContext[pb.WatchRequest, pb.WatchEvent]
    ) -> AsyncIterator[pb.WatchEvent]:
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        caller = Caller(request.worker_id, request.epoch, peer_identity(context))

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        watch = self._store.watch(request.ticket, caller, request.first_token, request.fence, wake)
        yield pb.WatchEvent(
            accepted=pb.WatchAccepted(
                lease_id=watch.lease_id, lease_ms=int(self._store.lease_s * 1000), epoch=self._epoch
            )
        )
        async for event in self._events(watch, news):
            if not await faults.strike_async("kv.event"):
                yield event

    async def Renew(  # noqa: N802
        self, request: pb.RenewRequest, context: ServicerContext[pb.RenewRequest, pb.RenewReply]
    ) -> pb.RenewReply:
        if request.source_epoch != self._epoch:
            raise TicketInvalid("the leases are of another epoch of this worker")
        caller = Caller(request.worker_id, request.epoch, peer_identity(context))
        return pb.RenewReply(
            lost=self._store.renew(caller, list(request.lease_ids)), lease_ms=int(self._store.lease_s * 1000)
        )

    async def Release(  # noqa: N802
        self, request: pb.ReleaseRequest, context: ServicerContext[pb.ReleaseRequest, pb.ReleaseReply]
    ) -> pb.ReleaseReply:
        released = self._store.release_lease(request.lease_id)
        if not request.confirmed:
            log.info("a hand-off was given up by its reader", extra={"released": released})
        return pb.ReleaseReply(released=released)

    # --- inside -----------------------------------------------------------------------------------------------

    async def _events(self, watch: Watching, news: asyncio.Event) -> AsyncIterator[pb.WatchEvent]:
        while True:
            news.clear()
            update = self._store.poll(watch)
            if update.error is not None:
                yield pb.WatchEvent(failed=update.error.detail())
                return
            for start in range(update.start, update.end, self._event_tokens):
                end = min(start + self._event_tokens, update.end)
                ready = pb.RangeReady(start=start, end=end, blocks=await self._page_blocks(watch, start, end))
                if self._store.held(watch):
                    yield pb.WatchEvent(range=ready)
            if update.final is not None:
                final = await self._final(update.final)
                if self._store.held(watch):
                    yield pb.WatchEvent(final=final)
                    return
            elif self._store.held(watch):
                await news.wait()

    async def _page_blocks(self, watch: Watching, start: int, end: int) -> list[pb.LocatedBlock]:
        page = self._layout.page_tokens
        first, last = start // page, -(-end // page)
        items = watch.pages[first:last]
        valid = tuple(min(page, end - i * page) for i in range(first, last))
        return await self._blocks([c for c in self._layout.components if c.paged], items, valid)

    async def _final(self, final: Final) -> pb.HandoffFinal:
        components = [c for c in self._layout.components if not c.paged]
        blocks: list[pb.LocatedBlock] = []
        if components:
            for slot in final.slots:
                blocks += await self._blocks(components, (slot,), (1,))
        return pb.HandoffFinal(
            state_length=final.state_length,
            first=[_first_to_proto(f) for f in final.first],
            slots=blocks,
            extras=dict(final.extras),
        )

    async def _blocks(
        self, components: Sequence[Component], items: tuple[int, ...], valid: tuple[int, ...]
    ) -> list[pb.LocatedBlock]:
        work = asyncio.get_running_loop().run_in_executor(self._executor, self._sum, components, items, valid)
        return [
            pb.LocatedBlock(rank=rank, region_id=region, indices=items, checksums=sums)
            for rank, region, sums in await work
        ]

    def _sum(
        self, components: Sequence[Component], items: tuple[int, ...], valid: tuple[int, ...]
    ) -> list[tuple[int, int, list[int]]]:
        faults.strike("kv.checksum")
        sums = []
        for index, rank in enumerate(self._ranks):
            for component in components:
                region = rank.info.by_component[component.name]
                in_item = valid if component.paged else (component.tokens,) * len(items)
                sums.append((index, region.region_id, rank.checksum(region, component, items, in_item)))
        return sums

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(0.25, self._store.lease_s / 10))
            for key in self._store.expire():
                log.warning("a hand-off ended without its reader", extra={"request_id": key.request_id})


def _first_to_proto(first: First) -> common_pb2.FirstToken:
    token = common_pb2.FirstToken(choice=first.choice, token=first.token, finish=_FINISH(first.finish))
    if first.logprob:
        token.logprob.MergeFromString(first.logprob)
    return token
