"""Who calls, what they may hold, and the salt their cache entries live under.

A key is known only by its SHA-256. The effective salt is made here from the authenticated tenant, a client's own value
is only mixed in, and every field is length-prefixed, so ("ab", "") and ("a", "b") never meet.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from runtime.config import Config
from runtime.errors import InvalidRequest, QuotaExceeded, Saturated, Unauthenticated

RETRY_AFTER_MS = 1000
MAX_KNOWN_SALTS = 4096
_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Tenant:
    """max_inflight: prompts in flight at once; 0 = only the router's own limit. weight: its share where there is not
    enough for everybody. max_waiting: prompts in the queue. tokens_per_s and burst_tokens: a bucket of prompt and
    answer tokens. priority: lower is served sooner."""

    name: str
    max_inflight: int = 0
    weight: float = 1.0
    max_waiting: int = 0
    tokens_per_s: float = 0.0
    burst_tokens: float = 0.0
    priority: int = 0


OPEN = Tenant("default")


class Keys:
    """The configured keys, or none: then everybody is the one open tenant."""

    def __init__(self, tenants: dict[str, Tenant] | None) -> None:
        self._tenants = tenants

    @classmethod
    def load(cls, config: Config) -> Keys:
        """Raises InvalidRequest (field "api_keys_file") for anything but a mapping of digests to tenants."""
        if not config.api_keys_file:
            return cls(None)
        try:
            content = yaml.safe_load(Path(config.api_keys_file).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as exc:
            raise _bad("the file of API keys cannot be read") from exc
        if not isinstance(content, dict) or not content:
            raise _bad("the file of API keys holds no keys")
        return cls({_digest(key): _tenant(value) for key, value in content.items()})

    def tenants(self) -> list[Tenant]:
        return list((self._tenants or {}).values())

    @property
    def required(self) -> bool:
        return self._tenants is not None

    def tenant(self, authorization: str) -> Tenant:
        """From an Authorization header ("Bearer <key>"). Raises Unauthenticated.

        Looks at every key, whatever matches."""
        if self._tenants is None:
            return OPEN
        scheme, _, key = authorization.partition(" ")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).hexdigest()
        found: Tenant | None = None
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, presented):
                found = tenant
        if found is None or scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("a valid API key is required", reason="invalid_api_key")
        return found


class Salts:
    """effective salt = HMAC(server secret, length-prefixed tenant and client salt)."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode() or secrets.token_bytes(32)
        self._known: dict[tuple[str, str], bytes] = {}

    def of(self, tenant: Tenant, client_salt: str) -> bytes:
        known = self._known.get((tenant.name, client_salt))
        if known is not None:
            return known
        message = b"".join(
            len(part).to_bytes(8, "little") + part for part in (tenant.name.encode(), client_salt.encode())
        )
        salt = hmac.new(self._secret, message, hashlib.sha256).digest()
        if len(self._known) >= MAX_KNOWN_SALTS:  # clients choose theirs: start over rather than grow
            self._known.clear()
        self._known[(tenant.name, client_salt)] = salt
        return salt


class Shares(Protocol):
    """A tenant's limit over several routers: see quotas."""

    def allowed(self, tenant: Tenant) -> int: ...

    def uses(self, tenant: Tenant, count: int) -> None: ...

    async def gather(self, tenant: Tenant, count: int) -> None: ...


class Permits:
    """Prompts in flight, in all and per tenant. hold() is the permit: it is returned on every way out.

    shares: what other routers leave of a tenant's limit; None = this router is alone."""

    def __init__(self, max_inflight: int) -> None:
        self._max = max_inflight
        self._held: dict[str, int] = {}
        self._returned = asyncio.Event()
        self.shares: Shares | None = None

    @property
    def inflight(self) -> int:
        return sum(self._held.values())

    async def gather(self, tenant: Tenant, count: int) -> None:
        """Before hold(): give other routers a moment to give back what they do not use, if it is needed here. Returns
        at once, without letting others run, when it is not."""
        if self.shares is not None and tenant.max_inflight:
            await self.shares.gather(tenant, count)

    def hold(self, tenant: Tenant, count: int) -> Held:
        """Entering raises QuotaExceeded (the tenant's limit) or Saturated (the router's)."""
        return Held(self, tenant, count)

    def take(self, tenant: Tenant, count: int) -> Shares | None:
        """Raises as hold() says. Returns what give_back() wants."""
        mine = self._held.get(tenant.name, 0)
        shared = self.shares if tenant.max_inflight else None
        if tenant.max_inflight and mine + count > (shared.allowed(tenant) if shared else tenant.max_inflight):
            raise QuotaExceeded(
                "your requests in flight are at their limit",
                limit=f"{tenant.max_inflight} prompts",
                retry_after_ms=RETRY_AFTER_MS,
            )
        if self.inflight + count > self._max:
            raise Saturated("the router is at its limit", reason="overloaded", retry_after_ms=RETRY_AFTER_MS)
        self._held[tenant.name] = mine + count
        if shared:
            shared.uses(tenant, mine + count)
        return shared

    def give_back(self, tenant: Tenant, count: int, shared: Shares | None) -> None:
        left = self._held[tenant.name] = self._held[tenant.name] - count
        if shared:
            shared.uses(tenant, left)
        if not left:
            del self._held[tenant.name]
        self._returned.set()

    async def idle(self) -> None:
        """Return when nothing is in flight."""
        while self.inflight:
            self._returned.clear()
            await self._returned.wait()


class Held:
    """A permit while its block runs. A class, as stats.Counted is one."""

    __slots__ = ("_count", "_permits", "_shared", "_tenant")

    def __init__(self, permits: Permits, tenant: Tenant, count: int) -> None:
        self._permits = permits
        self._tenant = tenant
        self._count = count
        self._shared: Shares | None = None

    def __enter__(self) -> None:
        self._shared = self._permits.take(self._tenant, self._count)

    def __exit__(self, *_: object) -> None:
        self._permits.give_back(self._tenant, self._count, self._shared)


def _digest(key: Any) -> str:
    if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{64}", key):
        raise _bad("a key must be given as the 64 hex digits of its SHA-256")
    if key == _EMPTY:
        raise _bad("the empty key is not a key")
    return key


_COUNTS = ("max_inflight", "max_waiting")
_RATES = ("weight", "tokens_per_s", "burst_tokens")


def _tenant(value: Any) -> Tenant:
    if not isinstance(value, dict) or not set(value) <= {"tenant", "priority", *_COUNTS, *_RATES}:
        raise _bad("a key maps to `tenant` (a name) and its limits")
    name = value.get("tenant")
    sound = isinstance(name, str) and bool(name)
    sound &= all(type(value.get(key, 0)) is int and value.get(key, 0) >= 0 for key in _COUNTS)
    sound &= all(type(value.get(key, 1)) in (int, float) and 0 <= value.get(key, 1) < 1e12 for key in _RATES)
    sound &= value.get("weight", 1) > 0 if sound else False
    sound &= type(value.get("priority", 0)) is int and abs(value.get("priority", 0)) <= 100
    if not sound:
        raise _bad("a key maps to `tenant` (a name), and limits are counts or rates that are not negative")
    limits = {key: value[key] for key in (*_COUNTS, *_RATES, "priority") if key in value}
    return Tenant(str(name), **limits)


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="api_keys_file")
