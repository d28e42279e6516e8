"""`pdserve restart`: other processes in place of the workers' or the routers', one at a time and without a failed
request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import click

from deploy.actors import Actors
from deploy.fleet import Fleet
from deploy.placement import namespace
from deploy.restart import Restart, RestartFailed
from deploy.state import StateDir
from pdserve.status import with_token
from runtime.config import Config
from runtime.errors import InvalidRequest

LOOK_S = 0.2


async def run(config: Config, router: str, metrics: str, only: Sequence[str], *, rolling: bool, force: bool) -> None:
    """Raises RestartFailed and the tree of runtime.errors."""
    address, metrics, actors = _found(config, router, metrics)
    async with Fleet(address, with_token(config, router)) as fleet:
        restart = Restart(fleet, actors.restart, metrics, config.drain_timeout_s, Progress())
        done = await (restart.rolling(only, force=force) if rolling else restart.at_once(only))
    click.echo(f"restarted: {', '.join(done) or 'nothing was running'}")


def check_routers(*, rolling: bool, only: Sequence[str], router: str) -> None:
    """Raises InvalidRequest for what means workers."""
    for field, given in (("at_once", not rolling), ("worker", bool(only)), ("router", bool(router))):
        if given:
            raise InvalidRequest("routers are replaced one by one, all of the cluster started here", field=field)


def routers(config: Config) -> None:
    """Other processes in place of the routers' of the cluster started here. Raises RestartFailed and InvalidRequest."""
    state, say = StateDir(config.state_dir), Progress()
    record = state.read()
    if record is None or not record.running:
        raise InvalidRequest("no cluster was started here by `pdserve up`", field="state_dir")
    if not record.routers:
        raise InvalidRequest("the cluster still starts, or an earlier version has started it", field="state_dir")
    before = after = record
    os.kill(record.launcher_pid, signal.SIGUSR1)
    while after.renewals == before.renewals:
        time.sleep(LOOK_S)
        seen, now = after, state.read()
        if now is None or not now.running:
            raise RestartFailed("the cluster has ended")
        after = now
        for old, new in zip(seen.routers, after.routers, strict=True):
            if old != new:
                say(f"router {new}", f"serves in place of {old}")
    if after.renewal_error:
        raise RestartFailed(f"{after.renewal_error}; the routers after it were not touched")
    click.echo(f"restarted: {len(after.routers)} routers" if len(after.routers) > 1 else "restarted: the router")


def _found(config: Config, router: str, metrics: str) -> tuple[str, str, Actors]:
    """Where the router is, its metrics, and its workers' actors: as named, else of the cluster started here."""
    state = StateDir(config.state_dir)
    record = state.read()
    if router and config.address:
        return router, metrics, Actors(config.address, namespace(config))
    if router:
        raise InvalidRequest("the Ray cluster its workers are in must be named, too", field="address")
    if record is None:
        raise InvalidRequest("no cluster was started here by `pdserve up`; name a router with --router", field="router")
    if record.sim:
        raise InvalidRequest("simulated workers are not replaced one by one: `pdserve down`, then `up`", field="sim")
    return record.grpc, metrics or record.metrics, Actors.of(record, state)


class Progress:
    """A line for every step, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, worker: str, what: str) -> None:
        click.echo(f"{time.monotonic() - self._started:6.1f} s  {worker} {what}")
