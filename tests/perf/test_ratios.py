"""Ratios that must hold on any machine, with slack: each side of a ratio is measured in turn, in one run."""

from __future__ import annotations

import time

import pytest
import torch

from bench.engine import best_of
from engine.kernels.attention import decode_attention
from engine.layers.kv import Kv, KvPool, KvShape

pytestmark = pytest.mark.slow

ROWS, PAGES, HEADS = 4, 64, 9
SHAPE = KvShape(layers=4, kv_heads=3, head_dim=64, dtype=torch.bfloat16)


def test_paged_attention_takes_at_most_two_and_a_half_times_the_contiguous_one() -> None:
    """Every layer once, so that keys and values come from memory as they do in a step."""
    torch.set_num_threads(1)
    count = ROWS * PAGES
    pool = KvPool(SHAPE, count + 1, torch.device("cpu"))
    kv = Kv(pool)
    pages = (torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1).view(ROWS, PAGES).numpy()
    rows = torch.from_numpy(SHAPE.row_index(pages)).flatten()
    contiguous = [torch.randn(2, ROWS, 3, PAGES * 16, 64, device="cpu").bfloat16() for _ in range(SHAPE.layers)]
    q = torch.randn(ROWS, HEADS, 64, device="cpu").bfloat16()
    out = torch.empty(ROWS, HEADS * 64, dtype=torch.bfloat16, device="cpu")

    def paged() -> None:
        for layer in range(SHAPE.layers):
            decode_attention(q, kv.gather(layer, rows, ROWS, None), None, 0.125, out)

    def whole() -> None:
        for layer in contiguous:
            decode_attention(q, layer, None, 0.125, out)

    best = best_of({"paged": paged, "whole": whole}, 20, time.process_time)
    assert best["whole"] >= 0.4 * best["paged"], best
