"""Sets of workers as integers, one bit each: what the index keeps of every key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

K = TypeVar("K", bytes, tuple[bytes, int])


def place(lower: dict[K, tuple[int, int]], key: K, bit: int, tier: str) -> None:
    """One worker's copy is in this tier now."""
    one = 1 << bit
    host, disk = lower.get(key, (0, 0))
    host = host | one if tier == "host" else host & ~one
    disk = disk | one if tier == "disk" else disk & ~one
    if host or disk:
        lower[key] = (host, disk)
    else:
        lower.pop(key, None)


def bits_of(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def note(bits: int, count: int, found: dict[int, int]) -> None:
    """Each of these workers has `count` units."""
    if count:
        for bit in bits_of(bits):
            found[bit] = count
