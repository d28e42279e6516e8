"""Sampling noise as a function of (seed, choice, absolute position, vocabulary id), and of nothing else.

Integers up to the uniform variate: a splitmix64 chain over (seed, choice, position) makes two 32-bit keys on the host,
and each vocabulary id is hashed with them on the device. So any device, vocabulary shard, batch or worker draws the
same noise, and a continuation draws what the undisturbed run would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def _splitmix64(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def keys(seed: int, choice: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of one sampling event."""
    x = _splitmix64(_splitmix64(_splitmix64(seed & _MASK64) ^ choice) ^ position)
    return x & _MASK32, x >> 32


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 on values in [0, 2^32) held in int64. The second multiplier is taken minus 2^32: the product then fits
    63 bits, and its low 32 bits, all that is kept, are the same. No overflow, so exact on every device."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * (0x846CA68B - (1 << 32))) & _MASK32
    return x ^ (x >> 16)


def bits(events: Sequence[tuple[int, int]], ids: torch.Tensor) -> torch.Tensor:
    """32-bit hashes, int64, of vocabulary ids [E or 1, K] under the keys() of each event -> [E, K]."""
    k = torch.tensor(events, dtype=torch.int64, device=ids.device)
    first = _mix32(ids ^ k[:, 0:1])
    return _mix32((first + k[:, 1:2]) & _MASK32)


def gumbel(events: Sequence[tuple[int, int]], ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, fp32, of ids [E or 1, K] -> [E, K]. In fp64 up to the last rounding, so that a device's
    last bit of the logarithm does not show."""
    uniform = (bits(events, ids).to(torch.float64) + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
