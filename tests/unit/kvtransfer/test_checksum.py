"""wsum64: golden values, what it must notice and what it must not."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.checksum import weights, wsum64
from kvtransfer.types import Component, Region

MASK = (1 << 64) - 1
ITEMS = 12


def component(token_bytes: int = 8, units: int = 3, paged: bool = True) -> Component:
    return Component("kv", paged, units, 2, 2 if paged else 1, 16 if paged else 1, token_bytes, "bfloat16")


def region(c: Component, array: np.ndarray) -> Region:
    return Region(1, c.name, array.ctypes.data, array.nbytes, array.strides[0], 0, c.units)


def filled(c: Component, gap: int = 0, seed: int = 0) -> np.ndarray:
    """[items, item bytes (+ gap)]"""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (ITEMS, c.item_bytes + gap), dtype=np.uint8)


def by_definition(c: Component, item: np.ndarray, unit: int, valid: int) -> int:
    """The docstring of kvtransfer.checksum, word by word, in Python integers."""
    data = bytearray(item[unit * c.unit_bytes : (unit + 1) * c.unit_bytes].tobytes())
    row = c.tokens * c.token_bytes
    for start in range(0, len(data), row):
        data[start + valid * c.token_bytes : start + row] = bytes(row - valid * c.token_bytes)
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(x * _weight(i) for i, x in enumerate(words)) & MASK


def _weight(i: int) -> int:
    z = (i + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def test_golden_values_do_not_change() -> None:
    assert weights(3).tolist() == [16294208416658607535, 7960286522194355701, 487617019471545679]
    c = Component("kv", True, 2, 1, 1, 16, 8, "bfloat16")
    array = np.arange(2 * 256, dtype=np.uint64).astype(np.uint8).reshape(2, 256)
    assert wsum64(region(c, array), c, (1, 1), (16, 3)) == GOLDEN


GOLDEN = [10506816446487884336, 10500116269403971632, 4808550260569477016, 10835724410100451608]


@settings(deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, ITEMS - 1), st.integers(1, 16)), min_size=1, max_size=8))
def test_it_is_what_the_definition_says(token_bytes: int, wanted: list[tuple[int, int]]) -> None:
    c = component(token_bytes)
    array = filled(c)
    items, valid = tuple(i for i, _ in wanted), tuple(v for _, v in wanted)
    expected = [by_definition(c, array[i], u, v) for i, v in wanted for u in range(c.units)]
    assert wsum64(region(c, array), c, items, valid) == expected


@pytest.mark.parametrize("gap", [0, 8, 3, 64])
@pytest.mark.parametrize("items", [(1,), (1, 2, 3), (5, 2, 9, 1), (3, 3)])
def test_strides_and_order_of_items_are_honoured(gap: int, items: tuple[int, ...]) -> None:
    c = component(8)
    array = filled(c, gap)
    expected = [by_definition(c, array[i], u, 16) for i in items for u in range(c.units)]
    assert wsum64(region(c, array), c, items, (16,) * len(items)) == expected


def test_a_slot_is_summed_whole() -> None:
    c = component(20, paged=False)
    array = filled(c)
    assert wsum64(region(c, array), c, (2,), (1,)) == [by_definition(c, array[2], u, 1) for u in range(c.units)]


def test_bytes_past_the_valid_tokens_do_not_count() -> None:
    c = component(8)
    array = filled(c)
    before = wsum64(region(c, array), c, (1,), (5,))
    array[1].reshape(c.units, 4, 16, 8)[:, :, 5:] ^= 0xFF
    assert wsum64(region(c, array), c, (1,), (5,)) == before


@settings(deadline=None)
@given(st.integers(0, 3 * 4 * 16 * 8 - 1), st.integers(1, 255))
def test_any_changed_byte_changes_its_units_sum_and_no_other(position: int, change: int) -> None:
    c = component(8)
    array = filled(c)
    before = wsum64(region(c, array), c, (1,), (16,))
    array[1, position] ^= change
    after = wsum64(region(c, array), c, (1,), (16,))
    assert [a != b for a, b in zip(after, before, strict=True)] == [u == position // c.unit_bytes for u in range(3)]


def test_swapped_words_rows_layers_units_and_pages_are_noticed() -> None:
    c = component(8)
    array = filled(c)
    before = wsum64(region(c, array), c, (1, 2), (16, 16))
    for swap in (_words, _rows, _layers, _units, _pages):
        changed = array.copy()
        swap(changed, c)
        assert wsum64(region(c, changed), c, (1, 2), (16, 16)) != before, swap.__name__


def _view(array: np.ndarray, c: Component) -> np.ndarray:
    return array.reshape(ITEMS, c.units, c.layers, c.rows, c.tokens, c.token_bytes)


def _words(a: np.ndarray, c: Component) -> None:
    v = _view(a, c)[1, 0, 0, 0]
    v[[0, 1]] = v[[1, 0]]


def _rows(a: np.ndarray, c: Component) -> None:
    v = _view(a, c)[1, 0, 0]
    v[[0, 1]] = v[[1, 0]]


def _layers(a: np.ndarray, c: Component) -> None:
    v = _view(a, c)[1, 0]
    v[[0, 1]] = v[[1, 0]]


def _units(a: np.ndarray, c: Component) -> None:
    v = _view(a, c)[1]
    v[[0, 1]] = v[[1, 0]]


def _pages(a: np.ndarray, c: Component) -> None:
    a[[1, 2]] = a[[2, 1]]


def test_pages_of_360_kib_are_summed_at_three_gigabytes_a_second_or_more() -> None:
    c = Component("kv", True, 3, 30, 2, 16, 128, "bfloat16")
    array = np.ones((33, c.item_bytes), np.uint8)
    items = tuple(range(1, 33))
    best = min(_timed(c, array, items) for _ in range(15))
    assert 32 * c.item_bytes / best > 3e9


def _timed(c: Component, array: np.ndarray, items: tuple[int, ...]) -> float:
    began = time.thread_time()
    wsum64(region(c, array), c, items, (16,) * len(items))
    return time.thread_time() - began
