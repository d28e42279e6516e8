"""A tenant's limits over several routers: who may use how much of them, settled in the background.

Prompts in flight: a router claims a share of the limit and admits within it without asking anybody. What it does not
use it gives back, all but a little that is kept while there is plenty. A request that finds the share used up waits for
the next claims, a seventh of a second, and is then refused as ever. The shares of all routers never exceed the limit.

Tokens per second: every router keeps the whole bucket and is told what the others took from it, ten times a second
while it takes from it itself, else every second. So within such an interval all may together take more than it holds,
by what each of them is asked for then; the next tokens pay for that.

Without Redis a router goes on with its last share of either, at least an equal part of the limit among the routers it
knew: together at most twice the limit. One that never reached Redis has it all.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from router.admission.tenants import Tenant
from router.shared.claims import Claimant
from runtime.clock import Clock
from runtime.errors import RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry.pools import Share, Wish
from runtime.registry.store import Store

TICK_S = 0.1
"""Between two settlements while something has changed; a second otherwise."""

BRISK_S = 0.02
"""Between two settlements while a request waits for one."""

SHARE_TTL_S = 3.0
"""The shares of a router that died are free after this."""

ROUNDS = 7
"""Claims a request waits for: as long as others need to notice and to give back."""

PATIENCE_S = 0.5
"""A claim that takes longer is not waited for."""

IDLE_S = 1.0
SPARE = 16
"""Prompts a router may keep a claim on without using it, at most."""

COUNTER_TTL_S = 3600.0


class Buckets(Protocol):
    """The token buckets of this router: `admission`."""

    def take_spent(self) -> dict[str, int]:
        """Tokens that tenants were charged here since the last call."""
        ...

    def spent_elsewhere(self, tenant: str, tokens: int) -> None:
        """Other routers have charged it so much."""
        ...

    def limit_to(self, tenant: str, share: float) -> None:
        """From now on this router's bucket is this share of the whole."""
        ...


