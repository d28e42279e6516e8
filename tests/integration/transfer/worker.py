"""A worker without an engine: pools, a transport, KvSource over gRPC, a puller. Run as a process it is a source that
a test drives with one JSON command per line; used in-process it is the reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.checksum import wsum64
from kvtransfer.inprocess import InProcessTransport
from kvtransfer.layout import Rank, fingerprint
from kvtransfer.mapping import owned_units
from kvtransfer.nixl import NixlTransport
from kvtransfer.prefix import Holder, Offers
from kvtransfer.puller import Puller
from kvtransfer.service import KvSourceService
from kvtransfer.source import HandoffStore
from kvtransfer.tickets import TicketMint
from kvtransfer.transport import Flight, Incarnation, LocalRank
from kvtransfer.types import Component, Destination, First, Layout, LegKey, Region
from protos.v1 import kvsource_pb2_grpc
from runtime import rpc
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.errors import TransferFailed

KV = Component("kv", True, 4, 6, 2, 16, 64, "bfloat16")
STATE = Component("recurrent", False, 4, 3, 1, 1, 512, "float32")
LATENT = Component("latent", True, 1, 2, 1, 16, 72, "bfloat16", replicated=True)


BIG = Component("kv", True, 4, 64, 2, 16, 512, "bfloat16")  # 4 MiB a page: a read lasts long enough to be caught


def layout(
    tp: int = 1, model: str = "test", components: Sequence[Component] = (KV, STATE), big: bool = False
) -> Layout:
    if big:
        components = (BIG,)
    return Layout(tuple(components), model, 512, tp=tp)


class CountingHold:
    """A hold that says how often, and that, it was released."""

    def __init__(self) -> None:
        self.releases = 0
        self.released = threading.Event()

    def release(self) -> None:
        self.releases += 1
        self.released.set()


def item_bytes(component: Component, salt: int, item: int) -> npt.NDArray[np.uint8]:
    """[units, unit bytes]: what a source's fake model writes, the same in every process."""
    rng = np.random.default_rng([salt, item, sum(component.name.encode())])
    return rng.integers(0, 256, (component.units, component.unit_bytes), dtype=np.uint8)


@dataclass
class Pool:
    """One component on one rank: [items, units, unit bytes] and its region."""

    component: Component
    array: npt.NDArray[np.uint8]
    region: Region

    @classmethod
    def make(cls, component: Component, tp: int, rank: int, items: int, region_id: int) -> Pool:
        units = owned_units(component, tp, rank)
        array = np.zeros((items, len(units), component.unit_bytes), np.uint8)
        region = Region(
            region_id, component.name, array.ctypes.data, array.nbytes, array.strides[0], units.start, len(units)
        )
        return cls(component, array, region)

    def fill(self, salt: int, item: int) -> None:
        units = slice(self.region.first_unit, self.region.first_unit + self.region.units)
        self.array[item] = item_bytes(self.component, salt, item)[units]


