"""Shares of limits that several processes divide among themselves: who holds how much of what, as one bounded value.

Every holder claims what it wants of each slot and is given what the limit leaves beside the others; nobody's share is
ever taken away, it is given back or it expires with its holder. So the shares never exceed the limit, whatever order
claims come in. Pure: time is an argument, in milliseconds of the store's own clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_POOL_BYTES = 1 << 20
MAX_HOLDERS = 256
MAX_TTL_MS = 60_000
"""Nobody's claim is believed for longer, whatever the table says."""

_MOST = 1 << 53


@dataclass(frozen=True, slots=True)
class Wish:
    """What a holder wants of a slot, in all, of `limit`."""

    want: int
    limit: int


@dataclass(frozen=True, slots=True)
class Share:
    """held: of the slot, from now until the claim expires. others: held by all others. short: what they want and have
    not got."""

    held: int
    others: int = 0
    short: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """shares: by slot, those claimed. holders: all that are alive, the caller included."""

    shares: Mapping[str, Share]
    holders: int


@dataclass(slots=True)
class _Holder:
    expires_ms: int
    slots: dict[str, tuple[int, int]] = field(default_factory=dict)  # slot -> (held, wanted)


class Pool:
    """The table itself. loads() takes untrusted bytes."""

    def __init__(self) -> None:
        self._holders: dict[str, _Holder] = {}

    @classmethod
    def loads(cls, data: bytes) -> Pool:
        """Raises ValueError for anything that dumps() cannot have made."""
        pool = cls()
        if not data:
            return pool
        if len(data) > MAX_POOL_BYTES:
            raise ValueError("the pool is too large")
        try:
            table = json.loads(data)
        except (RecursionError, UnicodeDecodeError) as exc:
            raise ValueError("the pool is not JSON") from exc
        if not isinstance(table, dict) or len(table) > MAX_HOLDERS:
            raise ValueError("the pool is not a table of holders")
        for name, entry in table.items():
            pool._holders[name] = _holder(entry)
        return pool

    def dumps(self) -> bytes:
        table = {
            name: [holder.expires_ms, {slot: list(pair) for slot, pair in holder.slots.items()}]
            for name, holder in self._holders.items()
        }
        return json.dumps(table, separators=(",", ":")).encode()

    def claim(self, holder: str, wishes: Mapping[str, Wish], now_ms: int, ttl_ms: int) -> Claim:
        """Replace everything `holder` has here. A slot it does not name, or wants nothing of, is given back; ttl_ms 0:
        the holder leaves."""
        alive = range(now_ms + 1, now_ms + MAX_TTL_MS + 1)
        self._holders = {name: at for name, at in self._holders.items() if at.expires_ms in alive and name != holder}
        room = len(self._holders) < MAX_HOLDERS
        shares: dict[str, Share] = {}
        mine = _Holder(now_ms + min(ttl_ms, MAX_TTL_MS))
        for slot, wish in wishes.items():
            pairs = [other.slots[slot] for other in self._holders.values() if slot in other.slots]
            others = sum(held for held, _ in pairs)
            short = sum(max(wanted - held, 0) for held, wanted in pairs)
            held = max(min(wish.want, wish.limit - others), 0) if room else 0
            shares[slot] = Share(held, others, short)
            if wish.want:
                mine.slots[slot] = (held, wish.want)
        if room and ttl_ms > 0:
            self._holders[holder] = mine
        return Claim(shares, len(self._holders))


def _holder(entry: Any) -> _Holder:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], dict) or not _count(entry[0]):
        raise ValueError("not a holder")
    slots: dict[str, tuple[int, int]] = {}
    for slot, pair in entry[1].items():
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_count, pair)):
            raise ValueError("not a share")
        slots[slot] = (pair[0], pair[1])
    return _Holder(entry[0], slots)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST
