"""The KvSource service: says where bytes are and when they are final. It moves none itself.

A watcher's stream is: accepted, ranges as they become ready (with their checksums), then final or failed. Checksums
are computed on an executor thread, one range ahead of the wire at most, and only for what the watcher lacks; they are
sent only if the pages were still promised to it afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from grpc.aio import ServicerContext

from kvtransfer.layout import layout_from_proto, layout_to_proto, rank_to_proto, require_compatible, require_ranks
from kvtransfer.prefix import Offers
from kvtransfer.source import Caller, Final, HandoffStore, Update
from kvtransfer.source import Watch as Watching
from kvtransfer.transport import LocalRank
from kvtransfer.types import Component, First, Layout, Region
from protos.v1 import common_pb2, kvsource_pb2_grpc
from protos.v1 import kvsource_pb2 as pb
from runtime import faults
from runtime.errors import KvLost, TicketInvalid
from runtime.rpc import peer_identity

log = logging.getLogger(__name__)

_FINISH = cast("Callable[[int], common_pb2.FinishReason.ValueType]", int)  # enum values are plain ints at run time

EVENT_CHECKSUMS = 16384
"""Checksums per event at most: 128 KiB, far below the size limit of a message."""


class KvSourceService(kvsource_pb2_grpc.KvSourceServicer):
    """Serves one worker's hand-offs. Call start() once the loop runs, close() before the pools go away."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        layout: Layout,
        ranks: Sequence[LocalRank],
        store: HandoffStore,
        offers: Offers | None = None,
    ) -> None:
        """offers: of cached prefixes; None = there are none here."""
        require_ranks(layout, [r.info for r in ranks])
        self._worker_id = worker_id
        self._epoch = epoch
        self._layout = layout
        self._ranks = tuple(ranks)
        self._store = store
        self._offers = offers
        self._components = {component.name: component for component in layout.components}
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-source-checksum")
        self._reaper: asyncio.Task[None] | None = None
        per_page = sum(len(r.info.by_component) * max((g.units for g in r.info.regions), default=1) for r in ranks)
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

    async def OfferPrefix(  # noqa: N802
        self, request: pb.OfferPrefixRequest, context: ServicerContext[pb.OfferPrefixRequest, pb.OfferPrefixReply]
    ) -> pb.OfferPrefixReply:
        if self._offers is None or await faults.strike_async("kv.offer"):
            return pb.OfferPrefixReply()
        left = max(context.time_remaining() or 0.0, 0.0)
        return await self._offers.answer(request, peer_identity(context), context.peer(), left)

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
            async for ready in self._ranges(watch, update):
                if self._store.held(watch):
                    yield pb.WatchEvent(range=ready)
            if update.final is not None:
                final = await self._final(watch, update.final)
                if self._store.held(watch):
                    yield pb.WatchEvent(final=final)
                    return
            elif self._store.held(watch):
                await news.wait()

    async def _ranges(self, watch: Watching, update: Update) -> AsyncIterator[pb.RangeReady]:
        """What is new, in messages; while one goes out, the next one's checksums are computed."""
        spans = list(self._spans(watch, update.start, update.end))
        if not spans:
            return
        ahead = asyncio.create_task(self._page_blocks(watch, *spans[0]))
        try:
            for (start, end), following in zip(spans, [*spans[1:], None], strict=True):
                blocks = await ahead
                if following is not None:
                    ahead = asyncio.create_task(self._page_blocks(watch, *following))
                yield pb.RangeReady(start=start, end=end, blocks=blocks)
        finally:
            ahead.cancel()

    def _spans(self, watch: Watching, start: int, end: int) -> Iterator[tuple[int, int]]:
        """A range in messages of bounded size, each of pages of one pool."""
        border = watch.below.first * self._layout.page_tokens if watch.below is not None else end
        while start < end:
            stop = min(start + self._event_tokens, end, border if start < border else end)
            yield start, stop
            start = stop

    async def _page_blocks(self, watch: Watching, start: int, end: int) -> list[pb.LocatedBlock]:
        page, below = self._layout.page_tokens, watch.below
        first, last = start // page, -(-end // page)
        valid = tuple(min(page, end - i * page) for i in range(first, last))
        low = below is not None and first >= below.first
        kept = below.sums[first - below.first : last - below.first] if below is not None and low else ()
        return await self._blocks(_Items(True, watch.pages[first:last], valid, int(low), kept))

    async def _final(self, watch: Watching, final: Final) -> pb.HandoffFinal:
        blocks: list[pb.LocatedBlock] = []
        kept = watch.below.slot_sums if watch.below is not None else ()
        if any(not component.paged for component in self._layout.components):
            for index, slot in enumerate(final.slots):
                blocks += await self._blocks(_Items(False, (slot,), (1,), int(bool(kept)), kept[index : index + 1]))
        return pb.HandoffFinal(
            state_length=final.state_length,
            first=[_first_to_proto(f) for f in final.first],
            slots=blocks,
            extras=dict(final.extras),
        )

    async def _blocks(self, part: _Items) -> list[pb.LocatedBlock]:
        work = asyncio.get_running_loop().run_in_executor(self._executor, self._sum, part)
        return [
            pb.LocatedBlock(rank=rank, region_id=region, indices=part.items, checksums=sums)
            for rank, region, sums in await work
        ]

    def _sum(self, part: _Items) -> list[tuple[int, int, list[int]]]:
        """(rank, region, checksums) of each component. Raises KvLost when host memory is damaged."""
        faults.strike("kv.checksum")
        found, at = [], 0
        for index, rank in enumerate(self._ranks):
            for name in rank.info.by_component:
                component = self._components[name]
                if component.paged != part.paged:
                    continue
                region = rank.info.pool(name, part.pool)
                kept = [row[at : at + region.units] for row in part.kept]
                at += region.units
                found.append((index, region.region_id, _sums(rank, region, component, part, kept)))
        return found

    async def _reap(self) -> None:
        """Supervised: whatever one hand-off's end may raise, the others' leases end in their time."""
        while True:
            await asyncio.sleep(min(0.25, self._store.lease_s / 10))
            try:
                ended = self._store.expire()
            except Exception:  # supervises: one end that fails keeps no other lease alive
                log.exception("the end of a hand-off failed")
                continue
            for key in ended:
                log.warning("a hand-off ended without its reader", extra={"request_id": key.request_id})


@dataclass(frozen=True, slots=True)
class _Items:
    """Pages or one slot, in one pool. valid: tokens of each. kept: checksums made when they were written, over all
    components and all tokens of each; none for the engine's own pool."""

    paged: bool
    items: tuple[int, ...]
    valid: tuple[int, ...]
    pool: int
    kept: Sequence[tuple[int, ...]]


def _sums(
    rank: LocalRank, region: Region, component: Component, part: _Items, kept: Sequence[tuple[int, ...]]
) -> list[int]:
    """Checksums [item][unit], flattened. Those that were made when host memory was written stay what they are, so that
    a byte that has changed since shows at the reader; a page of which only a part is valid is compared here."""
    valid = part.valid if part.paged else (component.tokens,) * len(part.items)
    if not kept:
        return rank.checksum(region, component, part.items, valid)
    sums = [list(row) for row in kept]
    for index, (item, tokens) in enumerate(zip(part.items, valid, strict=True)):
        if tokens < component.tokens:
            if rank.checksum(region, component, (item,), (component.tokens,)) != sums[index]:
                raise KvLost("a page in host memory is damaged")
            sums[index] = rank.checksum(region, component, (item,), (tokens,))
    return [value for row in sums for value in row]


def _first_to_proto(first: First) -> common_pb2.FirstToken:
    token = common_pb2.FirstToken(choice=first.choice, token=first.token, finish=_FINISH(first.finish))
    if first.logprob:
        token.logprob.MergeFromString(first.logprob)
    return token