@dataclass
class Worker:
    worker_id: str
    epoch: int
    layout: Layout
    config: Config
    items: int = 64
    transport: str = "inprocess"
    host_items: int = 0
    holder: Holder | None = None
    listen: str = "127.0.0.1:0"
    pools: list[dict[str, Pool]] = field(default_factory=list)
    host: list[dict[str, Pool]] = field(default_factory=list)
    ranks: list[LocalRank] = field(default_factory=list)
    holds: dict[str, CountingHold] = field(default_factory=dict)
    tickets: list[bytes] = field(default_factory=list)
    posted: Posted | None = None
    address: str = ""

    async def start(self) -> Worker:
        self.clock = SystemClock()
        for rank in range(self.layout.tp):
            await self._start_rank(rank)
        mint = TicketMint(self.worker_id, self.epoch, fingerprint(self.layout))
        self.store = HandoffStore(mint, self.clock, self.config.lease_s)
        offers = Offers(self.epoch, fingerprint(self.layout), self.store, self.holder, 2) if self.holder else None
        self.service = KvSourceService(self.worker_id, self.epoch, self.layout, self.ranks, self.store, offers)
        self.service.start()
        self.server = rpc.server(self.config)
        kvsource_pb2_grpc.add_KvSourceServicer_to_server(self.service, self.server)
        self.address = rpc.bind(self.server, self.listen, self.config)
        await self.server.start()
        self.puller = Puller(self.worker_id, self.epoch, self.layout, self.ranks, self.config, self.clock)
        return self

    async def close(self) -> None:
        await self.puller.close()
        await self.service.close()
        await self.server.stop(None)
        for rank in self.ranks:
            await rank.transport.close()

    async def _start_rank(self, rank: int) -> None:
        pools = {
            c.name: Pool.make(c, self.layout.tp, rank, self.items, index + 1)
            for index, c in enumerate(self.layout.components)
        }
        incarnation = Incarnation(self.worker_id, rank, self.epoch)
        transport: Any = (
            NixlTransport(incarnation, progress_us=self.config.nixl_progress_us, quarantine_s=self.config.quarantine_s)
            if self.transport == "nixl"
            else InProcessTransport(incarnation, self.config.quarantine_s)
        )
        host = {
            c.name: Pool.make(c, self.layout.tp, rank, self.host_items, len(pools) + index + 1)
            for index, c in enumerate(self.layout.components)
            if self.host_items
        }
        self.host.append(host)
        regions = tuple(p.region for p in (*pools.values(), *host.values()))
        agent = await transport.start(regions)
        self.pools.append(pools)
        self.ranks.append(LocalRank(Rank(agent.name, agent.metadata, regions, rank), transport, wsum64))

    # --- as a source ------------------------------------------------------------------------------------------

    def key(self, request: str) -> LegKey:
        return LegKey(request, "prefill", 1)

    def open(self, request: str, pages: Sequence[int], tokens: int, ready: int = 0) -> bytes:
        hold = self.holds[request] = CountingHold()
        return self.store.open(self.key(request), pages=pages, token_count=tokens, ready=ready, hold=hold)

    def fill(self, salt: int, items: Sequence[int], paged: bool = True) -> None:
        for rank in self.pools:
            for pool in rank.values():
                if pool.component.paged == paged:
                    for item in items:
                        pool.fill(salt, item)

    def final(self, request: str, tokens: int, slots: Sequence[int] = (1,)) -> None:
        self.store.final(self.key(request), state_length=tokens, first=[First(0, 42)], slots=slots)

    def transport_used(self) -> int:
        """Pages that were read into."""
        return int(self.pools[0]["kv"].array.any(axis=(1, 2)).sum())

    # --- as a reader ------------------------------------------------------------------------------------------

    def destination(self, pages: Sequence[int], tokens: int, slots: Sequence[int] = (1,), held: int = 0) -> Destination:
        return Destination(tuple(pages), tuple(slots), tokens, held, CountingHold())

    def wrong(self, salt: int, sources: Sequence[int], mine: Sequence[int], paged: bool = True) -> list[str]:
        """Items that differ from what the source's fake model wrote."""
        return [
            f"{name} rank {rank} item {item}"
            for rank, pools in enumerate(self.pools)
            for name, pool in pools.items()
            if pool.component.paged == paged
            for source, item in zip(sources, mine, strict=True)
            if not np.array_equal(pool.array[item], self._expected(pool, salt, source))
        ]

    def _expected(self, pool: Pool, salt: int, item: int) -> npt.NDArray[np.uint8]:
        first = pool.region.first_unit
        return item_bytes(pool.component, salt, item)[first : first + pool.region.units]


# --- a source in its own process ----------------------------------------------------------------------------------


