"""Choose and reserve: find workers that agree to take a request, or wait in line, or refuse with a reason.

Both workers of a pair are asked at once; when one refuses, the other's booking is given back and the next best pair is
tried. When everybody refused, the request waits for a change of load in the line; a role that is not there at all is
refused at once (503 naming it), since waiting would not bring it. Workers whose breaker is open are left out, unless
that leaves nobody: then the request is tried anyhow, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import partial

from router.admission.admission import Ask
from router.admission.line import Line
from router.admission.tenants import Tenant
from router.policy import pairing
from router.policy.pairing import Role
from router.policy.refusals import Refusals
from router.policy.view import Nobody, Wait
from router.request import Work
from router.workers.breaker import Breakers
from router.workers.deadlines import SURE
from router.workers.fleet import Fleet
from router.workers.planner import Plan, Planner, Standing
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import DeadlineExceeded, InvalidRequest, PdserveError, Saturated, WorkerLost
from runtime.metrics import Metrics
from runtime.values import value

RETRY_AFTER_MS = 1000
LOOK_AGAIN_S = 0.25
"""A waiting request looks again after this even when no worker reported a change."""

LOOK_S = 0.02
"""Not sooner than this without a change, however little is left of its time: that may stand still."""

LEGS = ("prefill", "decode")
SILENT = "silent"
"""In an Avoid, beside the legs: those of its workers that said nothing until a timer ran out."""

Choice = pairing.Pair | pairing.Local
Attempt = Callable[[Choice, Plan | None], Awaitable[dict[str, PdserveError]]]
"""Reserve at the chosen workers. Returns the refusals by leg ("prefill", "decode"); empty = everything is booked."""

Avoid = Mapping[str, frozenset[str]]


@value
class Wish:
    """What a passage wants. tokens: known ones; length: with the answer. avoid: workers that failed it, by leg.
    patience_s: of a request that goes on elsewhere. It stands in no line, and waits this long for a worker that is not
    there at all."""

    work: Work
    tokens: tuple[int, ...]
    length: int
    attempt: Attempt
    avoid: Avoid = field(default_factory=dict)
    patience_s: float | None = None


class _Round:
    """One walk through the fleet: who has refused, and how. resting: whom to ask when nobody else is left, by leg."""

    def __init__(self, avoid: Avoid, resting: Avoid | None = None) -> None:
        self._resting = resting or {}
        self.prefill = {*avoid.get("prefill", ()), *self._resting.get("prefill", ())}
        self.decode = {*avoid.get("decode", ()), *self._resting.get("decode", ())}
        self._avoid = avoid
        self.never: list[InvalidRequest] = []
        self.passing = 0

    def refuse(self, choice: Choice, refusals: dict[str, PdserveError]) -> None:
        for leg, error in refusals.items():
            worker = choice.worker if isinstance(choice, pairing.Local) else getattr(choice, leg)
            if isinstance(choice, pairing.Local) or leg == "prefill":
                self.prefill.add(worker)
            if isinstance(choice, pairing.Local) or leg == "decode":
                self.decode.add(worker)
            if isinstance(error, InvalidRequest):
                self.never.append(error)
            else:
                self.passing += 1

    def wake(self) -> bool:
        """Those who rest are asked, too. False: there are none (any more)."""
        resting, self._resting = self._resting, {}
        self.prefill -= resting.get("prefill", frozenset()) - self._avoid.get("prefill", frozenset())
        self.decode -= resting.get("decode", frozenset()) - self._avoid.get("decode", frozenset())
        return any(resting.values())

    def role(self, worker_id: str, role: Role) -> Role | None:
        """What a worker of this role may still be asked for."""
        may_prefill = role is not Role.DECODE and worker_id not in self.prefill
        may_decode = role is not Role.PREFILL and worker_id not in self.decode
        if may_prefill and may_decode:
            return Role.BOTH
        if may_prefill:
            return Role.PREFILL
        return Role.DECODE if may_decode else None


class Booking:
    """Shared by all requests: the fleet, the line and the limits of waiting."""

    def __init__(
        self,
        fleet: Fleet,
        planner: Planner,
        config: Config,
        clock: Clock,
        metrics: Metrics,
        tenants: Iterable[Tenant] = (),
    ) -> None:
        self._fleet = fleet
        self._planner = planner
        self._config = config
        self._now = clock.monotonic
        self._timeout_s = config.queue_timeout_s
        self.breakers = Breakers()
        self.refusals = Refusals()
        self.line = Line(config.max_queue, clock, tenants)
        self._degraded = metrics.counter(
            "pdserve_router_degraded_choices", "Choices among workers whose breakers are open, for want of others"
        )

    async def book(self, wish: Wish) -> Choice:
        """Raises Saturated (no_prefill_worker, no_decode_worker, queue_full, queue_timeout), QuotaExceeded,
        DeadlineExceeded and InvalidRequest."""
        ask = self._ask(wish.work)
        if wish.patience_s is None:
            late_s = self._too_late_s(wish, ask)
            self.line.check(replace(ask, first_token_s=late_s) if late_s else ask)
            if not self.line:
                choice = await self._round(wish)
                if isinstance(choice, Choice):
                    self.line.passed(ask)
                    return choice
        deadline = asyncio.timeout(wish.work.deadline - self._now())
        try:
            async with deadline:
                if wish.patience_s is not None:
                    return await self._patiently(wish, wish.patience_s)
                return await self._wait(wish, ask)
        except TimeoutError as exc:
            if deadline.expired():
                raise DeadlineExceeded("the request's deadline passed") from exc
            raise Saturated(
                "no worker had room in time",
                reason="queue_timeout",
                limit=f"{self._timeout_s:g} s",
                retry_after_ms=RETRY_AFTER_MS,
            ) from exc
        finally:
            del deadline  # it knows this task, which knows what cancelled it, and that this frame

    def forget(self, worker_id: str) -> None:
        """What it did and refused in an earlier life."""
        self.breakers.forget(worker_id)
        self.refusals.forget(worker_id)

    def another_decode(self, length: int, group: str, refused: frozenset[str]) -> str | None:
        """For a ticket that exists already: a decode worker that may read it."""
        return pairing.choose_decode(self._states(), length, group, refused)

    def _ask(self, work: Work) -> Ask:
        config, count = self._config, len(work.tokens)
        return Ask(
            work.request_id,
            work.tenant,
            work.arrived,
            due=work.arrived + config.ttft_goal_s + config.ttft_goal_s_per_1k * count / 1000,
            deadline=work.deadline,
            priority=work.priority,
            prefill_s=self._planner.speeds.prefill_s("", count, 0),
            tokens=work.most_tokens,
        )

    def _too_late_s(self, wish: Wish, ask: Ask) -> float:
        """When its first token can be there, if that is surely past its deadline; else 0: nobody computes for that."""
        left_s = ask.deadline - self._now()
        seconds = SURE * self.line.wait_s(ask, left_s / SURE) if self.line else 0.0
        if seconds > left_s:
            return seconds
        due = partial(self.line.due, ask)
        return self._planner.too_late_s(wish.work, wish.tokens, left_s, due, self.line.last_due)

    # waiting

    async def _wait(self, wish: Wish, ask: Ask) -> Choice:
        """Raises TimeoutError when nobody had room for too long; while workers are only busy, its time does not run."""
        async with self.line.place(ask) as place:
            end = self.line.short_s + self._timeout_s
            while (left := end - self.line.short_s) > 0:
                if not await place.turn(max(left, LOOK_S)):
                    continue
                change = self._fleet.changed_event()
                if self._too_late_s(wish, ask):
                    raise _unmeetable()
                found = await self._round(wish)
                if isinstance(found, Choice):
                    self.line.short(False)
                    place.taken()
                    return found
                self.line.short(found is None)
                await _soon(change, min(LOOK_AGAIN_S, max(found.seconds if found is not None else left, LOOK_S)))
        raise TimeoutError

    def due(self, work: Work) -> float:
        """When its first token is due, as workers are told, on this router's clock."""
        told = self.line.told(work.tenant, work.request_id)
        return told if told is not None else self.line.due(self._ask(work))

    async def _patiently(self, wish: Wish, patience_s: float) -> Choice:
        """A worker that died may be back soon, and another may come; a full one is waited for as ever."""
        began = self._now()
        end = began + patience_s
        while self._now() < began + self._timeout_s:
            change = self._fleet.changed_event()
            wanted = self._forgiving(wish)
            try:
                choice = await self._round(wanted)
                if isinstance(choice, Choice):
                    return choice
                if self._now() >= end and not self._anybody(wanted):
                    raise Saturated("no other worker is available", reason="no_other_worker")
            except Saturated:
                if self._now() >= end:
                    raise
            left = end - self._now()
            await _soon(change, min(LOOK_AGAIN_S, left) if left > 0 else LOOK_AGAIN_S)
        raise TimeoutError

    def _forgiving(self, wish: Wish) -> Wish:
        """Where nobody else is left, who failed it is asked again: not who said nothing, since that may cost as much
        time once more."""
        if self._anybody(wish):
            return wish
        silent = wish.avoid.get(SILENT, frozenset())
        either = (replace(wish, avoid={**wish.avoid, leg: silent}) for leg in LEGS)
        return next(filter(self._anybody, either), replace(wish, avoid=dict.fromkeys(LEGS, silent)))

    def _anybody(self, wish: Wish) -> bool:
        """Somebody is there who could take it at some time."""
        found = _Round(wish.avoid)
        choice = pairing.choose(self._states(), wish.length, frozenset(found.prefill), frozenset(found.decode))
        return isinstance(choice, Choice)

    # choosing

    async def _round(self, wish: Wish) -> Choice | Wait | None:
        """Try every choice once. None: everybody refused for now. Wait: whoever has room is too busy."""
        if wish.patience_s is None and self._planner.busy(self._config.line_hold_s):
            self._least_loaded(wish, _Round(wish.avoid))  # says so at once when a role is missing or too small
            return Wait(LOOK_AGAIN_S, "workers_busy")
        state = _Round(wish.avoid, self._resting(wish.length))
        while True:
            found = self._planned(wish, state) if self._planner.active else self._least_loaded(wish, state)
            if isinstance(found, Wait):
                return None if state.passing else found
            if found is None:
                if state.wake():
                    continue
                if state.never and not state.passing:
                    raise state.never[0]
                return None
            choice, plan = found
            refusals = await wish.attempt(choice, plan)
            if self.refusals or refusals:
                self._remember(choice, refusals, wish.length)
            if not refusals:
                return choice
            state.refuse(choice, refusals)

    def _resting(self, length: int) -> Avoid:
        """Who has just refused as much, by leg."""
        if not self.refusals:
            return {}
        now = self._now()
        return {
            leg: frozenset(w.id for w in self._fleet.workers() if self.refusals.rests(w.id, leg, length, w.load, now))
            for leg in LEGS
        }

    def _remember(self, choice: Choice, refusals: dict[str, PdserveError], length: int) -> None:
        legs = (
            {"decode": choice.worker}
            if isinstance(choice, pairing.Local)
            else {"prefill": choice.prefill, "decode": choice.decode}
        )
        for leg, worker_id in legs.items():
            worker, error = self._fleet.worker(worker_id), refusals.get(leg)
            if worker is None or isinstance(error, InvalidRequest | WorkerLost):
                continue
            if error is not None:
                self.refusals.refused(worker_id, leg, length, worker.load, self._now())
            elif not refusals:
                self.refusals.granted(worker_id, leg)

    def _least_loaded(self, wish: Wish, state: _Round) -> tuple[Choice, None] | None:
        """Raises Saturated or InvalidRequest when there is nobody at all."""
        choice = pairing.choose(self._states(), wish.length, frozenset(state.prefill), frozenset(state.decode))
        if isinstance(choice, pairing.NoWorker):
            if self._fleet.returning(Role(choice.missing)):
                return None
            raise _nobody(choice)
        return None if isinstance(choice, pairing.AllRefused) else (choice, None)

    def _planned(self, wish: Wish, state: _Round) -> tuple[Choice, Plan | None] | Wait | None:
        now = self._now()
        place = Standing(now - wish.work.arrived, self.due(wish.work), self.line.behind(wish.work.priority))

        def careful(worker_id: str, role: Role) -> Role | None:
            may = state.role(worker_id, role)
            return may if may is not None and self.breakers.allow(worker_id, may, now) else None

        decision = self._planner.plan(wish.work, wish.tokens, careful, place)
        if isinstance(decision, Nobody):
            decision = self._planner.plan(wish.work, wish.tokens, state.role, place)
            if isinstance(decision, Nobody) and not self._prefills():
                decision = self._planner.plan(wish.work, wish.tokens, state.role, place, alone=True)
            if isinstance(decision, Plan):
                self._degraded.inc()
        if isinstance(decision, Plan):
            if wish.patience_s is None and decision.surely_s > wish.work.deadline - now:
                raise _unmeetable()
            return decision.choice, decision
        if isinstance(decision, Nobody):
            return self._least_loaded(wish, state)  # says why, or knows somebody the policy does not
        return decision

    def _prefills(self) -> bool:
        """Whether anybody is there for prompts, whatever else keeps it from taking this one."""
        return any(state.usable and state.role is not Role.DECODE for state in self._fleet.states())

    def _states(self) -> list[pairing.WorkerState]:
        """The fleet, without those whose breaker is open; if that leaves a role empty, with them."""
        states = self._fleet.states()
        if self.breakers.quiet:
            return states
        now = self._now()
        closed = [state for state in states if self.breakers.allow(state.worker_id, state.role, now)]
        if len(closed) == len(states) or not pairing.serves(states):
            return states
        if pairing.serves(closed):
            return closed
        self._degraded.inc()
        return states


async def _soon(change: asyncio.Event, seconds: float = LOOK_AGAIN_S) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await change.wait()


def _unmeetable() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline cannot be met", reason="deadline_unmeetable")


def _nobody(choice: pairing.NoWorker) -> PdserveError:
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
