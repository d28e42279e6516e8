from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from runtime import lifecycle

_CHILD = """
import asyncio, sys
from runtime import lifecycle

async def main(stopping):
    print("up", flush=True)
    await stopping.wait()
    print("stopping", flush=True)
    if sys.argv[1] == "hang":
        await asyncio.sleep(600)
    return 7

sys.exit(lifecycle.run(main, use_uvloop=sys.argv[2] == "uvloop"))
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert _line(process) == "up"
    return process


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that is not a log entry."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() in ("up", "stopping"):
            return line.strip()
    raise AssertionError("the process ended")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_main_end_with_its_own_exit_code(number: signal.Signals, loop: str) -> None:
    process = start("clean", loop)
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 7


def test_the_second_signal_ends_the_process_at_once() -> None:
    process = start("hang", "asyncio")
    process.send_signal(signal.SIGTERM)
    assert _line(process) == "stopping"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=1)
    assert process.returncode == 128 + signal.SIGTERM


async def test_handlers_are_restored_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with lifecycle.signals() as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await stopping.wait()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_says_that_it_serves_to_who_has_asked_for_it_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle.tell_ready()  # nobody has
    reader, writer = os.pipe()
    monkeypatch.setenv(lifecycle.READY_FD, str(writer))
    lifecycle.tell_ready()
    lifecycle.tell_ready()
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"ready\n", "and the pipe is closed"
    assert lifecycle.READY_FD not in os.environ, "its own children are not asked"
