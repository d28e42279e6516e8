"""The NIXL transport: one thread owns the agent, the event loop talks to it through a queue.

What was measured and is worked around here (each line was a crash, a hang or a core burnt):
- A transfer handle that is used after release() kills the process, so a handle is released once, after it ended.
- release() of an active transfer returns at once and the bytes still land: an abandoned read stays in quarantine until
  its handle reports done or failed.
- Removing the agent of a peer that is merely frozen makes its handles fail at once, and yet the bytes land when it
  thaws. So an agent is removed only when none of its transfers is in progress, and removal ends no quarantine.
- A peer that is frozen, or cut off, leaves its transfers in progress for ever: deadlines are our own.
- A dead peer raises at post or from the state check; the agent is removed and added again at the next use.
- An agent of the same name cannot be added while the old one is known: names hold the incarnation.
- The progress thread polls without a pause unless its delay is set, which the Python API does not offer.
- With Debian's ibverbs providers installed, UCX's EFA module crashes the exiting process: it is left out.

Over shared memory (CMA) a post copies before it returns, without the GIL; over TCP and RDMA completion is found by
polling, there is nothing to wait on. The thread polls only while transfers are in flight, and sleeps in its queue else.
Reads that wait at the same moment are posted in batches (batches.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtransfer.batches import Batch, batches
from kvtransfer.mapping import Moves
from kvtransfer.transport import Agent, Flight, Incarnation, ReadStats
from kvtransfer.types import Region
from runtime.errors import DeadlineExceeded, TransferFailed

log = logging.getLogger(__name__)

POLL_FIRST_S = 50e-6
POLL_LAST_S = 1e-3
REPORT_S = 1e-3
"""Results are handed over together, but none waits longer than this behind other posts."""
CLOSE_S = 2.0

Result = Callable[[], None]
"""What the event loop is to do about a flight."""


def load() -> tuple[Any, Any]:
    """(API module, bindings module) of whichever NIXL build is installed. Raises TransferFailed when none is."""
    os.environ.setdefault("UCX_MODULES", "^efa")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # its default is stdout, which may be somebody's output
    for name in ("nixl_cu12", "nixl_cu13"):
        try:
            return importlib.import_module(f"{name}._api"), importlib.import_module(f"{name}._bindings")
        except ImportError:
            continue
    raise TransferFailed("NIXL is not installed: install the `worker` extra, or choose another transport")


@dataclass(slots=True, eq=False)
class _Peer:
    name: str
    incarnation: Incarnation
    metadata: bytes
    added: bool = False
    broken: bool = False  # a read failed: remove and add again before the next one
    leaving: bool = False  # disconnected: remove as soon as nothing is in progress
    active: int = 0


@dataclass(slots=True, eq=False)
class _InFlight:
    batch: Batch
    peer: _Peer
    handle: Any


class NixlTransport:
    """See transport.Transport. All methods but the thread's own belong to the event loop that called start()."""

    name = "nixl"

    def __init__(self, incarnation: Incarnation, *, progress_us: int = 500, quarantine_s: float = 60.0) -> None:
        self._incarnation = incarnation
        self._quarantine_s = quarantine_s
        self._flights: set[Flight] = set()
        self._owner = _Owner(incarnation.agent_name, progress_us, self._deliver)
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
        flight = Flight(agent_name, moves, deadline)
        if not self._owner.submit(flight):
            flight.fail(TransferFailed("the transport is closed"))
            flight.settle()
            return flight
        self._flights.add(flight)
        flight.quiet.add_done_callback(lambda _: self._flights.discard(flight))
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
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # a caller may go at any moment; its command's end must not fail over that
        if not self._owner.submit(lambda: _complete(done, work)):
            raise TransferFailed("the transport is closed")
        return await asyncio.wrap_future(done)

    def _deliver(self, results: list[Result]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: [result() for result in results])


def _complete(done: Future[Any], work: Callable[[], Any]) -> None:
    """Run a command on the owner's thread; its exception is the caller's."""
    try:
        done.set_result(work())
    except TransferFailed as error:
        done.set_exception(error)
    except Exception as error:
        log.warning("a NIXL call failed", exc_info=error)
        done.set_exception(TransferFailed(f"NIXL refused: {type(error).__name__}"))


