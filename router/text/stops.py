"""Stop strings over a text that comes in pieces: a stop may begin in one piece and end in a later one.

Text that could be the beginning of a stop string is held back until it is one or is not. The stop that ends first
wins; of those that end together, the one that starts first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matched:
    """text: what may be given out; stop: the stop string that ended the answer, or ""."""

    text: str
    stop: str = ""


class StopMatcher:
    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str) -> Matched:
        """Raises nothing; after a match the matcher is done and must not be pushed again."""
        if not self._stops:
            return Matched(piece)
        text = self._held + piece
        hit = self._first_hit(text)
        if hit is not None:
            start, end, stop = hit
            self._held = ""
            return Matched(text[: end if self._include else start], stop)
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return Matched(text[: len(text) - keep])

    def pass_through(self, piece: str) -> str:
        """Text that no stop may end (below min_tokens)."""
        held, self._held = self._held, ""
        return held + piece

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_hit(self, text: str) -> tuple[int, int, str] | None:
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not hits:
            return None
        end, start, stop = min(hits)
        return start, end, stop

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
