"""Rotary position embedding and its scalings, as frequencies and as cos/sin tables.

Equations: RoFormer (arXiv 2104.09864), linear position interpolation (2306.15595), YaRN (2309.00071), and the Llama 3.1
frequency smoothing. Each is checked against transformers in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import Unsupported


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """kind: default, linear, dynamic, llama3 or yarn. original_len: positions the model was trained on.

    `dynamic` (NTK by sequence length) changes the frequencies of a sequence as it grows past original_len, which
    contradicts keys that are already cached; up to original_len it equals `default`, and max_len() ends there.
    """

    theta: float
    head_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, *, partial: bool = False) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises Unsupported.

        partial: the model can rotate the first `partial_rotary_factor` of a head only; head_dim of the result is what
        is rotated.
        """
        raw: dict[str, Any] = dict(config.get("rope_scaling") or {})
        raw.update(config.get("rope_parameters") or {})
        kind = str(raw.get("rope_type") or raw.get("type") or "default")
        if kind not in _FREQUENCIES:
            raise Unsupported(f"rope scaling {kind!r} is not supported", field="rope_scaling")
        share = float(raw.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
        if share != 1.0 and not partial:
            raise Unsupported("partial rotary embeddings are not supported", field="partial_rotary_factor")
        context = int(config.get("max_position_embeddings") or 2048)
        original = int(raw.get("original_max_position_embeddings") or context)
        factor = raw.get("factor")
        return cls(
            theta=float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0),
            head_dim=int(head_dim * share),
            kind=kind,
            factor=float(factor) if factor is not None else context / original,
            original_len=original,
            low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
            high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
            attention_factor=raw.get("attention_factor"),
            beta_fast=float(raw.get("beta_fast") or 32.0),
            beta_slow=float(raw.get("beta_slow") or 1.0),
            mscale=float(raw.get("mscale") or 0.0),
            mscale_all_dim=float(raw.get("mscale_all_dim") or 0.0),
            truncate=bool(raw.get("truncate", True)),
        )

    def max_len(self, context: int) -> int:
        """The longest sequence these frequencies are right for."""
        return min(context, self.original_len) if self.kind == "dynamic" else context

    def magnitude(self) -> float:
        """Factor on cos and sin (YaRN's attention temperature; 1 otherwise)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _default(c: RopeConfig) -> torch.Tensor:
    exponent = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device="cpu") / c.head_dim
    return 1.0 / (c.theta**exponent)


def _linear(c: RopeConfig) -> torch.Tensor:
    return _default(c) / c.factor


def _llama3(c: RopeConfig) -> torch.Tensor:
    freq = _default(c)
    wavelength = 2 * math.pi / freq
    long, short = c.original_len / c.low_freq_factor, c.original_len / c.high_freq_factor
    smooth = (c.original_len / wavelength - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    between = (1 - smooth) * freq / c.factor + smooth * freq
    scaled = torch.where(wavelength > long, freq / c.factor, freq)
    return torch.where((wavelength >= short) & (wavelength <= long), between, scaled)


def _yarn(c: RopeConfig) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        return c.head_dim * math.log(c.original_len / (rotations * 2 * math.pi)) / (2 * math.log(c.theta))

    low, high = dimension(c.beta_fast), dimension(c.beta_slow)
    if c.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, c.head_dim - 1.0)
    span = high - low if high != low else 0.001  # the ramp's ends may meet
    ramp = ((torch.arange(c.head_dim // 2, dtype=torch.float32, device="cpu") - low) / span).clamp(0, 1)
    extrapolated = _default(c)
    return extrapolated / c.factor * ramp + extrapolated * (1 - ramp)


_FREQUENCIES = {"default": _default, "linear": _linear, "dynamic": _default, "llama3": _llama3, "yarn": _yarn}


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """[head_dim / 2] fp32 on the CPU, so that every device gets the same table."""
    return _FREQUENCIES[config.kind](config)


class Rope:
    """cos and sign-folded sin by position: `x * cos + swap_halves(x) * sin` rotates x. [max_len, head_dim] each."""

    def __init__(
        self,
        config: RopeConfig,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        divisors: torch.Tensor | None = None,
    ) -> None:
        """divisors: [head_dim / 2] per-frequency divisors a GGUF carries in place of a scaling (rope_freqs)."""
        freq = inverse_frequencies(config)
        if divisors is not None:
            freq = freq / divisors.to(dtype=torch.float32, device="cpu")
        angle = torch.arange(max_len, dtype=torch.float32, device="cpu")[:, None] * freq
        cos, sin = angle.cos() * config.magnitude(), angle.sin() * config.magnitude()
        self.cos = torch.cat((cos, cos), -1).to(dtype=dtype, device=device)
        self.sin = torch.cat((-sin, sin), -1).to(dtype=dtype, device=device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, head_dim] for positions [T]; once per step, shared by all layers."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads x [T, heads, head_dim] by their positions' cos and sin."""
    swapped = x.roll(x.shape[-1] // 2, -1)  # the halves change places; flip() of pairs took six times as long
    return torch.addcmul(x * cos, swapped, sin)
