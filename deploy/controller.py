"""The elastic controller's process: look, decide, do one thing, again. Its decisions are in `elastic`, its measures in
`pressure`; here is the I/O.

It holds nothing that the fleet needs. When it ends or dies, every worker keeps its role; what it left half done (a
worker that drains) is put back by the next one. A router or a registry that does not answer only makes it wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import fields

import structlog

from deploy.actors import Actors, RayFailed
from deploy.elastic import Elastic
from deploy.elastic_state import POOLS, Action, Add, Drain, Nothing, Pool, Remove, Rules, SetRole
from deploy.fleet import Fleet
from deploy.placement import local_gpus, most_workers, spec_of
from deploy.pressure import ROLES, Goals, Hearing, Measured, Totals, Window, look, scrape
from deploy.state import StateDir
from protos.v1 import registry_pb2
from runtime import lifecycle, logs
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.errors import InvalidRequest, PdserveError

PERIOD_S = 1.0
DRAIN_WAIT_S = 1.0
"""How long one call waits for a worker to be empty; the next look may call the drain off."""
GOODBYE_S = 2.0

_WIRE = {name: role for role, name in ROLES.items()}
_WORDS = {"role": "to"}  # in every line of the log, `role` is the process's own
_log = structlog.get_logger("pdserve.controller")


class Controller:
    """router: its gRPC address. metrics: host:port of its /metrics (of several routers: commas between
    them), "" = only workers' own reports are used.
    actors: None = nobody can be asked for more or fewer."""

    def __init__(
        self, config: Config, router: str, metrics: str, actors: Actors | None = None, period_s: float = PERIOD_S
    ) -> None:
        """Raises InvalidRequest when the bounds ask for what cannot be done."""
        if actors is None and (config.prefill_max or config.decode_max):
            raise InvalidRequest("there is no Ray here to ask for more workers", field="prefill_max")
        self.elastic = Elastic(Rules.of(config))
        self._config = config
        self._router, self._metrics = router, metrics
        self._actors = actors
        self._clock = SystemClock()
        self._period_s = period_s
        self._goals = Goals.of(config)
        self._hearing = Hearing()
        self._totals = Totals()
        self._window = Window(max(config.elastic_dwell_s, 5.0))
        self._records: dict[str, registry_pb2.WorkerRecord] = {}
        self._said = ""

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set. A worker that drains for us then is put back."""
        async with Fleet(self._router, self._config) as fleet:
            while not stopping.is_set():
                try:
                    await self.turn(fleet)
                except PdserveError as error:
                    self._say(error.reason, "waiting for the router", reason=error.reason)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._period_s):
                        await stopping.wait()
            await self._leave(fleet)

    async def turn(self, fleet: Fleet) -> Action:
        """One look and what follows from it. Raises PdserveError when there is nothing to see."""
        records = await fleet.workers()
        measured = await self._measure()
        now = self._clock.monotonic()
        self._records = {record.worker_id: record for record in records}
        view = look(records, self._hearing, measured, self._goals, now)
        action = self.elastic.step(now, view)
        pressures = {pool: round(self.elastic.smoothed(pool), 2) for pool in POOLS}
        if isinstance(action, Nothing):
            self._say(action.why, action.why, **pressures)
            return action
        name = type(action).__name__.lower()
        self._say(f"{name} {_facts(action)}", name, **_facts(action), **pressures)
        try:
            await self._do(action, fleet)
        except (PdserveError, RayFailed) as error:
            _log.warning("refused", action=type(action).__name__.lower(), **_facts(action), why=str(error))
            what = f"+{action.role}" if isinstance(action, Add) else action.worker
            self.elastic.refused(what, self._clock.monotonic())
        return action

    async def _measure(self) -> Measured:
        if self._metrics:
            try:
                samples = await asyncio.to_thread(scrape, self._metrics)
            except (OSError, ValueError) as error:
                _log.debug("no_measures", why=str(error))
                return Measured()
            self._window.add(self._clock.monotonic(), self._totals.add(samples))
        return self._window.measured()

    async def _do(self, action: Action, fleet: Fleet) -> None:
        if isinstance(action, Drain):
            running, leases = await fleet.drain(self._address(action.worker), action.on, DRAIN_WAIT_S)
            if action.on:
                self.elastic.drained(action.worker, running + leases)
        elif isinstance(action, SetRole):
            await fleet.set_role(self._address(action.worker), _WIRE[action.role])
        elif isinstance(action, Add):
            name = await asyncio.to_thread(self._add, action.role)
            self.elastic.added(name, action.role, self._clock.monotonic())
        elif isinstance(action, Remove):
            assert self._actors is not None
            await asyncio.to_thread(self._actors.remove, action.worker)

    def _add(self, role: Pool) -> str:
        assert self._actors is not None
        config = self._config
        cores, gpus = len(os.sched_getaffinity(0)), local_gpus()
        registry = config.registry or self._router
        spec = spec_of(config, registry, f"{role}-0", role, cores=cores, gpus=gpus)
        return self._actors.add(spec, most_workers(config), list(self._records))

    def _address(self, worker: str) -> str:
        return self._records[worker].address

    async def _leave(self, fleet: Fleet) -> None:
        move = self.elastic.move
        if move is None or move.worker not in self._records:
            return
        with contextlib.suppress(PdserveError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await fleet.drain(self._address(move.worker), False)

    def _say(self, news: str, event: str, **facts: object) -> None:
        """Once while it is the same news, not at every look."""
        if news != self._said:
            self._said = news
            _log.info(event, **facts)


def _facts(action: Action) -> dict[str, object]:
    return {_WORDS.get(one.name, one.name): getattr(action, one.name) for one in fields(action)}


def main(config: Config, router: str, metrics: str) -> int:
    """The process. router: "" = the one of the cluster of this state folder, whose Ray is asked for workers, too.

    Raises InvalidRequest without either."""
    state = StateDir(config.state_dir)
    record = state.read() if not router else None
    if not router and record is None:
        raise InvalidRequest("no cluster was started here by `pdserve up`; name a router with --router", field="router")
    actors = None
    if record is not None:
        router, metrics = record.grpc, metrics or record.metrics
        actors = None if record.sim else Actors.of(record, state)
        config = config.model_copy(update={"registry_token": config.registry_token or record.registry_token})
    controller = Controller(config, router, metrics, actors)
    logs.setup(config, role="controller")
    _log.info("configuration", **config.shown())
    return lifecycle.run(controller.run)
