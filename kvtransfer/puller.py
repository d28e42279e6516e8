"""The reader's side of a hand-off: watch, read each range as it becomes ready, verify, confirm.

Failures this answers: decoding from pages that were never, partly or wrongly written; a destination that is handed to
the next request while an abandoned read still writes to it; a source that is frozen rather than dead; a decode worker
that needed nothing and therefore never said "done".

It decides nothing about the request: the caller hears TicketInvalid, KvLost, TransferFailed, ChecksumMismatch,
LayoutMismatch or DeadlineExceeded, and chooses between recomputing and giving back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvtransfer.blocks import Key, Located
from kvtransfer.checksum import memory
from kvtransfer.layout import fingerprint, require_ranks, require_supported
from kvtransfer.peers import ChannelFactory, Lease, Peer, Peers, Self, gone
from kvtransfer.prefix import question
from kvtransfer.tickets import parse
from kvtransfer.transport import Flight, LocalRank
from kvtransfer.types import Destination, First, Layout, Pulled, Wanted
from protos.v1 import common_pb2
from protos.v1 import kvsource_pb2 as pb
from runtime import faults, rpc
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    KvLost,
    LayoutMismatch,
    PdserveError,
    TransferFailed,
    WorkerLost,
    from_detail,
)

log = logging.getLogger(__name__)

RELEASE_TRIES = 3
CLOSE_S = 2.0
HELLO_S = 5.0
"""How long a source may take to answer at all; from there on its lease is the measure."""
_OURS = (KvLost, LayoutMismatch, DeadlineExceeded)


@dataclass(slots=True)
class _Landing:
    """One pull's progress. cursor: tokens [0, cursor) are here or on their way."""

    dest: Destination
    cursor: int
    started: float
    sole: bool = False
    flights: list[Flight] = field(default_factory=list)
    first_range_at: float = 0.0
    nbytes: int = 0
    pages: int = 0
    read_s: float = 0.0
    checksum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Part:
    """What is read and verified at once: a range of pages, or the state slots. tokens: valid ones over all items."""

    paged: bool
    items: tuple[int, ...]
    tokens: int
    located: dict[Key, Located]


