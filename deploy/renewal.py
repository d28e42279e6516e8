"""Other processes in place of the routers', one after the other, and no request fails.

For each a second process starts at the same addresses. It says that it serves, and from then on gets its part of the
connections; the old one is told to end: it takes no new connection, finishes what runs and is gone, within
drain_timeout_s. Then it is the next one's turn. A process that does not come to serve ends the whole, and the rest goes
on in its old processes.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, MutableSequence, Sequence

from deploy import processes

READY_S = 120.0
"""How long a new router may take to read its model's files and to know the workers."""
GRACE_S = 5.0
"""After drain_timeout_s, until an old one is killed."""

Started = tuple[subprocess.Popen[bytes], int]
"""A process, and the end of a pipe that says when it serves."""


class Renewal:
    """turn() is called again and again, and waits for nothing. routers: changed in place as they are replaced. error:
    why it has ended early. Owner calls close()."""

    def __init__(
        self, routers: MutableSequence[subprocess.Popen[bytes]], start: Callable[[int], Started], drain_s: float
    ) -> None:
        self._routers = routers
        self._start = start
        self._drain_s = drain_s
        self._number = 0
        self._new: subprocess.Popen[bytes] | None = None
        self._word = -1
        self._old: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self.error = ""

    def turn(self) -> bool:
        """Whether there is more to come."""
        if self._old is not None:
            self._await_end(self._old)
        elif self._new is not None:
            self._await_word(self._new)
        elif self._number == len(self._routers):
            return False
        else:
            self._begin()
        return not self.error

    def processes(self) -> Sequence[subprocess.Popen[bytes]]:
        """Those that are no routers of the fleet: on their way in, or out."""
        return [one for one in (self._new, self._old) if one is not None]

    def close(self) -> None:
        """Whoever is on its way is the owner's to end."""
        if self._word >= 0:
            os.close(self._word)
            self._word = -1

    def _begin(self) -> None:
        try:
            self._new, self._word = self._start(self._number)
        except OSError as error:  # no room for a process, or for its log
            self.error = f"router {self._number}: it cannot be started ({error.strerror})"
            return
        os.set_blocking(self._word, False)
        self._until = time.monotonic() + READY_S

    def _await_word(self, new: subprocess.Popen[bytes]) -> None:
        try:
            word = os.read(self._word, 64)
        except BlockingIOError:
            if time.monotonic() > self._until:
                self._failed(new, "it does not come to serve")
            return
        if not word:
            self._failed(new, "it has ended before it served")
            return
        self.close()
        self._old, self._routers[self._number], self._new = self._routers[self._number], new, None
        self._old.terminate()
        self._until = time.monotonic() + self._drain_s + GRACE_S

    def _failed(self, new: subprocess.Popen[bytes], why: str) -> None:
        self.close()
        code = processes.stop(new, GRACE_S)
        self._new, self.error = None, f"router {self._number}: {why} ({code})"

    def _await_end(self, old: subprocess.Popen[bytes]) -> None:
        if old.poll() is None:
            if time.monotonic() > self._until:
                old.kill()
            return
        self._old = None
        self._number += 1
