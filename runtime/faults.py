"""Named fail-points for tests: places where a delay, a loss, a failure or a corruption can be switched on.

Code asks `faults.on(point)` where something can go wrong; while nothing is armed that is one global look-up and a
comparison. Armed by a test in its own process (`with faults.armed(...)`), or for a process by the environment:

    PDSERVE_FAULTS="pull.read=delay:0.5*3,watch.send=drop,ticket.issue=fail:kv_lost"

point=action[:argument][*times][@skip]: `times` hits take effect (default: all), after the first `skip` hits.
Only a process whose environment has PDSERVE_FAULTS (empty is enough) lets faults be switched later, through arm().
Actions: delay:seconds, drop, fail[:reason], corrupt[:byte position], count (only counts hits).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from runtime.errors import InvalidRequest, PdserveError, PermissionDenied, classes

Action = Literal["delay", "drop", "fail", "corrupt", "count"]
ENV = "PDSERVE_FAULTS"


@dataclass(frozen=True, slots=True)
class Fault:
    """times: how many hits take effect, 0 = all. skip: hits let through first."""

    point: str
    action: Action
    argument: str = ""
    times: int = 0
    skip: int = 0

    @staticmethod
    def parse(text: str) -> Fault:
        """Raises InvalidRequest for anything that is not of the form above."""
        point, equals, rest = text.strip().partition("=")
        rest, _, skip = rest.partition("@")
        rest, _, times = rest.partition("*")
        action, _, argument = rest.partition(":")
        known = action in get_args(Action)
        if not point or not equals or not known or not (skip or "0").isdigit() or not (times or "0").isdigit():
            raise InvalidRequest(
                f"not a fault: {text!r}", field="faults", limit="point=action[:argument][*times][@skip]"
            )
        fault = Fault(point, action, argument, int(times or 0), int(skip or 0))  # type: ignore[arg-type]
        _check_argument(fault)
        return fault


class _Armed:
    """The faults of this process and how often each point was hit."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.faults: dict[str, Fault] = {}
        self.hits: dict[str, int] = {}


_state = _Armed()
_active = False  # read without the lock at every point: false in production


def on(point: str) -> Fault | None:
    """The fault that strikes now at `point`, if any; counts the hit. What it means is the caller's to carry out
    (see strike() and corrupted() for the common cases)."""
    if not _active:
        return None
    return _hit(point)


def strike(point: str) -> bool:
    """Carry out delay (blocking) and fail at `point`. True: drop what you were about to do."""
    fault = on(point)
    if fault is not None and fault.action == "delay":
        time.sleep(float(fault.argument))
    return _settled(fault)


async def strike_async(point: str) -> bool:
    """strike() for a coroutine: a delay does not block the event loop."""
    fault = on(point)
    if fault is not None and fault.action == "delay":
        await asyncio.sleep(float(fault.argument))
    return _settled(fault)


def corrupted(point: str, data: bytearray | memoryview) -> bool:
    """Flip one byte of `data` (the argument's position, else the middle) when a corrupt fault strikes at `point`."""
    fault = on(point)
    if fault is None or fault.action != "corrupt" or not len(data):
        return False
    position = int(fault.argument) % len(data) if fault.argument else len(data) // 2
    data[position] ^= 0xFF
    return True


def hits(point: str) -> int:
    """How often `point` was reached since it was armed."""
    with _state.lock:
        return _state.hits.get(point, 0)


@contextmanager
def armed(*faults: Fault | str) -> Iterator[None]:
    """Arm for the duration of the block, in this process; for tests. One fault per point."""
    added = [Fault.parse(fault) if isinstance(fault, str) else fault for fault in faults]
    _add(added)
    try:
        yield
    finally:
        _remove([fault.point for fault in added])


def switchable() -> bool:
    """Whether the environment of this process allows arm() from outside."""
    return ENV in os.environ


def arm(text: str) -> None:
    """Replace all faults by those of `text` (comma-separated, empty = none); for an admin call of a running worker.

    Raises PermissionDenied unless the process was started with PDSERVE_FAULTS in its environment.
    """
    if not switchable():
        raise PermissionDenied(f"faults are not enabled in this process ({ENV})")
    parsed = [Fault.parse(part) for part in text.split(",") if part.strip()]
    _remove(list(_state.faults))
    _add(parsed)


def arm_from_environment() -> None:
    """Called once when a process starts; does nothing without PDSERVE_FAULTS."""
    if switchable():
        arm(os.environ[ENV])


def _hit(point: str) -> Fault | None:
    with _state.lock:
        fault = _state.faults.get(point)
        if fault is None:
            return None
        count = _state.hits[point] = _state.hits.get(point, 0) + 1
    effective = count - fault.skip
    return fault if effective > 0 and (not fault.times or effective <= fault.times) else None


def _settled(fault: Fault | None) -> bool:
    if fault is None:
        return False
    if fault.action == "fail":
        raise classes().get(fault.argument, PdserveError)(f"injected at {fault.point}")
    return fault.action == "drop"


def _check_argument(fault: Fault) -> None:
    ok = {"delay": _is_delay, "fail": _is_reason, "corrupt": _is_position}.get(fault.action, _is_empty)
    if not ok(fault.argument):
        raise InvalidRequest(f"bad argument of fault {fault.point}", field="faults")


def _is_delay(argument: str) -> bool:
    try:
        return 0 <= float(argument) <= 3600
    except ValueError:
        return False


def _is_reason(argument: str) -> bool:
    return not argument or argument in classes()


def _is_position(argument: str) -> bool:
    return not argument or argument.isdigit()


def _is_empty(argument: str) -> bool:
    return not argument


def _add(faults: list[Fault]) -> None:
    global _active
    with _state.lock:
        for fault in faults:
            _state.faults[fault.point] = fault
            _state.hits[fault.point] = 0
        _active = bool(_state.faults)


def _remove(points: list[str]) -> None:
    global _active
    with _state.lock:
        for point in points:
            _state.faults.pop(point, None)
        _active = bool(_state.faults)
