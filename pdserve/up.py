"""`pdserve up`: start a cluster, say where it is, stay (or leave it running)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from rich.console import Console

from deploy.cluster import Cluster, Endpoints, StartFailed
from pdserve import preflight
from pdserve.progress import ProgressView
from runtime import exposure
from runtime.config import Config

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """The user asked for the end."""


async def until_signal(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work`, cancelled at the first SIGINT, SIGTERM or SIGHUP. Raises Stopped then; later ones are ignored, so
    that the end is orderly (the death signals of the processes are there for a kill -9)."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise Stopped from None


async def run(config: Config) -> int:
    """Exit status: 0 after a wished end, 1 when something failed."""
    await asyncio.to_thread(preflight.check, config)
    console = Console()
    view = ProgressView(console)
    cluster = Cluster(config, view)
    try:
        with view:
            endpoints: Endpoints = await until_signal(cluster.start())
        _warn(cluster.config)
        _announce(console, config, endpoints)
        if config.detach:
            cluster.leave()
            return 0
        await until_signal(cluster.wait())
    except Stopped:
        console.print("stopping", highlight=False)
    except StartFailed as error:
        Console(stderr=True).print(f"pdserve: {error}", markup=False, highlight=False, soft_wrap=True, style="red")
        return 1
    finally:
        if not config.detach:
            cluster.stop()
    return 0


def _warn(config: Config) -> None:
    """Before the addresses: the logs of the processes say it, too, where nobody looks at first."""
    console = Console(stderr=True)
    for text in (*exposure.of_router(config), *exposure.of_worker(config)):
        console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True, style="yellow")


def _announce(console: Console, config: Config, endpoints: Endpoints) -> None:
    if config.detach:
        end = "`pdserve down` ends it"
    elif config.address:
        end = f"Ctrl-C ends the router; `pdserve down --address {config.address}` the workers"
    else:
        end = "Ctrl-C ends it"
    lines = [
        f"HTTP  http://{endpoints.http}/v1",  # TLS is for gRPC alone
        f"gRPC  {endpoints.grpc}",
        f"{len(endpoints.workers)} simulated workers ({config.sim})"
        if config.sim
        else f"Ray   {endpoints.ray or config.address}",
        end,
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
