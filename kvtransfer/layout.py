"""What two workers must agree on before a byte moves: wire forms, fingerprint, and the check that names both values.

Tensor parallelism may differ between the two (mapping.py splits units); everything else is compared.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from kvtransfer.mapping import owned_units
from kvtransfer.types import Component, Layout, Region
from protos.v1 import kvsource_pb2 as pb
from runtime.errors import LayoutMismatch

MAX_ADDRESS = 1 << 64
POOLS = 2
"""Regions of one component at most: the engine's pool and the host tier's."""

MEMORIES = ("DRAM", "VRAM")


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a worker as its peers see it: coordinates, transport agent, and where its pools lie.

    A component's first region is the pool the engine computes in; a second one is the same layout in host memory, from
    which cached prefixes are served. by_component: the first ones.
    """

    agent_name: str
    agent_metadata: bytes
    regions: tuple[Region, ...]
    tp_rank: int = 0
    pp_rank: int = 0
    dcp_rank: int = 0
    by_component: dict[str, Region] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first: dict[str, Region] = {}
        for region in self.regions:
            first.setdefault(region.component, region)
        object.__setattr__(self, "by_component", first)

    def pool(self, component: str, number: int) -> Region:
        """Region `number` of a component: 0 the engine's, 1 the host tier's."""
        return [region for region in self.regions if region.component == component][number]


# --- wire forms ---------------------------------------------------------------------------------------------------


def layout_to_proto(layout: Layout) -> pb.Layout:
    return pb.Layout(
        version=layout.version,
        page_tokens=layout.page_tokens,
        chunk_tokens=layout.chunk_tokens,
        components=[pb.Component(**_alike(Component, c)) for c in layout.components],
        model_fingerprint=layout.model_fingerprint,
        tp=layout.tp,
        pp=layout.pp,
        dcp=layout.dcp,
        codecs=layout.codecs,
        checksum=layout.checksum,
    )


def layout_from_proto(wire: pb.Layout) -> Layout:
    """No check here: an absurd value is refused by `require_compatible`, which names it."""
    return Layout(
        components=tuple(Component(**_alike(Component, c)) for c in wire.components),
        model_fingerprint=wire.model_fingerprint,
        chunk_tokens=wire.chunk_tokens,
        page_tokens=wire.page_tokens,
        version=wire.version,
        tp=wire.tp,
        pp=wire.pp,
        dcp=wire.dcp,
        codecs=tuple(wire.codecs),
        checksum=wire.checksum,
    )


def rank_to_proto(rank: Rank) -> pb.RankInfo:
    return pb.RankInfo(
        tp_rank=rank.tp_rank,
        pp_rank=rank.pp_rank,
        dcp_rank=rank.dcp_rank,
        agent_name=rank.agent_name,
        agent_metadata=rank.agent_metadata,
        regions=[pb.Region(**_alike(Region, r)) for r in rank.regions],
    )


def rank_from_proto(wire: pb.RankInfo) -> Rank:
    return Rank(
        agent_name=wire.agent_name,
        agent_metadata=wire.agent_metadata,
        regions=tuple(Region(**_alike(Region, r)) for r in wire.regions),
        tp_rank=wire.tp_rank,
        pp_rank=wire.pp_rank,
        dcp_rank=wire.dcp_rank,
    )


def _alike(kind: type[Component | Region], value: Component | Region | pb.Component | pb.Region) -> dict[str, Any]:
    """The fields of a component or a region: on the wire they have the same names and kinds."""
    return {f.name: getattr(value, f.name) for f in fields(kind)}


# --- agreement ----------------------------------------------------------------------------------------------------

_SHARED = ("version", "page_tokens", "chunk_tokens", "model_fingerprint", "checksum")
_COMPONENT = ("paged", "units", "layers", "rows", "tokens", "token_bytes", "dtype", "codec", "replicated")


