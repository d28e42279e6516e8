"""Sources as a reader knows them: handshakes, and the leases it holds, kept alive by one renewal per pair.

The lease clock is the reader's own: a lease counts from the moment its request was *sent*, less a margin, so the
reader gives up before the source does, whatever the network did in between.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import grpc

from kvtransfer.blocks import Plan
from kvtransfer.layout import (
    layout_from_proto,
    layout_to_proto,
    rank_from_proto,
    require_compatible,
    require_ranks,
)
from kvtransfer.transport import Agent, Incarnation, LocalRank
from kvtransfer.types import Layout
from protos.v1 import kvsource_pb2 as pb
from protos.v1 import kvsource_pb2_grpc
from runtime import faults
from runtime.clock import Clock
from runtime.errors import KvLost, PdserveError, WorkerLost
from runtime.rpc import from_rpc_error

ChannelFactory = Callable[[str], grpc.aio.Channel]

MOST_PEERS = 1024
"""Sources known at a time; beyond that, the one not used for longest is forgotten. That one has gone shows only when
it is asked again, and a fleet that comes and goes leaves one at every address it had."""


@dataclass(frozen=True, slots=True)
class Self:
    """The reading worker."""

    worker_id: str
    epoch: int
    layout: Layout
    ranks: tuple[LocalRank, ...]


@dataclass(slots=True, eq=False)
class Lease:
    """valid_until: on the reader's clock, margin already taken off. lost: why it is certainly gone, once known."""

    lease_id: str
    valid_until: float
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)


class LeaseKeeper:
    """Renews every lease held at one source with one call. Runs only while there are leases."""

    def __init__(
        self, stub: kvsource_pb2_grpc.KvSourceAsyncStub, me: Self, source_epoch: int, clock: Clock, margin_s: float
    ) -> None:
        self._stub = stub
        self._me = me
        self._source_epoch = source_epoch
        self._clock = clock
        self._margin_s = margin_s
        self._leases: dict[str, Lease] = {}
        self._lease_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def hold(self, lease_id: str, lease_s: float, asked_at: float) -> Iterator[Lease]:
        """Keep a lease alive inside the block. asked_at: when the call that granted it was sent."""
        lease = Lease(lease_id, asked_at + lease_s - self._margin_s)
        self._leases[lease_id] = lease
        self._lease_s = lease_s
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="kv-lease-renewal")
        try:
            yield lease
        finally:
            del self._leases[lease_id]

    async def require(self, lease: Lease) -> None:
        """Return never; raise KvLost as soon as the lease is lost or runs out on this reader's clock."""
        while (left := lease.valid_until - self._clock.monotonic()) > 0 and not lease.lost.done():
            await asyncio.wait([lease.lost], timeout=left)
        self.check(lease)

    def check(self, lease: Lease) -> None:
        """Raises KvLost unless the lease is certainly still held. Lost silently: the source is presumed frozen."""
        if lease.lost.done():
            raise KvLost(f"the source no longer holds the pages: {lease.lost.result()}")
        if self._clock.monotonic() >= lease.valid_until:
            raise SourceSilent("the lease could not be renewed in time")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._leases:
            await asyncio.sleep(self._lease_s / 4)
            if self._leases and not await faults.strike_async("kv.renew"):
                await self._renew()

    async def _renew(self) -> None:
        asked_at = self._clock.monotonic()
        asked = dict(self._leases)
        request = pb.RenewRequest(
            worker_id=self._me.worker_id, epoch=self._me.epoch, source_epoch=self._source_epoch, lease_ids=list(asked)
        )
        try:
            reply = await self._stub.Renew(request, timeout=self._lease_s / 4)
        except grpc.aio.AioRpcError as exc:
            error = from_rpc_error(exc)
            if isinstance(error, KvLost):
                for lease in asked.values():
                    lease.lose("it has been restarted")
            return  # anything else may pass; the leases' own clock decides
        for lease_id, lease in asked.items():
            if lease_id in reply.lost:
                lease.lose("its lease ended")
            else:
                lease.valid_until = asked_at + reply.lease_ms / 1000 - self._margin_s


class SourceSilent(KvLost):
    """No answer for a lease's length: frozen, or cut off. Its agent is removed, so nothing of it can land later."""


@dataclass(slots=True, eq=False)
class Peer:
    """A source that was shaken hands with, in one incarnation, and the connection to it.

    users: calls in progress. A dropped peer's channel is closed after the last one, since gRPC cancels what is open.
    """

    address: str
    worker_id: str
    epoch: int
    agents: tuple[Agent, ...]
    plan: Plan
    channel: grpc.aio.Channel
    stub: kvsource_pb2_grpc.KvSourceAsyncStub
    leases: LeaseKeeper
    users: int = 0
    dropped: bool = False


