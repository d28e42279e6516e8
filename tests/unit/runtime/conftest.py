from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.runtime.servers import RedisServer


@pytest.fixture(scope="session")
def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(_redis: RedisServer) -> str:
    """An empty database of the session's server."""
    import redis

    with redis.Redis.from_url(_redis.url) as client:
        client.flushall()
    return _redis.url


@pytest.fixture
def own_redis(tmp_path: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that the test may kill, pause and start again."""
    server = RedisServer(tmp_path_factory.mktemp("own-redis"))
    server.start()
    yield server
    server.resume()
    server.kill()
