"""`pdserve worker --sim PROFILE`: workers whose model and network are timing models, many in one process.

All else is the real worker of `pdserve.worker`: its protocol, engine, cache, tickets, leases and events. A router
cannot tell them apart, except by the answers' text; it needs the same --model, whose tokenizer is all that is read.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable

from bench.sim import below
from bench.sim.clock import DriftingClock, drift_of
from bench.sim.live import Nics, SimRunner, SimTransport, configured, refuse_overridden
from bench.sim.profile import Profile
from engine.runner_api import Runner
from engine.tiers.build import Ways
from kvtransfer.transport import Incarnation, Transport
from runtime import logs
from runtime.clock import Clock, SystemClock
from runtime.config import Config
from runtime.modelfiles import ModelFiles


@functools.cache
def nics(profile: str) -> Nics:
    """The NICs of this machine, shared by all simulated workers of the process."""
    return Nics(Profile.load(profile))


def make_runner(config: Config, files: ModelFiles) -> Runner:
    return SimRunner(nics(config.sim).profile, config.worker_id, files.vocab_size, tuple(files.eos_token_ids))


def make_transport(config: Config, incarnation: Incarnation) -> Transport:
    return SimTransport(incarnation, nics(config.sim))


def make_ways(config: Config, clock: Clock) -> Ways:
    """How bytes move below the device."""
    return below.ways(nics(config.sim).profile, config.worker_id, clock)


def make_clock(config: Config) -> Clock:
    """The worker's own: it drifts."""
    return DriftingClock(SystemClock(), drift_of(nics(config.sim).profile, config.worker_id))


async def serve(config: Config, stopping: asyncio.Event) -> int:
    """`sim_count` workers until `stopping` is set. The first one's exit status that is not 0, else 0; a worker that
    fails ends all of them."""
    from pdserve._worker_advert import Identity
    from pdserve.worker import WorkerProcess

    logs.setup(config)
    profile = nics(config.sim).profile
    refuse_overridden(config, profile)
    files = await asyncio.to_thread(ModelFiles.open, config.model)
    processes = []
    for number in range(config.sim_count):
        identity = Identity.make(_of(config, number))
        own = _of(config, number).model_copy(update={"worker_id": identity.worker_id})
        processes.append(WorkerProcess(configured(own, profile), identity, files, stopping))
    return max(await asyncio.gather(*(_until_one_fails(process.run(), stopping) for process in processes)))


async def _until_one_fails(running: Awaitable[int], stopping: asyncio.Event) -> int:
    code = await running
    if code:
        stopping.set()
    return code


def _of(config: Config, number: int) -> Config:
    """The first worker gets the configured name and address. The others' names count on from it (worker-0, worker-1),
    their ports are any."""
    if not number:
        return config
    host = config.listen.rpartition(":")[0]
    stem, _, first = config.worker_id.rpartition("-")
    name = f"{stem}-{int(first) + number}" if stem and first.isdecimal() else f"{config.worker_id}-{number}"
    name = name if config.worker_id else ""
    return config.model_copy(update={"worker_id": name, "listen": f"{host}:0"})