async def _answer(worker: Worker, ask: dict[str, Any]) -> dict[str, Any]:
    request = ask.get("request", "")
    match ask["op"]:
        case "open":
            ticket = worker.open(request, ask["pages"], ask["tokens"], ask.get("ready", 0))
            return {"ticket": ticket.hex()}
        case "fill":
            worker.fill(ask["salt"], ask["items"], ask.get("paged", True))
        case "ready":
            worker.store.range_ready(worker.key(request), ask["start"], ask["end"])
        case "final":
            worker.final(request, ask["tokens"], ask.get("slots", [1]))
        case "corrupt":
            worker.pools[0]["kv"].array[ask["page"], 0, ask["byte"]] ^= 1
        case "state":
            state = worker.store.state(worker.key(request))
            return {"state": state.value if state else None, "releases": worker.holds[request].releases}
        case "counts":
            counts = worker.store.counts()
            return {"computing": counts.computing, "leased": counts.leased, "pages": counts.pages}
        case "ticket":
            worker.tickets.append(bytes.fromhex(ask["ticket"]))
        case "begin":
            await _pull_big(worker, ask["address"], worker.destination(BIG_PAGES, _BIG_TOKENS, slots=()))
            worker.posted = await _begin(worker, ask["address"], ask["pid"])
        case "landed":
            return {"pages": worker.transport_used()}
        case "give_up":
            return await _give_up(worker)
        case "pull_again":
            return await _pull_again(worker, ask["address"])
        case other:
            raise AssertionError(other)
    return {}


BIG_PAGES = list(range(1, 24))
_BIG_TOKENS = 16 * len(BIG_PAGES)


def _hold(dest: Destination) -> CountingHold:
    assert isinstance(dest.hold, CountingHold)
    return dest.hold


async def _pull_big(worker: Worker, address: str, dest: Destination) -> None:
    await worker.puller.pull(worker.tickets.pop(0), address, dest, worker.clock.monotonic() + 60, 1)


@dataclass
class Posted:
    """A pull that is under way: its reads have been posted."""

    dest: Destination
    flights: list[Flight]
    running: asyncio.Task[None]


async def _begin(worker: Worker, address: str, source: int) -> Posted:
    """Begin a pull, of which the source is stopped before the read is posted."""
    worker.pools[0]["kv"].array[:] = 0
    dest = worker.destination(BIG_PAGES, _BIG_TOKENS, slots=())
    posted: asyncio.Future[list[Flight]] = asyncio.get_running_loop().create_future()
    post = worker.puller._post

    def stopped_first(*arguments: Any) -> list[Flight]:
        stop(source)
        flights = post(*arguments)
        posted.set_result(flights)
        return flights

    worker.puller._post = stopped_first  # type: ignore[assignment,method-assign]
    running = asyncio.create_task(_pull_big(worker, address, dest))
    flights = await posted
    worker.puller._post = post  # type: ignore[method-assign]
    return Posted(dest, flights, running)


async def _give_up(worker: Worker) -> dict[str, Any]:
    """The read's time is over, by decree: the pull fails."""
    assert worker.posted is not None
    for flight in worker.posted.flights:
        flight.deadline = 0.0
    try:
        await worker.posted.running
    except TransferFailed:
        return {
            "released": _hold(worker.posted.dest).releases,
            "quarantined": worker.puller.quarantined_pages() == len(BIG_PAGES),
        }
    raise AssertionError("a read from a stopped process has ended")


async def _pull_again(worker: Worker, address: str) -> dict[str, Any]:
    """When the abandoned destination is nobody's any more."""
    assert worker.posted is not None
    released = await asyncio.get_running_loop().run_in_executor(None, _hold(worker.posted.dest).released.wait, 60)
    await _pull_big(worker, address, worker.destination(BIG_PAGES, _BIG_TOKENS, slots=()))
    return {"released": released, "wrong": worker.wrong(7, BIG_PAGES, BIG_PAGES)}


def stop(pid: int) -> None:
    """Stop a process, and see that every thread of it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while any(thread != "T" for thread in _threads(pid)):
        time.sleep(0.001)


def _threads(pid: int) -> Iterator[str]:
    """The states of a process's threads."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that ends meanwhile
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]


async def _main(spec: dict[str, Any]) -> None:
    config = Config(**spec.get("config", {}))
    worker = Worker(
        spec["worker_id"],
        spec["epoch"],
        layout(**spec.get("layout", {})),
        config,
        items=spec.get("items", 64),
        transport="nixl",
        listen=spec.get("listen", "127.0.0.1:0"),
    )
    await worker.start()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"address": worker.address}), flush=True)
    while line := await reader.readline():
        print(json.dumps(await _answer(worker, json.loads(line))), flush=True)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
