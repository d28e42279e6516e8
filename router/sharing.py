"""What several routers share through Redis: who may be used for what. One place that decides whether there is sharing.

Workers' caches are shared only where all routers make the same salts (`cache_salt_secret`): otherwise no router could
use what another one's requests left in a cache, and nothing would prove that a log is a router's.
"""

from __future__ import annotations

import hmac

import structlog

from router.planner import Planner
from router.shared_index import SharedIndex
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
        if not is_redis(config.registry):
            return
        if not config.cache_salt_secret:
            _log.warning("caches_not_shared", hint="routers of one deployment need the same cache_salt_secret")
        elif planner.listening:
            secret = hmac.digest(config.cache_salt_secret.encode(), b"pdserve shared state", "sha256")
            self.index = SharedIndex(store, planner.index, namespace, secret, router_id, clock, metrics)
        planner.shared = self.index

    def start(self) -> None:
        if self.index is not None:
            self.index.start()

    async def close(self) -> None:
        if self.index is not None:
            await self.index.close()
