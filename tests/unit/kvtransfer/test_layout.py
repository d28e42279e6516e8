"""Two workers are paired only if everything but tensor parallelism is equal, and the refusal names both values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.layout import (
    Rank,
    fingerprint,
    layout_from_proto,
    layout_to_proto,
    rank_from_proto,
    rank_to_proto,
    require_compatible,
    require_ranks,
)
from kvtransfer.types import Component, Layout, Region
from protos.v1 import kvsource_pb2 as pb
from runtime.errors import LayoutMismatch
from tests.unit.kvtransfer.support import KV, LAYOUT, STATE

REGIONS = (
    Region(1, "kv", 1 << 20, 10 * KV.item_bytes, KV.item_bytes, 0, 4),
    Region(2, "recurrent", 1 << 24, 3 * STATE.item_bytes, STATE.item_bytes, 0, 4),
)


def with_kv(**changes: object) -> Layout:
    return replace(LAYOUT, components=(replace(KV, **changes), STATE))  # type: ignore[arg-type]


def test_a_layout_and_a_rank_survive_the_wire() -> None:
    layout = replace(LAYOUT, tp=2, codecs=("identity", "fp8"))
    wire = pb.Layout.FromString(layout_to_proto(layout).SerializeToString())
    assert layout_from_proto(wire) == layout
    rank = Rank("agent", b"\0meta", REGIONS, 1)
    assert rank_from_proto(pb.RankInfo.FromString(rank_to_proto(rank).SerializeToString())) == rank


def test_the_fingerprint_is_golden_and_ignores_tensor_parallelism_and_component_order() -> None:
    assert fingerprint(LAYOUT).hex() == FINGERPRINT
    assert fingerprint(replace(LAYOUT, tp=4)) == fingerprint(LAYOUT)
    assert fingerprint(replace(LAYOUT, components=(STATE, KV))) == fingerprint(LAYOUT)


FINGERPRINT = "e65e3347ef10425ac5d4fb42a660e8a626f77de7638909605aedce44e90c8e07"

DIFFERENCES = [
    (replace(LAYOUT, version=2), "version", "1", "2"),
    (replace(LAYOUT, page_tokens=32), "page_tokens", "16", "32"),
    (replace(LAYOUT, chunk_tokens=256), "chunk_tokens", "512", "256"),
    (replace(LAYOUT, model_fingerprint="model-b"), "model_fingerprint", "model-a", "model-b"),
    (replace(LAYOUT, checksum="crc32"), "checksum", "wsum64-v1", "crc32"),
    (replace(LAYOUT, components=(KV,)), "components", "recurrent", "kv"),
    (with_kv(dtype="float32"), "kv.dtype", "bfloat16", "float32"),
    (with_kv(codec="fp8"), "kv.codec", "identity", "fp8"),
    (with_kv(units=8), "kv.units", "4", "8"),
    (with_kv(layers=3), "kv.layers", "2", "3"),
    (with_kv(rows=1), "kv.rows", "2", "1"),
    (with_kv(token_bytes=16), "kv.token_bytes", "8", "16"),
    (with_kv(replicated=True), "kv.replicated", "False", "True"),
]


@pytest.mark.parametrize(("theirs", "name", "mine_value", "their_value"), DIFFERENCES)
def test_a_difference_is_refused_naming_both_values(
    theirs: Layout, name: str, mine_value: str, their_value: str
) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        require_compatible(LAYOUT, theirs)
    message = caught.value.message
    assert name in message
    assert mine_value in message
    assert their_value in message
    assert fingerprint(theirs) != fingerprint(LAYOUT)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallelism_may_differ(tp: int) -> None:
    require_compatible(LAYOUT, replace(LAYOUT, tp=tp))


def test_a_tensor_parallel_size_that_cannot_share_the_units_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="4 units of kv do not divide over tp 3"):
        require_compatible(LAYOUT, replace(LAYOUT, tp=3))


@pytest.mark.parametrize("changes", [{"pp": 2}, {"dcp": 2}, {"tp": 0}])
def test_what_cannot_be_transferred_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(LayoutMismatch):
        require_compatible(LAYOUT, replace(LAYOUT, **changes))  # type: ignore[arg-type]


def test_a_codec_that_one_side_does_not_offer_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="codecs"):
        require_compatible(LAYOUT, replace(LAYOUT, codecs=("fp8",)))


def test_a_component_without_size_is_refused() -> None:
    empty = replace(LAYOUT, components=(Component("kv", True, 4, 0, 2, 16, 8, "bfloat16"),))
    with pytest.raises(LayoutMismatch, match="size of zero"):
        require_compatible(empty, empty)


def test_good_region_tables_are_accepted() -> None:
    require_ranks(LAYOUT, [Rank("a", b"", REGIONS)])


def test_a_host_pool_is_a_components_second_region() -> None:
    low = replace(REGIONS[0], region_id=3)
    rank = Rank("a", b"", (*REGIONS, low))
    require_ranks(LAYOUT, [rank])
    assert rank.by_component == {region.component: region for region in REGIONS}
    assert rank.pool("kv", 1) is low


BAD_REGIONS = [
    REGIONS[:1],
    (*REGIONS, replace(REGIONS[0], region_id=3, length=8)),
    (*REGIONS, replace(REGIONS[0], region_id=3), replace(REGIONS[0], region_id=4)),
    (REGIONS[0], replace(REGIONS[1], region_id=1)),
    (replace(REGIONS[0], units=2), REGIONS[1]),
    (replace(REGIONS[0], first_unit=1), REGIONS[1]),
    (replace(REGIONS[0], stride=8), REGIONS[1]),
    (replace(REGIONS[0], length=8), REGIONS[1]),
    (replace(REGIONS[0], base=0), REGIONS[1]),
    (replace(REGIONS[0], base=(1 << 64) - 8), REGIONS[1]),
    (replace(REGIONS[0], memory="FILE"), REGIONS[1]),
]


@pytest.mark.parametrize("regions", BAD_REGIONS)
def test_region_tables_that_do_not_fit_the_layout_are_refused(regions: tuple[Region, ...]) -> None:
    with pytest.raises(LayoutMismatch):
        require_ranks(LAYOUT, [Rank("a", b"", regions)])


@pytest.mark.parametrize("ranks", [[], [1], [0, 0], [1, 0]])
def test_ranks_that_do_not_make_the_tensor_parallel_size_are_refused(ranks: list[int]) -> None:
    with pytest.raises(LayoutMismatch):
        require_ranks(LAYOUT, [Rank("a", b"", REGIONS, r) for r in ranks])
