"""Keeps the memory of a step's tensors for the next step.

Left alone, glibc gives large blocks back to the kernel as soon as they are free and gets them again, page by page and
zeroed, for the next operation: a prompt of 2048 tokens cost 190 000 page faults, a sixth of its time.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 32 << 20
"""The most glibc takes for a block that comes from the heap; weights and pools are larger, and mapped on their own."""
KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """For the whole process, once; what is kept is bounded by the largest step. False where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt and mallopt(_MMAP_THRESHOLD, LARGEST) and mallopt(_TRIM_THRESHOLD, KEPT))
