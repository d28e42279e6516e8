"""Checksums made by a device are those of kvtransfer.checksum: here the device is the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import device_memory
from engine.device_memory import DeviceChecksum, checksums, items_of
from kvtransfer.checksum import wsum64
from kvtransfer.types import Component, Region

ITEMS = 9


def pool(component: Component, units: int, gap: int, seed: int) -> tuple[Region, np.ndarray[Any, Any]]:
    """A region whose items have `gap` bytes behind the last unit."""
    stride = units * component.unit_bytes + gap
    array = np.random.default_rng(seed).integers(0, 256, (ITEMS, stride), dtype=np.uint8)
    return Region(1, component.name, array.ctypes.data, array.nbytes, stride, 0, units), array


@settings(deadline=None, max_examples=60)
@given(
    token_bytes=st.integers(1, 24),
    units=st.integers(1, 3),
    gap=st.sampled_from((0, 8, 5)),
    paged=st.booleans(),
    wanted=st.lists(st.tuples(st.integers(1, ITEMS - 1), st.integers(1, 16)), min_size=1, max_size=6),
)
def test_they_are_the_values_that_host_memory_has(
    token_bytes: int, units: int, gap: int, paged: bool, wanted: list[tuple[int, int]]
) -> None:
    component = Component("c", paged, units, 2, 2 if paged else 1, 16 if paged else 1, token_bytes, "bfloat16")
    region, array = pool(component, units, gap, token_bytes)
    items, valid = tuple(i for i, _ in wanted), tuple(v if paged else 1 for _, v in wanted)
    expected = wsum64(region, component, items, valid)
    before = array.copy()
    assert checksums(items_of(region), component, units, items, valid) == expected
    assert np.array_equal(array, before), "the pool itself was written"


def test_blocks_do_not_show_in_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    component = Component("c", True, 2, 2, 2, 16, 8, "bfloat16")
    region, _array = pool(component, 2, 0, 3)
    items, valid = (5, 1, 8, 2, 2), (16, 3, 16, 1, 16)
    whole = checksums(items_of(region), component, 2, items, valid)
    monkeypatch.setattr(device_memory, "BLOCK_BYTES", 2 * region.stride)
    assert checksums(items_of(region), component, 2, items, valid) == whole == wsum64(region, component, items, valid)


def test_a_region_in_a_devices_memory_is_never_read_by_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a region in VRAM, when its checksum is asked for twice, then its memory was mapped once, as a tensor of the
    region's device, and the values are right."""
    component = Component("c", True, 2, 2, 2, 16, 8, "bfloat16")
    host, _array = pool(component, 2, 0, 4)
    region = Region(1, "c", host.base, host.length, host.stride, 0, 2, device=1, memory="VRAM")
    mapped: list[Region] = []

    def of(wanted: Region) -> torch.Tensor:
        mapped.append(wanted)
        return items_of(host)

    monkeypatch.setattr(device_memory, "items_of", of)
    checksum = DeviceChecksum()
    for _ in range(2):
        assert checksum(region, component, (3, 1), (16, 2)) == wsum64(host, component, (3, 1), (16, 2))
    assert mapped == [region]
    assert checksum(host, component, (3,), (16,)) == wsum64(host, component, (3,), (16,))
    assert mapped == [region], "host memory is for the processor"


def test_a_worker_takes_the_checksum_that_can_read_its_pools() -> None:
    """Host pools need no torch (an oracle worker has none); a pool in VRAM must never reach the processor's."""
    from pdserve._worker_parts import _checksum

    component = Component("c", True, 2, 2, 2, 16, 8, "bfloat16")
    host, _array = pool(component, 2, 0, 5)
    vram = Region(2, "c", 0xDEAD000, host.length, host.stride, 0, 2, memory="VRAM")
    assert _checksum([host]) is wsum64
    assert isinstance(_checksum([host, vram]), DeviceChecksum)
