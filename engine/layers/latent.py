"""Pages of multi-head latent attention: one row per token and layer, shared by all heads and so by all ranks.

[page, layer, 16 tokens, latent + shared key part] in the model's type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.mla_plan import PagedPlan
from kvtransfer.types import PAGE_TOKENS, Component


@dataclass(frozen=True, slots=True)
class LatentShape:
    """width: of a cache row, latent and shared key part together."""

    layers: int
    width: int
    dtype: torch.dtype

    def component(self) -> Component:
        return Component(
            name="mla",
            paged=True,
            units=1,
            layers=self.layers,
            rows=1,
            tokens=PAGE_TOKENS,
            token_bytes=self.width * self.dtype.itemsize,
            dtype=str(self.dtype).removeprefix("torch."),
            replicated=True,
        )


class LatentPool:
    """Owns the pages' memory."""

    def __init__(self, shape: LatentShape, num_pages: int, device: torch.device) -> None:
        self.pages = torch.zeros((num_pages, shape.layers, PAGE_TOKENS, shape.width), dtype=shape.dtype, device=device)

    def layer(self, index: int) -> torch.Tensor:
        """[page, 16, width] of the index-th layer with latent attention, strided by page."""
        return self.pages[:, index]


@dataclass(frozen=True, slots=True)
class LatentStep:
    """Where a step's rows find their latents: decode rows come first, prefill rows and padding after them."""

    decode: PagedPlan
    prefill: PagedPlan
