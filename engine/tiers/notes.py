"""What is said of pages and states on disk, written down there so that a worker that starts again knows it, too: how
long they are worth keeping (see engine.retention), and who has gone on from them (see engine.successors).

It orders eviction and promises nothing: what was said in the last moment before a crash is lost. Ends are kept by the
wall clock, for no other clock goes on while the worker is down; one that was set meanwhile makes them end early or
late, by a day at most.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from engine.retention import Retained
from engine.successors import Successors
from engine.tiers.disk_states import DiskStates
from engine.tiers.journal import Found, Hint, Keep, Past, StatePut

NOTE_AFTER_S = 1.0
"""A change waits so long at most for a write it can go along with."""

NOTE_AT = 128
"""So many changes do not wait."""

SLACK = 0.1
"""A new end that is later by less than this share of what is left is not written down."""

LONGEST_S = 24 * 3600.0

T = TypeVar("T", bound=Hint)


class Notes(ABC, Generic[T]):
    """Of one kind. here: whether something is on disk. now: monotonic seconds."""

    def __init__(self, here: Callable[[bytes], bool], now: Callable[[], float]) -> None:
        self._here, self._now = here, now
        self._noted: dict[bytes, T] = {}
        self._due: dict[bytes, float] = {}  # since when

    def changed(self, name: bytes) -> None:
        """Something may have been said about this."""
        if self._here(name) and name not in self._due and self._differs(self._current(name), self._noted.get(name)):
            self._due[name] = self._now()

    def forget(self, names: Iterable[bytes]) -> None:
        """These are on disk no more."""
        for name in names:
            self._noted.pop(name, None)
            self._due.pop(name, None)

    @property
    def waiting(self) -> bool:
        return bool(self._due)

    @property
    def pressing(self) -> bool:
        """They are not to wait any longer for a write they can go along with."""
        oldest = next(iter(self._due.values()), math.inf)
        return len(self._due) >= NOTE_AT or self._now() - oldest >= NOTE_AFTER_S

    def take(self, names: Iterable[bytes] = ()) -> list[tuple[bytes, T]]:
        """What is to be written down, of `names` too, which are about to be."""
        wanted, self._due = {**self._due, **dict.fromkeys(names, 0.0)}, {}
        found = [(name, self._current(name)) for name in wanted]
        known = [(name, said) for name, said in found if said is not None]
        self._noted.update(known)
        return known

    def failed(self, names: Iterable[bytes]) -> None:
        """What was taken of these could not be written down."""
        for name in names:
            self._noted.pop(name, None)
            self.changed(name)

    def check_empty(self) -> None:
        """While nothing is being written. Raises AssertionError."""
        assert all(map(self._here, (*self._noted, *self._due))), "notes of what is on disk no more"

    @abstractmethod
    def _current(self, name: bytes) -> T | None:
        """None: there is nothing to say."""

    def _differs(self, current: T | None, noted: T | None) -> bool:
        """Whether it is worth writing down."""
        return current != noted


class Hints(Notes[Keep]):
    """By page key. wall: the wall clock, in seconds."""

    def __init__(
        self, retained: Retained, here: Callable[[bytes], bool], now: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        super().__init__(here, now)
        self._retained, self._wall = retained, wall

    def restore(self, found: Mapping[bytes, Keep]) -> None:
        """Before the keys themselves are taken in: they are ranked by these."""
        ahead = self._wall() - self._now()
        for key, hint in found.items():
            ends = min(hint.ends - ahead, self._now() + LONGEST_S) if hint.ends < math.inf else math.inf
            self._retained.restore(key, hint.priority, ends, hint.session)
        self._noted = dict(found)

    def _current(self, name: bytes) -> Keep | None:
        kept = self._retained.kept(name)
        if kept is None:
            return None
        priority, ends, session = kept
        return Keep(priority, ends + self._wall() - self._now(), session)

    def _differs(self, current: Keep | None, noted: Keep | None) -> bool:
        if current is None or noted is None:
            return current is not noted
        if (current.priority, current.session) != (noted.priority, noted.session):
            return True
        if math.inf in (current.ends, noted.ends):
            return current.ends != noted.ends
        return abs(current.ends - noted.ends) > SLACK * (current.ends - self._wall())


class Lines(Notes[Past]):
    """By name of a state."""

    def __init__(self, successors: Successors, states: DiskStates, now: Callable[[], float]) -> None:
        super().__init__(self._on_disk, now)
        self._successors, self._states = successors, states
        successors.changed = self.changed

    def restore(self, states: Mapping[bytes, StatePut], found: Mapping[bytes, Past]) -> None:
        for name, past in found.items():
            self._successors.restore(name, states[name].key, past.line)
        self._noted = dict(found)

    def _on_disk(self, name: bytes) -> bool:
        key = self._successors.key(name)
        return key is not None and self._states.named(key, name)

    def _current(self, name: bytes) -> Past | None:
        line = self._successors.line(name)
        return Past(line) if line is not None else None


class Notebook:
    """Both."""

    def __init__(self, hints: Hints, lines: Lines) -> None:
        self.hints, self.lines = hints, lines

    def restore(self, found: Found) -> None:
        """Before the pages and states themselves are taken in."""
        kept = {key: hint for key, hint in found.hints.items() if isinstance(hint, Keep)}
        past = {name: hint for name, hint in found.hints.items() if isinstance(hint, Past)}
        self.hints.restore(kept)
        self.lines.restore(found.states, past)

    @property
    def waiting(self) -> bool:
        return self.hints.waiting or self.lines.waiting

    @property
    def pressing(self) -> bool:
        return self.hints.pressing or self.lines.pressing

    def take(self, keys: Iterable[bytes] = ()) -> list[tuple[bytes, Hint]]:
        """What is to be written down, of the pages `keys` too, which are about to be."""
        return [*self.hints.take(keys), *self.lines.take()]

    def failed(self, taken: Iterable[tuple[bytes, Hint]]) -> None:
        """It could not be written down."""
        for name, hint in taken:
            (self.hints if isinstance(hint, Keep) else self.lines).failed([name])

    def check_empty(self) -> None:
        self.hints.check_empty()
        self.lines.check_empty()
