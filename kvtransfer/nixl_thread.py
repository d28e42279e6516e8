"""The thread that owns a NIXL agent: it takes commands from a queue and hands results to the event loop.

What was measured and is worked around here (each line was a crash, a hang or a core burnt):
- A transfer handle that is used after release() kills the process, so a handle is released once, after it ended.
- release() of an active transfer returns at once and the bytes still land: an abandoned read stays in quarantine until
  its handle reports done or failed.
- Removing the agent of a peer that is merely frozen makes its handles fail at once, and yet the bytes land when it
  thaws. So an agent is removed only when none of its transfers is in progress, and removal ends no quarantine.
- A peer that is frozen, or cut off, leaves its transfers in progress for ever: deadlines are our own.
- A dead peer raises at post or from the state check; the agent is removed and added again at the next use.
- An agent of the same name cannot be added while the old one is known: names hold the incarnation.

Over shared memory (CMA) a post copies before it returns, without the GIL; over TCP and RDMA completion is found by
polling, there is nothing to wait on. The thread polls only while transfers are in flight, and sleeps in its queue else.
Reads that wait at the same moment are posted in batches (batches.py). A read that waits alone takes the shortest way:
a copy of 16 MiB takes under a millisecond and leaves the caches empty, so that every line of Python around it shows.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvtransfer import cuda_context
from kvtransfer.batches import Batch, batches
from kvtransfer.nixl_agent import Reads, failures, load, make_agent
from kvtransfer.transport import Agent, Flight, Incarnation, ReadStats
from kvtransfer.types import Region
from runtime.errors import DeadlineExceeded, TransferFailed

log = logging.getLogger(__name__)

POLL_FIRST_S = 20e-6
POLL_LAST_S = 1e-3
POLL_SHARE = 1 / 8
"""A state is looked at again after this share of the time since the last post or end: none is seen much later than it
took, and a long transfer is left alone."""
REPORT_S = 1e-3
"""Results are handed over together, but none waits longer than this behind other posts."""
CLOSE_S = 2.0

Result = Callable[[], None]
"""What the event loop is to do about a flight."""


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
    handle: int


@dataclass(slots=True, eq=False)
class Owner:
    """Every method but submit(), call() and stop() runs on the thread."""

    agent_name: str
    progress_us: int
    deliver: Callable[[list[Result]], None]
    thread: threading.Thread = field(init=False)
    dead: bool = False
    _commands: queue.SimpleQueue[Flight | Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    _accepting: bool = True
    _agent: Any = None
    _reads: Reads = field(init=False)  # from open() on
    _registered: list[Any] = field(default_factory=list)
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _active: list[_InFlight] = field(default_factory=list)
    _results: list[Result] = field(default_factory=list)
    _more: bool = False  # further posts follow at once
    _changed_at: float = 0.0
    _reported_at: float = 0.0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._main, name="nixl-owner")

    # --- from the event loop's thread -------------------------------------------------------------------------

    def submit(self, command: Flight | Callable[[], None]) -> bool:
        """Queue a read or a command, unless the transport is closing: then False, and it will not run."""
        if not self._accepting or self.dead:
            return False
        self._commands.put(command)
        return True

    def call(self, work: Callable[[], Any]) -> Future[Any] | None:
        """Queue a command whose result, or exception, is wanted. None when the transport is closing."""
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # a caller may go at any moment; its command's end must not fail over that
        return done if self.submit(lambda: _complete(done, work)) else None

    def stop(self) -> None:
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
        """A command, or reads, or nothing; then states. Waits for a command when nothing is in flight, else a little.
        False when told to stop."""
        command: Flight | Callable[[], None] | None = self._report
        if not self._active:
            command = self._commands.get()
        else:
            with contextlib.suppress(queue.Empty):
                command = self._commands.get(timeout=self._pause())
        if isinstance(command, Flight):
            command = self._take_reads(command)
        if command is None:
            return False
        command()
        if self._active:
            self._poll()
        self._report()
        return True

    def _pause(self) -> float:
        return min(max((time.monotonic() - self._changed_at) * POLL_SHARE, POLL_FIRST_S), POLL_LAST_S)

    def _take_reads(self, first: Flight) -> Callable[[], None] | None:
        """Post what is queued up to the first command, which is returned."""
        if self._commands.empty():
            if self._wanted(first):
                self._post(Batch.of(first))
            return self._report
        reads = [first]
        after: Callable[[], None] | None = self._report
        while not self._commands.empty():
            command = self._commands.get()
            if not isinstance(command, Flight):
                after = command
                break
            reads.append(command)
        self._post_all([flight for flight in reads if self._wanted(flight)])
        return after

    def _post_all(self, reads: list[Flight]) -> None:
        made = batches(reads)
        self._more = True
        for batch in made:
            if batch is made[-1]:
                self._more = False
            self._post(batch)

    def _report(self) -> None:
        if self._results:
            self.deliver(self._results)
            self._results = []
            self._reported_at = time.monotonic()

    # --- commands ---------------------------------------------------------------------------------------------

    def open(self, regions: Sequence[Region]) -> bytes:
        """Make the agent and register memory; its metadata."""
        api, bindings = load()
        devices = {r.device for r in regions if r.memory == "VRAM"}
        if len(devices) > 1:
            raise TransferFailed("an agent serves the memory of one GPU")
        for device in devices:
            cuda_context.use(device)
        self._agent = make_agent(api, bindings, self.agent_name, self.progress_us)
        self._reads = Reads(self._agent)
        for memory in sorted({r.memory for r in regions}):
            table = [(r.base, r.length, r.device, "") for r in regions if r.memory == memory]
            self._registered.append(self._agent.register_memory(table, memory))
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def connect(self, incarnation: Incarnation, agent: Agent) -> None:
        """Know a peer, as a new incarnation where it is one. Raises TransferFailed."""
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
        """Forget a peer as soon as nothing of it is in progress."""
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
            if peer.broken or not peer.added:
                self._add(peer)
            moves = batch.flights[0].moves
            handle = self._reads.prepare(peer.name, batch.local, moves.local_memory, batch.remote, moves.remote_memory)
            state = self._reads.post(handle)
        except _expected() as error:  # these reads fail, the others go on
            if handle is None and len(batch.flights) > 1:  # nothing has moved: find out whose fault it is
                for flight in batch.flights:
                    self._post(Batch.of(flight))
            else:
                self._broken(batch, handle, peer, error)
            return
        if state == "DONE":
            self._succeed(batch, handle, peer)
        elif state == "PROC":
            self._active.append(_InFlight(batch, peer, handle))
            peer.active += 1
            self._changed_at = time.monotonic()
        else:
            self._broken(batch, handle, peer, TransferFailed("the post failed"))

    def _poll(self) -> None:
        ended = [entry for entry in self._active if not self._in_progress(entry)]
        for entry in ended:
            self._active.remove(entry)
            entry.peer.active -= 1
            self._tidy(entry.peer)
            self._changed_at = time.monotonic()

    def _in_progress(self, entry: _InFlight) -> bool:
        try:
            state = self._reads.state(entry.handle)
        except failures() as error:  # a lost peer raises instead of answering "ERR"
            self._broken(entry.batch, entry.handle, entry.peer, error)
            return False
        if state == "PROC":
            self._watch_deadline(entry)
            return True
        if state == "DONE":
            self._succeed(entry.batch, entry.handle, entry.peer)
        else:
            self._broken(entry.batch, entry.handle, entry.peer, TransferFailed("the read failed"))
        return False

    def _watch_deadline(self, entry: _InFlight) -> None:
        """A caller past its deadline has its answer now; the destination is owed until the handle ends."""
        now = time.monotonic()
        for flight in [f for f in entry.batch.flights if now >= f.deadline and not f.result.done()]:
            self._results.append(partial(flight.fail, DeadlineExceeded("the read did not finish in time")))

    def _succeed(self, batch: Batch, handle: int, peer: _Peer) -> None:
        """Say so first, unless more is to be said soon; the handle may wait."""
        counted = self._reads.counted(handle)
        if len(batch.flights) > 1 and counted.totalBytes != batch.nbytes:
            error = TransferFailed(f"{counted.totalBytes} of {batch.nbytes} bytes arrived")
            self._broken(batch, handle, peer, error)
            return
        total = ReadStats(counted.totalBytes, counted.descCount, counted.xferDuration / 1e6)
        self._results.append(partial(batch.succeed, total))
        if not self._more or time.monotonic() - self._reported_at > REPORT_S:
            self._report()
        self._reads.release(handle)

    def _broken(self, batch: Batch, handle: int | None, peer: _Peer | None, error: Exception) -> None:
        """The handle has ended (or never began): release it, and have the peer set up anew."""
        log.warning("NIXL reads failed", extra={"peer": batch.flights[0].peer, "error": type(error).__name__})
        if handle is not None:
            self._reads.release(handle)
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
        except failures() as error:
            raise TransferFailed(f"the peer's agent was refused: {type(error).__name__}") from error
        added = added.decode(errors="replace") if isinstance(added, bytes) else str(added)
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
        except failures() as error:  # it is gone either way
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
        """Wait until nothing can land any more, remove every peer, give the memory back. A handle that is active still
        is left as it is, and so is the agent: released, it would be used after its end."""
        until = time.monotonic() + CLOSE_S
        while self._active and time.monotonic() < until:
            self._poll()
            self._report()
            time.sleep(POLL_LAST_S)
        for name in list(self._peers):
            self.disconnect(name)
        if self._agent is not None and not self._active:
            for table in self._registered:
                self._agent.deregister_memory(table)
            self._agent = None
        for entry in self._active:
            self._results += [partial(f.fail, TransferFailed("the transport was closed")) for f in entry.batch.flights]


def _expected() -> tuple[type[Exception], ...]:
    return (TransferFailed, *failures())


def _complete(done: Future[Any], work: Callable[[], Any]) -> None:
    """Run a command; its exception is the caller's. A bug is the thread's end as well, which is seen and reported."""
    try:
        done.set_result(work())
    except TransferFailed as error:
        done.set_exception(error)
    except failures() as error:
        log.warning("a NIXL call failed", exc_info=error)
        done.set_exception(TransferFailed(f"NIXL refused: {type(error).__name__}"))
    except BaseException as error:
        done.set_exception(TransferFailed(f"the NIXL thread has died: {type(error).__name__}"))
        raise
