"""Linear layers with weights packed once for the device.

On the CPU the weight is reordered by oneDNN at load: twice as fast as F.linear at one row (no reorder per call), and
from two rows on a row's result does not depend on how many rows there are, which deterministic mode relies on. With
few rows fp32 weights are read by a function of ours where the runner lets it (engine/kernels/cpu/products.cpp).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from engine.kernels.cpu.build import current
from engine.kernels.cpu.decode import PackedLinear, pack
from engine.kernels.cpu.products import MAX_ROWS, Product, in_panels

_PACK_ROWS = 4  # a hint only: the packed form was the same for every value tried


class Linear:
    """y = x Wᵀ + b. weight [out, in]; bias [out] or None. compiled: keep the compiled decode step's form of it too
    (a second copy of the weights)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, compiled: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.for_decode: PackedLinear | None = pack(weight, bias) if compiled else None
        self._packed = packs(weight)
        self.weight: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self._packed else weight
        )
        self.few: Product | None = _few_rows(self.weight, weight, bias) if self._packed else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        if self.few is not None and len(x) <= MAX_ROWS:
            return self.few(x)
        if not self._packed:
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + self(x), the sum taken before the result is rounded where the device fuses it."""
        if self.few is not None and len(x) <= MAX_ROWS:
            return self.few(x, residual)
        if not self._packed:
            return residual + F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return y


def _few_rows(packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    compiled = current()
    if compiled is None or not compiled.products or not in_panels(packed, weight):
        return None
    return Product(compiled, packed, bias, *weight.shape)


def packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs weights like this one here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
