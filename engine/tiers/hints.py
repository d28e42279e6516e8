"""The hints of what is on disk (see engine.retention), so that a worker that starts again knows them, too.

They order eviction and promise nothing: those of the last moment before a crash are lost. Their ends are kept by the
wall clock, for no other clock goes on while the worker is down; one that was set meanwhile makes them end early or
late, by a day at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from engine.retention import Retained
from engine.tiers.journal import Hint

NOTE_AFTER_S = 1.0
"""A change waits so long at most for a write it can go along with."""

NOTE_AT = 128
"""So many changes do not wait."""

SLACK = 0.1
"""A new end that is later by less than this share of what is left is not written down."""

LONGEST_S = 24 * 3600.0


class Hints:
    """here: whether a key is on disk. now, wall: monotonic and wall clock, in seconds."""

    def __init__(
        self, retained: Retained, here: Callable[[bytes], bool], now: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._retained, self._here = retained, here
        self._now, self._wall = now, wall
        self._noted: dict[bytes, Hint] = {}
        self._due: dict[bytes, float] = {}  # since when

    def restore(self, found: Mapping[bytes, Hint]) -> None:
        """Before the keys themselves are taken in: they are ranked by these."""
        ahead = self._wall() - self._now()
        for key, hint in found.items():
            ends = min(hint.ends - ahead, self._now() + LONGEST_S) if hint.ends < math.inf else math.inf
            self._retained.restore(key, hint.priority, ends, hint.session)
        self._noted = dict(found)

    def changed(self, key: bytes) -> None:
        """Something may have been said about this key."""
        if self._here(key) and key not in self._due and self._differs(key):
            self._due[key] = self._now()

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are on disk no more."""
        for key in keys:
            self._noted.pop(key, None)
            self._due.pop(key, None)

    @property
    def waiting(self) -> bool:
        return bool(self._due)

    @property
    def pressing(self) -> bool:
        """They are not to wait any longer for a write they can go along with."""
        oldest = next(iter(self._due.values()), math.inf)
        return len(self._due) >= NOTE_AT or self._now() - oldest >= NOTE_AFTER_S

    def take(self, keys: Iterable[bytes] = ()) -> list[tuple[bytes, Hint]]:
        """What is to be written down, for `keys` too, which are about to be."""
        wanted, self._due = {**self._due, **dict.fromkeys(keys, 0.0)}, {}
        found = [(key, self._current(key)) for key in wanted]
        known = [(key, hint) for key, hint in found if hint is not None]
        self._noted.update(known)
        return known

    def failed(self, keys: Iterable[bytes]) -> None:
        """What was taken of these could not be written down."""
        for key in keys:
            self._noted.pop(key, None)
            self.changed(key)

    def _current(self, key: bytes) -> Hint | None:
        kept = self._retained.kept(key)
        if kept is None:
            return None
        priority, ends, session = kept
        return Hint(priority, ends + self._wall() - self._now(), session)

    def _differs(self, key: bytes) -> bool:
        current, noted = self._current(key), self._noted.get(key)
        if current is None or noted is None:
            return current is not noted
        if (current.priority, current.session) != (noted.priority, noted.session):
            return True
        if math.inf in (current.ends, noted.ends):
            return current.ends != noted.ends
        return abs(current.ends - noted.ends) > SLACK * (current.ends - self._wall())
