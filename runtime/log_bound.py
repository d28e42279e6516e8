"""A storm of failures does not become a storm of lines: of each kind of failure the first LINES in SECONDS are written,
then one line says how many were left out. What is counted is in the metrics anyway; a log that writes a thousand
refusals a second costs the requests that could be served.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import structlog

LINES = 20
SECONDS = 10.0
KINDS = 256
"""Of one interval; what comes beyond is one kind by its event. Reasons come from peers, too."""

KIND = "_kind"
"""In an entry, and in no line: what its event is without the values in its text."""

Entry = MutableMapping[str, Any]
Kind = tuple[str, str]
_QUIET = frozenset({"info", "debug"})
_CAUSES = ("reason", "why", "error", "cause")


@dataclass(slots=True)
class _Window:
    began: float
    written: int = 0
    left_out: int = 0


class Bounded:
    """A structlog processor, the first one. tell: writes an entry past it."""

    def __init__(
        self,
        tell: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        lines: int = LINES,
        seconds: float = SECONDS,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._lines, self._seconds = lines, seconds
        self._windows: dict[Kind, _Window] = {}
        self._over = float("inf")  # when the first window ends
        self._lock = threading.Lock()

    def __call__(self, logger: Any, method: str, entry: Entry) -> Entry:
        failure = method not in _QUIET or "reason" in entry
        if not failure and self._over == float("inf"):
            return entry
        now = self._clock()
        if now >= self._over:
            self._close(now)
        if failure and not self._admit(_kind(entry), now):
            raise structlog.DropEvent
        return entry

    def finish(self) -> None:
        """Tell what was left out so far: no line may come after this one."""
        self._close(float("inf"))

    def _admit(self, kind: Kind, now: float) -> bool:
        with self._lock:
            if kind not in self._windows and len(self._windows) >= KINDS:
                kind = (kind[0], "")
            window = self._windows.setdefault(kind, _Window(now))
            self._over = min(self._over, window.began + self._seconds)
            if window.written < self._lines:
                window.written += 1
                return True
            window.left_out += 1
            return False

    def _close(self, now: float) -> None:
        with self._lock:
            ended = {kind: one for kind, one in self._windows.items() if one.began + self._seconds <= now}
            for kind in ended:
                del self._windows[kind]
            self._over = min((one.began + self._seconds for one in self._windows.values()), default=float("inf"))
        for (event, reason), window in ended.items():
            if window.left_out:
                said = {"of": event, "reason": reason} if reason else {"of": event}
                self._tell({"event": "lines_left_out", **said, "lines": window.left_out, "seconds": self._seconds})


def _kind(entry: Entry) -> Kind:
    """What happened and why. The texts of errors differ from one to the next: of those the class counts."""
    why = next((entry[name] for name in _CAUSES if isinstance(entry.get(name), str)), "")
    error = entry.get("exc_info")
    if error is True:
        error = sys.exc_info()
    if isinstance(error, tuple):
        error = error[1]
    if isinstance(error, BaseException):
        why = type(error).__name__
    return str(entry.pop(KIND, "") or entry.get("event", "")), why
