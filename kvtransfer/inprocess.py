"""A transport by memory copy inside one process, for tests and single-process experiments.

Same interface and same rules as NIXL's, with faults on demand. It refuses peers of another process: an address means
nothing there, and a demo must not mistake it for a real hand-off.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.mapping import Moves
from kvtransfer.transport import Agent, Flight, Incarnation, ReadStats
from kvtransfer.types import Region
from runtime.errors import DeadlineExceeded, TransferFailed

_PROCESS = secrets.token_hex(8)


@dataclass(slots=True)
class Faults:
    """What goes wrong with the reads that start from now on. Set and cleared by tests."""

    delay_s: float = 0.0
    drop: bool = False  # never completes: past its deadline it stays in quarantine
    fail: bool = False  # the post is refused
    corrupt: bool = False  # one byte of what arrived is flipped
    truncate: bool = False  # the last range does not arrive, and is not counted
    gate: asyncio.Event | None = None  # hold until set, then copy: a write that lands late


@dataclass(slots=True)
class InProcessTransport:
    """Copies on executor threads; `faults` may be changed at any time."""

    incarnation: Incarnation
    quarantine_s: float = 60.0
    faults: Faults = field(default_factory=Faults)
    name: str = "inprocess"
    _peers: dict[str, Incarnation] = field(default_factory=dict)
    _tasks: dict[asyncio.Task[None], Flight] = field(default_factory=dict)
    _closed: bool = False

    async def start(self, regions: Sequence[Region]) -> Agent:
        if any(r.memory != "DRAM" for r in regions):
            raise TransferFailed("the in-process transport moves host memory only")
        return Agent(self.incarnation.agent_name, _metadata())

    async def connect(self, incarnation: Incarnation, agent: Agent) -> None:
        if agent.metadata != _metadata():
            raise TransferFailed("the in-process transport reaches workers of this process only")
        for name, known in list(self._peers.items()):
            if (known.worker_id, known.rank) == (incarnation.worker_id, incarnation.rank) and name != agent.name:
                if known.epoch > incarnation.epoch:
                    raise TransferFailed("a newer incarnation of this peer is known")
                await self.disconnect(name)
        self._peers[agent.name] = incarnation

    async def disconnect(self, agent_name: str) -> None:
        self._peers.pop(agent_name, None)
        for task, flight in list(self._tasks.items()):
            if flight.peer == agent_name:
                task.cancel()

    def read(self, agent_name: str, moves: Moves, deadline: float) -> Flight:
        flight = Flight(agent_name, moves, deadline)
        if self._closed or agent_name not in self._peers:
            flight.fail(TransferFailed("no such peer is connected"))
            flight.settle()
            return flight
        task = asyncio.create_task(self._run(flight, Faults(**{f: getattr(self.faults, f) for f in _FIELDS})))
        self._tasks[task] = flight
        task.add_done_callback(lambda done: self._finished(done, flight))
        return flight

    def quarantined(self) -> int:
        return sum(flight.quarantined for flight in self._tasks.values())

    def unhealthy(self) -> str:
        bound = time.monotonic() - self.quarantine_s
        old = [f for f in self._tasks.values() if f.quarantined and f.over_at < bound]
        return f"{len(old)} reads in quarantine beyond {self.quarantine_s:g} s" if old else ""

    async def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)

    def _finished(self, task: asyncio.Task[None], flight: Flight) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            flight.fail(error if isinstance(error, TransferFailed) else TransferFailed("the peer was disconnected"))
        flight.settle()

    async def _run(self, flight: Flight, faults: Faults) -> None:
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        timer = loop.call_later(
            max(0.0, flight.deadline - started), flight.fail, DeadlineExceeded("the read did not finish in time")
        )
        try:
            if faults.fail:
                raise TransferFailed("the read was refused")
            if faults.drop:
                await asyncio.Event().wait()
            await asyncio.sleep(faults.delay_s)
            if faults.gate is not None:
                await faults.gate.wait()
            # Shielded: a copy that runs cannot be stopped, so cancelling waits for it like every other write.
            copy = loop.run_in_executor(None, _copy, flight.moves, faults)
            try:
                copied = await asyncio.shield(copy)
            except asyncio.CancelledError:
                await copy
                raise
            flight.succeed(ReadStats(copied, len(flight.moves), time.monotonic() - started))
        finally:
            timer.cancel()


_FIELDS = tuple(Faults.__dataclass_fields__)


def _metadata() -> bytes:
    return f"{os.getpid()}:{_PROCESS}".encode()


def _copy(moves: Moves, faults: Faults) -> int:
    pairs = list(zip(moves.local.tolist(), moves.remote.tolist(), strict=True))
    if faults.truncate:
        pairs.pop()
    copied = 0
    for (to, size, _), (source, _, _) in pairs:
        ctypes.memmove(to, source, size)
        copied += size
    if faults.corrupt and pairs:
        to, size, _ = pairs[0][0]
        ctypes.c_uint8.from_address(to + size // 2).value ^= 0x10
    return copied
