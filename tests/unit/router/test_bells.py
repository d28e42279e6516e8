"""A bell that rings late has not been heard: what the worker said meanwhile is read first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from router.dispatch.bells import GRACE_S, LATE_S, Bell


class Handle:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop whose time is the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: list[tuple[float, Callable[[], None], Handle]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> Handle:
        self.waiting.append((self.now + delay, callback, Handle()))
        return self.waiting[-1][2]

    def stand_until(self, now: float) -> None:
        """What was due meanwhile is called now."""
        self.now = now
        due = [entry for entry in self.waiting if entry[0] <= now]
        self.waiting = [entry for entry in self.waiting if entry[0] > now]
        for _, callback, handle in due:
            if not handle.cancelled:
                callback()


def bell(loop: Loop, delay: float) -> tuple[Bell, list[float]]:
    rung: list[float] = []
    return Bell(cast(asyncio.AbstractEventLoop, cast(Any, loop)), delay, lambda: rung.append(loop.now)), rung


def test_a_bell_rings_when_it_is_due() -> None:
    loop = Loop()
    _, rung = bell(loop, 5.0)
    loop.stand_until(4.9)
    assert rung == []
    loop.stand_until(5.0 + LATE_S)
    assert rung == [5.5]
    loop.stand_until(50.0)
    assert rung == [5.5]


def test_a_bell_that_rings_after_the_process_stood_still_rings_once_more_later_and_then_counts() -> None:
    loop = Loop()
    _, rung = bell(loop, 5.0)
    loop.stand_until(20.0)
    assert rung == []
    loop.stand_until(20.0 + GRACE_S)
    assert rung == [20.0 + GRACE_S]


def test_what_was_answered_in_the_grace_cancels_it() -> None:
    loop = Loop()
    one, rung = bell(loop, 5.0)
    loop.stand_until(20.0)
    one.cancel()
    loop.stand_until(60.0)
    assert rung == []