@dataclass(slots=True, eq=False)
class _Owner:
    """The thread that owns the agent. Every method but submit() and stop() runs on it."""

    agent_name: str
    progress_us: int
    deliver: Callable[[list[Result]], None]
    thread: threading.Thread = field(init=False)
    dead: bool = False
    _commands: queue.SimpleQueue[Flight | Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _accepting: bool = True
    _agent: Any = None
    _registered: list[Any] = field(default_factory=list)
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _active: list[_InFlight] = field(default_factory=list)
    _results: list[Result] = field(default_factory=list)
    _wait_s: float = POLL_FIRST_S
    _reported_at: float = 0.0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._main, name="nixl-owner")

    # --- from other threads -----------------------------------------------------------------------------------

    def submit(self, command: Flight | Callable[[], None]) -> bool:
        """Queue a read or a command, unless the transport is closing: then False, and it will not run."""
        with self._lock:
            if self._accepting and not self.dead:
                self._commands.put(command)
                return True
        return False

    def stop(self) -> None:
        with self._lock:
            if self._accepting:
                self._accepting = False
                self._commands.put(None)

    # --- the thread -------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while self._turn():
                pass
            self._shut()
        finally:
            self.dead = True
            self._report()

    def _turn(self) -> bool:
        """Commands, then states. Waits for a command when nothing is in flight, else a little."""
        running = self._commands_once()
        self._poll()
        self._report()
        return running

    def _commands_once(self) -> bool:
        """What is queued, in order, reads that follow each other together. False when told to stop."""
        reads: list[Flight] = []
        try:
            command = self._commands.get(timeout=self._wait_s if self._active else None)
            while isinstance(command, Flight):
                reads.append(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            command = self._report
        self._post_all(reads)
        if command is None:
            return False
        command()
        return True

    def _post_all(self, reads: list[Flight]) -> None:
        for batch in batches([flight for flight in reads if self._wanted(flight)]):
            self._post(batch)
            if time.monotonic() - self._reported_at > REPORT_S:
                self._report()

    def _report(self) -> None:
        if self._results:
            self.deliver(self._results)
            self._results = []
        self._reported_at = time.monotonic()

    # --- commands ---------------------------------------------------------------------------------------------

    def open(self, regions: Sequence[Region]) -> bytes:
        api, bindings = load()
        self._agent = make_agent(api, bindings, self.agent_name, self.progress_us)
        for memory in sorted({r.memory for r in regions}):
            table = [(r.base, r.length, r.device, "") for r in regions if r.memory == memory]
            self._registered.append(self._agent.register_memory(table, memory))
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, incarnation: Incarnation, agent: Agent) -> None:
        known = self._peers.get(agent.name)
        if known is None:
            self._replace(incarnation)
            known = self._peers[agent.name] = _Peer(agent.name, incarnation, agent.metadata)
        known.leaving = False
        try:
            self._add(known)
        except TransferFailed:
            known.leaving = True
            self._tidy(known)
            raise

    def disconnect(self, agent_name: str) -> None:
        peer = self._peers.get(agent_name)
        if peer is not None:
            peer.leaving = True
            self._tidy(peer)

    # --- inside -----------------------------------------------------------------------------------------------

    def _wanted(self, flight: Flight) -> bool:
        if flight.result.done():
            self._end(flight, TransferFailed("the read was abandoned"))
            return False
        peer = self._peers.get(flight.peer)
        if peer is None or peer.leaving:
            self._end(flight, TransferFailed("no such peer is connected"))
            return False
        return True

    def _post(self, batch: Batch) -> None:
        """Start reads. Whatever goes wrong is the flights', and the peer is set up anew at its next use."""
        peer = self._peers.get(batch.flights[0].peer)
        handle = None
        try:
            if peer is None:
                raise TransferFailed("the peer was disconnected")
            self._add(peer)
            handle = self._initialize(batch)
            state = self._agent.transfer(handle)
        except Exception as error:  # noqa: BLE001  any NIXL error: these reads fail, the others go on
            if handle is None and len(batch.flights) > 1:  # nothing has moved: find out whose fault it is
                for flight in batch.flights:
                    self._post(*batches([flight]))
            else:
                self._broken(batch, handle, peer, error)
            return
        entry = _InFlight(batch, peer, handle)
        if state == "PROC":
            self._active.append(entry)
            peer.active += 1
            self._wait_s = POLL_FIRST_S
        elif state == "DONE":
            self._succeed(entry)
        else:
            self._broken(batch, handle, peer, TransferFailed("the post failed"))

    def _initialize(self, batch: Batch) -> Any:
        moves = batch.flights[0].moves
        local = self._agent.get_xfer_descs(batch.local, moves.local_memory)
        remote = self._agent.get_xfer_descs(batch.remote, moves.remote_memory)
        return self._agent.initialize_xfer("READ", local, remote, batch.flights[0].peer)

    def _poll(self) -> None:
        if not self._active:
            return
        ended = [entry for entry in self._active if not self._in_progress(entry)]
        for entry in ended:
            self._active.remove(entry)
            entry.peer.active -= 1
            self._tidy(entry.peer)
        self._wait_s = POLL_FIRST_S if ended else min(self._wait_s * 1.5, POLL_LAST_S)

    def _in_progress(self, entry: _InFlight) -> bool:
        try:
            state = self._agent.check_xfer_state(entry.handle)
        except Exception as error:  # noqa: BLE001  a lost peer raises instead of answering "ERR"
            self._broken(entry.batch, entry.handle, entry.peer, error)
            return False
        if state == "PROC":
            self._watch_deadline(entry)
            return True
        if state == "DONE":
            self._succeed(entry)
        else:
            self._broken(entry.batch, entry.handle, entry.peer, TransferFailed("the read failed"))
        return False

    def _watch_deadline(self, entry: _InFlight) -> None:
        """A caller past its deadline has its answer now; the destination is owed until the handle ends."""
        now = time.monotonic()
        for flight in [f for f in entry.batch.flights if now >= f.deadline and not f.result.done()]:
            self._results.append(partial(flight.fail, DeadlineExceeded("the read did not finish in time")))

    def _succeed(self, entry: _InFlight) -> None:
        counted, batch = self._agent.get_xfer_telemetry(entry.handle), entry.batch
        if len(batch.flights) > 1 and counted.totalBytes != batch.nbytes:
            error = TransferFailed(f"{counted.totalBytes} of {batch.nbytes} bytes arrived")
            self._broken(batch, entry.handle, entry.peer, error)
            return
        entry.handle.release()
        total = ReadStats(counted.totalBytes, counted.descCount, counted.xferDuration / 1e6)
        self._results.append(partial(batch.succeed, total))

    def _broken(self, batch: Batch, handle: Any, peer: _Peer | None, error: Exception) -> None:
        """The handle has ended (or never began): release it, and have the peer set up anew."""
        log.warning("NIXL reads failed", extra={"peer": batch.flights[0].peer, "error": type(error).__name__})
        if handle is not None:
            handle.release()
        if peer is not None:
            peer.broken = True
            self._tidy(peer)
        for flight in batch.flights:
            self._end(flight, TransferFailed(f"the read failed: {type(error).__name__}"))

    def _end(self, flight: Flight, error: Exception) -> None:
        def result() -> None:
            flight.fail(error)
            flight.settle()

        self._results.append(result)

    def _add(self, peer: _Peer) -> None:
        if peer.broken and peer.added:
            raise TransferFailed("the connection to the peer is broken, and reads from it are still in progress")
        if peer.added or peer.name == self.agent_name:  # a worker that pulls from itself knows its own agent
            return
        try:
            added = self._agent.add_remote_agent(peer.metadata)
        except Exception as error:
            raise TransferFailed(f"the peer's agent was refused: {type(error).__name__}") from error
        added = added.decode() if isinstance(added, bytes) else str(added)
        if added != peer.name:
            self._agent.remove_remote_agent(added)
            raise TransferFailed("the peer's metadata is of another agent than its name")
        peer.added, peer.broken = True, False

    def _tidy(self, peer: _Peer) -> None:
        """Remove the agent of a peer that is broken or leaving, once nothing of it is in progress."""
        if peer.active or not (peer.broken or peer.leaving):
            return
        if peer.leaving:
            self._peers.pop(peer.name, None)
        if not peer.added:
            return
        peer.added = False
        try:
            self._agent.remove_remote_agent(peer.name)
        except Exception as error:  # noqa: BLE001  it is gone either way
            log.warning("a NIXL agent could not be removed", extra={"error": type(error).__name__})

    def _replace(self, incarnation: Incarnation) -> None:
        """Remove older incarnations of this worker and rank. Raises TransferFailed for one that is older itself."""
        same = (incarnation.worker_id, incarnation.rank)
        for name, peer in list(self._peers.items()):
            if (peer.incarnation.worker_id, peer.incarnation.rank) == same:
                if peer.incarnation.epoch > incarnation.epoch:
                    raise TransferFailed("a newer incarnation of this peer is known")
                self.disconnect(name)

    def _shut(self) -> None:
        """Wait until nothing can land any more, remove every peer, give the memory back."""
        until = time.monotonic() + CLOSE_S
        while self._active and time.monotonic() < until:
            self._poll()
            self._report()
            time.sleep(POLL_LAST_S)
        for entry in self._active:
            entry.handle._released = True  # never released while active: leaked on purpose, with its agent
        for name in list(self._peers):
            self.disconnect(name)
        if self._agent is not None and not self._active:
            for table in self._registered:
                self._agent.deregister_memory(table)
            self._agent = None
        for entry in self._active:
            self._results += [partial(f.fail, TransferFailed("the transport was closed")) for f in entry.batch.flights]


def make_agent(api: Any, bindings: Any, name: str, progress_us: int) -> Any:
    """A UCX agent whose progress thread sleeps `progress_us` between rounds (0 = polls without a pause)."""
    original: Any = bindings.nixlAgentConfig

    class Config(original):  # type: ignore[misc]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, progress_us if key == "pthrDelay" else value)

    bindings.nixlAgentConfig = Config
    try:
        return api.nixl_agent(
            name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"], capture_telemetry=True)
        )
    finally:
        bindings.nixlAgentConfig = original
