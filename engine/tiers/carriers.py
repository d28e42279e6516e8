"""Who moves bytes between a device pool and the host pool, chosen by where the device pool lies.

A carrier moves items of one component, returns when every byte has arrived, and holds the interpreter's lock as little
as it can: an engine step asks for that lock some thousand times. It is used by the tier's own thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.native import NotBuilt, default_cache, library
from kvtransfer.checksum import weights
from kvtransfer.types import Component, Region
from runtime.config import Config
from runtime.errors import Unsupported

BESIDE_STEP = 4e9
"""Bytes per second. A step reads weights as fast as memory gives them: this leaves it most of that."""

SOURCE = Path(__file__).with_name("copy_cpu.cpp")

Pair = tuple[int, int]
"""(device item, host item)"""

Part = tuple[Component, Region, Region]
"""One component's regions: the device's and the host's."""

Found = npt.NDArray[np.uint64]
"""Checksums [items, units] of one component."""

_log = logging.getLogger(__name__)


class Carrier(Protocol):
    @property
    def block_bytes(self) -> int:
        """Moved, and summed, in one go."""
        ...

    @property
    def beside_step(self) -> float:
        """Bytes per second of copies nobody waits for, while a step runs; 0 = no bound, they do not meet."""
        ...

    def move(self, part: Part, pairs: Sequence[Pair], down: bool) -> Found | None:
        """Checksums [pairs, units] of the bytes that were moved, where they come with the copy; else None."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Both pools in host memory. memmove releases the interpreter's lock; checksums are made by numpy, of blocks that
    stay in a core's cache."""

    block_bytes: int = 1 << 20
    beside_step: float = BESIDE_STEP

    def move(self, part: Part, pairs: Sequence[Pair], down: bool) -> Found | None:
        for target, source, size in merged(addresses(part, pairs, down)):
            ctypes.memmove(target, source, size)
        return None

    def close(self) -> None:
        """Nothing is held."""


PLAIN = Plain()


@dataclass(frozen=True, slots=True)
class Fused:
    """Both pools in host memory: copied past the caches and summed on the way, by compiled code."""

    library: ctypes.CDLL
    block_bytes: int = 4 << 20
    beside_step: float = BESIDE_STEP

    def move(self, part: Part, pairs: Sequence[Pair], down: bool) -> Found | None:
        component, _, host = part
        if component.unit_bytes % 8 or any(r.base % 8 or r.stride % 8 for r in part[1:]):
            return PLAIN.move(part, pairs, down)
        table = np.array(addresses(part, pairs, down), np.int64).reshape(-1, 3)
        targets, sources = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
        factors = weights(component.unit_bytes // 8)
        sums = np.empty((len(pairs), host.units), np.uint64)
        self.library.pdserve_move(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_int64(len(pairs)),
            ctypes.c_int64(host.units),
            ctypes.c_int64(component.unit_bytes),
            ctypes.c_void_p(factors.ctypes.data),
            ctypes.c_void_p(sums.ctypes.data),
        )
        return sums

    def close(self) -> None:
        """Nothing is held."""


def carrier_for(config: Config, device: Sequence[Region], host: Sequence[Region]) -> Carrier:
    """Raises Unsupported for memory nobody here can copy from."""
    kinds = {region.memory for region in device}
    if kinds == {"DRAM"}:
        return fused(Path(config.compile_cache) if config.compile_cache else default_cache()) or PLAIN
    if kinds == {"VRAM"}:
        from engine.tiers.cuda import CudaCarrier

        if config.host_poison:
            raise Unsupported("host_poison is for pools in host memory", field="host_poison")
        return CudaCarrier(device, host)
    raise Unsupported("there is no way from this device's memory to a host pool", field="host_pool_bytes")


def fused(cache: Path | None) -> Fused | None:
    """None where it cannot be built."""
    try:
        return Fused(library(SOURCE, cache))
    except NotBuilt as error:
        _log.warning("copies between tiers are not compiled, they will cost steps more", extra={"why": str(error)})
        return None


def addresses(part: Part, pairs: Sequence[Pair], down: bool) -> list[tuple[int, int, int]]:
    """(target address, source address, bytes) of each pair."""
    _, device, host = part
    found = []
    for here, there in pairs:
        up, low = device.base + here * device.stride, host.base + there * host.stride
        found.append((low, up, host.stride) if down else (up, low, host.stride))
    return found


def merged(table: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours on both sides become one copy."""
    out: list[tuple[int, int, int]] = []
    for target, source, size in table:
        if out and out[-1][0] + out[-1][2] == target and out[-1][1] + out[-1][2] == source:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + size)
        else:
            out.append((target, source, size))
    return out
