"""The source's side of hand-offs: which pages are promised to whom, until when. Synchronous, no I/O, clock passed in.

Failures this answers: pages freed while a decode worker reads them, pages kept for ever because nobody said "done",
a late release of an earlier attempt that frees a newer one, and a ticket that outlives its pages.

Ownership of a hand-off's pages (its `hold`), one owner at a time:

    computing                   the request: its deadline, release(), or fail(), also when its router is lost
    final                       the lease; every renewal of the watching worker extends it (a cached prefix is final
                                from the start)
    failed, released, expired   nobody: the hold is released at the transition, exactly once

Thread-safe by one short lock, since the engine thread announces ranges while RPC handlers watch and renew; no callback
(hold.release, a watcher's wake) runs under it. Time is the clock's monotonic seconds.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtransfer.tickets import TicketMint, parse
from kvtransfer.types import Below, First, Hold, LegKey
from protos.v1 import kvsource_pb2 as pb
from runtime.clock import Clock
from runtime.errors import DeadlineExceeded, InvalidRequest, KvLost, PdserveError, TicketInvalid

ENDED_REMEMBERED = 4096
"""Ended hand-offs whose end is still named in the refusal of their ticket; older ones are just unknown."""


class State(Enum):
    COMPUTING = "computing"
    FINAL = "final"
    FAILED = "failed"
    RELEASED = "released"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Caller:
    """The worker that watches. identity: as mutual TLS verified it, "" without."""

    worker_id: str
    epoch: int
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Final:
    state_length: int
    first: tuple[First, ...]
    slots: tuple[int, ...]
    extras: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Update:
    """News for one watcher: tokens [start, end) are readable; then `final`; or, instead of more, `error`."""

    start: int = 0
    end: int = 0
    final: Final | None = None
    error: PdserveError | None = None


@dataclass(slots=True)
class Watch:
    """One caller's view of one hand-off. The cursor is the first token not yet handed out by poll()."""

    lease_id: str
    caller: Caller
    pages: tuple[int, ...]
    token_count: int
    cursor: int
    wake: Callable[[], None]
    below: Below | None = None
    error: PdserveError | None = None
    final_sent: bool = False


@dataclass(slots=True)
class _Handoff:
    key: LegKey
    nonce: bytes
    pages: tuple[int, ...]
    token_count: int
    ready: int
    hold: Hold
    deadline: float
    below: Below | None = None
    state: State = State.COMPUTING
    final: Final | None = None
    fence: int = 0
    watch: Watch | None = None
    lease_from: float | None = None  # None: not leased, the request owns the pages
    renewed_at: float = float("-inf")


@dataclass(slots=True)
class _Effects:
    """What a transition leaves to do outside the lock."""

    wakes: list[Callable[[], None]] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)

    def run(self) -> None:
        """Each of them, also after one that fails; then its error is raised."""
        with contextlib.ExitStack() as effects:
            for wake in reversed(self.wakes):
                effects.callback(wake)
            for hold in reversed(self.holds):
                effects.callback(hold.release)


@dataclass(frozen=True, slots=True)
class Counts:
    """computing: hand-offs whose pages their request owns; leased: those a lease owns.
    pages: promised by both."""

    computing: int
    leased: int
    pages: int


