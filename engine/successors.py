"""Which cached states the requests that went on from them have made superfluous. Torch-free; the engine's thread only.

A conversation resumes the state its last turn left, and leaves a deeper one: nobody comes back to the old one, though
the hit has made it the most recent there is. It is spent, and so are the states its own line left before it; on every
tier spent states make way first, and none is copied down. Until then they can be resumed like any other.

A state that is shared is never spent. It is shared at its second sighting: a second request resumes it, a second page
is known to follow its own, or it was made where prompts part. That is remembered by name, longer than the state lives;
of states on disk it is written down there (see engine.tiers.notes).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

BOUND = 1 << 16
"""States remembered; the longest untouched are forgotten, and count as neither shared nor spent."""

NOBODY = bytes(8)


@dataclass(frozen=True, slots=True)
class Line:
    """What is remembered of a state. maker: the request that left it. before: the state that one had resumed, or left
    just before. resumed: who has gone on from it. Requests by a digest of their name, NOBODY = none is known."""

    maker: bytes = NOBODY
    before: bytes | None = None
    resumed: bytes = NOBODY
    shared: bool = False
    spent: bool = False


@dataclass(slots=True)
class _Line:
    """See Line. key: of the page it hangs on."""

    key: bytes
    maker: bytes = NOBODY
    before: bytes | None = None
    resumed: bytes = NOBODY
    shared: bool = False
    spent: bool = False

    def share(self) -> None:
        self.shared, self.spent = True, False


class Successors:
    """ways: how many different pages are known to follow the one under a key. Names are those of states.state_id;
    requests go by any name of theirs that lasts through retries. changed: told the name of a state of which something
    new may be remembered."""

    def __init__(self, ways: Callable[[bytes], int] = lambda _: 1, bound: int = BOUND) -> None:
        self.ways = ways
        self.changed: Callable[[bytes], None] = lambda _: None
        self._bound = bound
        self._lines: OrderedDict[bytes, _Line] = OrderedDict()

    def spent(self, name: bytes) -> bool:
        """From any thread."""
        line = self._lines.get(name)
        return line is not None and line.spent

    def key(self, name: bytes) -> bytes | None:
        """Of the page this state hangs on, if anything is remembered of it."""
        line = self._lines.get(name)
        return line.key if line is not None else None

    def line(self, name: bytes) -> Line | None:
        line = self._lines.get(name)
        return Line(line.maker, line.before, line.resumed, line.shared, line.spent) if line is not None else None

    def restore(self, name: bytes, key: bytes, line: Line) -> None:
        """As an earlier process knew it, the longest untouched first."""
        self._lines[name] = _Line(key, line.maker, line.before, line.resumed, line.shared, line.spent)
        self._forget()

    def resumed(self, name: bytes, key: bytes, by: str) -> None:
        """A request goes on from this state."""
        line, who = self._line(name, key), _digest(by)
        if who == line.maker:  # it lost its memory, and comes back to its own
            return
        if line.resumed not in (NOBODY, who):
            line.share()
        line.resumed = who
        self.changed(name)

    def left(self, name: bytes, key: bytes, by: str, before: bytes | None, *, junction: bool = False) -> None:
        """A request has left this state, deeper than the one it came by before. junction: where prompts may part."""
        line, who = self._line(name, key), _digest(by)
        if line.maker == NOBODY:
            line.maker = who
        if before != name:
            line.before = line.before or before
        if junction:
            line.share()
        self.changed(name)
        came_by = self._lines.get(before) if before is not None and before != name else None
        if came_by is not None and came_by.resumed == who:
            self._spend(before, who)

    def _spend(self, name: bytes | None, by: bytes) -> None:
        """It and what its line left before: as far as nobody else has gone on from there."""
        while name is not None:
            line = self._lines.get(name)
            if line is None or line.shared or line.spent or line.resumed not in (NOBODY, by):
                return
            parted = self.ways(line.key) > 1
            if parted:
                line.share()
            else:
                line.spent = True
            self.changed(name)
            name = None if parted else line.before

    def _line(self, name: bytes, key: bytes) -> _Line:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(key)
            self._forget()
        else:
            self._lines.move_to_end(name)
        return line

    def _forget(self) -> None:
        if len(self._lines) > self._bound:
            self._lines.popitem(last=False)


def _digest(request: str) -> bytes:
    return hashlib.blake2b(request.encode(), digest_size=len(NOBODY)).digest()
