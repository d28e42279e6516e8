"""Who is alive: worker records with a time to live, in the router's memory or in Redis."""

from __future__ import annotations

from runtime.clock import Clock, SystemClock
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.metrics import Metrics
from runtime.registry.memory import MemoryStore
from runtime.registry.store import Store


def is_redis(registry: str) -> bool:
    return registry.startswith(("redis://", "rediss://", "unix://"))


def check_of_router(config: Config) -> None:
    """A router keeps its registry itself or in Redis, never in another router. Raises InvalidRequest."""
    if config.registry and not is_redis(config.registry):
        raise InvalidRequest(
            "a router keeps the registry itself (leave it empty) or in Redis: redis://host:port/database",
            field="registry",
        )


def open_redis(config: Config, metrics: Metrics) -> Store:
    """The Redis that config.registry names. Connects when first used. redis is imported only here."""
    from runtime.registry.redis import RedisStore

    return RedisStore(config.registry, metrics, config.registry_token)


def open_store(config: Config, metrics: Metrics, clock: Clock | None = None) -> Store:
    """The router's store: Redis where config.registry says so, else the embedded one."""
    if is_redis(config.registry):
        return open_redis(config, metrics)
    return MemoryStore(clock or SystemClock())
