"""Transfer figures: our path against raw NIXL READs of the same descriptors, in one run.

`python -m bench.transfer` prints JSON. A second process is the source. Sizes are made of SmolLM2 pages (16 tokens,
360 KiB), scattered on both sides so that nothing merges. For each case:

raw       an agent of its own, used directly in a tight loop without thread or event loop: prepare, post, done
posted    the same, but every handle is prepared before the clock starts
read      Transport.read from the event loop (uvloop, as a worker's), asked to answered: queue, thread, prepare, post,
          done, wake-up
moved     of a lone read, post to done as the transport reports it with every transfer
pull      a whole hand-off: Watch, ready ranges, reads, checksums, final; bytes as the transport counted them

`ratio` is raw time / read time, `ratio_posted` is posted / read, `ratio_moved` posted / moved (1 = as fast). Every
round takes all of them, in an order that changes, each after a pause; figures are medians, `ratio_best`
compares the minima.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import uvloop

from bench._options import whole
from kvtransfer.checksum import wsum64
from kvtransfer.layout import Rank, fingerprint
from kvtransfer.mapping import Moves, UnitRead, moves
from kvtransfer.nixl import NixlTransport
from kvtransfer.nixl_agent import load, make_agent
from kvtransfer.puller import Puller
from kvtransfer.service import KvSourceService
from kvtransfer.source import HandoffStore
from kvtransfer.tickets import TicketMint
from kvtransfer.transport import Incarnation, LocalRank
from kvtransfer.types import Component, Destination, First, Layout, LegKey, Region
from protos.v1 import kvsource_pb2 as pb
from protos.v1 import kvsource_pb2_grpc
from runtime import rpc
from runtime.clock import SystemClock
from runtime.config import Config

KV = Component("kv", True, 3, 30, 2, 16, 128, "bfloat16")
LAYOUT = Layout((KV,), "bench", 512)
PAGES = 768
MIB = 1 << 20
PAUSE_S = 0.01
CASES = {"16 MiB": (1, 16 * MIB), "256 MiB": (1, 256 * MIB), "32 x 1 MiB": (32, MIB)}


class _NoHold:
    def release(self) -> None:
        """Pages of a benchmark are never reused."""


@dataclass
class Side:
    """A worker without an engine: one pool, a NIXL transport, KvSource, a puller."""

    worker_id: str
    config: Config

    async def start(self) -> Side:
        self.array = _pool()
        self.region = Region(1, KV.name, self.array.ctypes.data, self.array.nbytes, KV.item_bytes, 0, KV.units)
        self.transport = NixlTransport(Incarnation(self.worker_id, 0, 1), progress_us=self.config.nixl_progress_us)
        agent = await self.transport.start([self.region])
        self.rank = Rank(agent.name, agent.metadata, (self.region,))
        ranks = [LocalRank(self.rank, self.transport, wsum64)]
        clock = SystemClock()
        self.store = HandoffStore(TicketMint(self.worker_id, 1, fingerprint(LAYOUT)), clock, self.config.lease_s)
        self.service = KvSourceService(self.worker_id, 1, LAYOUT, ranks, self.store)
        self.service.start()
        self.server = rpc.server(self.config)
        kvsource_pb2_grpc.add_KvSourceServicer_to_server(self.service, self.server)
        self.address = rpc.bind(self.server, "127.0.0.1:0", self.config)
        await self.server.start()
        self.puller = Puller(self.worker_id, 1, LAYOUT, ranks, self.config, clock)
        return self

    def channel(self, address: str) -> grpc.aio.Channel:
        return rpc.channel(address, self.config)

    async def close(self) -> None:
        await self.puller.close()
        await self.service.close()
        await self.server.stop(None)
        await self.transport.close()


def _pool() -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(os.getpid())
    return rng.integers(0, 256, PAGES * KV.item_bytes, dtype=np.uint8)


# --- the source process -------------------------------------------------------------------------------------------


async def _source() -> None:
    side = await Side("source", Config()).start()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    hello = {"address": side.address, "base": side.region.base, "agent": side.rank.agent_metadata.hex()}
    print(json.dumps(hello), flush=True)
    count = 0
    while line := await reader.readline():
        tickets = []
        for pages in json.loads(line):
            count += 1
            key, tokens = LegKey(f"r{count}", "prefill", 1), len(pages) * 16
            ticket = side.store.open(key, pages=pages, token_count=tokens, ready=0, hold=_NoHold())
            side.store.final(key, state_length=tokens, first=[First(0, 1)])
            tickets.append(ticket.hex())
        print(json.dumps(tickets), flush=True)
    await side.close()


class SourceProcess:
    """The source, and a way to have hand-offs opened there."""

    async def start(self) -> SourceProcess:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.transfer", "--source"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=64 * MIB,
        )
        self.hello = await self._line()
        return self

    async def open(self, pages: Sequence[Sequence[int]]) -> list[bytes]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(pages).encode() + b"\n")
        return [bytes.fromhex(t) for t in await self._line()]

    async def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return await self.process.wait()

    async def _line(self) -> Any:
        assert self.process.stdout is not None
        while not (line := await self.process.stdout.readline()).startswith((b"{", b"[")):
            assert line, "the source did not start"
        return json.loads(line)


# --- measuring ----------------------------------------------------------------------------------------------------


class Raw:
    """NIXL as its own examples use it: no thread of ours, no event loop."""

    def __init__(self, side: Side, source: bytes) -> None:
        api, bindings = load()
        self._agent = make_agent(api, bindings, "raw", side.config.nixl_progress_us)
        self._table = self._agent.register_memory([(side.region.base, side.region.length, 0, "")], "DRAM")
        name = self._agent.add_remote_agent(source)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def run(self, tables: Sequence[Moves]) -> tuple[float, float]:
        """Seconds to the last completion: from the start, and from the first post."""
        agent = self._agent
        began = time.perf_counter()
        handles = [
            agent.initialize_xfer(
                "READ", agent.get_xfer_descs(m.local, "DRAM"), agent.get_xfer_descs(m.remote, "DRAM"), self._peer
            )
            for m in tables
        ]
        posted = time.perf_counter()
        pending = [h for h in handles if agent.transfer(h) != "DONE"]
        while pending:
            pending = [h for h in pending if agent.check_xfer_state(h) != "DONE"]
        done = time.perf_counter()
        for handle in handles:
            handle.release()
        return done - began, done - posted

    def close(self) -> None:
        self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._table)
        del self._agent


@dataclass
class Bench:
    side: Side
    source: SourceProcess
    raw: Raw
    rounds: int

    async def case(self, count: int, size: int) -> dict[str, Any]:
        pages = self._pages(count, size)
        tables = [self._moves(mine, theirs) for mine, theirs in pages]
        nbytes = sum(t.nbytes for t in tables)
        raw, reads, pulls = [], [], []

        async def one_raw() -> None:
            raw.append(self.raw.run(tables))

        async def one_read() -> None:
            reads.append(await self._read(tables))

        async def one_pull() -> None:
            pulls.append(await self._pulls(pages))

        works = [one_raw, one_read, one_pull]
        for _ in range(self.rounds):
            for work in works:
                await asyncio.sleep(PAUSE_S)
                await work()
            works.append(works.pop(0))
        whole, posted = [r[0] for r in raw], [r[1] for r in raw]
        read, moved = [r[0] for r in reads], [r[1] for r in reads]
        alone = {"ratio_moved": round(statistics.median(posted) / statistics.median(moved), 3)} if count == 1 else {}
        return {
            "bytes": nbytes,
            "descriptors": sum(len(t) for t in tables),
            "raw_ms": _ms(whole),
            "posted_ms": _ms(posted),
            "raw_gb_s": round(nbytes / statistics.median(whole) / 1e9, 2),
            "read_ms": _ms(read),
            "read_gb_s": round(nbytes / statistics.median(read) / 1e9, 2),
            "ratio": round(statistics.median(whole) / statistics.median(read), 3),
            "ratio_posted": round(statistics.median(posted) / statistics.median(read), 3),
            "ratio_best": round(min(whole) / min(read), 3),
            **alone,
            "pull_ms": _ms([p["all"] for p in pulls]),
            "pull_wait_ms": _ms([p["wait"] for p in pulls]),
            "pull_read_ms": _ms([p["read"] for p in pulls]),
            "pull_checksum_ms": _ms([p["checksum"] for p in pulls]),
        }

    def _pages(self, count: int, size: int) -> list[tuple[list[int], list[int]]]:
        """(mine, theirs) for each of `count` hand-offs: disjoint, in no order."""
        each = max(1, round(size / KV.item_bytes))
        rng = np.random.default_rng(count)
        mine, theirs = (
            (rng.permutation(PAGES - 1)[: count * each] + 1).reshape(count, each).tolist() for _ in range(2)
        )
        return list(zip(mine, theirs, strict=True))

    def _moves(self, mine: Sequence[int], theirs: Sequence[int]) -> Moves:
        hello = self.source.hello
        remote = Region(1, KV.name, hello["base"], self.side.region.length, KV.item_bytes, 0, KV.units)
        return moves(KV, UnitRead(0, 0, 0, KV.units), self.side.region, mine, remote, theirs)

    async def _read(self, tables: Sequence[Moves]) -> tuple[float, float]:
        """Seconds asked to answered, and post to done as the transport counted them (the longest of several)."""
        began = time.perf_counter()
        until = time.monotonic() + 30
        flights = [self.side.transport.read("source/0/1", table, until) for table in tables]
        stats = [await flight.result for flight in flights]
        return time.perf_counter() - began, max(one.seconds for one in stats)

    async def _pulls(self, pages: Sequence[tuple[list[int], list[int]]]) -> dict[str, float]:
        tickets = await self.source.open([theirs for _, theirs in pages])
        began = time.perf_counter()
        until = time.monotonic() + 30
        pulled = await asyncio.gather(
            *(
                self.side.puller.pull(
                    ticket,
                    self.source.hello["address"],
                    Destination(tuple(mine), (), len(mine) * 16, 0, _NoHold()),
                    until,
                    1,
                )
                for ticket, (mine, _) in zip(tickets, pages, strict=True)
            )
        )
        return {
            "all": time.perf_counter() - began,
            "wait": statistics.median(p.wait_s for p in pulled),
            "read": sum(p.read_s for p in pulled),
            "checksum": sum(p.checksum_s for p in pulled),
        }

    async def accepted_ms(self) -> float:
        """One Watch to its first message: what the RPC costs before any range."""
        (ticket,) = await self.source.open([[1]])
        async with self.side.channel(self.source.hello["address"]) as channel:
            stub: kvsource_pb2_grpc.KvSourceAsyncStub = kvsource_pb2_grpc.KvSourceStub(channel)
            times = []
            for fence in range(1, 30):
                began = time.perf_counter()
                call = stub.Watch(
                    pb.WatchRequest(ticket=pb.SignedTicket.FromString(ticket), fence=fence, worker_id="reader", epoch=1)
                )
                await call.read()
                times.append(time.perf_counter() - began)
                call.cancel()
        return _ms(times)


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def _checksum_gb_s(side: Side) -> float:
    items = tuple(range(1, 33))
    best = min(_once(lambda: wsum64(side.region, KV, items, (16,) * len(items))) for _ in range(9))
    return round(len(items) * KV.item_bytes / best / 1e9, 1)


async def _idle_percent(seconds: float = 2.0) -> float:
    """CPU of the reader's process with nothing in flight: progress thread, gRPC, lease reaper."""
    began = time.process_time()
    await asyncio.sleep(seconds)
    return round(100 * (time.process_time() - began) / seconds, 2)


def _once(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def measure(rounds: int) -> dict[str, Any]:
    """Every case, and the checksum's speed."""
    source = await SourceProcess().start()
    side = await Side("reader", Config()).start()
    await side.puller.connect(source.hello["address"])
    raw = Raw(side, bytes.fromhex(source.hello["agent"]))
    bench = Bench(side, source, raw, rounds)
    result: dict[str, Any] = {"checksum_gb_s": _checksum_gb_s(side), "cases": {}}
    result["idle_cpu_percent"] = await _idle_percent()
    result["watch_to_accepted_ms"] = await bench.accepted_ms()
    for name, (count, size) in CASES.items():
        await bench.case(count, size)  # wires the connection, faults the pages in
        result["cases"][name] = await bench.case(count, size)
    raw.close()
    await side.close()
    result["source_exit"] = await source.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="store_true", help="be the source process")
    parser.add_argument("--rounds", type=whole, default=15)
    arguments = parser.parse_args()
    if arguments.source:
        uvloop.run(_source())
    else:
        print(json.dumps(uvloop.run(measure(arguments.rounds)), indent=2))


if __name__ == "__main__":
    main()
