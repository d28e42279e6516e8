"""Copies between a pool in a GPU's memory and the pinned host pool, on a stream of their own.

Items are scattered on both sides, and a copy engine likes few large copies. So a batch goes through a staging buffer on
the device: one gather (or scatter) over all its items, one copy for each run of neighbours on the host. The host pool
is page-locked once, or every copy would be staged by the driver and wait for the processor.

A step that wrote the pages is over before a copy of them is asked for (Runner.run returns when its writes are visible),
and no step reads a page before its load was concluded: the two streams need no event between them. Memory that torch
hands out on this stream is used on this stream only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.device_memory import items_of
from engine.tiers.carriers import Found, Pair, Part
from kvtransfer.types import Region
from runtime.errors import Unsupported

STAGING_BYTES = 32 << 20
"""Of one gather: enough for full speed of PCIe, little beside a pool."""


class Staged:
    """The copies themselves, on whatever stream is current. pools, rows: [items, bytes] by the region's base."""

    def __init__(self, device: torch.device, pools: dict[int, torch.Tensor], rows: dict[int, torch.Tensor]) -> None:
        self._device, self._pools, self._rows = device, pools, rows

    def pools(self) -> list[torch.Tensor]:
        """The device's, [items, bytes] each."""
        return list(self._pools.values())

    def move(self, part: Part, pairs: Sequence[Pair], down: bool) -> None:
        """Started when this returns, not done."""
        _, device, host = part
        step = max(1, STAGING_BYTES // host.stride)
        for start in range(0, len(pairs), step):
            some = pairs[start : start + step]
            way = self._down if down else self._up
            way(self._pools[device.base], self._rows[host.base], some)

    def _down(self, pool: torch.Tensor, rows: torch.Tensor, pairs: Sequence[Pair]) -> None:
        staged = pool.index_select(0, self._index(pairs))
        for first, row, count in runs([low for _, low in pairs]):
            rows[row : row + count].copy_(staged[first : first + count], non_blocking=True)

    def _up(self, pool: torch.Tensor, rows: torch.Tensor, pairs: Sequence[Pair]) -> None:
        staged = torch.empty((len(pairs), rows.shape[1]), dtype=torch.uint8, device=self._device)
        for first, row, count in runs([low for _, low in pairs]):
            staged[first : first + count].copy_(rows[row : row + count], non_blocking=True)
        pool.index_copy_(0, self._index(pairs), staged)

    def _index(self, pairs: Sequence[Pair]) -> torch.Tensor:
        """Its source is not page-locked, so it has been read when this returns."""
        return torch.tensor([item for item, _ in pairs], dtype=torch.int64, device=self._device)


class CudaCarrier:
    """Locks the host regions' pages. Raises Unsupported when that is not allowed. One thread at a time."""

    block_bytes = 2 * STAGING_BYTES
    beside_step = 0.0

    def __init__(self, device: Sequence[Region], host: Sequence[Region]) -> None:
        numbers = {region.device for region in device}
        if len(numbers) != 1:
            raise Unsupported("a host pool serves one GPU", field="host_pool_bytes")
        gpu = torch.device("cuda", numbers.pop())
        self._stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        pools = {region.base: items_of(region) for region in device}
        self._copies = Staged(gpu, pools, {region.base: items_of(region) for region in host})
        self._locked: list[int] = []
        for region in host:
            self._lock(region)

    def pools(self) -> list[torch.Tensor]:
        """As tensors, [items, bytes] each."""
        return self._copies.pools()

    def move(self, part: Part, pairs: Sequence[Pair], down: bool) -> Found | None:
        with torch.cuda.stream(self._stream):
            self._copies.move(part, pairs, down)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        done.synchronize()  # without the interpreter's lock
        return None

    def close(self) -> None:
        """Give the host pages free again. Idempotent."""
        self._stream.synchronize()
        for base in self._locked:
            torch.cuda.cudart().cudaHostUnregister(base)  # type: ignore[no-untyped-call]
        self._locked = []

    def _lock(self, region: Region) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(region.base, region.length, 0)
        if int(status) != 0:
            self.close()
            raise Unsupported("the host pool's pages cannot be locked (ulimit -l)", field="host_pool_bytes")
        self._locked.append(region.base)


def runs(items: Sequence[int]) -> list[tuple[int, int, int]]:
    """(position in items, item, count) of each run of neighbours."""
    found: list[tuple[int, int, int]] = []
    for position, item in enumerate(items):
        if found and item == found[-1][1] + found[-1][2]:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((position, item, 1))
    return found
