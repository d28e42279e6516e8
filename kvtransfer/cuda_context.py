"""The CUDA context of a thread, by the driver's own library.

Whoever registers device memory with UCX, or posts reads into it, does so in the context that is current on its thread.
torch makes one current on threads that run torch; the thread that owns a NIXL agent runs none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from runtime.errors import TransferFailed

LIBRARY = "libcuda.so.1"


def use(device: int, load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Make the primary context of this device (the one torch allocates in) current on the calling thread. It stays
    retained as long as the process lives. Raises TransferFailed where there is no driver, or no such device."""
    try:
        driver = load(LIBRARY)
    except OSError as error:
        raise TransferFailed("memory of a GPU cannot be registered: there is no CUDA driver") from error
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (ctypes.c_uint(0),)),
        ("cuDeviceGet", (ctypes.byref(handle), ctypes.c_int(device))),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), handle)),
        ("cuCtxSetCurrent", (context,)),
    ):
        status = int(getattr(driver, name)(*arguments))
        if status:
            raise TransferFailed(f"device {device} cannot be used by the transport: {name} returned {status}")
