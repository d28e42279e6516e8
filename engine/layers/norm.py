"""Root mean square normalisation (arXiv 1910.07467), computed in fp32 whatever the activations' type."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.kernels.cpu.build import current
from engine.kernels.cpu.latent import RmsNorm
from engine.kernels.ops import rms_norm


class RMSNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._shape = tuple(weight.shape)
        self._eps = eps
        self._compiled = _compiled(weight, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> same shape and type."""
        if self._compiled is not None:
            return self._compiled(x)
        return F.rms_norm(x, self._shape, self.weight, self._eps)


class ZeroCentredNorm:
    """RMSNorm whose weight is stored less one (Qwen3-Next and later)."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._compiled = _compiled(weight.float() + 1.0, eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., width] -> same shape and type."""
        if self._compiled is not None:
            return self._compiled(x)
        return rms_norm(x, self._weight, self._eps, plus_one=True)


def _compiled(weight: torch.Tensor, eps: float) -> RmsNorm | None:
    compiled = current()
    return None if compiled is None else RmsNorm(compiled, weight, eps)
