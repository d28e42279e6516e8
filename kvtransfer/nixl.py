"""The NIXL transport: the event loop's face of the thread that owns the agent (nixl_thread.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtransfer.mapping import Moves
from kvtransfer.nixl_thread import Owner, Result
from kvtransfer.transport import Agent, Flight, Incarnation
from kvtransfer.types import Region
from runtime.errors import TransferFailed


class NixlTransport:
    """See transport.Transport. All methods but the thread's own belong to the event loop that called start()."""

    name = "nixl"

    def __init__(self, incarnation: Incarnation, *, progress_us: int = 500, quarantine_s: float = 60.0) -> None:
        self._incarnation = incarnation
        self._quarantine_s = quarantine_s
        self._flights: set[Flight] = set()
        self._owner = Owner(incarnation.agent_name, progress_us, self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self, regions: Sequence[Region]) -> Agent:
        self._loop = asyncio.get_running_loop()
        self._owner.thread.start()
        metadata = await self._call(lambda: self._owner.open(regions))
        return Agent(self._incarnation.agent_name, metadata)

    async def connect(self, incarnation: Incarnation, agent: Agent) -> None:
        await self._call(lambda: self._owner.connect(incarnation, agent))

    async def disconnect(self, agent_name: str) -> None:
        with contextlib.suppress(TransferFailed):  # closed already
            await self._call(lambda: self._owner.disconnect(agent_name))

    def read(self, agent_name: str, moves: Moves, deadline: float) -> Flight:
        flight = Flight(agent_name, moves, deadline, self._flights.discard)
        if self._owner.submit(flight):
            self._flights.add(flight)  # while the thread wakes up
        else:
            flight.fail(TransferFailed("the transport is closed"))
            flight.settle()
        return flight

    def quarantined(self) -> int:
        return sum(flight.quarantined for flight in self._flights)

    def unhealthy(self) -> str:
        if self._owner.dead:
            return "the NIXL thread has died"
        bound = time.monotonic() - self._quarantine_s
        old = sum(f.quarantined and f.over_at < bound for f in self._flights)
        return f"{old} reads in quarantine beyond {self._quarantine_s:g} s" if old else ""

    async def close(self) -> None:
        self._owner.stop()
        if self._owner.thread.ident is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._owner.thread.join)
        await asyncio.sleep(0)  # what the thread reported last

    async def _call(self, work: Callable[[], Any]) -> Any:
        done = self._owner.call(work)
        if done is None:
            raise TransferFailed("the transport is closed")
        return await asyncio.wrap_future(done)

    def _deliver(self, results: list[Result]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_run, results)


def _run(results: list[Result]) -> None:
    for result in results:
        result()
