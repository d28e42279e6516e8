"""How far a worker's word goes: what it says it has cached, and how long it says things took.

The failure that shapes it: a worker whose cache events are wrong (lost, late, invented) looks warm to every prompt, and
one whose clock or sums are wrong looks fast; both are given everything, and nothing they say later changes that. What
this router has seen itself does: what a prompt really found there, and the time from sending it to its first token.

Nobody is shut out by this. A word is worth as much as it was of late, and the truth told again restores it.
"""

from __future__ import annotations

import math
from operator import attrgetter

from protos.v1 import common_pb2

RATE = 0.2
SILENT_S, HALF_S = 30.0, 60.0
"""A word that was not tried for so long is worth more again; after HALF_S more half of the doubt is left."""

SLACK_SHARE, SLACK_S = 1.25, 0.02
"""What lies between a worker's sums and ours without anybody being wrong: streams, loops, other clocks."""

MOST_KNOWN = 20_000
"""Workers, or paths between them: of more, those that were met first are forgotten."""

SHORTEST_S, LONGEST_S = 1e-6, 1e6
"""Of what a clock shows of work that was done."""
_SECONDS = ("queue_s", "prefill_s", "handoff_wait_s", "transfer_s", "decode_s", "checksum_s", "fetch_s")
_seconds_of = attrgetter(*_SECONDS)


def sound(times: common_pb2.StageTimes) -> None:
    """What a worker says took no time a clock could show (NaN, negative, without end) took none: one such number would
    stay in every mean, price and prediction it is mixed into."""
    for name, seconds in zip(_SECONDS, _seconds_of(times), strict=True):
        if seconds and not measurable(seconds):
            setattr(times, name, 0.0)


def measurable(seconds: float) -> bool:
    """Whether it can be a measured time of work. NaN cannot."""
    return SHORTEST_S <= seconds <= LONGEST_S


class Trust:
    """By worker: the share of the tokens it was said to have that prompts really found there. 1 until it is known."""

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._told_at: dict[str, float] = {}
        self._relaxed_at = math.nan

    def of(self, worker: str) -> float:
        return self._shares.get(worker, 1.0)

    def learn(self, worker: str, said: int, found: int, now: float = math.nan) -> None:
        """A prompt was sent there because of `said` cached tokens, and found so many."""
        if said > 0:
            share = self.of(worker)
            if worker not in self._shares and len(self._shares) >= MOST_KNOWN:
                self.forget(next(iter(self._shares)))
            self._shares[worker] = share + RATE * (min(found / said, 1.0) - share)
            self._told_at[worker] = now

    def relax(self, now: float) -> None:
        """Whom nobody believes nobody asks: of one whose word was not tried for a while, it is worth more again."""
        since, self._relaxed_at = now - self._relaxed_at, now
        if since > 0.0:
            left = 0.5 ** (since / HALF_S)
            for worker, told_at in self._told_at.items():
                if now - told_at > SILENT_S:
                    self._shares[worker] = 1.0 - left * (1.0 - self._shares[worker])

    def forget(self, worker: str) -> None:
        self._shares.pop(worker, None)
        self._told_at.pop(worker, None)


def as_seen(reported_s: float, said_s: float, took_s: float) -> float:
    """A part of a worker's time, as it must have been. said_s: the sum of all parts as the worker says. took_s: as this
    router saw it; 0 = it did not see it. Of whoever says less than was seen, all parts are stretched alike."""
    if said_s <= 0.0 or took_s <= SLACK_SHARE * said_s + SLACK_S:
        return reported_s
    return reported_s * took_s / said_s
