"""Who waits, in which order, and who is told no.

The failures that shape it: one tenant's thousand prompts in front of everybody else's one; long prompts that starve
short ones, or the other way round; a queue that grows until everything in it is too late; work done for a client whose
deadline cannot be met any more.

A bounded queue. Within a tenant requests are ordered by due time (arrival + TTFT objective); priorities move the due
time, and waiting moves everybody forward, so nothing starves. Between tenants the one that has been served least for
its weight is next, where service is what was really used: prefill seconds, bytes moved, decode residency; a priority is
worth a fixed amount of service there. Limits give 429 for one's own quota and 503 for the fleet's saturation, with
reason and Retry-After. Nothing is shed after its first byte: what has left the queue never comes back to it.

What has left it still waits at a worker, which computes first what is due first. due() is what workers are told, so
that this order is fair as well: time spent behind one's own tenant's requests does not count as lateness, and nobody is
due before the prompts of a tenant that has been served less.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.errors import DeadlineExceeded, PdserveError, QuotaExceeded, Saturated
from runtime.values import value

PRIORITY_STEP_S = 5.0
"""What one priority is worth, in due time and in service. engine.order counts with the same."""


GONE_KEPT = 64
"""Entries of those who left, beyond one for each that waits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one tenant; 0 = none. weight: its share of the fleet when there is not enough. max_inflight counts what runs
    and what waits; tokens_per_s and burst_tokens: a bucket of prompt and output tokens."""

    weight: float = 1.0
    max_inflight: int = 0
    max_waiting: int = 0
    tokens_per_s: float = 0.0
    burst_tokens: float = 0.0


_NONE = Limits()


@dataclass(frozen=True, slots=True)
class Prices:
    """What a unit of each resource is in seconds of service."""

    prefill_s: float = 1.0
    byte: float = 1e-11
    decode_token_s: float = 1e-6  # a context token held on a decode worker for a second


@value
class Ask:
    """A request at the door. due: arrival + TTFT objective. deadline: after which nobody wants the answer (both on the
    caller's clock). priority: lower is sooner, each step worth `priority_step_s`. prefill_s: predicted, to charge in
    advance; tokens: prompt and expected output. first_token_s: the soonest a first token can be, from now."""

    request_id: str
    tenant: str
    arrived: float
    due: float
    deadline: float
    priority: int = 0
    prefill_s: float = 0.0
    tokens: int = 0
    first_token_s: float = 0.0


@dataclass(slots=True)
class _Tenant:
    limits: Limits
    served: float = 0.0  # virtual time: service / weight
    running: int = 0
    bucket: float = 0.0
    bucket_at: float = 0.0
    bucket_share: float = 1.0  # this router's part of the bucket
    spent: int = 0  # charged to the bucket since take_spent()
    heap: list[tuple[float, int, Ask]] = field(default_factory=list)
    waiting: int = 0
    left_at: float = 0.0  # when its last one left the queue
    computing: dict[str, tuple[float, int]] = field(default_factory=dict)  # of prompts at workers: due, priority

    @property
    def inflight(self) -> int:
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class Config:
    """max_waiting: requests in the queue, all tenants. priority_step_s: what one priority is worth in due time, and in
    service between tenants; ageing: none is needed beyond it, since due times are absolute and the clock passes them
    all, and those that are served more fall behind."""

    max_waiting: int = 1024
    priority_step_s: float = PRIORITY_STEP_S
    max_debt_s: float = 30.0
    prices: Prices = Prices()


class Admission:
    """Pure: every call is given the time. A request is in exactly one of: waiting, running, gone."""

    def __init__(self, config: Config | None = None, limits: Mapping[str, Limits] | None = None) -> None:
        self._config = config or Config()
        self._limits = dict(limits or {})
        self._tenants: dict[str, _Tenant] = {}
        self._where: dict[str, str] = {}  # request -> tenant, while it waits
        self._computing: dict[str, _Tenant] = {}  # those with prompts at workers
        self._runs: dict[str, tuple[str, float]] = {}  # request -> tenant, seconds charged in advance
        self._order = 0
        self._floor = 0.0  # virtual time of the last one served: where a newcomer begins
        self._drain_s = 0.0  # smoothed seconds between two departures from the queue
        self._left_at: float | None = None

    # --- the door -----------------------------------------------------------------------------------------------

    def refusal(self, ask: Ask, now: float) -> PdserveError | None:
        """Why this request may not even wait; None: it may. Changes nothing."""
        tenant, limits = self._tenant(ask.tenant), self._of(ask.tenant)
        if ask.deadline <= now + ask.first_token_s:
            return DeadlineExceeded("the deadline cannot be met", reason="deadline_unmeetable")
        if limits.max_inflight and tenant.inflight >= limits.max_inflight:
            return QuotaExceeded(
                "your requests in flight are at their limit",
                limit=f"{limits.max_inflight} requests",
                retry_after_ms=self._after(1),
            )
        if limits.max_waiting and tenant.waiting >= limits.max_waiting:
            return QuotaExceeded(
                "your waiting requests are at their limit",
                limit=f"{limits.max_waiting} requests",
                retry_after_ms=self._after(1),
            )
        missing = self._bucket_missing(tenant, limits, ask.tokens, now)
        if missing > 0:
            return QuotaExceeded(
                "your tokens per second are used up",
                limit=f"{limits.tokens_per_s:g} tokens/s",
                retry_after_ms=max(int(1000 * missing / (limits.tokens_per_s * tenant.bucket_share)), 1),
            )
        if len(self._where) >= self._config.max_waiting:
            return Saturated(
                "too many requests wait already",
                reason="queue_full",
                limit=f"{self._config.max_waiting} requests",
                retry_after_ms=self._after(len(self._where) - self._config.max_waiting + 1),
            )
        return None

    def enter(self, ask: Ask, now: float) -> None:
        """Into the queue. Raises what refusal() says."""
        error = self.refusal(ask, now)
        if error is not None:
            raise error
        assert ask.request_id not in self._where, "it waits already"
        assert ask.request_id not in self._runs, "it runs already"
        tenant, limits = self._tenant(ask.tenant), self._of(ask.tenant)
        if limits.tokens_per_s:
            tenant.bucket -= ask.tokens
            tenant.spent += ask.tokens
        if not tenant.waiting:  # an idle tenant saves no credit
            tenant.served = max(tenant.served, self._floor)
        self._order += 1
        due = ask.due + ask.priority * self._config.priority_step_s
        heapq.heappush(tenant.heap, (due, self._order, ask))
        tenant.waiting += 1
        self._where[ask.request_id] = ask.tenant

    # --- the queue ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._where)

    @property
    def running(self) -> int:
        return len(self._runs)

    def head(self, now: float) -> Ask | None:
        """Who is next: the earliest due of the tenant served least. It stays until start() or leave()."""
        best = self._next_tenant()
        return best.heap[0][2] if best is not None else None

    def due(self, ask: Ask) -> float:
        """When its first token is due as workers are told, if it leaves the queue now; or was, if it is at a worker."""
        told = self.told(ask.tenant, ask.request_id)
        if told is not None:
            return told
        tenant, step = self._tenant(ask.tenant), self._config.priority_step_s
        due = max(ask.arrived, tenant.left_at) + ask.due - ask.arrived + step * ask.priority
        mine = tenant.served + step * ask.priority
        for other in self._computing.values():
            if other is not tenant:
                for theirs, priority in other.computing.values():
                    if theirs > due and other.served + step * priority < mine:
                        due = theirs
        return due

    def told(self, tenant: str, request_id: str) -> float | None:
        """due() of a request whose prompt is at a worker; None: it is not."""
        told = self._tenant(tenant).computing.get(request_id)
        return told[0] if told is not None else None

    def leave(self, request_id: str) -> bool:
        """The client has gone, or the request was refused elsewhere. False: it was not waiting."""
        name = self._where.pop(request_id, None)
        if name is None:
            return False
        tenant = self._tenants[name]
        tenant.waiting -= 1
        self._tidy(tenant)
        return True

    def start(self, request_id: str, now: float) -> Ask:
        """It was placed: out of the queue, charged its predicted prefill."""
        name = self._where[request_id]
        tenant = self._tenants[name]
        ask = next(entry[2] for entry in tenant.heap if entry[2].request_id == request_id)
        self.leave(request_id)
        tenant.computing[request_id] = (self.due(ask), ask.priority)
        self._computing[name] = tenant
        tenant.left_at = now
        self._floor = max(self._floor, tenant.served)
        self._charge(name, ask.prefill_s)
        tenant.running += 1
        self._runs[request_id] = (name, ask.prefill_s)
        if self._left_at is not None:
            self._drain_s += 0.1 * (now - self._left_at - self._drain_s)
        self._left_at = now
        return ask

    # --- what runs ----------------------------------------------------------------------------------------------

    def used(self, request_id: str, *, prefill_s: float = 0.0, moved: float = 0.0, token_seconds: float = 0.0) -> None:
        """What it really took: observed prefill replaces the prediction; bytes and residency are added."""
        run = self._runs.get(request_id)
        if run is None:
            return
        name, charged = run
        prices = self._config.prices
        cost = moved * prices.byte + token_seconds * prices.decode_token_s
        if prefill_s > 0:
            cost += prefill_s * prices.prefill_s - charged
            self._runs[request_id] = (name, 0.0)
        self._charge(name, cost)

    def computed(self, request_id: str) -> None:
        """Its first token is there: it waits for nothing any more. Idempotent."""
        run = self._runs.get(request_id)
        if run is not None:
            self._computed(run[0], request_id)

    def _computed(self, name: str, request_id: str) -> None:
        tenant = self._tenants[name]
        tenant.computing.pop(request_id, None)
        if not tenant.computing:
            self._computing.pop(name, None)

    def over(self, request_id: str) -> bool:
        """The request has ended. Idempotent."""
        run = self._runs.pop(request_id, None)
        if run is None:
            return False
        self._computed(run[0], request_id)
        self._tenants[run[0]].running -= 1
        return True

    # --- other routers ------------------------------------------------------------------------------------------

    def take_spent(self) -> dict[str, int]:
        """Tokens charged to buckets since the last call, by tenant."""
        spent = {name: tenant.spent for name, tenant in self._tenants.items() if tenant.spent}
        for name in spent:
            self._tenants[name].spent = 0
        return spent

    def spent_elsewhere(self, name: str, tokens: int, now: float) -> None:
        """Other routers have charged this tenant's bucket since the last call; at first, before it was filled up again:
        nobody is refused for what a bucket that was full could not take. Never more than two buckets at once, whatever
        they say."""
        tenant, limits = self._tenant(name), self._of(name)
        tenant.bucket -= min(tokens, 2 * max(limits.burst_tokens, 1.0))
        self._bucket_missing(tenant, limits, 0, now)

    def limit_to(self, name: str, share: float) -> None:
        """From now on the bucket here is this share (0..1] of the tenant's."""
        self._tenant(name).bucket_share = share

    # --- inside -------------------------------------------------------------------------------------------------

    def _of(self, name: str) -> Limits:
        return self._limits.get(name, _NONE)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            limits = self._of(name)
            tenant = self._tenants[name] = _Tenant(limits, served=self._floor, bucket=limits.burst_tokens)
        return tenant

    def _next_tenant(self) -> _Tenant | None:
        best: _Tenant | None = None
        least: tuple[float, tuple[float, int]] | None = None
        for tenant in self._tenants.values():
            if tenant.waiting:
                self._tidy(tenant)
                due, order, ask = tenant.heap[0]
                rank = (tenant.served + self._config.priority_step_s * ask.priority, (due, order))
                if least is None or rank < least:
                    best, least = tenant, rank
        return best

    def _tidy(self, tenant: _Tenant) -> None:
        """Drop from the top of the heap who has left; and from all of it, when those are most of it: they lie below one
        that is held for as long as that waits."""
        if len(tenant.heap) > 2 * tenant.waiting + GONE_KEPT:
            tenant.heap = [entry for entry in tenant.heap if entry[2].request_id in self._where]
            heapq.heapify(tenant.heap)
        while tenant.heap and tenant.heap[0][2].request_id not in self._where:
            heapq.heappop(tenant.heap)

    def _charge(self, name: str, seconds: float) -> None:
        tenant = self._tenants[name]
        tenant.served += seconds / max(tenant.limits.weight, 1e-6)
        tenant.served = min(tenant.served, self._floor + self._config.max_debt_s)

    @staticmethod
    def _bucket_missing(tenant: _Tenant, limits: Limits, tokens: int, now: float) -> float:
        """Tokens the bucket lacks. A request larger than the whole bucket waits for a full one, and overdraws it."""
        if not limits.tokens_per_s:
            return 0.0
        burst = max(limits.burst_tokens * tenant.bucket_share, 1.0)
        rate = limits.tokens_per_s * tenant.bucket_share
        tenant.bucket = min(burst, tenant.bucket + (now - tenant.bucket_at) * rate)
        tenant.bucket_at = now
        return min(float(tokens), burst) - tenant.bucket

    def _after(self, places: int) -> int:
        """Milliseconds until so many have probably left the queue."""
        return int(min(max(1000 * places * self._drain_s, 250.0), 30_000.0))

    def check(self) -> None:
        """Assert that the counts are those of the entries. Raises AssertionError."""
        for name, tenant in self._tenants.items():
            waiting = [entry for entry in tenant.heap if self._where.get(entry[2].request_id) == name]
            assert tenant.waiting == len(waiting)
            assert tenant.running == sum(run[0] == name for run in self._runs.values())
            assert all(self._runs[request][0] == name for request in tenant.computing)
            assert bool(tenant.computing) == (name in self._computing)
        assert not self._where.keys() & self._runs.keys(), "a request waits and runs"
        assert len(self._where) <= self._config.max_waiting
