"""What became of one request. Every request that was due ends in exactly one of these."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

Gaps = np.ndarray[Any, np.dtype[np.float32]]

COMPLETED, REFUSED, FAILED, CUT = "completed", "refused", "failed", "cut_short"
STATES = (COMPLETED, REFUSED, FAILED, CUT)
"""refused: answered with an error in place of an answer; failed: broken off by the other side, or never answered;
cut short: ended from here, or not sent because the turn before it did not end well."""

PARTS = ("queue_s", "prefill_s", "handoff_wait_s", "transfer_s", "decode_s")
"""Of the router's ledger, in order of time."""

_NO_GAPS: Gaps = np.zeros(0, np.float32)


@dataclass(slots=True)
class Result:
    """Times in seconds after the start of the run; first and end are 0 where there was none. due: from when it counts;
    late: what the load generator lost between then (or the moment a place was free) and sending; held: how long
    --concurrency kept it. gaps: between chunks of the answer."""

    number: int
    state: str
    reason: str = ""
    due: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    end: float = 0.0
    late: float = 0.0
    held: float = 0.0
    asked_prompt: int = 0
    asked_output: int = 0
    prompt: int = 0
    cached: int = -1  # the server did not say
    output: int = 0
    parts: tuple[float, ...] = ()
    gaps: Gaps = field(default_factory=lambda: _NO_GAPS)

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for an answer of one."""
        return (self.last - self.first) / (self.output - 1) if self.output > 1 else 0.0

    @property
    def latency(self) -> float:
        return self.end - self.due


_FIELDS = tuple(one.name for one in fields(Result) if one.name != "gaps")


def pack(results: Iterable[Result]) -> list[list[Any]]:
    """For JSON, without loss."""
    return [
        [*(getattr(one, name) for name in _FIELDS), base64.b64encode(one.gaps.tobytes()).decode()] for one in results
    ]


def unpack(rows: Iterable[Sequence[Any]]) -> list[Result]:
    made = []
    for *values, gaps in rows:
        one = Result(**dict(zip(_FIELDS, values, strict=True)))
        one.parts = tuple(one.parts)
        one.gaps = np.frombuffer(base64.b64decode(gaps), np.float32)
        made.append(one)
    return made