@dataclass(slots=True)
class Lease:
    """A tenant's prompts at this router. used: in flight; short: of requests that wait for the next claim; held: this
    router's share."""

    limit: int
    used: int = 0
    short: int = 0
    held: int = 0
    others: int = 0
    others_short: int = 0
    used_at: float = 0.0

    def allowed(self, routers: int, away: bool) -> int:
        return max(self.held, -(-self.limit // routers)) if away else self.held

    def want(self, routers: int, now: float) -> int:
        """What to claim now. Nothing is kept that another router lacks, or after a second without use."""
        need = min(self.used + self.short, self.limit)
        if self.others_short or (not need and now - self.used_at > IDLE_S):
            return need
        free = max(self.limit - self.others - need, 0)
        return need + min(free // (2 * routers), SPARE)

    def took(self, share: Share) -> None:
        self.held, self.others, self.others_short = share.held, share.others, share.short


@dataclass(slots=True)
class _Spending:
    """A tenant's tokens: `total` of all routers when last told (-1: not yet), and how much of it was spent here, both
    fading."""

    total: int = -1
    mine: float = 0.0
    all: float = 0.0

    def told(self, total: int, mine: int) -> int:
        """What the others have spent since. A counter that went back was lost: it begins anew."""
        known = 0 <= self.total <= total - mine
        elsewhere = total - mine - self.total if known else 0
        self.total = total
        self.mine = 0.98 * self.mine + mine
        self.all = 0.98 * self.all + mine + elsewhere
        return elsewhere

    def share(self, routers: int) -> float:
        return max(self.mine / self.all if self.all > 0 else 0.0, 1.0 / routers)


class Quotas(Claimant):
    """allowed() and gather() are for whoever admits."""

    def __init__(
        self,
        store: Store,
        router_id: str,
        tenants: Iterable[Tenant],
        buckets: Buckets,
        clock: Clock,
        metrics: Metrics,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(store, "tenants", router_id, SHARE_TTL_S)
        self._patience_s = patience_s
        self._buckets = buckets
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._spending = {tenant.name: _Spending() for tenant in tenants if tenant.tokens_per_s}
        self._unsent: dict[str, int] = {}
        self._told_all_at = self._claimed_at = float("-inf")
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self.routers = 1
        self.away = False
        self._silent = False  # a claim takes too long to be waited for
        self._agreed = metrics.gauge(
            "pdserve_router_quotas_shared",
            "1: tenants' limits are settled with the other routers; 0: last known shares",
        )
        self._agreed.set(1)

    # --- the door -------------------------------------------------------------------------------------------------

    def allowed(self, tenant: Tenant) -> int:
        """Prompts of this tenant this router may have in flight now."""
        away = self.away or self._silent
        return min(self._lease(tenant).allowed(self.routers, away), tenant.max_inflight)

    def uses(self, tenant: Tenant, count: int) -> None:
        """So many are in flight here now."""
        lease = self._lease(tenant)
        lease.used, lease.used_at = count, self._clock.monotonic()

    async def gather(self, tenant: Tenant, count: int) -> None:
        """Return when so many more are allowed, or will not be."""
        lease = self._lease(tenant)
        enough, hopeless = lease.used + count <= self.allowed(tenant), lease.used + count > tenant.max_inflight
        if enough or hopeless or self.away:
            return
        lease.short += count
        before = self._settled
        try:
            async with asyncio.timeout(self._patience_s):
                for _ in range(ROUNDS):
                    self._wake.set()
                    await self._settled.wait()
                    if self.away or lease.used + count <= self.allowed(tenant):
                        return
        except TimeoutError:
            self._silent = self._silent or self._settled is before
        finally:
            lease.short -= count

    def _lease(self, tenant: Tenant) -> Lease:
        lease = self._leases.get(tenant.name)
        if lease is None:
            lease = self._leases[tenant.name] = Lease(tenant.max_inflight, used_at=self._clock.monotonic())
        return lease

    # --- settling -------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Settle once with the other routers, or go on without them; then whoever waits looks again."""
        try:
            await self._claim()
            await self._count()
        except RegistryUnavailable:
            self._lost()
        else:
            self._back()
        self._agreed.set(0 if self.away else 1)
        settled, self._settled = self._settled, asyncio.Event()
        settled.set()

    async def _claim(self) -> None:
        now = self._clock.monotonic()
        wishes: dict[str, Wish] = {}
        for name, lease in list(self._leases.items()):
            want = lease.want(self.routers, now)
            lease.held = min(lease.held, want)  # before it is said: nobody may use here what others are given
            if want:
                wishes[slot(name)] = Wish(want, lease.limit)
            elif not lease.used:
                del self._leases[name]
        claim = await self.claim(wishes)
        self._claimed_at = now
        self.routers = max(claim.holders, 1)
        for name, lease in self._leases.items():
            share = claim.shares.get(slot(name))
            if share is not None:
                lease.took(share)

    async def _count(self) -> None:
        for name, tokens in self._buckets.take_spent().items():
            self._unsent[name] = self._unsent.get(name, 0) + tokens
        now = self._clock.monotonic()
        sent = {name: tokens for name, tokens in self._unsent.items() if name in self._spending}
        self._unsent.clear()
        if now - self._told_all_at >= 1.0:
            self._told_all_at = now
            sent = dict.fromkeys(self._spending, 0) | sent
        if not sent:
            return
        totals = await self._store.add({f"tokens:{slot(name)}": count for name, count in sent.items()}, COUNTER_TTL_S)
        for name, mine in sent.items():
            total = totals.get(f"tokens:{slot(name)}")
            spending = self._spending[name]
            if total is None:
                spending.total = -1
            else:
                self._buckets.spent_elsewhere(name, spending.told(total, mine))

    def _lost(self) -> None:
        """The last known shares hold until Redis is back."""
        if not self.away:
            for name, spending in self._spending.items():
                self._buckets.limit_to(name, spending.share(self.routers))
        self.away = True
        self._unsent.clear()
        self._buckets.take_spent()

    def _back(self) -> None:
        self._silent = False
        if self.away:
            for name, spending in self._spending.items():
                self._buckets.limit_to(name, 1.0)
                spending.total = -1
        self.away = False

    def _due(self) -> bool:
        """Whether there is anything to settle now: a share to grow, to give back, or that others may lack; tokens."""
        if self.away or self._spending or self._clock.monotonic() - self._claimed_at >= IDLE_S:
            return True
        return any(lease.short or lease.held != lease.used for lease in self._leases.values())

    def _pause(self) -> float:
        if not self.away and any(lease.short for lease in self._leases.values()):
            return BRISK_S
        return TICK_S if self.away or self._spending or self._leases else IDLE_S

    async def turn(self) -> None:
        self._wake.clear()
        if self._due():
            await self.settle()

    async def pause(self) -> None:
        await asyncio.sleep(BRISK_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause() - BRISK_S):
                await self._wake.wait()


def slot(tenant: str) -> str:
    """Of a tenant in the store: no odd characters, and no name for whoever looks there."""
    return hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:24]
