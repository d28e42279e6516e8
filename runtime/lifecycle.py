"""A process from start to end: the event loop, and two signals.

The first SIGTERM or SIGINT asks: the event `stopping` is set and main() winds down by itself. The second does not ask:
the process exits at once. Threads must be joined before main() returns: an interpreter that exits while a thread is
inside a torch operation aborts.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog

READY_FD = "PDSERVE_READY_FD"
"""Names a pipe: whoever has started a process waits there for its word."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log = structlog.get_logger("pdserve.lifecycle")


@contextmanager
def signals() -> Iterator[asyncio.Event]:
    """Inside a running event loop of the main thread: the event that the first signal sets. Handlers are restored."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def received(number: signal.Signals) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        _log.info("stopping", signal=number.name)
        stopping.set()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, int | None]], *, use_uvloop: bool = False) -> int:
    """Run main(stopping) to its end on a new event loop; returns its exit code (None counts as 0)."""

    async def body() -> int:
        with signals() as stopping:
            return await main(stopping) or 0

    with asyncio.Runner(loop_factory=_uvloop_factory() if use_uvloop else None) as runner:
        return runner.run(body())


def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def tell_ready() -> None:
    """This process serves. Said once, to whoever has started it and wants to know."""
    number = os.environ.pop(READY_FD, "")
    if number:
        with suppress(OSError):
            os.write(int(number), b"ready\n")
            os.close(int(number))
