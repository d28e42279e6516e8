"""A breaker per worker and leg: a worker that keeps failing is left alone for a while, then tried with one request.

A client's own fault (4xx), a refusal for lack of room and a cancel say nothing of the worker and are neutral. Half-open
lets one probe through; its slot is reclaimed when the probe is never heard of again, so a lost probe cannot keep a
worker out for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from router.policy.pairing import Role
from runtime.errors import PdserveError, Saturated


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Result(Enum):
    """Of one leg, as the breaker sees it."""

    GOOD = "good"
    BAD = "bad"
    NEUTRAL = "neutral"


@dataclass(frozen=True, slots=True)
class Config:
    """failures within window_s open it for open_s, doubled after each failed probe up to open_max_s. probe_s: a probe
    not heard of for so long is given up. A success in between does not excuse `failures`; rate does: at least this
    share of the window's results must be bad."""

    failures: int = 5
    window_s: float = 30.0
    rate: float = 0.5
    open_s: float = 2.0
    open_max_s: float = 60.0
    probe_s: float = 30.0


@dataclass(slots=True)
class Breaker:
    """One worker's one leg. The clock is an argument.

    It remembers when each result was, in plain numbers: tens of thousands of (when, what) tuples of the last half
    minute had the garbage collector stop the router for 10 to 80 ms, again and again.
    """

    config: Config = Config()
    _good: deque[float] = field(default_factory=deque)
    _bad: deque[float] = field(default_factory=deque)
    _opened: float | None = None
    _pause: float = 0.0
    _probe: tuple[Hashable, float] | None = None

    def state(self, now: float) -> State:
        if self._opened is None:
            return State.CLOSED
        return State.OPEN if now < self._opened + self._pause else State.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be sent. Takes nothing: send() does."""
        if self._opened is None:
            return True
        state = self.state(now)
        if state is State.HALF_OPEN:
            return self._probe is None or now >= self._probe[1] + self.config.probe_s
        return state is State.CLOSED

    def send(self, key: Hashable, now: float) -> bool:
        """A request goes there: in half-open it is the probe. False: not allowed."""
        if self._opened is None:
            return True
        if not self.allows(now):
            return False
        if self.state(now) is State.HALF_OPEN:
            self._probe = (key, now)
        return True

    def heard(self, key: Hashable, result: Result, now: float) -> None:
        """How it went. A neutral probe leaves its place to another one; late results of an open breaker are dropped."""
        if self._probe is not None and self._probe[0] == key:
            self._probe = None
            if result is Result.GOOD:
                self._opened, self._pause = None, 0.0
                self._forget()
            elif result is Result.BAD:
                self._open(now)
            return
        if result is Result.NEUTRAL or self._opened is not None:
            return
        failed = result is Result.BAD
        (self._bad if failed else self._good).append(now)
        for results in (self._good, self._bad):
            while results and results[0] <= now - self.config.window_s:
                results.popleft()
        bad = len(self._bad)
        if failed and bad >= self.config.failures and bad >= self.config.rate * (bad + len(self._good)):
            self._open(now)

    def _open(self, now: float) -> None:
        self._opened = now
        self._pause = min(max(2 * self._pause, self.config.open_s), self.config.open_max_s)
        self._probe = None
        self._forget()

    def _forget(self) -> None:
        self._good.clear()
        self._bad.clear()


class Breakers:
    """By (worker, leg); made when first asked for, forgotten with the worker's epoch."""

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or Config()
        self._breakers: dict[tuple[str, str], Breaker] = {}
        self._open: set[tuple[str, str]] = set()

    def of(self, worker: str, leg: str) -> Breaker:
        breaker = self._breakers.get((worker, leg))
        if breaker is None:
            breaker = self._breakers[worker, leg] = Breaker(self._config)
        return breaker

    @property
    def quiet(self) -> bool:
        """All are closed: nobody need be asked."""
        return not self._open

    def heard(self, worker: str, leg: str, key: Hashable, result: Result, now: float) -> None:
        """How a leg went."""
        breaker = self.of(worker, leg)
        breaker.heard(key, result, now)
        if result is not Result.NEUTRAL:
            if breaker.state(now) is State.CLOSED:
                self._open.discard((worker, leg))
            else:
                self._open.add((worker, leg))

    def allow(self, worker: str, role: Role, now: float) -> bool:
        """Whether the legs of a worker of this role may be sent there."""
        if not self._open:
            return True
        legs = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode",)}.get(role, ("prefill", "decode"))
        known = [self._breakers.get((worker, leg)) for leg in legs]
        return all(breaker is None or breaker.allows(now) for breaker in known)

    def forget(self, worker: str) -> None:
        """A new epoch starts with a clean record."""
        for key in [key for key in self._breakers if key[0] == worker]:
            del self._breakers[key]
            self._open.discard(key)


def result_of(error: PdserveError | None, *, granted: bool = False) -> Result:
    """From how a leg ended; None = well. The table of errors says what counts against a worker. granted: it had agreed
    to take the request; that there is no room after all is then its own fault."""
    if error is None:
        return Result.GOOD
    if granted and isinstance(error, Saturated):
        return Result.BAD
    return Result.BAD if error.row.breaker else Result.NEUTRAL
