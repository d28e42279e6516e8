"""All memory of a model: what its pages and slots hold (Groups), and the tensors that hold it (Pools).

One page index space: a page id means the same page in every paged component.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.kv import Kv, KvPool, KvShape
from engine.layers.latent import LatentPool, LatentShape
from engine.layers.state import LinearSpec, StatePool
from engine.plan import Copy
from kvtransfer.types import Component, Region


@dataclass(frozen=True, slots=True)
class Groups:
    """kv: layers with keys and values per head (query_heads and window say how they attend); latent: layers with
    latent attention; state: linear layers. None = the model has no such layer."""

    kv: KvShape | None = None
    query_heads: int = 0
    window: int = 0
    latent: LatentShape | None = None
    state: LinearSpec | None = None

    def components(self) -> tuple[Component, ...]:
        paged = [group.component() for group in (self.kv, self.latent) if group is not None]
        return (*paged, *(self.state.components() if self.state else ()))


class Pools:
    """The memory of every group, allocated once. ring: of each state slot, see StatePool."""

    def __init__(self, groups: Groups, num_pages: int, num_slots: int, device: torch.device, ring: int = 1) -> None:
        assert groups.state is not None or num_slots <= 1, "this model has no recurrent state"
        self._components = groups.components()
        self._kv = Kv(KvPool(groups.kv, num_pages, device)) if groups.kv else None
        self._latent = LatentPool(groups.latent, num_pages, device) if groups.latent else None
        self._state = StatePool(groups.state, num_slots, device, ring) if groups.state else None

    @property
    def kv(self) -> Kv:
        assert self._kv is not None, "this model has no attention with keys and values"
        return self._kv

    @property
    def latent(self) -> LatentPool:
        assert self._latent is not None, "this model has no latent attention"
        return self._latent

    @property
    def state(self) -> StatePool:
        assert self._state is not None, "this model has no recurrent state"
        return self._state

    def regions(self) -> tuple[Region, ...]:
        """One per component, in the order of Groups.components()."""
        pairs = enumerate(zip(self._components, self._tensors(), strict=True))
        return tuple(_region(i, component, tensor) for i, (component, tensor) in pairs)

    def copy(self, copy: Copy) -> None:
        """Copy one page of every paged component, or one slot."""
        if not copy.paged:
            self.state.copy_slot(copy.source, copy.target, copy.length, copy.whole)
            return
        for pages in self._paged():
            pages[copy.target].copy_(pages[copy.source])

    def _paged(self) -> list[torch.Tensor]:
        found = [self._kv.pool.pages] if self._kv else []
        return found + ([self._latent.pages] if self._latent else [])

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._paged(), *(self._state.tensors if self._state else ())]


def _region(region_id: int, component: Component, tensor: torch.Tensor) -> Region:
    return Region(
        region_id=region_id,
        component=component.name,
        base=tensor.data_ptr(),
        length=tensor.numel() * tensor.element_size(),
        stride=component.item_bytes,
        first_unit=0,
        units=component.units,
        device=tensor.device.index or 0,
        memory="DRAM" if tensor.device.type == "cpu" else "VRAM",
    )
