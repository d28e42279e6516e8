"""Which rank reads which units from which, for any two tensor-parallel sizes, on arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.mapping import Moves, UnitRead, concat, moves, owned_units, owners, unit_reads
from kvtransfer.types import Component, Region
from runtime.errors import LayoutMismatch


def component(units: int, replicated: bool = False) -> Component:
    return Component("kv", True, units, 2, 2, 16, 4, "bfloat16", replicated=replicated)


def fits(units: int, tp: int) -> bool:
    return units % tp == 0 or tp % units == 0


SIZES = (1, 2, 3, 4, 6, 8)
PAIRS = [(u, p, d) for u in (1, 2, 3, 4, 6, 8, 12) for p in SIZES for d in SIZES if fits(u, p) and fits(u, d)]


def pool(c: Component, tp: int, rank: int, items: int, fill: bool) -> tuple[np.ndarray, Region]:
    """[items, units, unit bytes] of one rank; filled, every byte tells item and unit."""
    units = owned_units(c, tp, rank)
    array = np.zeros((items, len(units), c.unit_bytes), np.uint8)
    if fill:
        for item in range(items):
            for at, unit in enumerate(units):
                array[item, at] = np.random.default_rng([item, unit]).integers(0, 256, c.unit_bytes, dtype=np.uint8)
    region = Region(1, c.name, array.ctypes.data, array.nbytes, array.strides[0], units.start, len(units))
    return array, region


def carry_out(table: Moves, memory: dict[int, np.ndarray]) -> None:
    """Do the reads on arrays, found by address."""

    def view(address: int, size: int) -> np.ndarray:
        for base, flat in memory.items():
            if base <= address and address + size <= base + flat.nbytes:
                return flat[address - base : address - base + size]
        raise AssertionError("a range outside every pool")

    for (to, size, _), (source, length, _) in zip(table.local.tolist(), table.remote.tolist(), strict=True):
        assert size == length
        view(to, size)[:] = view(source, size)


@pytest.mark.parametrize(("units", "tp_p", "tp_d"), PAIRS)
@pytest.mark.parametrize("replicated", [False, True])
def test_every_reader_gets_exactly_its_units(units: int, tp_p: int, tp_d: int, replicated: bool) -> None:
    c = component(units, replicated)
    sources = [pool(c, tp_p, r, 6, True) for r in range(tp_p)]
    readers = [pool(c, tp_d, r, 9, False) for r in range(tp_d)]
    memory = {array.ctypes.data: array.reshape(-1) for array, _ in sources + readers}
    theirs, mine = [5, 1, 2, 3], [1, 4, 5, 7]

    for read in unit_reads(tp_p, tp_d, c):
        carry_out(moves(c, read, readers[read.reader][1], mine, sources[read.owner][1], theirs), memory)

    for rank, (array, _) in enumerate(readers):
        whole, _ = pool(c, tp_d, rank, 6, True)
        assert np.array_equal(array[mine], whole[theirs])
        untouched = [i for i in range(9) if i not in mine]
        assert not array[untouched].any()


@pytest.mark.parametrize(("units", "tp_p", "tp_d"), PAIRS)
def test_a_unit_is_read_from_one_owner_that_has_it_and_readers_spread_over_owners(
    units: int, tp_p: int, tp_d: int
) -> None:
    c = component(units)
    reads = unit_reads(tp_p, tp_d, c)
    seen = Counter((r.reader, u) for r in reads for u in range(r.first_unit, r.first_unit + r.units))
    assert seen == Counter((rank, unit) for rank in range(tp_d) for unit in owned_units(c, tp_d, rank))
    for read in reads:
        held = owned_units(c, tp_p, read.owner)
        assert held.start <= read.first_unit
        assert read.first_unit + read.units <= held.stop
    for unit in range(units):
        used = {r.owner for r in reads if r.first_unit <= unit < r.first_unit + r.units}
        assert len(used) == min(len(owners(c, tp_p, unit)), len(owners(c, tp_d, unit)))


def test_equal_sizes_read_rank_by_rank_in_one_piece() -> None:
    assert unit_reads(2, 2, component(8)) == (UnitRead(0, 0, 0, 4), UnitRead(1, 1, 4, 4))


def test_two_sizes_that_divide_neither_each_other_meet_in_overlapping_ranges() -> None:
    reads = unit_reads(2, 3, component(6))
    assert reads == (UnitRead(0, 0, 0, 2), UnitRead(0, 1, 2, 1), UnitRead(1, 1, 3, 1), UnitRead(1, 2, 4, 2))


@pytest.mark.parametrize(("tp_p", "tp_d"), [(3, 1), (1, 3), (3, 2), (8, 3)])
def test_units_that_cannot_be_shared_out_evenly_are_refused_by_name(tp_p: int, tp_d: int) -> None:
    with pytest.raises(LayoutMismatch, match=r"4 units of kv|tp 3"):
        unit_reads(tp_p, tp_d, component(4))


def test_a_replicated_component_fits_any_size() -> None:
    assert [r.owner for r in unit_reads(2, 4, component(1, True))] == [0, 0, 1, 1]


def test_items_that_are_neighbours_on_both_sides_become_one_range() -> None:
    c = component(4)
    local, remote = (Region(1, "kv", base, 20 * c.item_bytes, c.item_bytes, 0, 4) for base in (1 << 20, 1 << 24))
    table = moves(c, UnitRead(0, 0, 0, 4), local, [1, 2, 3, 7, 8, 9], remote, [4, 5, 6, 7, 11, 12])
    assert (table.local[:, 1] // c.item_bytes).tolist() == [3, 1, 2]
    assert table.nbytes == 6 * c.item_bytes


def test_a_share_of_a_page_is_never_merged_across_pages() -> None:
    c = component(4)
    region = Region(1, "kv", 1 << 20, 20 * c.item_bytes, c.item_bytes, 0, 4)
    table = moves(c, UnitRead(0, 0, 1, 2), region, [1, 2, 3], region, [4, 5, 6])
    assert table.local[:, 1].tolist() == [2 * c.unit_bytes] * 3
    assert int(table.local[0, 0]) == region.base + c.item_bytes + c.unit_bytes


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30, unique_by=lambda p: p[0]))
def test_merging_changes_no_byte(pairs: list[tuple[int, int]]) -> None:
    c = component(1)
    array, region = pool(c, 1, 0, 41, True)
    target, local = pool(c, 1, 0, 41, False)
    mine, theirs = [p[0] for p in pairs], [p[1] for p in pairs]
    table = moves(c, UnitRead(0, 0, 0, 1), local, mine, region, theirs)
    carry_out(table, {array.ctypes.data: array.reshape(-1), target.ctypes.data: target.reshape(-1)})
    assert np.array_equal(target[mine], array[theirs])


def test_tables_of_different_memory_kinds_stay_apart() -> None:
    row = np.array([[1, 2, 0]], np.uint64)
    parts = [Moves(row, row), Moves(row, row, "VRAM", "VRAM"), Moves(row, row)]
    assert [(len(m), m.local_memory) for m in concat(parts)] == [(2, "DRAM"), (1, "VRAM")]
