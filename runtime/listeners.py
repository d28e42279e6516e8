"""How a process leaves a port that other processes listen on, too, without losing a connection.

The kernel deals connections out among the listeners of a port (SO_REUSEPORT) by their first packet, and resets those
that a listener has not accepted when it closes. So it turns first packets away before: a client sends its own again a
second later, which goes to somebody else. What had been dealt out until then is accepted meanwhile, and then it closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

_SO_ATTACH_FILTER = 26
_FLAGS_AT, _SYN, _ACK = 13, 0x02, 0x10
_LOAD_BYTE, _AND, _JUMP_EQUAL, _RETURN = 0x30, 0x54, 0x15, 0x06
_PROGRAM = (  # over a TCP segment, returns how much of it is kept
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_AND, 0, 0, _SYN | _ACK),
    (_JUMP_EQUAL, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
)


def turn_away(ports: Collection[int]) -> int:
    """From now on this process is dealt no new connection on these TCP ports. Returns how many of its sockets listen
    there. Where the kernel knows no filters nothing changes: a connection in that moment may be lost."""
    count = 0
    for listener in _listeners():
        with listener:
            if listener.getsockname()[1] in ports:
                count += 1
                _attach(listener)
    return count


def _attach(listener: socket.socket) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _PROGRAM))
    program = struct.pack("HL", len(_PROGRAM), ctypes.addressof(code))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _listeners() -> Iterator[socket.socket]:
    """Handles of our own for every TCP socket of this process that listens. A server need not give its sockets away,
    and gRPC does not."""
    for name in os.listdir(Path("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            one = socket.socket(fileno=os.dup(int(name)))
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                yield one
            else:
                one.close()