class Puller:
    """Pulls hand-offs into one worker's pools. Used from one event loop."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        layout: Layout,
        ranks: Sequence[LocalRank],
        config: Config,
        clock: Clock,
        channel: ChannelFactory | None = None,
    ) -> None:
        require_supported(layout)
        require_ranks(layout, [r.info for r in ranks])
        self._me = Self(worker_id, epoch, layout, tuple(ranks))
        self._config = config
        self._clock = clock
        factory = channel or (lambda address: rpc.channel(address, config))
        self._peers = Peers(self._me, factory, clock, config.lease_margin_s)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-pull-checksum")
        self._background: set[asyncio.Task[None]] = set()
        self._quarantined = 0

    async def pull(
        self,
        signed_ticket: bytes,
        source_address: str,
        dest: Destination,
        deadline: float,
        fence: int,
        *,
        sole: bool = False,
    ) -> Pulled:
        """Bring tokens [dest.held, dest.token_count) and the state into `dest`, verified, and confirm.

        deadline: on the clock's monotonic time. May be cancelled at any moment. In every case `dest.hold` is released
        once nothing can be written to the pages any more, which may be after this returned. sole: nobody else will want
        what this ticket is for, so the source is let go when this does not succeed, too.
        """
        landing = _Landing(dest, dest.held, self._clock.monotonic(), sole)
        try:
            async with asyncio.timeout(deadline - landing.started) as scope:
                return await self._pull(parse(signed_ticket), source_address, landing, deadline, fence)
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceeded("the hand-off did not arrive in time") from None
        finally:
            self._let_go(landing)

    async def ask(
        self, address: str, source_epoch: int, ref: common_pb2.AttemptRef, wanted: Wanted, timeout: float
    ) -> pb.OfferPrefixReply:
        """Ask a worker, in the epoch it is believed to live in, for a cached prefix: without a ticket it has none.
        Raises EpochMismatch, LayoutMismatch, WorkerLost, DeadlineExceeded, KvLost."""
        began = self._clock.monotonic()
        peer = await self._peer(address, timeout)
        me = self._me
        request = question(me.worker_id, me.epoch, source_epoch, fingerprint(me.layout), ref, wanted)
        with self._peers.using(peer):
            try:
                return await peer.stub.OfferPrefix(request, timeout=timeout - (self._clock.monotonic() - began))
            except grpc.aio.AioRpcError as exc:
                error = rpc.from_rpc_error(exc)
                if gone(error):
                    await self._peers.drop(peer)
                raise error from exc

    async def decline(self, offer: pb.SignedTicket, address: str, timeout: float) -> None:
        """Let the source go of a prefix that is not wanted after all. Best effort: its lease ends anyway."""
        try:
            async with asyncio.timeout(timeout):
                peer = await self._peer(address, timeout)
                request = pb.WatchRequest(ticket=offer, fence=1, worker_id=self._me.worker_id, epoch=self._me.epoch)
                with self._peers.using(peer):
                    call = peer.stub.Watch(request)
                    try:
                        lease_id = (await _next(call)).accepted.lease_id
                        await peer.stub.Release(pb.ReleaseRequest(lease_id=lease_id), timeout=timeout)
                    finally:
                        call.cancel()
        except (PdserveError, grpc.aio.AioRpcError, TimeoutError) as exc:
            log.info("an offer could not be declined", extra={"reason": type(exc).__name__})

    def quarantined_pages(self) -> int:
        """Pages of pulls that are over while a read may still land in them."""
        return self._quarantined

    def unhealthy(self) -> str:
        """Empty, or why this worker must be replaced."""
        return next((why for r in self._me.ranks if (why := r.transport.unhealthy())), "")

    async def connect(self, address: str, timeout: float = 10.0) -> None:
        """Shake hands ahead of the first pull. Raises as pull() does."""
        await self._peer(address, timeout)

    async def close(self) -> None:
        """Say what is left to say, then forget every peer. Close the transports after this."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_S)
        await self._peers.close()
        for task in self._background:
            task.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._executor.shutdown)

    # --- one pull ---------------------------------------------------------------------------------------------

    async def _pull(
        self, ticket: pb.SignedTicket, address: str, landing: _Landing, deadline: float, fence: int
    ) -> Pulled:
        assert 0 <= landing.dest.held < landing.dest.token_count
        request = pb.WatchRequest(
            ticket=ticket,
            first_token=landing.dest.held,
            fence=fence,
            worker_id=self._me.worker_id,
            epoch=self._me.epoch,
        )
        peer = await self._peer(address, deadline - self._clock.monotonic())
        try:
            return await self._watch(peer, request, landing, deadline)
        except _StaleConnection:  # the source was restarted since we last met, or was away: once more, from the start
            peer = await self._peer(address, deadline - self._clock.monotonic())
            return await self._watch(peer, request, landing, deadline)

    async def _watch(self, peer: Peer, request: pb.WatchRequest, landing: _Landing, deadline: float) -> Pulled:
        asked_at = self._clock.monotonic()
        with self._peers.using(peer):
            call = peer.stub.Watch(request)
            try:
                accepted = await self._accepted(call, peer)
                with peer.leases.hold(accepted.lease_id, accepted.lease_ms / 1000, asked_at) as lease:
                    try:
                        final = await self._land_all(call, peer, lease, landing, deadline)
                        peer.leases.check(lease)
                    except BaseException:
                        if landing.sole:
                            self._spawn(self._release(peer, lease, confirmed=False))
                        raise
                self._spawn(self._release(peer, lease, confirmed=True))
                return self._pulled(landing, final)
            except PdserveError as error:
                if gone(error):
                    await self._peers.drop(peer)
                raise error if isinstance(error, _OURS) else KvLost("the source of the pages is lost") from error
            finally:
                call.cancel()

    async def _accepted(self, call: _Call, peer: Peer) -> pb.WatchAccepted:
        """The source's first word. A source that is not there, or in another epoch, may just have been restarted:
        nothing has moved, so the caller tries once more with a new connection and handshake."""
        try:
            accepted = (await asyncio.wait_for(_next(call), HELLO_S)).accepted
        except TimeoutError as error:
            await self._peers.drop(peer)
            raise KvLost("the source of the pages does not answer") from error
        except WorkerLost as error:
            await self._peers.drop(peer)
            raise _StaleConnection("the source of the pages is lost") from error
        if accepted.epoch != peer.epoch:
            await self._peers.drop(peer)
            raise _StaleConnection("the source was restarted meanwhile")
        return accepted

    async def _peer(self, address: str, timeout: float) -> Peer:
        try:
            return await self._peers.get(address, min(timeout, HELLO_S))
        except DeadlineExceeded as error:
            raise KvLost("the source of the pages does not answer") from error
        except PdserveError as error:
            raise error if isinstance(error, _OURS) else KvLost("the source of the pages is lost") from error

    async def _land_all(
        self, call: _Call, peer: Peer, lease: Lease, landing: _Landing, deadline: float
    ) -> pb.HandoffFinal:
        """Read ranges as they are announced; verify them while later ones arrive."""
        try:
            async with asyncio.TaskGroup() as group:
                guard = group.create_task(peer.leases.require(lease))
                landings: list[asyncio.Task[None]] = []
                while not (event := await _next(call)).HasField("final"):
                    part = self._range(peer, landing, event.range)
                    landings.append(group.create_task(self._arrive(peer, landing, part, deadline)))
                state = self._state(peer, landing, event.final)
                landings += [group.create_task(self._arrive(peer, landing, part, deadline)) for part in state]
                await asyncio.wait(landings)
                guard.cancel()
        except BaseExceptionGroup as errors:
            error = _first_error(errors)
            if isinstance(error, ChecksumMismatch) and not landing.sole:
                self._spawn(self._release(peer, lease, confirmed=False))
            raise error from None
        return event.final

    def _range(self, peer: Peer, landing: _Landing, ready: pb.RangeReady) -> _Part:
        """Check one announced range: the next tokens, whole pages, every index inside its region."""
        dest, page = landing.dest, self._me.layout.page_tokens
        whole = ready.end % page == 0 or ready.end == dest.token_count
        if ready.start != landing.cursor or not ready.start < ready.end <= dest.token_count or not whole:
            raise TransferFailed(f"tokens {ready.start} to {ready.end} were announced after {landing.cursor}")
        landing.cursor = ready.end
        landing.first_range_at = landing.first_range_at or self._clock.monotonic()
        items = dest.pages[ready.start // page : -(-ready.end // page)]
        located = peer.plan.locate(ready.blocks, True, len(items))
        landing.pages += len(items)
        return _Part(True, items, ready.end - ready.start, located)

    def _state(self, peer: Peer, landing: _Landing, final: pb.HandoffFinal) -> list[_Part]:
        """Check the end: everything was announced, the state is as long as expected. One part if there is a state."""
        dest = landing.dest
        if final.state_length != dest.token_count or landing.cursor != dest.token_count:
            raise TransferFailed(
                f"{dest.token_count} tokens were expected, {landing.cursor} announced, the state holds "
                f"{final.state_length}"
            )
        if all(c.paged for c in self._me.layout.components):
            return []
        located = peer.plan.locate(final.slots, False, len(dest.slots))
        return [_Part(False, dest.slots, len(dest.slots), located)]

    async def _arrive(self, peer: Peer, landing: _Landing, part: _Part, deadline: float) -> None:
        """Read one part, then verify it on the executor's thread, while later parts arrive."""
        if await faults.strike_async("kv.read"):
            await asyncio.Event().wait()  # a read that never ends: the deadline finds it
        for flight in self._post(peer, landing, part, deadline):
            try:
                stats = await flight.result
            except DeadlineExceeded as error:  # of this one read, shorter than the request's
                raise TransferFailed("a read did not finish in time") from error
            if stats.nbytes != flight.moves.nbytes:
                raise TransferFailed(f"{stats.nbytes} of {flight.moves.nbytes} bytes arrived")
            landing.nbytes += stats.nbytes
            landing.read_s += stats.seconds
        loop = asyncio.get_running_loop()
        landing.checksum_s += await loop.run_in_executor(self._executor, self._verify, peer, part)

    def _post(self, peer: Peer, landing: _Landing, part: _Part, deadline: float) -> list[Flight]:
        until = time.monotonic() + min(deadline - self._clock.monotonic(), self._config.transfer_timeout_s)
        flights = [
            rank.transport.read(peer.agents[owner].name, table, until)
            for reader, rank in enumerate(self._me.ranks)
            for owner, table in peer.plan.moves(reader, rank.info, part.paged, part.items, part.located)
        ]
        landing.flights += flights
        return flights

    def _verify(self, peer: Peer, part: _Part) -> float:
        """Seconds it took. Raises ChecksumMismatch. On the executor's thread."""
        began = time.perf_counter()
        faults.strike("kv.verify")
        for reader, rank in enumerate(self._me.ranks):
            self._corrupt(rank, part)
            peer.plan.verify(reader, rank, part.paged, part.items, part.tokens, part.located)
        return time.perf_counter() - began

    def _corrupt(self, rank: LocalRank, part: _Part) -> None:
        """Where a test may damage what arrived, in host memory."""
        for component in self._me.layout.components:
            region = rank.info.by_component[component.name]
            if component.paged == part.paged and region.memory == "DRAM":
                start = part.items[0] * region.stride
                faults.corrupted("kv.bytes", memory(region)[start : start + component.unit_bytes].data)

    def _pulled(self, landing: _Landing, final: pb.HandoffFinal) -> Pulled:
        return Pulled(
            state_length=final.state_length,
            first=tuple(_first_token(f) for f in final.first),
            bytes_read=landing.nbytes,
            pages_read=landing.pages,
            wait_s=landing.first_range_at - landing.started,
            read_s=landing.read_s,
            checksum_s=landing.checksum_s,
            extras=dict(final.extras),
        )

    # --- afterwards -------------------------------------------------------------------------------------------

    async def _release(self, peer: Peer, lease: Lease, *, confirmed: bool) -> None:
        """Best effort with retries; what fails here ends with the lease. Whoever waits for the pull goes on first."""
        await asyncio.sleep(0)
        request = pb.ReleaseRequest(lease_id=lease.lease_id, confirmed=confirmed)
        if await faults.strike_async("kv.release"):
            return
        with self._peers.using(peer):
            for attempt in range(RELEASE_TRIES):
                try:
                    await peer.stub.Release(request, timeout=1.0)
                    return
                except grpc.aio.AioRpcError as exc:
                    log.info("a release was not acknowledged", extra={"status": exc.code().name, "attempt": attempt})
                    await asyncio.sleep(0.1 * 2**attempt)

    def _let_go(self, landing: _Landing) -> None:
        """Release the destination now, or once every abandoned read is quiet."""
        loud = [f.quiet for f in landing.flights if not f.settled]
        if not loud:
            landing.dest.hold.release()
            return
        self._quarantined += len(landing.dest.pages)
        self._spawn(self._quarantine(landing, loud))

    async def _quarantine(self, landing: _Landing, loud: Sequence[asyncio.Future[None]]) -> None:
        await asyncio.wait(loud)
        self._quarantined -= len(landing.dest.pages)
        landing.dest.hold.release()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _StaleConnection(KvLost):
    """Nothing has moved yet: worth one more try."""


_Call = grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchEvent]


async def _next(call: _Call) -> pb.WatchEvent:
    """The next event that is good news. Raises the source's error, or WorkerLost for a broken stream."""
    try:
        event = await call.read()
    except grpc.aio.AioRpcError as exc:
        raise rpc.from_rpc_error(exc) from exc
    if not isinstance(event, pb.WatchEvent):
        raise KvLost("the source ended the hand-off without a word")
    if event.HasField("failed"):
        error = from_detail(event.failed)
        raise error if isinstance(error, KvLost) else KvLost(error.message, reason=error.reason)
    return event


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The cause of a failed task group: our own errors before anything else."""
    flat: list[BaseException] = []
    stack: list[BaseException] = [errors]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            flat.append(error)
    return next((e for e in flat if isinstance(e, PdserveError)), flat[0])


def _first_token(wire: common_pb2.FirstToken) -> First:
    logprob = wire.logprob.SerializeToString() if wire.HasField("logprob") else b""
    return First(wire.choice, wire.token, int(wire.finish), logprob)
