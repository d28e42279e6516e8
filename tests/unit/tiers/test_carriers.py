"""Who moves the bytes: each leaves the same bytes and the same checksums, wherever the pools lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine import native
from engine.device_memory import items_of
from engine.tiers import cuda
from engine.tiers.carriers import SOURCE, Carrier, Fused, Plain, fused
from engine.tiers.pace import Pace
from engine.tiers.pool import HostPool, Mover, view
from kvtransfer.checksum import wsum64
from kvtransfer.types import Component, Region
from tests.unit.engine_torch.test_runner import _EveryFactoryNamesItsDevice as EveryFactoryNamesItsDevice

PAIRS = [(3, 1), (1, 2), (2, 3), (6, 6), (5, 7)]
SIZES = [(1, 64), (3, 8 * 1029), (2, 16384 + 8)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Fused:
    made = fused(tmp_path_factory.mktemp("compiled"))
    if made is None:
        pytest.fail("g++ is needed by this test")
    return made


def component(units: int, unit_bytes: int, paged: bool = True) -> Component:
    return Component(
        name="kv" if paged else "state",
        paged=paged,
        units=units,
        layers=1,
        rows=1,
        tokens=1,
        token_bytes=unit_bytes,
        dtype="uint8",
    )


def pools(kind: Component) -> tuple[HostPool, Region, HostPool]:
    """A device pool of random bytes in host memory, and a host pool of zeros."""
    shape = Region(0, kind.name, 0, 0, kind.units * kind.unit_bytes, 0, kind.units)
    device = HostPool([kind], [shape], 8, 8)
    region = replace(device.regions[0], component=kind.name)
    view(region)[:] = np.random.default_rng(1).integers(0, 256, view(region).shape, np.uint8)
    return device, region, HostPool([kind], [region], 8, 8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("paged", [True, False])
def test_compiled_copies_are_plain_ones_with_their_checksums(
    compiled: Fused, size: tuple[int, int], paged: bool
) -> None:
    kind = component(*size, paged)
    found = []
    for carrier in (Plain(), compiled):
        _keep, region, host = pools(kind)
        mover = Mover((kind,), (region,), host.regions, carrier)
        sums = mover.save(paged, PAIRS)
        assert sums == mover.sums(paged, [low for _, low in PAIRS])
        for up, low in PAIRS:
            assert (view(host.regions[0])[low] == view(region)[up]).all()
        assert not view(host.regions[0])[[0, 4, 5]].any()
        before = view(region).copy()
        view(region)[:] = 0
        assert mover.load(paged, PAIRS, sums) == len(PAIRS)
        touched = [up for up, _ in PAIRS]
        assert (view(region)[touched] == before[touched]).all()
        assert not view(region)[[0, 4, 7]].any()
        found.append(sums)
    assert found[0] == found[1]


def test_a_damaged_item_and_all_behind_it_do_not_count(compiled: Fused) -> None:
    kind = component(2, 4096)
    _keep, region, host = pools(kind)
    mover = Mover((kind,), (region,), host.regions, compiled)
    sums = mover.save(True, PAIRS)
    view(host.regions[0])[PAIRS[2][1], 5000] ^= 1
    assert mover.load(True, PAIRS, sums) == 2


def test_units_that_are_no_whole_words_are_copied_plainly(compiled: Fused) -> None:
    kind = component(3, 20)
    _keep, region, host = pools(kind)
    mover = Mover((kind,), (region,), host.regions, compiled)
    (low,) = host.regions
    assert mover.save(True, [(1, 1)]) == [tuple(wsum64(low, kind, (1,), (1,)))]


def test_without_a_compiler_copies_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fused(tmp_path) is None
    with pytest.raises(native.NotBuilt):
        native.library(SOURCE, tmp_path)


class _Devices(EveryFactoryNamesItsDevice):
    """As for the runner: on a machine with a GPU a tensor without a device would be made where nobody wants it."""


@pytest.fixture
def named_devices() -> Iterator[TorchFunctionMode]:
    with _Devices() as mode:
        yield mode


def test_staged_copies_move_scattered_items_both_ways(
    named_devices: TorchFunctionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way on pools in host memory, in stages of two items."""
    kind = component(2, 64)
    _keep, region, host = pools(kind)
    (low,) = host.regions
    monkeypatch.setattr(cuda, "STAGING_BYTES", 2 * low.stride)
    staged = cuda.Staged(torch.device("cpu"), {region.base: items_of(region)}, {low.base: items_of(low)})
    before = view(region).copy()

    staged.move((kind, region, low), PAIRS, True)
    for up, there in PAIRS:
        assert (view(low)[there] == before[up]).all()
    view(region)[:] = 0
    staged.move((kind, region, low), PAIRS, False)

    touched = [up for up, _ in PAIRS]
    assert (view(region)[touched] == before[touched]).all()
    assert not view(region)[[0, 4, 7]].any()


def test_neighbours_on_the_host_are_one_copy() -> None:
    assert cuda.runs([4, 5, 6, 2, 9, 10]) == [(0, 4, 3), (3, 2, 1), (4, 9, 2)]
    assert cuda.runs([]) == []


def test_copies_in_no_hurry_wait_while_a_step_runs_and_only_then() -> None:
    slept: list[float] = []
    busy = True
    pace = Pace(1000.0, lambda: busy, clock=lambda: sum(slept), sleep=slept.append)
    pace.spent(500)
    pace.spent(250)
    assert slept == [0.5, 0.25]
    busy = False
    pace.spent(10_000)
    assert slept == [0.5, 0.25]
    Pace(0.0, lambda: True, sleep=slept.append).spent(1)
    assert len(slept) == 2


def test_only_stores_ahead_of_need_wait() -> None:
    kind = component(1, 64)
    _keep, region, host = pools(kind)
    paused: list[int] = []
    carrier: Carrier = Plain()
    mover = Mover((kind,), (region,), host.regions, carrier, paused.append)
    sums = mover.save(True, PAIRS)
    mover.load(True, PAIRS, sums)
    assert paused == []
    mover.save(True, PAIRS, in_no_hurry=True)
    assert sum(paused) == 64 * len(PAIRS)