class HandoffStore:
    """All hand-offs of one worker epoch."""

    def __init__(self, mint: TicketMint, clock: Clock, lease_s: float, page_tokens: int = 16) -> None:
        self._mint = mint
        self._clock = clock
        self._lease_s = lease_s
        self._page = page_tokens
        self._lock = threading.Lock()
        self._live: dict[LegKey, _Handoff] = {}
        self._leases: dict[str, LegKey] = {}
        self._ended: OrderedDict[LegKey, State] = OrderedDict()

    @property
    def lease_s(self) -> float:
        return self._lease_s

    # --- the prefill leg says ---------------------------------------------------------------------------------

    def open(
        self,
        key: LegKey,
        *,
        pages: Sequence[int],
        token_count: int,
        ready: int,
        hold: Hold,
        peer_identity: str = "",
        deadline: float = float("inf"),
        below: Below | None = None,
    ) -> bytes:
        """Promise the pages of tokens [0, token_count) and return the ticket (a serialised SignedTicket).

        The store owns `hold` from here on. `ready`: tokens [0, ready) are valid already. deadline: of the request, on
        the clock's monotonic time. below: which pages are the host tier's; None = none.
        Raises InvalidRequest when the key is live already (the caller keeps its hold).
        """
        if token_count < 1 or len(pages) != -(-token_count // self._page) or not 0 <= ready <= token_count:
            raise InvalidRequest(f"{len(pages)} pages and {ready} ready tokens do not fit {token_count} tokens")
        ticket, nonce = self._mint.mint(key, token_count, peer_identity)
        with self._lock:
            if key in self._live:
                raise InvalidRequest("this attempt has a hand-off already", reason="duplicate")
            self._live[key] = _Handoff(
                key, nonce, tuple(pages), token_count, ready, hold, deadline, below
            )  # fmt: skip
            self._ended.pop(key, None)
        return ticket

    def range_ready(self, key: LegKey, start: int, end: int) -> bool:
        """Tokens [start, end) are final in memory; ranges come in order and may overlap what is known.
        False: the hand-off has ended meanwhile, nothing to do."""
        with self._changing() as effects:
            handoff = self._live.get(key)
            if handoff is None:
                return False
            assert start <= handoff.ready
            assert end <= handoff.token_count
            assert handoff.state is State.COMPUTING
            handoff.ready = max(handoff.ready, end)
            self._notify(handoff, effects)
            return True

    def final(
        self,
        key: LegKey,
        *,
        state_length: int,
        first: Sequence[First],
        slots: Sequence[int] = (),
        extras: Mapping[str, bytes] | None = None,
    ) -> bool:
        """The prompt is computed: every token is ready, the state lies in `slots`, the lease starts."""
        with self._changing() as effects:
            handoff = self._live.get(key)
            if handoff is None:
                return False
            assert handoff.state is State.COMPUTING
            assert state_length == handoff.token_count
            handoff.ready = handoff.token_count
            handoff.state = State.FINAL
            handoff.final = Final(state_length, tuple(first), tuple(slots), dict(extras or {}))
            handoff.lease_from = self._clock.monotonic()
            self._notify(handoff, effects)
            return True

    def fail(self, key: LegKey, error: PdserveError) -> bool:
        """The prompt will not be computed. The watcher is told why."""
        return self._end(key, State.FAILED, error)

    def release(self, key: LegKey) -> bool:
        """The router's word that nobody will read this (any more). Idempotent: False when it was over already."""
        return self._end(key, State.RELEASED, TicketInvalid("the hand-off was released"))

    # --- the decode worker says -------------------------------------------------------------------------------

    def watch(
        self, signed: bytes | pb.SignedTicket, caller: Caller, first_token: int, fence: int, wake: Callable[[], None]
    ) -> Watch:
        """Start watching; counts as a renewal. wake() is called, from any thread, whenever poll() may have news.

        A higher fence supersedes a lower one, whose watcher gets an error; the same fence may be taken again by the
        same worker only. Raises TicketInvalid.
        """
        claims = self._mint.verify(parse(signed) if isinstance(signed, bytes) else signed)
        if claims.peer_identity and claims.peer_identity != caller.identity:
            raise TicketInvalid("the ticket was issued for another worker")
        with self._changing() as effects:
            handoff = self._live.get(claims.key)
            if handoff is None:
                ended = self._ended.get(claims.key)
                raise TicketInvalid(f"the hand-off is {ended.value if ended else 'unknown'}")
            if not secrets.compare_digest(handoff.nonce, claims.nonce) or handoff.token_count != claims.token_count:
                raise TicketInvalid("the ticket is of an earlier hand-off of this attempt")
            if not 0 <= first_token < handoff.token_count:
                raise TicketInvalid(f"token {first_token} is outside the {handoff.token_count} tokens handed over")
            self._supersede(handoff, caller, fence, effects)
            watch = Watch(
                lease_id=secrets.token_hex(8),
                caller=caller,
                pages=handoff.pages,
                token_count=handoff.token_count,
                cursor=first_token - first_token % self._page,
                wake=wake,
                below=handoff.below,
            )
            handoff.watch, handoff.fence = watch, fence
            handoff.renewed_at = self._clock.monotonic()
            self._leases[watch.lease_id] = handoff.key
            return watch

    def poll(self, watch: Watch) -> Update:
        """What is new since the last poll: whole pages only, except the prompt's last one."""
        with self._lock:
            handoff = self._watched(watch)
            if handoff is None:
                return Update(error=watch.error or TicketInvalid("the hand-off is over"))
            end = handoff.ready
            if end < handoff.token_count:
                end -= end % self._page
            start, watch.cursor = watch.cursor, max(watch.cursor, end)
            final = None if watch.final_sent else handoff.final
            watch.final_sent = watch.final_sent or final is not None
            return Update(start, watch.cursor, final)

    def held(self, watch: Watch) -> bool:
        """Whether the pages are still promised to this watcher (asked after their checksums were computed)."""
        with self._lock:
            return self._watched(watch) is not None

    def renew(self, caller: Caller, lease_ids: Sequence[str]) -> list[str]:
        """Extend these leases of the caller; returns the ones it does not hold (any more)."""
        now = self._clock.monotonic()
        lost: list[str] = []
        with self._lock:
            for lease_id in lease_ids:
                handoff = self._leased(lease_id, caller)
                if handoff is None or self._expired(handoff, now):
                    lost.append(lease_id)
                else:
                    handoff.renewed_at = now
        return lost

    def release_lease(self, lease_id: str) -> bool:
        """The watching worker has everything, or will not need it. False for a lease that is gone or superseded:
        a late release of an earlier attempt frees nothing."""
        with self._lock:
            key = self._leases.get(lease_id)
        return key is not None and self.release(key)

    # --- the clock says ---------------------------------------------------------------------------------------

    def expire(self) -> list[LegKey]:
        """Called on a tick: end every lease that ran out, and every computation past its deadline; returns them."""
        now = self._clock.monotonic()
        with self._lock:
            leases = [h.key for h in self._live.values() if self._expired(h, now)]
            late = [h.key for h in self._live.values() if h.state is State.COMPUTING and now >= h.deadline]
        ended = [k for k in leases if self._end(k, State.EXPIRED, KvLost("the lease ran out"), now)]
        error = DeadlineExceeded("the deadline passed before the prompt was computed")
        return ended + [k for k in late if self._end(k, State.FAILED, error)]

    def close(self) -> None:
        """End everything (the worker is going away); watchers are told."""
        with contextlib.ExitStack() as ends:  # of all, also after one that fails
            for key in list(self._live):
                ends.callback(self._end, key, State.RELEASED, KvLost("the source is shutting down"))

    # --- questions --------------------------------------------------------------------------------------------

    def state(self, key: LegKey) -> State | None:
        with self._lock:
            handoff = self._live.get(key)
            return handoff.state if handoff else self._ended.get(key)

    def live(self, leg: str) -> int:
        """Hand-offs of one kind that are promised to somebody."""
        with self._lock:
            return sum(key.leg == leg for key in self._live)

    def counts(self) -> Counts:
        with self._lock:
            live = list(self._live.values())
        return Counts(
            computing=sum(h.lease_from is None for h in live),
            leased=sum(h.lease_from is not None for h in live),
            pages=sum(len(h.pages) for h in live),
        )

    # --- inside -----------------------------------------------------------------------------------------------

    def _changing(self) -> _Changing:
        return _Changing(self._lock)

    def _watched(self, watch: Watch) -> _Handoff | None:
        handoff = self._live.get(self._leases[watch.lease_id]) if watch.lease_id in self._leases else None
        return handoff if handoff is not None and handoff.watch is watch and watch.error is None else None

    def _leased(self, lease_id: str, caller: Caller) -> _Handoff | None:
        handoff = self._live.get(self._leases[lease_id]) if lease_id in self._leases else None
        if handoff is None or handoff.watch is None or handoff.watch.lease_id != lease_id:
            return None
        holder = handoff.watch.caller
        return handoff if (holder.worker_id, holder.epoch) == (caller.worker_id, caller.epoch) else None

    def _expired(self, handoff: _Handoff, now: float) -> bool:
        if handoff.lease_from is None:
            return False
        return now >= max(handoff.lease_from, handoff.renewed_at) + self._lease_s

    def _supersede(self, handoff: _Handoff, caller: Caller, fence: int, effects: _Effects) -> None:
        old = handoff.watch
        if old is None:
            return
        again = (old.caller.worker_id, old.caller.epoch) == (caller.worker_id, caller.epoch)
        if fence < handoff.fence or (fence == handoff.fence and not again):
            raise TicketInvalid(f"fence {fence} is superseded by {handoff.fence}")
        old.error = TicketInvalid(f"superseded by fence {fence}")
        self._leases.pop(old.lease_id, None)
        effects.wakes.append(old.wake)

    def _notify(self, handoff: _Handoff, effects: _Effects) -> None:
        if handoff.watch is not None:
            effects.wakes.append(handoff.watch.wake)

    def _end(self, key: LegKey, state: State, error: PdserveError, expired_at: float | None = None) -> bool:
        """The one way out. expired_at: only if the lease has really run out by then (a renewal may have come)."""
        with self._changing() as effects:
            handoff = self._live.get(key)
            if handoff is None or (expired_at is not None and not self._expired(handoff, expired_at)):
                return False
            del self._live[key]
            handoff.state = state
            self._ended[key] = state
            if len(self._ended) > ENDED_REMEMBERED:
                self._ended.popitem(last=False)
            effects.holds.append(handoff.hold)
            if handoff.watch is not None:
                handoff.watch.error = error
                self._leases.pop(handoff.watch.lease_id, None)
                self._notify(handoff, effects)
            return True


class _Changing:
    """The lock, and after it, outside of it, the effects."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._effects = _Effects()

    def __enter__(self) -> _Effects:
        self._lock.acquire()
        return self._effects

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        self._effects.run()
