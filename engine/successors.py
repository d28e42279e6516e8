"""Which cached states the requests that went on from them have made superfluous. Torch-free; the engine's thread only.

A conversation resumes the state its last turn left, and leaves a deeper one: nobody comes back to the old one, though
the hit has made it the most recent there is. It is spent, and so are the states its own line left before it; on every
tier spent states make way first, and none is copied down. Until then they can be resumed like any other.

A state that is shared is never spent. It is shared at its second sighting: a second request resumes it, a second page
is known to follow its own, or it was made where prompts part. That is remembered by name, longer than the state lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

BOUND = 1 << 16
"""States remembered; the longest untouched are forgotten, and count as neither shared nor spent."""


@dataclass(slots=True)
class _Line:
    """key: of the page it hangs on. maker: the request that left it. before: the state that one had resumed, or left
    just before. resumed: who has gone on from it."""

    key: bytes
    maker: str = ""
    before: bytes | None = None
    resumed: str = ""
    shared: bool = False
    spent: bool = False

    def share(self) -> None:
        self.shared, self.spent = True, False


class Successors:
    """ways: how many different pages are known to follow the one under a key. Names are those of states.state_id;
    requests go by any name of theirs that lasts through retries."""

    def __init__(self, ways: Callable[[bytes], int] = lambda _: 1, bound: int = BOUND) -> None:
        self.ways = ways
        self._bound = bound
        self._lines: OrderedDict[bytes, _Line] = OrderedDict()

    def spent(self, name: bytes) -> bool:
        """From any thread."""
        line = self._lines.get(name)
        return line is not None and line.spent

    def resumed(self, name: bytes, key: bytes, by: str) -> None:
        """A request goes on from this state."""
        line = self._line(name, key)
        if by == line.maker:  # it lost its memory, and comes back to its own
            return
        if line.resumed not in ("", by):
            line.share()
        line.resumed = by

    def left(self, name: bytes, key: bytes, by: str, before: bytes | None, *, junction: bool = False) -> None:
        """A request has left this state, deeper than the one it came by before. junction: where prompts may part."""
        line = self._line(name, key)
        line.maker = line.maker or by
        if before != name:
            line.before = line.before or before
        if junction:
            line.share()
        came_by = self._lines.get(before) if before is not None and before != name else None
        if came_by is not None and came_by.resumed == by:
            self._spend(came_by, by)

    def _spend(self, line: _Line | None, by: str) -> None:
        """It and what its line left before: as far as nobody else has gone on from there."""
        while line is not None and not line.shared and not line.spent:
            if line.resumed not in ("", by):
                return
            if self.ways(line.key) > 1:
                line.share()
                return
            line.spent = True
            line = self._lines.get(line.before) if line.before is not None else None

    def _line(self, name: bytes, key: bytes) -> _Line:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(key)
            if len(self._lines) > self._bound:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(name)
        return line