def fingerprint(layout: Layout) -> bytes:
    """SHA-256 (32 bytes) over all that two workers must have in common. tp, and the codecs on offer, may differ."""
    shared = {name: getattr(layout, name) for name in _SHARED}
    components = [{"name": c.name} | {k: getattr(c, k) for k in _COMPONENT} for c in layout.components]
    text = json.dumps([shared, sorted(components, key=lambda c: str(c["name"]))], sort_keys=True)
    return hashlib.sha256(b"pdserve layout\0" + text.encode()).digest()


def require_compatible(mine: Layout, theirs: Layout) -> None:
    """Raises LayoutMismatch naming the first property in which the two differ, with both values."""
    for name in _SHARED:
        _equal(name, getattr(mine, name), getattr(theirs, name))
    _equal("components", sorted(c.name for c in mine.components), sorted(c.name for c in theirs.components))
    by_name = {c.name: c for c in theirs.components}
    for component in mine.components:
        for name in _COMPONENT:
            _equal(f"{component.name}.{name}", getattr(component, name), getattr(by_name[component.name], name))
        if component.codec not in theirs.codecs or component.codec not in mine.codecs:
            _equal(f"codecs for {component.name}", list(mine.codecs), list(theirs.codecs))
            raise LayoutMismatch(f"codec {component.codec} of {component.name} is offered by neither side")
    for layout in (mine, theirs):
        require_supported(layout)


def require_supported(layout: Layout) -> None:
    """Raises LayoutMismatch for what cannot be moved at all: whatever the peer is."""
    for name in ("pp", "dcp"):
        if getattr(layout, name) != 1:
            raise LayoutMismatch(f"{name} is {getattr(layout, name)}, and only 1 can be transferred")
    if layout.tp < 1 or layout.page_tokens < 1:
        raise LayoutMismatch(f"tp {layout.tp} and page_tokens {layout.page_tokens} must be at least 1")
    for c in layout.components:
        if min(c.units, c.layers, c.rows, c.tokens, c.token_bytes) < 1:
            raise LayoutMismatch(f"component {c.name} has a size of zero")
        if c.paged and c.tokens != layout.page_tokens:
            raise LayoutMismatch(f"component {c.name} has {c.tokens} tokens a page, the page has {layout.page_tokens}")
        owned_units(c, layout.tp, 0)


def require_ranks(layout: Layout, ranks: Sequence[Rank]) -> None:
    """Check a worker's region tables against its own layout: one rank per tp coordinate, one region per component and
    pool, units as the map says, items inside their region. Raises LayoutMismatch."""
    if [r.tp_rank for r in ranks] != list(range(layout.tp)) or any(r.pp_rank or r.dcp_rank for r in ranks):
        raise LayoutMismatch(f"ranks {[r.tp_rank for r in ranks]} do not make tp {layout.tp}")
    components = {c.name: c for c in layout.components}
    for rank in ranks:
        _equal(f"rank {rank.tp_rank} components", sorted(components), sorted(rank.by_component))
        if any(n > POOLS for n in Counter(r.component for r in rank.regions).values()):
            raise LayoutMismatch(f"rank {rank.tp_rank} has more than {POOLS} regions of a component")
        if len({r.region_id for r in rank.regions}) != len(rank.regions):
            raise LayoutMismatch(f"rank {rank.tp_rank} has two regions of one id")
        for region in rank.regions:
            _require_region(layout, components[region.component], rank.tp_rank, region)


def _require_region(layout: Layout, component: Component, tp_rank: int, region: Region) -> None:
    units = owned_units(component, layout.tp, tp_rank)
    _equal(f"{component.name} units of rank {tp_rank}", [units.start, len(units)], [region.first_unit, region.units])
    if region.stride < region.units * component.unit_bytes or region.length < region.stride:
        raise LayoutMismatch(f"region of {component.name} is too small for one item")
    if region.base == 0 or region.base + region.length > MAX_ADDRESS or region.memory not in MEMORIES:
        raise LayoutMismatch(f"region of {component.name} is not a range of memory")


def _equal(name: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise LayoutMismatch(f"{name} differs: {mine} here, {theirs} at the peer")


def item_count(region: Region) -> int:
    """Items that lie wholly inside the region."""
    return region.length // region.stride
