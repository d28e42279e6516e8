"""Block attention residuals (Kimi K3): a sub-layer's input is a learned mixture of earlier block sums. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def attn_res(sources: Tensor, query: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """sum_i softmax_i(query . rms_norm(source_i)) source_i.

    sources [n, T, hidden]: embedding, finished block sums, the running partial sum; the raw sources are mixed, only the
    scores see them normalised. query [hidden]; weight [hidden] of the norm, or None. Returns [T, hidden].
    """
    direction = query.float() if weight is None else query.float() * weight.float()
    raw = sources.float()
    norms = torch.linalg.vector_norm(raw, dim=-1).square() / raw.shape[-1]
    scores = (raw @ direction) * torch.rsqrt(norms + eps)  # [n, T]
    shares = torch.softmax(scores, dim=0)
    return torch.einsum("nt,nth->th", shares, raw).to(sources.dtype)
