"""Who has just said no, and is not asked first again as long as nothing about it has changed.

The failure that shapes it: a worker that reports itself idle and refuses whatever it is asked (its report is wrong, or
it is full of what it does not count) is the least loaded one for every request there is. Each asks it first, is
refused, gives the other leg's booking back and asks again elsewhere.

A refusal says nothing of smaller requests, and nothing of later: after a pause that doubles, or when the worker's
report says that anything has become different, it is asked like any other. When nobody else is left it is asked anyhow.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos.v1 import common_pb2

FIRST_S, LONGEST_S = 0.05, 2.0

_Report = tuple[int, int, int, int]


@dataclass(slots=True)
class _Refusal:
    tokens: int  # of the smallest request refused
    until: float
    pause: float
    report: _Report


class Refusals:
    """By worker and leg. The clock is an argument. Empty as long as nobody refuses."""

    def __init__(self) -> None:
        self._refused: dict[tuple[str, str], _Refusal] = {}

    def __len__(self) -> int:
        return len(self._refused)

    def refused(self, worker: str, leg: str, tokens: int, load: common_pb2.Load, now: float) -> None:
        """A request of so many tokens was refused by a worker that reported this load."""
        known = self._refused.get((worker, leg))
        report = _report(load)
        if known is None or known.report != report:
            self._refused[(worker, leg)] = _Refusal(tokens, now + FIRST_S, FIRST_S, report)
            return
        known.tokens = min(known.tokens, tokens)
        if now >= known.until:
            known.pause = min(2 * known.pause, LONGEST_S)
            known.until = now + known.pause

    def granted(self, worker: str, leg: str) -> None:
        self._refused.pop((worker, leg), None)

    def rests(self, worker: str, leg: str, tokens: int, load: common_pb2.Load, now: float) -> bool:
        """Whether asking would very likely be in vain."""
        known = self._refused.get((worker, leg))
        if known is None or now >= known.until or tokens < known.tokens:
            return False
        return known.report == _report(load)

    def forget(self, worker: str) -> None:
        for key in [key for key in self._refused if key[0] == worker]:
            del self._refused[key]


def _report(load: common_pb2.Load) -> _Report:
    """What would change if there were room again."""
    return (load.pages_free, load.running, load.waiting, load.queued_prefill_tokens)
