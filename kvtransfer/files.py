"""Ranges of one file to and from host memory: through NIXL's POSIX backend, or plainly.

A block file is used by one thread. Both kinds raise OSError or TransferFailed when bytes could not be moved (a full
disk, a file that was cut short); whether the bytes are the right ones is for checksums to tell.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvtransfer.nixl_agent import failures, load
from kvtransfer.types import Region
from runtime.errors import TransferFailed

Ranges = Sequence[tuple[int, int, int]]
"""(address, bytes, offset in the file)"""

POLL_S = 50e-6
TIMEOUT_S = 30.0


class BlockFile(Protocol):
    def write(self, ranges: Ranges) -> None: ...

    def read(self, ranges: Ranges) -> None: ...

    def close(self) -> None: ...


class PlainFile:
    """preadv and pwritev. For machines without NIXL, and the measure of the other one."""

    def __init__(self, path: Path, size: int, memory: Sequence[Region]) -> None:
        self._fd = _open(path, size)

    def write(self, ranges: Ranges) -> None:
        for address, size, offset in ranges:
            view = memoryview((ctypes.c_uint8 * size).from_address(address))
            while view.nbytes:
                done = os.pwrite(self._fd, view, offset)
                view, offset = view[done:], offset + done

    def read(self, ranges: Ranges) -> None:
        for address, size, offset in ranges:
            view = memoryview((ctypes.c_uint8 * size).from_address(address))
            while view.nbytes:
                done = os.preadv(self._fd, [view], offset)
                if done == 0:
                    raise TransferFailed("the file is shorter than it was")
                view, offset = view[done:], offset + done

    def close(self) -> None:
        os.close(self._fd)


class NixlFile:
    """The POSIX backend of a NIXL agent of its own, without threads: a call polls until the transfer is done.

    memory: host regions the ranges lie in; they are registered with the agent.
    """

    def __init__(self, path: Path, size: int, memory: Sequence[Region]) -> None:
        api, _ = load()
        self._name = f"disk-{os.getpid()}-{id(self)}"
        try:
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = api.nixl_agent(self._name, settings)
            self._agent.create_backend("POSIX")
            table = [(r.base, r.length, 0, "") for r in memory]
            self._memory = self._agent.register_memory(table, "DRAM", backends=["POSIX"])
            self._fd = _open(path, size)
            self._file = self._agent.register_memory([(0, size, self._fd, "")], "FILE", backends=["POSIX"])
        except failures() as error:
            raise TransferFailed(f"NIXL's POSIX backend was refused: {type(error).__name__}") from error

    def write(self, ranges: Ranges) -> None:
        self._move("WRITE", ranges)

    def read(self, ranges: Ranges) -> None:
        """A range past the end of the file is refused here: the backend would leave the memory as it was."""
        end = max((offset + size for _, size, offset in ranges), default=0)
        if os.fstat(self._fd).st_size < end:
            raise TransferFailed("the file is shorter than it was")
        self._move("READ", ranges)

    def close(self) -> None:
        self._agent.deregister_memory(self._file, backends=["POSIX"])
        self._agent.deregister_memory(self._memory, backends=["POSIX"])
        self._agent = None
        os.close(self._fd)

    def _move(self, direction: str, ranges: Ranges) -> None:
        if not ranges:
            return
        local = self._agent.get_xfer_descs([(address, size, 0) for address, size, _ in ranges], "DRAM")
        file = self._agent.get_xfer_descs([(offset, size, self._fd) for _, size, offset in ranges], "FILE")
        handle = None
        try:
            handle = self._agent.initialize_xfer(direction, local, file, self._name, backends=["POSIX"])
            state = self._agent.transfer(handle)
            until = time.monotonic() + TIMEOUT_S
            while state == "PROC" and time.monotonic() < until:
                state = self._agent.check_xfer_state(handle)
                if state == "PROC":
                    time.sleep(POLL_S)
        except failures() as error:
            if handle is not None:
                handle.release()
            raise TransferFailed(f"a file transfer failed: {type(error).__name__}") from error
        if state == "PROC":
            raise TransferFailed("a file transfer did not end")  # its handle is not released while it is active
        handle.release()
        if state != "DONE":
            raise TransferFailed("a file transfer failed")


def _open(path: Path, size: int) -> int:
    """The file at its full size, sparse where nothing was written. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd
