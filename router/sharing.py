"""What several routers share through Redis: who may be used for what. One place that decides whether there is sharing.

Workers' caches are shared only where all routers make the same salts (`cache_salt_secret`): otherwise no router could
use what another one's requests left in a cache, and nothing would prove that a log is a router's.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import structlog

from router.admission.line import Line
from router.admission.tenants import Permits, Tenant
from router.shared.index import SharedIndex
from router.shared.others import Presence
from router.shared.quotas import Quotas
from router.workers.planner import Planner
from runtime.clock import Clock
from runtime.config import Config
from runtime.metrics import Metrics
from runtime.registry import is_redis
from runtime.registry.store import Store

_log = structlog.get_logger("pdserve.router.sharing")


class Sharing:
    """Nothing at all without Redis. Owner calls start() and close()."""

    def __init__(
        self,
        config: Config,
        store: Store,
        planner: Planner,
        namespace: tuple[str, ...],
        router_id: str,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.index: SharedIndex | None = None
        self.quotas: Quotas | None = None
        self._parts = store, router_id, clock, metrics
        self.presence: Presence | None = None
        self.active = is_redis(config.registry)
        if not self.active:
            return
        self.presence = Presence(store, router_id, planner.others)
        if not config.cache_salt_secret:
            _log.warning("caches_not_shared", hint="routers of one deployment need the same cache_salt_secret")
        elif planner.listening:
            secret = hmac.digest(config.cache_salt_secret.encode(), b"pdserve shared state", "sha256")
            self.index = SharedIndex(store, planner.index, namespace, secret, router_id, clock, metrics)
        planner.shared = self.index

    def limit(self, tenants: Sequence[Tenant], permits: Permits, line: Line) -> None:
        """Tenants' limits are those of all routers together."""
        if self.active and any(tenant.max_inflight or tenant.tokens_per_s for tenant in tenants):
            store, router_id, clock, metrics = self._parts
            self.quotas = permits.shares = Quotas(store, router_id, tenants, line, clock, metrics)

    def start(self) -> None:
        for part in (self.presence, self.index, self.quotas):
            if part is not None:
                part.start()

    async def close(self) -> None:
        for part in (self.presence, self.index, self.quotas):
            if part is not None:
                await part.close()
