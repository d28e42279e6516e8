"""The store in Redis, for several routers or a router that must not be the registry.

Keys (one hash tag, so they sit on one node of a cluster):
    {pdserve}:worker:<id>    serialised WorkerRecord, expires by itself
    {pdserve}:workers        sorted set of ids (all scores 0), the index
    {pdserve}:moved          bounded stream, one entry for each change that watchers should see
    {pdserve}:log:<name>     opaque bytes, appended to
    {pdserve}:pool:<name>    shares of limits: see pools
    {pdserve}:count:<name>   integer

Plain commands only: no scripts, no pickle. Values are read with a length limit and parsed as untrusted input; what is
malformed is skipped and counted. With a registry token a record begins with an HMAC of its key and itself under it, and
one without is skipped like any other garbage. Commands used (for an ACL): see COMMANDS.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as aioredis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, WatchError

from runtime.errors import InvalidRequest, RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry.pools import MAX_POOL_BYTES, MAX_TTL_MS, Claim, Pool, Wish
from runtime.registry.store import (
    MAX_READ_BYTES,
    MAX_RECORD_BYTES,
    MAX_WORKERS,
    Snapshot,
    WorkerRecord,
    bounded,
    checked,
    differs,
    parsed,
    superseded,
)

COMMANDS = (
    "GETRANGE", "SET", "DEL", "EXISTS", "WATCH", "UNWATCH", "MULTI", "EXEC", "DISCARD", "ZADD", "ZREM", "ZRANGE",
    "XADD", "XREVRANGE", "XREAD", "APPEND", "RENAME", "INCRBY", "PEXPIRE", "TIME",
    "AUTH", "HELLO", "SELECT", "PING", "CLIENT",
)  # fmt: skip

_TAG = "{pdserve}"
_INDEX = f"{_TAG}:workers"
_MOVED = f"{_TAG}:moved"
_MOVED_ENTRIES = 256
_INCARNATION = f"{_TAG}:incarnation"
_SEAL_BYTES = 32
_MAX_VALUE_BYTES = MAX_RECORD_BYTES + _SEAL_BYTES
_TIMEOUT_S = 1.0
_CONNECTIONS = 12
_BLOCK_MS = 500  # below the socket timeout
_PARTS_AT_ONCE = 8  # of a log: about a megabyte
_ATTEMPTS = 5  # of an optimistic transaction that another client disturbed

_log = structlog.get_logger("pdserve.registry")


class RedisStore:
    """Implements Store on a Redis 6.2 or newer. One event loop; close() ends its connections."""

    def __init__(self, url: str, metrics: Metrics, token: str = "") -> None:
        self._token = token.encode()
        pool = aioredis.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=_TIMEOUT_S,  # for a free connection
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # callers retry, with their own pauses
        )
        # Any: the client's annotations join every protocol version and decoding, which fits none
        self._redis: Any = aioredis.Redis.from_pool(pool)
        self._ignored = metrics.counter(
            "pdserve_registry_ignored_records", "Stored records that were malformed or too large", ["cause"]
        )

    async def put(self, record: WorkerRecord, ttl_s: float) -> None:
        key = _worker_key(record.worker_id)
        data = self._sealed(key, checked(record).SerializeToString())
        async with _answers():
            for _ in range(_ATTEMPTS):
                async with self._redis.pipeline(transaction=True) as pipe:
                    await pipe.watch(key)
                    old = self._parse(key, await _value(pipe, key))
                    if old is not None and old.epoch > record.epoch:
                        raise superseded()
                    pipe.multi()
                    pipe.set(key, data, px=max(1, int(ttl_s * 1000)))
                    pipe.zadd(_INDEX, {record.worker_id: 0})
                    if differs(old, record):
                        _mark_moved(pipe)
                    if await _executed(pipe):
                        return
        raise RegistryUnavailable("the registry is too busy with this worker's record")

    async def remove(self, worker_id: str, epoch: int) -> bool:
        key = _worker_key(worker_id)
        async with _answers():
            for _ in range(_ATTEMPTS):
                async with self._redis.pipeline(transaction=True) as pipe:
                    await pipe.watch(key)
                    old = self._parse(key, await _value(pipe, key))
                    if old is None or old.epoch > epoch:
                        return False
                    pipe.multi()
                    pipe.delete(key)
                    pipe.zrem(_INDEX, worker_id)
                    _mark_moved(pipe)
                    if await _executed(pipe):
                        return True
        raise RegistryUnavailable("the registry is too busy with this worker's record")

    async def snapshot(self) -> Snapshot:
        async with _answers():
            incarnation = await self._incarnation()
            cursor = await self._newest(_MOVED)  # before the records: what moves later is seen by wait()
            ids = [raw.decode("utf-8", "replace") for raw in await self._redis.zrange(_INDEX, 0, MAX_WORKERS - 1)]
            async with self._redis.pipeline(transaction=False) as pipe:
                for worker_id in ids:
                    pipe.getrange(_worker_key(worker_id), 0, _MAX_VALUE_BYTES)
                values: list[bytes] = await pipe.execute() if ids else []
            records: dict[str, WorkerRecord] = {}
            unreadable: set[str] = set()
            for worker_id, value in zip(ids, values, strict=True):
                if not value:
                    await self._unlist(worker_id)
                    continue
                record = self._parse(_worker_key(worker_id), value)
                if record is not None and record.worker_id == worker_id:
                    records[worker_id] = record
                else:
                    unreadable.add(worker_id)
            return Snapshot(records, cursor, incarnation, frozenset(unreadable))

    async def wait(self, cursor: str, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        async with _answers():
            while (left := end - loop.time()) > 0:
                block = max(1, min(_BLOCK_MS, int(left * 1000)))
                if await self._redis.xread({_MOVED: cursor or "0"}, count=1, block=block):
                    return

    async def write_log(self, log: str, parts: Sequence[bytes], ttl_s: float) -> None:
        bounded(parts)
        key, fresh, ttl_ms = _log_key(log), _log_key(f"{log}:{secrets.token_hex(8)}"), max(1, int(ttl_s * 1000))
        async with _answers():
            await self._redis.set(fresh, b"", px=ttl_ms)
            for start in range(0, len(parts), _PARTS_AT_ONCE):
                await self._redis.append(fresh, b"".join(parts[start : start + _PARTS_AT_ONCE]))
            await self._redis.rename(fresh, key)

    async def append_logs(self, items: Mapping[str, bytes], ttl_s: float) -> Mapping[str, int]:
        async with _answers(), self._redis.pipeline(transaction=False) as pipe:
            for log, data in items.items():
                pipe.append(_log_key(log), data)
                pipe.pexpire(_log_key(log), max(1, int(ttl_s * 1000)))
            answers = await pipe.execute()
        return {log: int(length) for log, length in zip(items, answers[::2], strict=True)}

    async def read_log(self, log: str, start: int) -> bytes:
        async with _answers():
            return bytes(await self._redis.getrange(_log_key(log), start, start + MAX_READ_BYTES - 1))

    async def claim(self, pool: str, holder: str, wishes: Mapping[str, Wish], ttl_s: float) -> Claim:
        key, ttl_ms = f"{_TAG}:pool:{pool}", int(ttl_s * 1000)
        async with _answers():
            for _ in range(_ATTEMPTS):
                async with self._redis.pipeline(transaction=True) as pipe:
                    await pipe.watch(key)
                    table = self._pool(await pipe.getrange(key, 0, MAX_POOL_BYTES))
                    seconds, micros = await pipe.time()
                    claim = table.claim(holder, wishes, 1000 * int(seconds) + int(micros) // 1000, ttl_ms)
                    pipe.multi()
                    pipe.set(key, table.dumps(), px=MAX_TTL_MS)
                    if await _executed(pipe):
                        return claim
        raise RegistryUnavailable("the registry is too busy with this pool")

    async def add(self, deltas: Mapping[str, int], ttl_s: float) -> Mapping[str, int]:
        async with _answers(), self._redis.pipeline(transaction=False) as pipe:
            for name, delta in deltas.items():
                pipe.incrby(_count_key(name), delta)
                pipe.pexpire(_count_key(name), max(1, int(ttl_s * 1000)))
            answers = dict(zip(deltas, (await pipe.execute(raise_on_error=False))[::2], strict=True))
            broken = [name for name, value in answers.items() if _no_number(value)]
            for name in broken:
                self._ignored.labels("counter").inc()
                pipe.delete(_count_key(name))
            if broken:
                await pipe.execute()
        return {name: value for name, value in answers.items() if name not in broken}

    async def close(self) -> None:
        await self._redis.aclose()

    async def _incarnation(self) -> str:
        found = await self._redis.getrange(_INCARNATION, 0, 31)
        if not found:
            await self._redis.set(_INCARNATION, secrets.token_hex(8), nx=True)
            found = await self._redis.getrange(_INCARNATION, 0, 31)
        return _text(found)

    async def _newest(self, stream: str) -> str:
        rows = await self._redis.xrevrange(stream, count=1)
        return _text(rows[0][0]) if rows else "0"

    async def _unlist(self, worker_id: str) -> None:
        """Drop an expired worker's id, unless it registers at this moment."""
        key = _worker_key(worker_id)
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(key)
            if await pipe.exists(key):
                return
            pipe.multi()
            pipe.zrem(_INDEX, worker_id)
            await _executed(pipe)

    def _pool(self, value: bytes) -> Pool:
        """Garbage is counted and begins anew: its holders claim again within their time to live."""
        try:
            return Pool.loads(bytes(value))
        except ValueError:
            self._ignored.labels("pool").inc()
            _log.warning("registry_pool_ignored")
            return Pool()

    def _sealed(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._token, key.encode() + b"\0" + data, "sha256") + data if self._token else data

    def _opened(self, key: str, value: bytes) -> bytes:
        """Raises InvalidRequest for what nobody with our token can have written."""
        if not self._token:
            return value
        data = value[_SEAL_BYTES:]
        if not hmac.compare_digest(value, self._sealed(key, data)):
            raise InvalidRequest("the stored record is not by a worker with our token", field="record")
        return data

    def _parse(self, key: str, value: bytes) -> WorkerRecord | None:
        """None for nothing and for garbage, which is counted."""
        if not value:
            return None
        try:
            return parsed(self._opened(key, bytes(value)))
        except InvalidRequest as exc:
            most = _MAX_VALUE_BYTES if self._token else MAX_RECORD_BYTES
            cause = "oversized" if len(value) > most else "malformed"
            self._ignored.labels(cause).inc()
            _log.warning("registry_record_ignored", cause=cause, field=exc.field)
            return None


