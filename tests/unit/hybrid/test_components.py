"""What a hybrid model moves, cut over any number of ranks at either end: the bytes of a slot, by component."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import numpy.typing as npt
import pytest

from engine.runner import TorchRunner
from kvtransfer.mapping import moves, owned_units, unit_reads
from kvtransfer.types import Component, Region
from tests.unit.hybrid.models import Walk, runner_of, tokens_of, view

Bytes = npt.NDArray[np.uint8]
SHARES = [(a, b) for a, b in itertools.product((1, 2, 4), repeat=2)]


def rank_pool(component: Component, whole: Bytes, tp: int, rank: int) -> tuple[Bytes, Region]:
    """One rank's own memory of a component, holding its units of `whole` [items, bytes]."""
    mine = owned_units(component, tp, rank)
    size = component.unit_bytes
    pool = np.ascontiguousarray(whole[:, mine.start * size : mine.stop * size])
    region = Region(0, component.name, pool.ctypes.data, pool.nbytes, len(mine) * size, mine.start, len(mine))
    return pool, region


def test_components_say_what_the_pools_are() -> None:
    runner = runner_of("kimi_linear", pages=5, slots=4)
    shapes = {c.name: (c.paged, c.units, c.layers, c.token_bytes, c.replicated) for c in runner.spec().components}
    assert shapes == {
        "mla": (True, 1, 2, (24 + 8) * 4, True),
        "recurrent": (False, 4, 3, 16 * 16 * 4, False),
        **{f"conv_{n}": (False, 4, 3, 16 * 3 * 4, False) for n in "qkv"},
    }
    for component, region in zip(runner.spec().components, runner.regions(), strict=True):
        assert region.length == region.stride * (5 if component.paged else 4)
        assert region.stride == component.item_bytes


def test_q_and_value_heads_differ_in_number() -> None:
    names = {c.name: c.units for c in runner_of("qwen3_next").spec().components if not c.paged}
    assert names == {"recurrent": 4, "conv_q": 2, "conv_k": 2, "conv_v": 4}
    names = {c.name: c.units for c in runner_of("granitemoehybrid").spec().components if not c.paged}
    assert names == {"recurrent": 8, "conv_x": 8, "conv_B": 2, "conv_C": 2}


@pytest.mark.parametrize(("tp_p", "tp_d"), SHARES)
@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "granitemoehybrid"])
def test_a_slot_arrives_whole_whatever_the_ranks_of_either_end(name: str, tp_p: int, tp_d: int) -> None:
    """Groups with fewer units than ranks are replicated, and read from one owner each."""
    runner = runner_of(name, slots=4)
    walk = Walk(runner, tokens_of(40), slot=2)
    walk.run(40)
    for component, whole in _slots(runner):
        sources = [rank_pool(component, whole, tp_p, rank) for rank in range(tp_p)]
        targets = [rank_pool(component, np.zeros_like(whole), tp_d, rank) for rank in range(tp_d)]
        for read in unit_reads(tp_p, tp_d, component):
            move = moves(component, read, targets[read.reader][1], [3], sources[read.owner][1], [2])
            for to, source in zip(move.local.tolist(), move.remote.tolist(), strict=True):
                ctypes.memmove(to[0], source[0], to[1])
        for rank, (pool, _) in enumerate(targets):
            expected, _ = rank_pool(component, whole, tp_d, rank)
            assert np.array_equal(pool[3], expected[2]), (component.name, rank)
            assert not pool[:3].any()


def _slots(runner: TorchRunner) -> list[tuple[Component, Bytes]]:
    pairs = zip(runner.spec().components, runner.regions(), strict=True)
    return [(c, view(r)) for c, r in pairs if not c.paged]
