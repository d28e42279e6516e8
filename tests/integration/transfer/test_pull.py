"""The reader's rules over real gRPC, with bytes moved by the in-process transport and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.source import State
from kvtransfer.types import Layout
from protos.v1 import kvsource_pb2 as pb
from runtime import faults
from runtime.errors import (
    LayoutMismatch,
    TicketInvalid,
    TransferFailed,
)
from tests.integration.transfer.conftest import Make
from tests.integration.transfer.pulling import (
    MINE,
    PAGES,
    TOKENS,
    computed,
    ended,
    hold_of,
    pull,
    until,
    untouched,
)
from tests.integration.transfer.worker import KV, LATENT, STATE, Worker, layout

# --- what arrives -------------------------------------------------------------------------------------------------


async def test_ranges_are_read_while_later_ones_are_computed(pair: tuple[Worker, Worker]) -> None:
    """Public report T066 (sgl-project/sglang#33970)."""
    source, reader = pair
    source.fill(7, PAGES)
    source.fill(7, [1], paged=False)
    ticket = source.open("r", PAGES, TOKENS)
    dest = reader.destination(MINE, TOKENS)
    running = asyncio.create_task(pull(reader, source, ticket, dest))

    source.store.range_ready(source.key("r"), 0, 48)
    await until(lambda: not reader.wrong(7, PAGES[:3], MINE[:3]))
    assert not reader.pools[0]["kv"].array[MINE[3:]].any()
    source.store.range_ready(source.key("r"), 48, TOKENS)
    await until(lambda: not reader.wrong(7, PAGES, MINE))
    assert not running.done()
    source.final("r", TOKENS)

    pulled = await running
    assert pulled.bytes_read == 7 * KV.item_bytes + STATE.item_bytes
    assert hold_of(dest).releases == 1
    await ended(source, State.RELEASED)
    assert source.holds["r"].releases == 1


@pytest.mark.parametrize(("held", "pages"), [(0, 7), (16, 6), (96, 1)])
async def test_pages_the_reader_holds_are_not_read_and_it_always_confirms(
    pair: tuple[Worker, Worker], held: int, pages: int
) -> None:
    source, reader = pair
    ticket = computed(source)
    pulled = await pull(reader, source, ticket, reader.destination(MINE, TOKENS, held=held))
    assert pulled.bytes_read == pages * KV.item_bytes + STATE.item_bytes
    assert pulled.pages_read == pages
    assert not reader.pools[0]["kv"].array[MINE[: held // 16]].any()
    assert reader.wrong(7, PAGES[held // 16 :], MINE[held // 16 :]) == []
    await ended(source, State.RELEASED)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32])
async def test_prompts_around_the_page_size_move_whole_pages(pair: tuple[Worker, Worker], tokens: int) -> None:
    source, reader = pair
    pages = PAGES[: -(-tokens // 16)]
    source.fill(3, pages)
    ticket = source.open("r", pages, tokens)
    source.final("r", tokens)
    pulled = await pull(reader, source, ticket, reader.destination(MINE[: len(pages)], tokens))
    assert pulled.bytes_read == len(pages) * KV.item_bytes + STATE.item_bytes
    assert reader.wrong(3, pages, MINE[: len(pages)]) == []


@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 2), (2, 1), (4, 2), (2, 4), (4, 8), (8, 4)])
async def test_workers_of_different_tensor_parallel_sizes_share_units_out(make: Make, tp_p: int, tp_d: int) -> None:
    """Public report T106 (vllm-project/vllm#43523; vllm-project/vllm#50765)."""
    components = (KV, STATE, LATENT)
    source = await make("p", shape=layout(tp_p, components=components))
    reader = await make("d", shape=layout(tp_d, components=components))
    ticket = computed(source)
    pulled = await pull(reader, source, ticket, reader.destination(MINE, TOKENS))
    assert reader.wrong(7, PAGES, MINE) == []
    assert reader.wrong(7, [1], [1], paged=False) == []
    shares = max(1, tp_d // 4)
    split = 7 * KV.item_bytes + STATE.item_bytes
    assert pulled.bytes_read == split * shares + 7 * LATENT.item_bytes * tp_d


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["released", "other epoch", "forged", "garbage"])
async def test_a_bad_ticket_moves_no_byte(make: Make, spoil: str) -> None:
    source, reader = await make("p"), await make("d")
    ticket = computed(source)
    if spoil == "released":
        source.store.release(source.key("r"))
    elif spoil == "other epoch":
        ticket = computed(await make("p", epoch=2))
    elif spoil == "forged":
        ticket = ticket[:-1] + bytes([ticket[-1] ^ 1])
    else:
        ticket = b"\x0a\xff"
    dest = reader.destination(MINE, TOKENS)
    with pytest.raises(TicketInvalid):
        await pull(reader, source, ticket, dest)
    assert untouched(reader)
    assert hold_of(dest).releases == 1


@pytest.mark.parametrize(
    "theirs",
    [
        layout(model="another"),
        layout(components=[KV]),
        Layout((KV, STATE), "test", 256),
        Layout((KV, STATE), "test", 512, tp=2, checksum="crc"),
    ],
)
async def test_a_pair_of_unequal_layout_is_refused_and_moves_no_byte(make: Make, theirs: Layout) -> None:
    source, reader = await make("p", shape=theirs), await make("d")
    ticket = computed(source)
    with pytest.raises(LayoutMismatch):
        await pull(reader, source, ticket, reader.destination(MINE, TOKENS))
    assert untouched(reader)


def _null_page(blocks: list[pb.LocatedBlock]) -> None:
    blocks[0].indices[0] = 0


def _past_the_end(blocks: list[pb.LocatedBlock]) -> None:
    blocks[0].indices[1] = 64


def _too_few(blocks: list[pb.LocatedBlock]) -> None:
    del blocks[0].indices[-1]


def _checksum_missing(blocks: list[pb.LocatedBlock]) -> None:
    del blocks[0].checksums[-1]


def _unknown_region(blocks: list[pb.LocatedBlock]) -> None:
    blocks[0].region_id = 9


def _unknown_rank(blocks: list[pb.LocatedBlock]) -> None:
    blocks[0].rank = 1


def _slots_as_pages(blocks: list[pb.LocatedBlock]) -> None:
    blocks[0].region_id = 2


def _none(blocks: list[pb.LocatedBlock]) -> None:
    blocks.clear()


def _twice(blocks: list[pb.LocatedBlock]) -> None:
    blocks.append(blocks[0])


@pytest.mark.parametrize(
    "spoil",
    [
        *(_null_page, _past_the_end, _too_few, _checksum_missing, _unknown_region, _unknown_rank, _slots_as_pages),
        *(_none, _twice),
    ],
)
async def test_an_index_outside_the_region_table_is_never_turned_into_an_address(
    pair: tuple[Worker, Worker], spoil: Callable[[list[pb.LocatedBlock]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = pair
    ticket = computed(source)
    honest = source.service._page_blocks

    async def spoilt(*arguments: Any) -> list[pb.LocatedBlock]:
        blocks = await honest(*arguments)
        spoil(blocks)
        return blocks

    monkeypatch.setattr(source.service, "_page_blocks", spoilt)
    dest = reader.destination(MINE, TOKENS)
    with pytest.raises(TicketInvalid):
        await pull(reader, source, ticket, dest)
    assert untouched(reader)
    assert hold_of(dest).releases == 1


async def test_a_source_of_another_length_than_expected_is_refused(pair: tuple[Worker, Worker]) -> None:
    """Public report T053 (sgl-project/sglang#30233; sgl-project/sglang#34208)."""
    source, reader = pair
    ticket = computed(source)
    with pytest.raises(TransferFailed):
        await pull(reader, source, ticket, reader.destination(MINE[:6], 96))


async def test_an_announcement_that_was_lost_is_noticed(pair: tuple[Worker, Worker]) -> None:
    source, reader = pair
    ticket = source.open("r", PAGES, TOKENS)
    with faults.armed("kv.event=drop*1"):
        running = asyncio.create_task(pull(reader, source, ticket, reader.destination(MINE, TOKENS)))
        await until(lambda: source.store.counts().computing == 1 and not running.done())
        source.store.range_ready(source.key("r"), 0, 16)
        await until(lambda: faults.hits("kv.event") == 1)
        source.store.range_ready(source.key("r"), 16, TOKENS)
        with pytest.raises(TransferFailed, match="announced after 0"):
            await running
