"""What a source says about where a range lies, checked, and turned into reads and expected checksums.

Every index a peer sends is checked against its own region table before an address is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtransfer.layout import Rank, item_count
from kvtransfer.mapping import U64, Moves, UnitRead, concat, moves, unit_reads
from kvtransfer.transport import LocalRank
from kvtransfer.types import Component, Layout, Region
from protos.v1 import kvsource_pb2 as pb
from runtime.errors import ChecksumMismatch, TicketInvalid


@dataclass(frozen=True, slots=True)
class Located:
    """Items of one component on one source rank, in one of its regions: indices in token order, checksums [item, unit
    of that rank]."""

    region: Region
    indices: tuple[int, ...]
    checksums: U64


Key = tuple[int, str]
"""(source rank, component name)"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How this worker's ranks read from one peer's: fixed for the pair."""

    components: tuple[Component, ...]
    reads: dict[str, tuple[UnitRead, ...]]
    ranks: tuple[Rank, ...]

    @classmethod
    def make(cls, mine: Layout, theirs: Layout, ranks: Sequence[Rank]) -> Plan:
        """Raises LayoutMismatch where units cannot be shared out."""
        reads = {c.name: unit_reads(theirs.tp, mine.tp, c) for c in mine.components}
        return cls(mine.components, reads, tuple(ranks))

    def locate(self, blocks: Iterable[pb.LocatedBlock], paged: bool, count: int) -> dict[Key, Located]:
        """Check `blocks`: exactly one for every rank and component, `count` items each, all inside their regions and
        none of them the null item. Raises TicketInvalid; nothing has been read then."""
        found: dict[Key, Located] = {}
        for block in blocks:
            key, located = self._check(block, paged, count)
            if key in found:
                raise TicketInvalid(f"the source named {key[1]} of rank {key[0]} twice")
            found[key] = located
        wanted = {(r, c.name) for r in range(len(self.ranks)) for c in self.components if c.paged == paged}
        if set(found) != wanted:
            raise TicketInvalid(f"the source named {len(found)} of {len(wanted)} blocks")
        return found

    def _check(self, block: pb.LocatedBlock, paged: bool, count: int) -> tuple[Key, Located]:
        if block.rank >= len(self.ranks):
            raise TicketInvalid(f"the source has no rank {block.rank}")
        region = next((r for r in self.ranks[block.rank].regions if r.region_id == block.region_id), None)
        component = next((c for c in self.components if region and c.name == region.component), None)
        if region is None or component is None or component.paged != paged:
            raise TicketInvalid(f"the source has no such region {block.region_id}")
        indices = tuple(block.indices)
        if len(indices) != count or len(block.checksums) != count * region.units:
            raise TicketInvalid(f"the source located {len(indices)} of {count} items of {component.name}")
        if min(indices) < 1 or max(indices) >= item_count(region):
            raise TicketInvalid(f"an item of {component.name} lies outside its region")
        sums = np.array(block.checksums, np.uint64).reshape(count, region.units)
        return (block.rank, component.name), Located(region, indices, sums)

    def moves(self, reader: int, local: Rank, paged: bool, items: Sequence[int], at: dict[Key, Located]) -> Reads:
        """What rank `reader` reads: for every owner, its tables."""
        by_owner: dict[int, list[Moves]] = {}
        for component in self.components:
            if component.paged != paged:
                continue
            for read in self.reads[component.name]:
                if read.reader == reader:
                    to, source = local.by_component[component.name], at[read.owner, component.name]
                    part = moves(component, read, to, items, source.region, source.indices)
                    by_owner.setdefault(read.owner, []).append(part)
        return [(owner, table) for owner, parts in by_owner.items() for table in concat(parts)]

    def verify(
        self, reader: int, local: LocalRank, paged: bool, items: tuple[int, ...], tokens: int, at: dict[Key, Located]
    ) -> None:
        """Compare what arrived at `items` with what the source announced. tokens: valid ones, over all items.
        Raises ChecksumMismatch naming component, item and unit. Runs on an executor thread."""
        for component in self.components:
            if component.paged == paged:
                region = local.info.by_component[component.name]
                valid = _valid(component, len(items), tokens)
                sums = local.checksum(region, component, items, valid)
                got = np.array(sums, np.uint64).reshape(len(items), region.units)
                self._compare(reader, component, region.first_unit, got, at)

    def _compare(self, reader: int, component: Component, first: int, got: U64, at: dict[Key, Located]) -> None:
        for read in self.reads[component.name]:
            if read.reader != reader:
                continue
            source = at[read.owner, component.name]
            skip = read.first_unit - source.region.first_unit
            sent = source.checksums[:, skip : skip + read.units]
            wrong = np.argwhere(got[:, read.first_unit - first :][:, : read.units] != sent)
            if len(wrong):
                item, unit = wrong[0].tolist()
                raise ChecksumMismatch(
                    f"{len(wrong)} checksums of {component.name} differ, first: item {item}, "
                    f"unit {read.first_unit + unit}"
                )


Reads = list[tuple[int, Moves]]


def _valid(component: Component, count: int, tokens: int) -> tuple[int, ...]:
    if not component.paged:
        return (component.tokens,) * count
    page = component.tokens
    return tuple(min(page, tokens - i * page) for i in range(count))
