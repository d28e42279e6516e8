"""Root mean square normalisation (arXiv 1910.07467), computed in fp32 whatever the activations' type."""

from __future__ import annotations

import torch
from torch.nn import functional as F


class RMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._shape = tuple(weight.shape)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> same shape and type."""
        return F.rms_norm(x, self._shape, self.weight, self._eps)
