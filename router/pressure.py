"""When this process is short of time, tokens of a stream share a chunk.

A chunk per token is what a client wants and costs a socket write each. While there is time to spare every step goes out
at once; when the event loop has none left, what arrives waits for a common beat, and everything a stream got in between
leaves as one chunk. Nothing waits longer than a beat, and a request's first token never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from protos.v1 import common_pb2, decode_pb2
from router.text.progress import GOES_ON

BEAT_S = 0.02
SAMPLE_S = 0.05
BUSY_ABOVE = 0.75
EASY_BELOW = 0.55
EASY_SAMPLES = 20
LATE_S = 0.03
"""A timer this late says the same: others have the processor."""

RAN_ABOVE = 0.15
"""What others have taken is not given back by doing less of next to nothing: a thread that wants the processor all the
time and hardly works when it has it is on a busy machine, not busy."""

_log = structlog.get_logger("pdserve.router.pressure")


class Pressure:
    """`on`: hold tokens back with hold(). `now`: it was so in the last sample, for whoever waits only while it lasts.
    One per event loop; run() keeps both current, no run() means never on."""

    def __init__(self) -> None:
        self.on = False
        self.now = False
        self._easy = 0
        self._held: dict[Callable[[], None], None] = {}
        self._beat: asyncio.TimerHandle | None = None

    def hold(self, flush: Callable[[], None]) -> None:
        """Call `flush` at the next beat, once however often it was held."""
        self._held[flush] = None
        if self._beat is None:
            self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._release)

    def drop(self, flush: Callable[[], None]) -> None:
        self._held.pop(flush, None)

    def _release(self) -> None:
        self._beat = None
        held, self._held = self._held, {}
        for flush in held:
            try:
                flush()
            except Exception as exc:  # noqa: BLE001  supervises: one request's fault holds back no other's tokens
                _log.error("flush_failed", exc_info=exc)

    async def run(self) -> None:
        """Sample for ever: the share of the time in which this thread worked or would have, had it got a processor."""
        with contextlib.suppress(asyncio.CancelledError):
            wall, (ran, waited) = time.monotonic(), _seconds()
            while True:
                await asyncio.sleep(SAMPLE_S)
                now, (ran_now, waited_now) = time.monotonic(), _seconds()
                worked = (ran_now - ran) / (now - wall)
                self.sampled(worked, worked + (waited_now - waited) / (now - wall), now - wall - SAMPLE_S)
                wall, ran, waited = now, ran_now, waited_now

    def sampled(self, worked: float, share: float, late_s: float) -> None:
        """On at once; off only after a while of ease, since sharing chunks is what brings the ease about. worked: the
        share of the time in which this thread ran; share: with what it waited for a processor."""
        if worked > RAN_ABOVE and (share > BUSY_ABOVE or late_s > LATE_S):
            self.on, self.now, self._easy = True, True, 0
        elif worked > RAN_ABOVE and share >= EASY_BELOW:
            self._easy = 0
        else:
            self.now = False
            self._easy += 1
            self.on = self.on and self._easy < EASY_SAMPLES


def _seconds() -> tuple[float, float]:
    """Seconds this thread ran, and waited to run where the kernel tells."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran, waited, _ = file.read().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return time.thread_time(), 0.0


Joined = tuple[int, int, Sequence[int], Sequence[common_pb2.TokenLogprob], int]


def joined(held: Sequence[decode_pb2.ChoiceTokens]) -> list[Joined]:
    """Messages of one choice that follow each other as one: (choice, first sequence, tokens, logprobs, finish)."""
    if len(held) == 1:
        one = held[0]
        return [(one.choice, one.first_sequence, one.tokens, one.logprobs, one.finish)]
    runs: list[list[Any]] = []
    latest: dict[int, list[Any]] = {}
    for one in held:
        run = latest.get(one.choice)
        if run is not None and run[4] == GOES_ON and one.first_sequence == run[1] + len(run[2]):
            run[2] += one.tokens
            run[3] += one.logprobs
            run[4] = one.finish
            continue
        run = [one.choice, one.first_sequence, list(one.tokens), list(one.logprobs), one.finish]
        latest[one.choice] = run
        runs.append(run)
    return [(run[0], run[1], run[2], run[3], run[4]) for run in runs]
