"""How long whose cache entries are worth keeping: the hints of requests, remembered by page key for every tier.

Hints order eviction and promise nothing. What has passed its time goes first, then lower priorities, and within one
priority the longest unused; entries of one session are used together, so they age and go together. An entry that
several requests share has the highest priority and the latest end that any of them asked for, one without a hint
counting as priority 0 without end; what has expired begins anew. So no page outranks one it hangs on.

Torch-free; one engine's, changed by its thread only. Nothing is remembered of keys that are in no tier.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.api import Retention

EXPIRED = -(1 << 16)
"""The rank of what has passed its time, below every priority."""

SPARE_ENDS = 64

MOST_TOGETHER = 4096
"""Entries of a session that are recent with it, the newest ones: a client that gives all its requests one name would
have the whole pool gone through at each of them, between two steps."""

Ranked = Callable[[bytes, int], None]
UsedAgain = Callable[[Sequence[bytes]], None]


@dataclass(slots=True)
class _Kept:
    """expires: monotonic seconds. queued: it has a place among those that wait for their end."""

    priority: int
    expires: float
    session: bytes = b""
    queued: bool = False
    expired: bool = False

    @property
    def rank(self) -> int:
        return EXPIRED if self.expired else self.priority


class Retained:
    """now: monotonic seconds, as of the last tick()."""

    def __init__(self) -> None:
        self.now = 0.0
        self._kept: dict[bytes, _Kept] = {}
        self._sessions: dict[bytes, dict[bytes, None]] = {}
        self._ends: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._tiers: list[tuple[Ranked, UsedAgain]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def serve(self, ranked: Ranked, again: UsedAgain) -> None:
        """Add a tier. ranked: told a key's rank whenever it may have changed. again: told keys of a session that was
        used, the deepest first. Both may be told keys they do not have."""
        self._tiers.append((ranked, again))

    def rank(self, key: bytes) -> int:
        known = self._kept.get(key)
        return known.rank if known is not None else 0

    def kept(self, key: bytes) -> tuple[int, float, bytes] | None:
        """(priority, end in monotonic seconds, session) of a key somebody has said something about."""
        known = self._kept.get(key)
        return (known.priority, known.expires, known.session) if known is not None else None

    def restore(self, key: bytes, priority: int, expires: float, session: bytes) -> None:
        """As an earlier process knew it. Parents come first; before any tier has the key."""
        self._kept[key] = known = _Kept(priority, expires, session)
        if session:
            self._sessions.setdefault(session, {})[key] = None
        if expires < math.inf:
            self._queue(key, known)

    def until(self, hint: Retention) -> float:
        """When entries used now under this hint pass their time."""
        return self.now + hint.ttl_s if hint.ttl_s else math.inf

    def touch(self, keys: Sequence[bytes], hint: Retention, fresh: int, until: float) -> None:
        """A request under `hint` uses these, which are in some tier, from the root of the prefix on. keys[fresh:] are
        its own making."""
        for index, key in enumerate(keys):
            self._take(key, hint, index >= fresh, until)

    def used(self, session: bytes) -> None:
        """Whose session this is has come back, or has gone: all of it is recent now."""
        keys = list(itertools.islice(reversed(self._sessions.get(session, {})), MOST_TOGETHER)) if session else []
        if keys:
            for _, again in self._tiers:
                again(keys)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self.now = now
        while self._ends and self._ends[0][0] <= now:
            _, _, key = heapq.heappop(self._ends)
            known = self._kept.get(key)
            if known is None or not known.queued:
                continue
            known.queued = False
            if known.expires > now:
                self._queue(key, known)
                continue
            known.expired = True
            self._tell(key, known)

    def forget(self, keys: Sequence[bytes]) -> None:
        """These are in no tier any more."""
        if not self._kept:
            return
        for key in keys:
            known = self._kept.pop(key, None)
            if known is not None:
                self._leave(key, known)
        if len(self._ends) > 2 * len(self._kept) + SPARE_ENDS:  # ends of what is gone, some a day ahead
            self._ends = [(one.expires, next(self._numbers), key) for key, one in self._kept.items() if one.queued]
            heapq.heapify(self._ends)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _take(self, key: bytes, hint: Retention, fresh: bool, until: float) -> None:
        known = self._kept.get(key)
        if known is None:
            if hint.plain:
                return
            known = self._kept[key] = _Kept(hint.priority, until)
            if not fresh:
                known.priority, known.expires = max(0, hint.priority), math.inf
        elif known.expired:
            known.priority, known.expires, known.expired = hint.priority, until, False
        else:
            known.priority = max(known.priority, hint.priority)
            known.expires = max(known.expires, until)
        if hint.session and hint.session != known.session:
            self._leave(key, known)
            known.session = hint.session
            self._sessions.setdefault(hint.session, {})[key] = None
        if known.expires < math.inf and not known.queued:
            self._queue(key, known)
        self._tell(key, known)

    def _queue(self, key: bytes, known: _Kept) -> None:
        known.queued = True
        heapq.heappush(self._ends, (known.expires, next(self._numbers), key))

    def _leave(self, key: bytes, known: _Kept) -> None:
        session = self._sessions.get(known.session)
        if session is not None:
            session.pop(key, None)
            if not session:
                del self._sessions[known.session]

    def _tell(self, key: bytes, known: _Kept) -> None:
        for ranked, _ in self._tiers:
            ranked(key, known.rank)
