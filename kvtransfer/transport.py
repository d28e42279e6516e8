"""What moves bytes: the interface of a transport, and the value that owns a read.

A read is over twice. `result` says what the caller may conclude: bytes arrived, failed, deadline. `quiet` says that no
byte can land any more, and only then may the destination be used for something else. For a read that succeeds the two
coincide; for one that is abandoned or past its deadline, the time between is quarantine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.layout import Rank
from kvtransfer.mapping import Moves
from kvtransfer.types import ChecksumFn, Region


@dataclass(frozen=True, slots=True)
class Agent:
    """A transport endpoint. `name` holds the incarnation (worker id, rank, epoch): it is never used twice."""

    name: str
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Whose agent it is: a newer epoch of the same worker and rank replaces the older one."""

    worker_id: str
    rank: int
    epoch: int

    @property
    def agent_name(self) -> str:
        return f"{self.worker_id}/{self.rank}/{self.epoch}"


@dataclass(frozen=True, slots=True)
class ReadStats:
    """As the transport counted: bytes, descriptors after merging, and seconds from post to done."""

    nbytes: int
    descriptors: int
    seconds: float


class Flight:
    """A read that was asked for. Both futures belong to the event loop that asked.

    result: ReadStats, or TransferFailed, DeadlineExceeded. quiet: done when the destination is left alone for good.
    Abandoning the flight (cancelling `result`) does not stop it. over_at: time.monotonic() when `result` was done.
    forget: called with the flight when it is settled.
    """

    __slots__ = ("_forget", "_quiet", "deadline", "moves", "over_at", "peer", "result", "settled")

    def __init__(
        self, peer: str, moves: Moves, deadline: float, forget: Callable[[Flight], None] | None = None
    ) -> None:
        self.peer = peer
        self.moves = moves
        self.deadline = deadline
        self.result: asyncio.Future[ReadStats] = asyncio.get_running_loop().create_future()
        self.over_at = float("inf")
        self.settled = False
        self._quiet: asyncio.Future[None] | None = None
        self._forget = forget
        self.result.add_done_callback(self._over)

    def _over(self, _: object) -> None:
        self.over_at = time.monotonic()

    @property
    def quiet(self) -> asyncio.Future[None]:
        """Made when it is asked for: most reads succeed, and nobody waits for their quiet."""
        if self._quiet is None:
            self._quiet = self.result.get_loop().create_future()
            if self.settled:
                self._quiet.set_result(None)
        return self._quiet

    @property
    def quarantined(self) -> bool:
        return self.result.done() and not self.settled

    def succeed(self, stats: ReadStats) -> None:
        if not self.result.done():
            self.result.set_result(stats)
        self.settle()

    def fail(self, error: Exception) -> None:
        """The caller learns now; the destination may still be written to until settle()."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # an abandoned failure is not "never retrieved"

    def settle(self) -> None:
        if self.settled:
            return
        self.settled = True
        if self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)
        if self._forget is not None:
            self._forget(self)


class Transport(Protocol):
    """Used from one event loop. Peers' failures are isolated: an error of one never touches reads from another."""

    @property
    def name(self) -> str:
        """As reported to users: "nixl", "inprocess"."""
        ...

    async def start(self, regions: Sequence[Region]) -> Agent:
        """Create the endpoint and register memory; once. The metadata is what connect() takes at the peer."""
        ...

    async def connect(self, incarnation: Incarnation, agent: Agent) -> None:
        """Make a peer readable; idempotent. A newer epoch replaces an older agent of the same worker and rank.
        Raises TransferFailed (unreachable, older incarnation, not of this transport)."""
        ...

    async def disconnect(self, agent_name: str) -> None:
        """Forget a peer; its reads in flight fail. Idempotent."""
        ...

    def read(self, agent_name: str, moves: Moves, deadline: float) -> Flight:
        """Start a read; never blocks, never raises: errors are in the flight. deadline: time.monotonic seconds."""
        ...

    def quarantined(self) -> int:
        """Reads past their deadline or abandoned whose destination may still be written to."""
        ...

    def unhealthy(self) -> str:
        """Empty, or why this process must be replaced: a quarantine older than its bound, a dead transport thread."""
        ...

    async def close(self) -> None:
        """Fail what is in flight, stop, join. The memory may be unmapped afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank of this worker: what its peers may know, and what only it can do."""

    info: Rank
    transport: Transport
    checksum: ChecksumFn
