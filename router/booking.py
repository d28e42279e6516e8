"""Choose and reserve: find workers that agree to take a request, or wait in line, or refuse with a reason.

Both workers of a pair are asked at once; when one refuses, the other's booking is given back and the next best pair is
tried. When everybody refused, the request waits for a change of load in the line; a role that is not there at all is
refused at once (503 naming it), since waiting would not bring it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from prometheus_client import Counter

from router import policy
from router.breaker import Breakers
from router.fleet import Fleet
from router.line import Line
from runtime.clock import Clock
from runtime.errors import InvalidRequest, PdserveError, Saturated

RETRY_AFTER_MS = 1000
LOOK_AGAIN_S = 0.25
"""A waiting request looks again after this even when no worker reported a change."""

Attempt = Callable[[policy.Pair | policy.Local], Awaitable[dict[str, PdserveError]]]
"""Reserve at the chosen workers. Returns the refusals by leg ("prefill", "decode"); empty = everything is booked."""


Avoid = Mapping[str, frozenset[str]]
NOBODY: Avoid = {}


@dataclass(slots=True)
class _Round:
    """One walk through the fleet."""

    prefill: set[str] = field(default_factory=set)
    decode: set[str] = field(default_factory=set)
    never: list[InvalidRequest] = field(default_factory=list)
    passing: int = 0

    def refuse(self, choice: policy.Pair | policy.Local, refusals: dict[str, PdserveError]) -> None:
        for leg, error in refusals.items():
            worker = choice.worker if isinstance(choice, policy.Local) else getattr(choice, leg)
            if isinstance(choice, policy.Local) or leg == "prefill":
                self.prefill.add(worker)
            if isinstance(choice, policy.Local) or leg == "decode":
                self.decode.add(worker)
            if isinstance(error, InvalidRequest):
                self.never.append(error)
            else:
                self.passing += 1


class Booking:
    """Shared by all requests: the fleet, the line and the limits of waiting."""

    def __init__(
        self,
        fleet: Fleet,
        breakers: Breakers,
        max_queue: int,
        queue_timeout_s: float,
        clock: Clock,
        degraded: Counter,
    ) -> None:
        self._fleet = fleet
        self._breakers = breakers
        self._degraded = degraded
        self._clock = clock
        self._timeout_s = queue_timeout_s
        self.line = Line(max_queue)

    async def book(
        self, length: int, deadline: float, attempt: Attempt, avoid: Avoid = NOBODY, patience_s: float | None = None
    ) -> policy.Pair | policy.Local:
        """length: tokens of prompt and answer. avoid: workers not to ask, by leg. patience_s: for a request that goes
        on elsewhere. It stands in no line, and waits this long for a worker that is not there at all.

        Raises Saturated (no_prefill_worker, no_decode_worker, queue_full, queue_timeout) and InvalidRequest."""
        if not self.line and patience_s is None:
            choice = await self._round(length, attempt, avoid)
            if choice is not None:
                return choice
        wait = min(self._timeout_s, deadline - self._clock.monotonic())
        try:
            async with asyncio.timeout(wait):
                if patience_s is not None:
                    return await self._patiently(length, attempt, avoid, patience_s)
                async with self.line.place():
                    return await self._wait(length, attempt, avoid)
        except TimeoutError as exc:
            raise Saturated(
                "no worker had room in time",
                reason="queue_timeout",
                limit=f"{self._timeout_s:g} s",
                retry_after_ms=RETRY_AFTER_MS,
            ) from exc

    def another_decode(self, length: int, group: str, refused: frozenset[str]) -> str | None:
        """For a ticket that exists already: a decode worker that may read it."""
        return policy.choose_decode(self._states(), length, group, refused)

    async def _patiently(
        self, length: int, attempt: Attempt, avoid: Avoid, patience_s: float
    ) -> policy.Pair | policy.Local:
        """A worker that died may be back soon, and another may come; a full one is waited for as ever."""
        end = self._clock.monotonic() + patience_s
        while True:
            change = self._fleet.changed_event()
            try:
                choice = await self._round(length, attempt, avoid)
                if choice is not None:
                    return choice
                if self._clock.monotonic() >= end and not self._anybody(length, avoid):
                    raise Saturated("no other worker is available", reason="no_other_worker")
            except Saturated:
                if self._clock.monotonic() >= end:
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await change.wait()

    def _anybody(self, length: int, avoid: Avoid) -> bool:
        """Somebody is there who could take it at some time."""
        choice = policy.choose(self._states(), length, *_refused(avoid))
        return isinstance(choice, policy.Pair | policy.Local)

    async def _wait(self, length: int, attempt: Attempt, avoid: Avoid) -> policy.Pair | policy.Local:
        while True:
            change = self._fleet.changed_event()
            choice = await self._round(length, attempt, avoid)
            if choice is not None:
                return choice
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await change.wait()
            except TimeoutError:
                continue

    def _states(self) -> list[policy.WorkerState]:
        """The fleet, without those whose breaker is open; if that leaves a role empty, with them (degraded)."""
        states = self._fleet.states()
        now = self._clock.monotonic()
        closed = [state for state in states if self._breakers.allow(state.worker_id, state.role, now)]
        if len(closed) == len(states) or not policy.serves(states):
            return states
        if policy.serves(closed):
            return closed
        self._degraded.inc()
        return states

    async def _round(self, length: int, attempt: Attempt, avoid: Avoid) -> policy.Pair | policy.Local | None:
        """Try every choice once. None: everybody refused for now."""
        state = _Round(set(avoid.get("prefill", ())), set(avoid.get("decode", ())))
        while True:
            choice = policy.choose(self._states(), length, frozenset(state.prefill), frozenset(state.decode))
            if isinstance(choice, policy.NoWorker):
                raise _nobody(choice)
            if isinstance(choice, policy.AllRefused):
                if state.never and not state.passing:
                    raise state.never[0]
                return None
            refusals = await attempt(choice)
            if not refusals:
                return choice
            state.refuse(choice, refusals)


def _refused(avoid: Avoid) -> tuple[frozenset[str], frozenset[str]]:
    return avoid.get("prefill", frozenset()), avoid.get("decode", frozenset())


def _nobody(choice: policy.NoWorker) -> PdserveError:
    if choice.too_small:
        return InvalidRequest(
            f"no {choice.missing} worker's context holds this request", reason="context_length_exceeded", field="prompt"
        )
    if choice.incompatible:
        return Saturated(
            "no decode worker is compatible with a prefill worker",
            reason="no_compatible_decode_worker",
            retry_after_ms=RETRY_AFTER_MS,
        )
    return Saturated(
        f"no {choice.missing} worker is available", reason=f"no_{choice.missing}_worker", retry_after_ms=RETRY_AFTER_MS
    )
