"""A worker's parts, made and taken apart in order: runner, engine, transport, hand-off store, services.

Order matters at the end. Streams first, so that nothing new comes; then pulls and hand-offs, so that no peer reads or
is read; then the transport, which deregisters the memory; then the engine thread, which must be joined before the
interpreter goes; the pools last.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_worker.service import DecodeService
from engine.face import Limits, Worker, load_of, tier_load
from engine.fetch import Fetcher, answered
from engine.loop import Engine, EngineSpec
from engine.meter import Meter
from engine.promotions import DISK_SHARE
from engine.runner_api import Runner
from engine.tiers.build import Ways
from engine.tiers.disk import OpenFile
from engine.tiers.pool import as_second_pool
from kvtransfer import hashing
from kvtransfer.checksum import wsum64
from kvtransfer.files import NixlFile, PlainFile
from kvtransfer.layout import Rank, fingerprint
from kvtransfer.prefix import Holder, Offers
from kvtransfer.puller import Puller
from kvtransfer.service import KvSourceService
from kvtransfer.source import HandoffStore
from kvtransfer.tickets import TicketMint
from kvtransfer.transport import Incarnation, LocalRank, Transport
from kvtransfer.types import ChecksumFn, Layout, Prefix, Region, Wanted
from pdserve._worker_advert import Identity
from pdserve._worker_faults import FaultyRunner
from prefill_worker.service import PrefillService
from protos.v1 import common_pb2
from runtime import faults
from runtime.clock import Clock, SystemClock
from runtime.config import Config
from runtime.errors import PdserveError
from runtime.metrics import Metrics
from runtime.modelfiles import ModelFiles

FETCH_SHARE = 0.5
"""A prefix is fetched no longer than this share of the time for which a request's room is booked."""


def load_runner(config: Config, files: ModelFiles, progress: Callable[[float], None]) -> Runner:
    """Read the weights (on a thread of the caller's choice). progress gets the fraction done. torch is imported here
    and only for a model that needs it."""
    if config.sim:
        from pdserve.sim import make_runner

        runner: Runner = make_runner(config, files)
    elif files.kind == "oracle":
        from engine.models.oracle import OracleRunner

        runner = OracleRunner()
    else:
        from engine import runner as torch_runner

        runner = torch_runner.load_runner(files, config, progress)
    return FaultyRunner(runner) if faults.switchable() else runner


def make_transport(config: Config, incarnation: Incarnation) -> Transport:
    if config.sim:
        from pdserve import sim

        return sim.make_transport(config, incarnation)
    if config.transport == "inprocess":
        from kvtransfer.inprocess import InProcessTransport

        return InProcessTransport(incarnation, config.quarantine_s)
    from kvtransfer.nixl import NixlTransport

    return NixlTransport(incarnation, progress_us=config.nixl_progress_us, quarantine_s=config.quarantine_s)


def make_clock(config: Config) -> Clock:
    """The worker's own."""
    if config.sim:
        from pdserve import sim

        return sim.make_clock(config)
    return SystemClock()


def make_ways(config: Config, files: ModelFiles, clock: Clock) -> Ways:
    """How bytes move between the device and what lies below it."""
    if config.sim:
        from pdserve import sim

        return sim.make_ways(config, clock)
    return Ways(open_file=disk_file(config), layout=f"{files.fingerprint()} {config.chunk_tokens}")


def disk_file(config: Config) -> OpenFile:
    """How the disk tier's file is read and written: like everything else, through NIXL."""
    return PlainFile if config.transport == "inprocess" else NixlFile


@dataclass(frozen=True, slots=True)
class Parts:
    """A running worker behind its sockets."""

    engine: Engine
    runner: Runner
    transport: Transport
    layout: Layout
    rank: Rank
    store: HandoffStore
    source: KvSourceService
    puller: Puller
    fetcher: Fetcher
    prefill: PrefillService
    decode: DecodeService
    load: Callable[[], common_pb2.Load]
    meter: Meter

    @classmethod
    async def make(
        cls,
        config: Config,
        files: ModelFiles,
        runner: Runner,
        identity: Identity,
        address: str,
        clock: Clock,
        metrics: Metrics | None = None,
    ) -> Parts:
        """Allocate the pools, register them, start the engine. Raises InvalidRequest, TransferFailed."""
        model = runner.spec()
        ways = make_ways(config, files, clock)
        engine = await asyncio.to_thread(Engine, runner, EngineSpec.of(model, config), config, clock, ways)
        layout = Layout(model.components, files.fingerprint(), config.chunk_tokens)
        transport = make_transport(config, Incarnation(identity.worker_id, 0, identity.epoch))
        agent = await transport.start((*engine.regions(), *engine.host_regions()))
        rank = Rank(agent.name, agent.metadata, (*engine.regions(), *as_second_pool(engine.host_regions())))
        local = LocalRank(rank, transport, _checksum(engine.regions()))
        mint = TicketMint(identity.worker_id, identity.epoch, fingerprint(layout))
        store = HandoffStore(mint, clock, config.lease_s)
        meter = Meter(metrics)
        offers = Offers(identity.epoch, fingerprint(layout), store, _holder(engine, meter), config.prefix_fetches)
        source = KvSourceService(identity.worker_id, identity.epoch, layout, [local], store, offers)
        puller = Puller(identity.worker_id, identity.epoch, layout, [local], config, clock)
        load = _loader(engine, store, puller)
        fetcher = Fetcher(
            engine.prefixes, puller, clock, meter, config.prefix_fetches, config.reservation_s * FETCH_SHARE
        )
        worker = _worker(config, files, engine, identity, address, clock, transport.name, load, meter, fetcher)
        prefill = PrefillService(worker, store, config.reattach_s)
        decode = DecodeService(worker, puller, store, config.reattach_s)
        engine.start_loop()
        source.start()
        return cls(
            engine, runner, transport, layout, rank, store, source, puller, fetcher, prefill, decode, load, meter
        )

    def tick(self, now: float) -> None:
        self.prefill.tick(now)
        self.decode.tick(now)

    def report(self) -> common_pb2.Load:
        """load(), and what lies below the device: more than every step's message should carry."""
        load = self.load()
        if self.engine.tiers is not None:
            load.tiers.extend(map(tier_load, self.engine.tiers.reports()))
        if self.fetcher.report().hit_pages:
            load.tiers.append(self.fetcher.report())
        return load

    def running(self) -> int:
        return self.prefill.busy() + self.decode.busy()

    def leases(self) -> int:
        """Hand-offs whose pages are promised to somebody."""
        counts = self.store.counts()
        return counts.computing + counts.leased

    def abort(self, error: PdserveError) -> None:
        self.prefill.abort(error)
        self.decode.abort(error)

    async def close(self, error: PdserveError, *, engine_stuck: bool = False) -> None:
        """engine_stuck: its thread cannot be joined, so the process must end without the interpreter's clean-up."""
        self.prefill.close(error)
        await self.decode.close(error)
        await self.prefill.settle()
        await self.decode.settle()
        await self.fetcher.close()
        await self.puller.close()
        await self.source.close()
        await self.transport.close()
        if not engine_stuck:
            await asyncio.to_thread(self.engine.stop)
            await asyncio.to_thread(self.runner.close)


def _loader(engine: Engine, store: HandoffStore, puller: Puller) -> Callable[[], common_pb2.Load]:
    sequence = itertools.count(1)

    def load() -> common_pb2.Load:
        return load_of(
            engine.load(),
            leases=store.counts().leased,
            quarantined_pages=puller.quarantined_pages(),
            sequence=next(sequence),
        )

    return load


def _worker(
    config: Config,
    files: ModelFiles,
    engine: Engine,
    identity: Identity,
    address: str,
    clock: Clock,
    transport: str,
    load: Callable[[], common_pb2.Load],
    meter: Meter,
    fetcher: Fetcher,
) -> Worker:
    model = config.served_model_name or files.name
    revision = files.fingerprint()
    limits = Limits(
        vocab_size=engine.model.vocab_size,
        max_model_len=engine.spec.max_model_len,
        max_n=config.max_n,
        max_top_logprobs=config.max_top_logprobs,
        max_logit_bias=config.max_logit_bias,
    )
    return Worker(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        address=address,
        pid=identity.pid,
        transport=transport,
        engine=engine,
        clock=clock,
        limits=limits,
        root_of=lambda salt: hashing.root(salt, model, revision),
        load=load,
        meter=meter,
        fetcher=fetcher,
    )


def _holder(engine: Engine, meter: Meter) -> Holder:
    async def ask(wanted: Wanted, within_s: float) -> Prefix | None:
        return await answered(engine.prefixes.offer(wanted, within_s), lambda prefix: prefix.hold.release())

    async def hold(wanted: Wanted, within_s: float) -> Prefix | None:
        try:
            async with asyncio.timeout(DISK_SHARE * within_s or None):
                found = await ask(wanted, within_s)
        except TimeoutError:  # a step lasts longer than the disk would have taken: what is above it
            found = await ask(wanted, 0.0)
        meter.offered(found.tier if found is not None else "")
        return found

    return hold


def _checksum(regions: Sequence[Region]) -> ChecksumFn:
    """By the processor for pools in host memory, else by the device they lie in. torch is imported for those only."""
    if all(region.memory == "DRAM" for region in regions):
        return wsum64
    from engine.device_memory import DeviceChecksum

    return DeviceChecksum()
