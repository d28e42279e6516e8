"""The line of requests that wait for capacity: `admission` decides the order, this wakes whoever is next.

What `admission` is told of every request, waiting or not, makes the shares of tenants come out right: a request that
found room at once is charged like one that waited.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from router.admission.admission import PRIORITY_STEP_S, Admission, Ask, Limits
from router.admission.admission import Config as AdmissionConfig
from router.admission.tenants import Tenant
from runtime.clock import Clock
from runtime.errors import PdserveError, Saturated

RETRY_AFTER_MS = 1000


class Line:
    """limit: requests that wait. place() is the wait itself; leaving it for any reason lets the next one look."""

    def __init__(self, limit: int, clock: Clock, tenants: Iterable[Tenant] = ()) -> None:
        self._limit = limit
        self._now = clock.monotonic
        limits = {
            tenant.name: Limits(
                weight=tenant.weight,
                max_waiting=tenant.max_waiting,
                tokens_per_s=tenant.tokens_per_s,
                burst_tokens=tenant.burst_tokens or tenant.tokens_per_s,
            )
            for tenant in tenants
        }
        self._admission = Admission(AdmissionConfig(max_waiting=max(limit, 1)), limits)
        self._turns: dict[str, asyncio.Event] = {}
        self._asks: dict[str, Ask] = {}  # of those who wait
        self._dues: dict[str, float] = {}  # of prompts at workers, as these are told
        self._pace_s = 0.0  # smoothed seconds between two that left for a worker while somebody waited
        self._left_at: float | None = None
        self._waiting: Counter[int] = Counter()  # by priority
        self._short_s = 0.0
        self._short_from: float | None = None

    def __len__(self) -> int:
        return len(self._admission)

    def check(self, ask: Ask) -> None:
        """Raises QuotaExceeded, Saturated or DeadlineExceeded for a request that may not even wait."""
        error = self._admission.refusal(ask, self._now())
        if error is not None:
            raise error

    def passed(self, ask: Ask) -> None:
        """It found room without waiting."""
        try:
            self._admission.enter(ask, self._now())
        except PdserveError:  # its tenant's bucket ran dry while it was placed: it is placed all the same
            return
        self._start(ask)

    def _start(self, ask: Ask) -> None:
        self._admission.start(ask.request_id, self._now())
        told = self._admission.told(ask.tenant, ask.request_id)
        if told is not None:
            self._dues[ask.request_id] = told

    @asynccontextmanager
    async def place(self, ask: Ask) -> AsyncIterator[Place]:
        """Raises Saturated(reason="queue_full") and what check() raises."""
        if not self._limit:
            raise Saturated(
                "too many requests wait already", reason="queue_full", limit="0 requests", retry_after_ms=RETRY_AFTER_MS
            )
        self._admission.enter(ask, self._now())
        if not self._asks:  # how fast an earlier crowd left says nothing of this one
            self._left_at, self._pace_s = self._now(), 0.0
        turn, self._asks[ask.request_id] = asyncio.Event(), ask
        self._turns[ask.request_id] = turn
        self._waiting[ask.priority] += 1
        place = Place(self, ask.request_id, turn)
        self.call_next()
        try:
            yield place
        finally:
            del self._turns[ask.request_id], self._asks[ask.request_id]
            self._waiting[ask.priority] -= 1
            self._admission.leave(ask.request_id)
            if not len(self):
                self.short(False)
            self.call_next()

    def is_next(self, request_id: str) -> bool:
        head = self._admission.head(self._now())
        return head is not None and head.request_id == request_id

    def behind(self, priority: int) -> int:
        """How many wait besides one of this priority, those that must give way to it left out."""
        return max(sum(count for theirs, count in self._waiting.items() if theirs <= priority) - 1, 0)

    def placed(self, request_id: str) -> None:
        self._start(self._asks[request_id])
        now = self._now()
        if self._left_at is not None:
            self._pace_s += (0.1 if self._pace_s else 1.0) * (now - self._left_at - self._pace_s)
        self._left_at = now

    def wait_s(self, ask: Ask, than: float) -> float:
        """Seconds until those have left that are sure to be before `ask` in line: its tenant's that are due sooner. By
        how fast they leave of late, or what the first has waited already. Counted only when it may be more than
        `than`."""
        if not self._asks:
            return 0.0
        pace_s = self._pace_s
        if self._left_at is not None and self._pace_s:
            pace_s = max(pace_s, min(self._now() - self._left_at, 10.0 * pace_s))
        if len(self._asks) * pace_s <= than:
            return 0.0
        mine = (ask.due + PRIORITY_STEP_S * ask.priority, ask.arrived)
        before = sum(
            other.tenant == ask.tenant and (other.due + PRIORITY_STEP_S * other.priority, other.arrived) < mine
            for other in self._asks.values()
        )
        return before * pace_s

    def last_due(self) -> float:
        """Of the prompts at workers."""
        return max(self._dues.values(), default=-math.inf)

    def short(self, now: bool) -> None:
        """What its first has found: no room anywhere, or workers that are only busy."""
        self._short_s = self.short_s
        self._short_from = self._now() if now else None

    @property
    def short_s(self) -> float:
        """Seconds, ever, for which those who waited here waited for room."""
        return self._short_s + (self._now() - self._short_from if self._short_from is not None else 0.0)

    def due(self, ask: Ask) -> float:
        """When its first token is due, as workers are told, if it is placed now; or was, if its prompt is at one."""
        return self._admission.due(ask)

    def told(self, tenant: str, request_id: str) -> float | None:
        """due() of a request whose prompt is at a worker; None: it is not."""
        return self._admission.told(tenant, request_id)

    def computed(self, request_id: str) -> None:
        """Its first token is there. Idempotent."""
        self._dues.pop(request_id, None)
        self._admission.computed(request_id)

    def over(self, request_id: str, *, prefill_s: float = 0.0, moved: float = 0.0, token_seconds: float = 0.0) -> None:
        """The request has ended, having used so much. Idempotent."""
        self._dues.pop(request_id, None)
        self._admission.used(request_id, prefill_s=prefill_s, moved=moved, token_seconds=token_seconds)
        self._admission.over(request_id)
        self.call_next()  # what it has used is charged: it may be another tenant's turn

    # the tenants' token buckets, which routers share: see quotas

    def take_spent(self) -> dict[str, int]:
        return self._admission.take_spent()

    def spent_elsewhere(self, tenant: str, tokens: int) -> None:
        self._admission.spent_elsewhere(tenant, tokens, self._now())

    def limit_to(self, tenant: str, share: float) -> None:
        self._admission.limit_to(tenant, share)

    def call_next(self) -> None:
        """Wake whoever is next."""
        head = self._admission.head(self._now())
        if head is not None and head.request_id in self._turns:
            self._turns[head.request_id].set()


class Place:
    """Somebody's place in the line."""

    def __init__(self, line: Line, request_id: str, turn: asyncio.Event) -> None:
        self._line = line
        self._request_id = request_id
        self._turn = turn

    async def turn(self, patience_s: float | None = None) -> bool:
        """Return when it is next, or False after so long. Somebody more urgent may come before it is placed: ask again
        before every look."""
        try:
            async with asyncio.timeout(patience_s):
                while not self._line.is_next(self._request_id):
                    self._turn.clear()
                    self._line.call_next()  # it was this one's turn, and what others have used has changed that
                    await self._turn.wait()
        except TimeoutError:
            return False
        return True

    def taken(self) -> None:
        """It has found room."""
        self._line.placed(self._request_id)
