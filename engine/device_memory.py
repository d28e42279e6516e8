"""Pool memory by its address, as tensors, and what a GPU makes of it: the checksums a transfer compares.

kvtransfer.checksum defines the value (and computes it for host memory); the same numbers come out here.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvtransfer.checksum import weights, wsum64
from kvtransfer.types import Component, Region

BLOCK_BYTES = 64 << 20
"""Gathered at once: large enough for a GPU's full bandwidth, little beside a pool."""

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Memory:
    """Somebody else's device memory as torch sees it: [items, bytes], without a copy."""

    region: Region

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.region.length // self.region.stride, self.region.stride),
            "strides": None,
            "typestr": "|u1",
            "data": (self.region.base, False),
            "version": 3,
        }


def items_of(region: Region) -> torch.Tensor:
    """[items, bytes] uint8 over the region's memory, host or device, without a copy."""
    if region.memory != "DRAM":
        return torch.as_tensor(_Memory(region), device=torch.device("cuda", region.device))
    raw = (ctypes.c_uint8 * region.length).from_address(region.base)
    return torch.from_numpy(np.ctypeslib.as_array(raw).reshape(-1, region.stride))


def checksums(
    rows: torch.Tensor, component: Component, units: int, items: Sequence[int], valid: Sequence[int]
) -> list[int]:
    """kvtransfer.checksum.wsum64 of rows (items_of a region), on their device: [item][unit], flattened."""
    size = component.unit_bytes
    words = -(-size // 8)
    factors = torch.from_numpy(weights(words).view(np.int64).copy()).to(rows.device)
    found: list[torch.Tensor] = []
    for at in _blocks(len(items), units * size):
        some = rows[:, : units * size].index_select(0, _index(items[at], rows))
        _blank(some.view(len(some), units, -1, component.tokens, component.token_bytes), valid[at])
        padded = torch.nn.functional.pad(some.view(-1, size), (0, words * 8 - size))
        found.append((padded.view(torch.int64) * factors).sum(-1))  # int64 wraps: the sum is one mod 2^64
    return [value & _MASK64 for part in found for value in part.tolist()]


def _blocks(count: int, item_bytes: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // item_bytes)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _index(items: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(items, dtype=torch.int64, device=like.device)


def _blank(some: torch.Tensor, valid: Sequence[int]) -> None:
    """Zero what lies past each item's valid tokens: [item, unit, layers and rows, token, bytes]."""
    for i, tokens in enumerate(valid):
        if tokens < some.shape[3]:
            some[i, :, :, tokens:] = 0


class DeviceChecksum:
    """A kvtransfer.types.ChecksumFn for regions in a GPU's memory and in the host's. Any thread.

    Its kernels run on a stream of their own, beside the model's: what they read was complete before anybody asked (a
    range is announced when its step has ended, a read is verified when the transport has said that it is done).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}

    def __call__(
        self, region: Region, component: Component, items: tuple[int, ...], valid: tuple[int, ...]
    ) -> list[int]:
        if region.memory == "DRAM":
            return wsum64(region, component, items, valid)
        with self._lock:
            rows = self._rows.get(region.base)
            if rows is None:
                rows = self._rows[region.base] = items_of(region)
            beside = self._beside(rows.device)
        with beside, torch.inference_mode():
            return checksums(rows, component, region.units, items, valid)

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type == "cpu":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[device])