@asynccontextmanager
async def _answers() -> AsyncIterator[None]:
    """An outage, a timeout, a full or a foreign server: all are RegistryUnavailable."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as exc:
        raise RegistryUnavailable("the registry does not answer") from exc


async def _executed(pipe: Any) -> bool:
    """False when another client changed the watched key meanwhile."""
    try:
        await pipe.execute()
    except WatchError:
        return False
    return True


async def _value(pipe: Any, key: str) -> bytes:
    """The value, cut one byte past the largest record: a giant one is noticed, not loaded."""
    value: bytes = await pipe.getrange(key, 0, _MAX_VALUE_BYTES)
    return value


def _mark_moved(pipe: Any) -> None:
    pipe.xadd(_MOVED, {"m": b"1"}, maxlen=_MOVED_ENTRIES, approximate=True)


def _worker_key(worker_id: str) -> str:
    return f"{_TAG}:worker:{worker_id}"


def _no_number(answer: int | Exception) -> bool:
    """What stands there cannot be added to. Raises the answer when it is any other error."""
    if not isinstance(answer, Exception):
        return False
    if any(text in str(answer) for text in ("not an integer", "overflow", "WRONGTYPE", "wrong kind")):
        return True
    raise answer


def _count_key(counter: str) -> str:
    return f"{_TAG}:count:{counter}"


def _log_key(log: str) -> str:
    return f"{_TAG}:log:{log}"


def _text(raw: bytes | str) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
