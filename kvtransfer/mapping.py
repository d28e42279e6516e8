"""Which rank reads which units from which rank, and the byte ranges that makes. Pure functions over numbers.

A component's `units` are equal shares (KV heads, value heads, groups). With units >= tp they are split evenly over the
ranks; with units < tp each is replicated in a group of tp / units ranks; a replicated component is whole on every rank.
A unit that several ranks of the source hold is read from one owner, chosen so that the readers spread over the owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtransfer.types import Component, Region
from runtime.errors import LayoutMismatch

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class UnitRead:
    """Rank `reader` of the destination reads units [first_unit, first_unit + units) from rank `owner` of the source."""

    owner: int
    reader: int
    first_unit: int
    units: int


def owned_units(component: Component, tp: int, rank: int) -> range:
    """The units rank `rank` of `tp` holds. Raises LayoutMismatch where they cannot be shared out evenly."""
    units = component.units
    if component.replicated or tp == 1:
        return range(units)
    if units >= tp:
        if units % tp:
            raise LayoutMismatch(f"{units} units of {component.name} do not divide over tp {tp}")
        share = units // tp
        return range(rank * share, (rank + 1) * share)
    if tp % units:
        raise LayoutMismatch(f"tp {tp} is not a multiple of the {units} units of {component.name}")
    unit = rank // (tp // units)
    return range(unit, unit + 1)


def owners(component: Component, tp: int, unit: int) -> range:
    """The ranks that hold `unit`, a contiguous range."""
    if component.replicated:
        return range(tp)
    if component.units >= tp:
        rank = unit // (component.units // tp)
        return range(rank, rank + 1)
    group = tp // component.units
    return range(unit * group, (unit + 1) * group)


def unit_reads(tp_source: int, tp_destination: int, component: Component) -> tuple[UnitRead, ...]:
    """Every read a hand-off of `component` needs, by reader, then unit. Raises LayoutMismatch as `owned_units` does."""
    owned_units(component, tp_source, 0)
    reads: list[UnitRead] = []
    for reader in range(tp_destination):
        for unit in owned_units(component, tp_destination, reader):
            owner = _owner(component, tp_source, tp_destination, unit, reader)
            last = reads[-1] if reads else None
            if last and (last.owner, last.reader, last.first_unit + last.units) == (owner, reader, unit):
                reads[-1] = UnitRead(owner, reader, last.first_unit, last.units + 1)
            else:
                reads.append(UnitRead(owner, reader, unit, 1))
    return tuple(reads)


def _owner(component: Component, tp_source: int, tp_destination: int, unit: int, reader: int) -> int:
    """Readers of the same unit are spread over the ranks that hold it, in order."""
    candidates = owners(component, tp_source, unit)
    readers = owners(component, tp_destination, unit)
    return candidates[(reader - readers.start) * len(candidates) // len(readers)]


# --- byte ranges --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moves:
    """Byte ranges to read: local[i] receives remote[i]. Both [n, 3] uint64: address, length, device. nbytes: of all."""

    local: U64
    remote: U64
    local_memory: str = "DRAM"
    remote_memory: str = "DRAM"
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", int(self.local[:, 1].sum()))

    def __len__(self) -> int:
        return len(self.local)


def moves(
    component: Component,
    read: UnitRead,
    local: Region,
    local_items: Sequence[int],
    remote: Region,
    remote_items: Sequence[int],
) -> Moves:
    """Ranges that bring `remote_items` of the owner into `local_items` of the reader, item by item, adjacent ranges
    merged where they are adjacent on both sides. Items must have been bounds-checked."""
    assert len(local_items) == len(remote_items)
    size = read.units * component.unit_bytes
    to = _addresses(component, read, local, local_items)
    source = _addresses(component, read, remote, remote_items)
    starts, lengths = _runs(to, source, size)
    return Moves(
        local=_table(to[starts], lengths, local.device),
        remote=_table(source[starts], lengths, remote.device),
        local_memory=local.memory,
        remote_memory=remote.memory,
    )


def concat(parts: Sequence[Moves]) -> list[Moves]:
    """One table per pair of memory kinds: a transfer has one kind on each side."""
    kinds: dict[tuple[str, str], list[Moves]] = {}
    for part in parts:
        kinds.setdefault((part.local_memory, part.remote_memory), []).append(part)
    return [
        Moves(np.concatenate([m.local for m in group]), np.concatenate([m.remote for m in group]), *kind)
        for kind, group in kinds.items()
    ]


def _addresses(component: Component, read: UnitRead, region: Region, items: Sequence[int]) -> U64:
    offset = (read.first_unit - region.first_unit) * component.unit_bytes
    assert offset >= 0
    assert read.first_unit + read.units <= region.first_unit + region.units
    return np.asarray(items, np.uint64) * np.uint64(region.stride) + np.uint64(region.base + offset)


def _runs(to: U64, source: U64, size: int) -> tuple[npt.NDArray[np.intp], U64]:
    """First index and byte length of every run of items that continue each other on both sides."""
    step = np.uint64(size)
    breaks = (np.diff(to) != step) | (np.diff(source) != step)
    starts = np.concatenate([np.zeros(1, np.intp), np.flatnonzero(breaks) + 1])
    counts = np.diff(np.append(starts, len(to)))
    return starts, counts.astype(np.uint64) * step


def _table(addresses: U64, lengths: U64, device: int) -> U64:
    table = np.empty((len(addresses), 3), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = lengths
    table[:, 2] = device
    return table
