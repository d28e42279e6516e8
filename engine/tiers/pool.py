"""Host memory in the device pools' layout, and the copies between the two with their checksums.

One region per component, named "<component>@host": item i is host page (or host slot) i, item 0 is null as on the
device. A page on the host has a checksum, made after it was written and compared before it is read back.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.checksum import wsum64
from kvtransfer.types import Component, Region
from runtime import faults

Sums = tuple[int, ...]
"""Checksums of one item, over components and units."""

Pair = tuple[int, int]
"""(device item, host item)"""

BLOCK_BYTES = 1 << 20
"""Copied and summed in one go: as much as stays in a core's cache."""

Table = list[tuple[int, int, int]]
"""(target address, source address, bytes)"""


class Copier(Protocol):
    """Copies between a device pool and host memory, or within host memory; returns when every byte has arrived."""

    def __call__(self, table: Table) -> None: ...


def copy_host(table: Table) -> None:
    """For device pools in host memory. memmove releases the GIL."""
    for target, source, size in table:
        ctypes.memmove(target, source, size)


HOST_SUFFIX = "@host"


def host_name(component: str) -> str:
    return component + HOST_SUFFIX


def as_second_pool(host: Sequence[Region]) -> tuple[Region, ...]:
    """Host regions as peers know them: of the component itself, which has another region on the device."""
    return tuple(replace(region, component=region.component.removesuffix(HOST_SUFFIX)) for region in host)


class HostPool:
    """pages and slots include the null ones; slots is 0 for a model without a state."""

    def __init__(self, components: Sequence[Component], device: Sequence[Region], pages: int, slots: int) -> None:
        self.pages, self.slots = pages, slots
        self._components = {c.name: c for c in components}
        self._memory: list[mmap.mmap] = []
        regions = []
        for number, region in enumerate(device):
            component = self._components[region.component]
            count = pages if component.paged else slots
            if count:
                regions.append(self._make(len(device) + number, component, region, count))
        self.regions = tuple(regions)

    def _make(self, number: int, component: Component, device: Region, count: int) -> Region:
        size = device.units * component.unit_bytes
        memory = mmap.mmap(-1, count * size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory.append(memory)
        base = np.frombuffer(memory, np.uint8).ctypes.data
        return Region(
            region_id=number,
            component=host_name(component.name),
            base=base,
            length=count * size,
            stride=size,
            first_unit=device.first_unit,
            units=device.units,
        )


@dataclass(frozen=True, slots=True)
class Mover:
    """Copies items between the device's regions and the host's. Any thread; the caller holds both sides."""

    components: tuple[Component, ...]
    device: tuple[Region, ...]
    host: tuple[Region, ...]
    copy: Copier = copy_host

    def item_bytes(self, paged: bool) -> int:
        return sum(h.stride for _, _, h in self._parts(paged))

    def units(self, paged: bool) -> int:
        """Checksums of one item."""
        return sum(h.units for _, _, h in self._parts(paged))

    def host_ranges(self, page: int) -> list[tuple[int, int]]:
        """(address, bytes) of one host page, component by component."""
        return [(h.base + page * h.stride, h.stride) for _, _, h in self._parts(True)]

    def save(self, paged: bool, pairs: Sequence[Pair]) -> list[Sums]:
        """Device to host. The checksums of the host items, each taken while its bytes are in the processor's cache."""
        faults.strike("tier.store")
        sums: list[Sums] = []
        for some in self._blocks(paged, pairs):
            self.copy(self._table(paged, some, down=True))
            sums += self.sums(paged, [host for _, host in some])
        return sums

    def load(self, paged: bool, pairs: Sequence[Pair], sums: Sequence[Sums]) -> int:
        """Host to device, as far as the checksums agree: how many leading items are good and have been copied."""
        faults.strike("tier.load")
        for _, _, region in self._parts(paged):
            if pairs and faults.on("tier.corrupt") is not None:
                view(region)[pairs[-1][1], 0] ^= 0xFF
        done = 0
        for some in self._blocks(paged, pairs):
            expected = sums[done : done + len(some)]
            found = self.sums(paged, [host for _, host in some])
            good = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(some))
            self.copy(self._table(paged, some[:good], down=False))
            done += good
            if good < len(some):
                break
        return done

    def _blocks(self, paged: bool, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        step = max(1, BLOCK_BYTES // max(self.item_bytes(paged), 1))
        for start in range(0, len(pairs), step):
            yield pairs[start : start + step]

    def sums(self, paged: bool, items: Sequence[int]) -> list[Sums]:
        """Checksums of host items, whatever part of a page is valid."""
        if not items:
            return []
        parts = []
        for component, _, region in self._parts(paged):
            flat = wsum64(region, component, tuple(items), (component.tokens,) * len(items))
            parts.append(np.array(flat, np.uint64).reshape(len(items), -1))
        joined = np.concatenate(parts, axis=1)
        return [tuple(row) for row in joined.tolist()]

    def poison(self, paged: bool, items: Iterable[int]) -> None:
        """Overwrite device items (host memory only), so that a copy that did not happen shows."""
        for item in items:
            for _, region, _ in self._parts(paged):
                assert region.memory == "DRAM", "poison is for pools in host memory"
                ctypes.memset(region.base + item * region.stride, 0xA5, region.stride)

    def _parts(self, paged: bool) -> list[tuple[Component, Region, Region]]:
        by_name = {r.component: r for r in self.host}
        kinds = {c.name: c for c in self.components}
        found = [(kinds[d.component], d, by_name.get(host_name(d.component))) for d in self.device]
        return [(c, d, h) for c, d, h in found if c.paged == paged and h is not None]

    def _table(self, paged: bool, pairs: Sequence[Pair], down: bool) -> Table:
        table: Table = []
        for _, device, host in self._parts(paged):
            for here, there in pairs:
                up, low = device.base + here * device.stride, host.base + there * host.stride
                table.append((low, up, host.stride) if down else (up, low, host.stride))
        return _merged(table)


def _merged(table: Table) -> Table:
    """Neighbours on both sides become one copy."""
    out: Table = []
    for target, source, size in table:
        if out and out[-1][0] + out[-1][2] == target and out[-1][1] + out[-1][2] == source:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + size)
        else:
            out.append((target, source, size))
    return out


def view(region: Region) -> npt.NDArray[np.uint8]:
    """[items, bytes] of a region in host memory, no copy."""
    assert region.memory == "DRAM"
    raw = (ctypes.c_uint8 * region.length).from_address(region.base)
    return np.ctypeslib.as_array(raw).reshape(-1, region.stride)