class Peers:
    """Handshake cache by address. A peer that is gone, or answers in another epoch, is dropped with its
    agents, and the next use shakes hands anew."""

    def __init__(
        self, me: Self, channel: ChannelFactory, clock: Clock, margin_s: float, most: int = MOST_PEERS
    ) -> None:
        self._me = me
        self._make_channel = channel
        self._clock = clock
        self._margin_s = margin_s
        self._most = most
        self._peers: dict[str, Peer] = {}  # by address, the one used last at the end
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # while somebody is at the address
        self._closing: set[asyncio.Task[None]] = set()
        self._meeting: Counter[str] = Counter()  # agents that a handshake is about to make known

    async def get(self, address: str, timeout: float) -> Peer:
        """The peer at `address`. Raises LayoutMismatch, WorkerLost, TransferFailed, DeadlineExceeded."""
        lock = self._locks.setdefault(address, asyncio.Lock())
        async with lock:
            peer = self._peers.get(address)
            if peer is not None:
                self._peers[address] = self._peers.pop(address)
                return peer
            channel = self._make_channel(address)
            try:
                fresh = await self._shake(address, channel, timeout)
            except BaseException:
                await channel.close(None)
                raise
            self._peers[address] = fresh
            for known in list(self._peers.values()):
                if known.worker_id == fresh.worker_id and known.epoch < fresh.epoch:
                    await self.drop(known)  # restarted at another address
            await self._forget_oldest()
            return fresh

    @contextmanager
    def using(self, peer: Peer) -> Iterator[None]:
        """Keep the peer's connection open inside the block."""
        peer.users += 1
        try:
            yield
        finally:
            peer.users -= 1
            self._retire(peer)

    async def drop(self, peer: Peer) -> None:
        """The peer is gone or silent: remove its agents (which ends its reads) and shake hands anew next time."""
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]
            await asyncio.shield(self._keep(asyncio.create_task(self._forget(peer))))  # nobody comes to it again

    async def close(self) -> None:
        for peer in list(self._peers.values()):
            await self.drop(peer)
        await asyncio.gather(*self._closing)

    async def _forget_oldest(self) -> None:
        unused = [peer for peer in self._peers.values() if not peer.users][:-1]  # the last one was just met
        for peer in unused[: max(len(self._peers) - self._most, 0)]:
            await self.drop(peer)

    async def _forget(self, peer: Peer) -> None:
        peer.dropped = True
        self._retire(peer)
        await peer.leases.close()
        await self._disconnect(peer.agents)

    def _retire(self, peer: Peer) -> None:
        if peer.dropped and not peer.users:
            self._keep(asyncio.create_task(peer.channel.close(None)))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """To its end, whoever waits for it."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _shake(self, address: str, channel: grpc.aio.Channel, timeout: float) -> Peer:
        stub: kvsource_pb2_grpc.KvSourceAsyncStub = kvsource_pb2_grpc.KvSourceStub(channel)
        try:
            reply = await stub.Handshake(self._hello(), timeout=timeout)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc) from exc
        theirs = layout_from_proto(reply.layout)
        require_compatible(self._me.layout, theirs)
        ranks = [rank_from_proto(r) for r in reply.ranks]
        require_ranks(theirs, ranks)
        plan = Plan.make(self._me.layout, theirs, ranks)
        agents = tuple(Agent(r.agent_name, r.agent_metadata) for r in ranks)
        await self._meet(reply.worker_id, reply.epoch, agents)
        leases = LeaseKeeper(stub, self._me, reply.epoch, self._clock, self._margin_s)
        return Peer(address, reply.worker_id, reply.epoch, agents, plan, channel, stub, leases)

    async def _meet(self, worker_id: str, epoch: int, agents: Sequence[Agent]) -> None:
        """Make the agents known to every transport, or, when that fails or is cancelled, to none in the end."""
        names = [agent.name for agent in agents]
        self._meeting.update(names)
        try:
            for index, agent in enumerate(agents):
                for rank in self._me.ranks:
                    await rank.transport.connect(Incarnation(worker_id, index, epoch), agent)
        except BaseException:
            self._keep(asyncio.create_task(self._disconnect(agents)))
            raise
        finally:
            self._meeting.subtract(names)  # from here on the peer is known, without a pause between

    async def _disconnect(self, agents: Sequence[Agent]) -> None:
        """Forget agents, but for those of a peer that is known, or is being met, maybe by another address. A transport
        does as it is told in order, and keeps an agent while reads from it are in progress."""
        for agent in agents:
            for rank in self._me.ranks:
                known = any(agent.name == a.name for peer in self._peers.values() for a in peer.agents)
                if not known and not self._meeting[agent.name]:
                    await rank.transport.disconnect(agent.name)

    def _hello(self) -> pb.HandshakeRequest:
        """Names only: a source has no use for its readers' memory, so it never learns where that is."""
        return pb.HandshakeRequest(
            worker_id=self._me.worker_id,
            epoch=self._me.epoch,
            layout=layout_to_proto(self._me.layout),
            ranks=[
                pb.RankInfo(
                    tp_rank=r.info.tp_rank,
                    pp_rank=r.info.pp_rank,
                    dcp_rank=r.info.dcp_rank,
                    agent_name=r.info.agent_name,
                )
                for r in self._me.ranks
            ],
        )


def gone(error: PdserveError) -> bool:
    """Whether this error means that the peer's process cannot be relied on any more."""
    return isinstance(error, WorkerLost | SourceSilent)
