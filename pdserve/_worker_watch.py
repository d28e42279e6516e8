"""Whether the engine's thread stands still, or merely does not get to run.

The failure that shapes it: on a machine with far more to do than it has cores (or one that stood still itself) a step
takes half a minute of wall time, and a worker that takes this for a stuck engine ends itself. All prefill workers do so
in the same minute, since they run the longest steps, and whatever waits for them is refused.

So only time counts in which the thread could have run: not what this process as a whole was stopped or starved for, and
of the time its thread wants a core, only what it was given. A thread that waits (for a lock, a device, a disk) or burns
a core without a turn is stuck.
"""

from __future__ import annotations

from collections.abc import Callable

LONGEST_LOOK_S = 1.0
"""More than this between two looks, and it was this process that did not run. Looks are a tenth of a second apart."""

Sample = tuple[bool, float]
"""(wants a core or has one, seconds of a core it has had so far)"""


def sample(thread: int) -> Sample | None:
    """Of a thread of this process, by its kernel id; None where the kernel does not say."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii") as file:
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
            seconds = int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
    return state == "R", seconds


class Standstill:
    """look() is called several times a second, from one place. sampled(): the engine thread's state."""

    def __init__(self, sampled: Callable[[], Sample | None]) -> None:
        self._sampled = sampled
        self._turned_at = float("-inf")
        self._looked_at: float | None = None
        self._core_s = 0.0
        self.seconds = 0.0

    def look(self, turned_at: float, now: float) -> float:
        """turned_at: when the engine turned last. Seconds for which it has stood still although it could have run."""
        elapsed = min(now - self._looked_at, LONGEST_LOOK_S) if self._looked_at is not None else 0.0
        self._looked_at = now
        if turned_at != self._turned_at:
            self._turned_at, self.seconds = turned_at, 0.0
            return 0.0
        if elapsed > 0:
            self.seconds += self._could_run(elapsed)
        return self.seconds

    def _could_run(self, elapsed: float) -> float:
        found = self._sampled()
        if found is None:
            return elapsed
        wants, core_s = found
        had, self._core_s = core_s - self._core_s, core_s
        return min(max(had, 0.0), elapsed) if wants else elapsed
