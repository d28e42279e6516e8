"""Host memory in the device pools' layout, and the copies between the two with their checksums.

One region per component, named "<component>@host": item i is host page (or host slot) i, item 0 is null as on the
device. A page on the host has a checksum, made after it was written and compared before it is read back.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.tiers.carriers import PLAIN, Carrier, Found, Pair, Part
from kvtransfer.checksum import wsum64
from kvtransfer.types import Component, Region
from runtime import faults

Sums = tuple[int, ...]
"""Checksums of one item, over components and units."""

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
    """Copies items between the device's regions and the host's. Any thread; the caller holds both sides. pause: called
    between blocks of what nobody waits for, with the bytes of the last one."""

    components: tuple[Component, ...]
    device: tuple[Region, ...]
    host: tuple[Region, ...]
    carrier: Carrier = PLAIN
    pause: Callable[[int], None] = lambda _: None

    def item_bytes(self, paged: bool) -> int:
        return sum(h.stride for _, _, h in self._parts(paged))

    def units(self, paged: bool) -> int:
        """Checksums of one item."""
        return sum(h.units for _, _, h in self._parts(paged))

    def host_ranges(self, paged: bool, item: int) -> list[tuple[int, int]]:
        """(address, bytes) of one host page or slot, component by component."""
        return [(h.base + item * h.stride, h.stride) for _, _, h in self._parts(paged)]

    def save(self, paged: bool, pairs: Sequence[Pair], *, in_no_hurry: bool = False) -> list[Sums]:
        """Device to host. The checksums of the host items, taken while the bytes are in the processor's cache."""
        faults.strike("tier.store")
        sums: list[Sums] = []
        for some in self._blocks(paged, pairs):
            sums += self._moved(paged, some, down=True)
            if in_no_hurry:
                self.pause(len(some) * self.item_bytes(paged))
        return sums

    def load(self, paged: bool, pairs: Sequence[Pair], sums: Sequence[Sums]) -> int:
        """Host to device, as far as the checksums agree: how many leading items are good and there. Whatever else has
        been written is not what it should be."""
        faults.strike("tier.load")
        for _, _, region in self._parts(paged):
            if pairs and faults.on("tier.corrupt") is not None:
                view(region)[pairs[-1][1], 0] ^= 0xFF
        done = 0
        for some in self._blocks(paged, pairs):
            expected = sums[done : done + len(some)]
            found = self._moved(paged, some, down=False)
            good = next((i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(some))
            done += good
            if good < len(some):
                break
        return done

    def _moved(self, paged: bool, pairs: Sequence[Pair], down: bool) -> list[Sums]:
        """Copy, and the checksums of what the host has."""
        parts = []
        for part in self._parts(paged):
            found = self.carrier.move(part, pairs, down)
            parts.append(found if found is not None else self._summed(part, [host for _, host in pairs]))
        return _joined(parts)

    def _blocks(self, paged: bool, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        step = max(1, self.carrier.block_bytes // max(self.item_bytes(paged), 1))
        for start in range(0, len(pairs), step):
            yield pairs[start : start + step]

    def sums(self, paged: bool, items: Sequence[int]) -> list[Sums]:
        """Checksums of host items, whatever part of a page is valid."""
        return _joined([self._summed(part, items) for part in self._parts(paged)]) if items else []

    @staticmethod
    def _summed(part: Part, items: Sequence[int]) -> Found:
        component, _, region = part
        flat = wsum64(region, component, tuple(items), (component.tokens,) * len(items))
        return np.array(flat, np.uint64).reshape(len(items), -1)

    def poison(self, paged: bool, items: Iterable[int]) -> None:
        """Overwrite device items (host memory only), so that a copy that did not happen shows."""
        for item in items:
            for _, region, _ in self._parts(paged):
                assert region.memory == "DRAM", "poison is for pools in host memory"
                ctypes.memset(region.base + item * region.stride, 0xA5, region.stride)

    def _parts(self, paged: bool) -> list[Part]:
        by_name = {r.component: r for r in self.host}
        kinds = {c.name: c for c in self.components}
        found = [(kinds[d.component], d, by_name.get(host_name(d.component))) for d in self.device]
        return [(c, d, h) for c, d, h in found if c.paged == paged and h is not None]


def _joined(parts: Sequence[Found]) -> list[Sums]:
    return [tuple(row) for row in np.concatenate(parts, axis=1).tolist()]


def view(region: Region) -> npt.NDArray[np.uint8]:
    """[items, bytes] of a region in host memory, no copy."""
    assert region.memory == "DRAM"
    raw = (ctypes.c_uint8 * region.length).from_address(region.base)
    return np.ctypeslib.as_array(raw).reshape(-1, region.stride)
