"""What the comparisons in this folder would show: each fault of a moved or kept state changes scores beyond their
tolerance, in every family. (A fault nobody can see would make the green tests worthless.)"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from engine.runner import TorchRunner
from tests.unit.hybrid.models import CONFIGS, Walk, runner_of, tokens_of, view

MODELS = [name for name in CONFIGS if "-" not in name]
Memory = dict[str, npt.NDArray[np.float32]]


def memory(runner: TorchRunner) -> Memory:
    """Every pool as [item, units, layers, ...] fp32."""
    found = {}
    for region, c in zip(runner.regions(), runner.spec().components, strict=True):
        shape = (-1, c.units, c.layers, c.rows, c.tokens, c.token_bytes // 4)
        found[c.name] = view(region).view(np.float32).reshape(shape)
    return found


def zero_one_layer(m: Memory, slot: int) -> None:
    m["recurrent"][slot, :, 1] = 0


def zero_one_head(m: Memory, slot: int) -> None:
    m["recurrent"][slot, 1] = 0


def swap_two_heads(m: Memory, slot: int) -> None:
    m["recurrent"][slot, [0, 1]] = m["recurrent"][slot, [1, 0]]


def swap_two_layers(m: Memory, slot: int) -> None:
    m["recurrent"][slot, :, [0, 1]] = m["recurrent"][slot, :, [1, 0]]


def transpose_the_state(m: Memory, slot: int) -> None:
    s = m["recurrent"][slot]
    size = s.shape[-1]
    keys = next(k for k in (16, 32) if size % k == 0)
    s[:] = np.moveaxis(s.reshape(*s.shape[:-1], -1, keys), -1, -2).reshape(s.shape)


def roll_convolution_rows(m: Memory, slot: int) -> None:
    for name, pool in m.items():
        if name.startswith("conv_"):
            rows = pool[slot].reshape(*pool[slot].shape[:-1], -1, 3)
            pool[slot] = np.roll(rows, 1, -1).reshape(pool[slot].shape)


def the_neighbouring_slot(m: Memory, slot: int) -> None:
    for name, pool in m.items():
        if name == "recurrent" or name.startswith("conv_"):
            pool[slot] = pool[slot + 1]


def a_page_lost(m: Memory, _: int) -> None:
    (pages,) = (pool for name, pool in m.items() if name in ("kv", "mla"))
    pages[2] = 0


FAULTS = (
    zero_one_layer,
    zero_one_head,
    swap_two_heads,
    swap_two_layers,
    transpose_the_state,
    roll_convolution_rows,
    the_neighbouring_slot,
    a_page_lost,
)


def swap_keys_and_values(m: Memory, _: int) -> None:
    m["kv"][2, :, :, [0, 1]] = m["kv"][2, :, :, [1, 0]]


def swap_two_kv_layers(m: Memory, _: int) -> None:
    m["kv"][2, :, [0, 1]] = m["kv"][2, :, [1, 0]]


KV_FAULTS = (swap_keys_and_values, swap_two_kv_layers)
KV_MODELS = [name for name in MODELS if not name.startswith("kimi")]
CASES = [*itertools.product(MODELS, FAULTS), *itertools.product(KV_MODELS, KV_FAULTS)]


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_fault_in_what_is_kept_shows_in_the_scores(name: str, fault: Callable[[Memory, int], None]) -> None:
    runner = runner_of(name)
    tokens = tokens_of(60)
    other = Walk(runner, tokens_of(30, 5), 2, 30)
    other.run(30)
    sound = Walk(runner, tokens, 3, 10)
    sound.run(50)
    sound.run(51)
    broken = Walk(runner, tokens, 1, 1)
    broken.run(50)
    fault(memory(runner), 1)
    broken.run(51)
    gap = np.abs(sound.scores[-1] - broken.scores[-1]).max() / np.abs(sound.scores[-1]).max()
    assert gap > 1e-3, "ten times what a comparison allows"


@pytest.mark.parametrize("name", MODELS)
def test_a_state_one_token_short_shows_in_the_scores(name: str) -> None:
    """The last token dropped, and the last token run twice."""
    tokens = tokens_of(60)
    runner = runner_of(name)
    sound, short, twice = (Walk(runner, tokens, slot, 1 + 20 * i) for i, slot in enumerate((1, 2, 3)))
    sound.run(50)
    sound.run(51)
    short.run(49)
    short.computed = 50
    short.run(51)
    twice.run(50)
    twice.computed = 49
    twice.run(50)
    twice.run(51)
    for wrong in (short, twice):
        gap = np.abs(sound.scores[-1] - wrong.scores[-1]).max() / np.abs(sound.scores[-1]).max()
        assert gap > 1e-3
