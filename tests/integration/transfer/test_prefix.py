"""Cached prefixes from another worker: device and host pages of one offer, damage, limits, lies."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.layout import fingerprint
from kvtransfer.prefix import MAX_TOKENS, _key, question, wanted_of
from kvtransfer.types import Below, LegKey, Prefix, Wanted
from protos.v1 import common_pb2
from runtime.clock import SystemClock
from runtime.errors import ChecksumMismatch, EpochMismatch, InvalidRequest, KvLost, LayoutMismatch, TransferFailed
from tests.integration.transfer.conftest import Make
from tests.integration.transfer.worker import CountingHold, Worker, layout

TOKENS = 100
DEVICE, HOST = (3, 9, 4), (5, 7, 6, 2)
REF = common_pb2.AttemptRef(request_id="r", attempt=1)
KEYS = tuple(bytes([i]) * 32 for i in range(7))
WANTED = Wanted(KEYS, tuple(range(112)), 16, state=True)


class Holder:
    """Offers 100 tokens, the first three pages on the device, the others and the state on the host."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.hold = CountingHold()
        self.asked: list[Wanted] = []
        self.damage = ""

    async def __call__(self, wanted: Wanted, within_s: float) -> Prefix | None:
        assert within_s > 0, "the caller's deadline came along"
        self.asked.append(wanted)
        if wanted.page_keys != KEYS or self.worker is None:
            return None
        return Prefix((*DEVICE, *HOST), (1,), TOKENS, self.hold, self._below(self.worker))

    def _below(self, worker: Worker) -> Below:
        host, info = worker.host[0], worker.ranks[0]
        for pool in host.values():
            for item in (*HOST, 1):
                pool.fill(2, item)
        sums = [tuple(info.checksum(host["kv"].region, host["kv"].component, (item,), (16,))) for item in HOST]
        slot = tuple(info.checksum(host["recurrent"].region, host["recurrent"].component, (1,), (1,)))
        if self.damage:
            pool, item = (host["recurrent"], 1) if self.damage == "slot" else (host["kv"], HOST[int(self.damage)])
            pool.array[item, 0, 5] ^= 0xFF
        return Below(len(DEVICE), tuple(sums), (slot,))


async def pair(make: Make) -> tuple[Worker, Worker, Holder]:
    holder = Holder()
    source = await make("p", host_items=16, holder=holder)
    holder.worker = source
    source.fill(1, DEVICE)
    return source, await make("d"), holder


async def ask(reader: Worker, source: Worker, wanted: Wanted = WANTED, epoch: int = 0) -> tuple[bytes, int, str]:
    reply = await reader.puller.ask(source.address, epoch or source.epoch, REF, wanted, 5.0)
    return reply.ticket.SerializeToString(), reply.token_count, reply.tier


async def pull(reader: Worker, source: Worker, ticket: bytes, tokens: int = TOKENS) -> None:
    mine = tuple(range(20, 20 + -(-tokens // 16)))
    destination = reader.destination(mine, tokens, held=16)
    await reader.puller.pull(ticket, source.address, destination, SystemClock().monotonic() + 10, 1)


async def test_an_offer_of_device_and_host_pages_arrives_whole_and_is_let_go(make: Make) -> None:
    source, reader, holder = await pair(make)
    ticket, tokens, tier = await ask(reader, source)
    assert (tokens, tier) == (TOKENS, "host")
    assert source.store.counts().leased == 1
    await pull(reader, source, ticket)
    assert reader.wrong(1, DEVICE[1:], (21, 22)) == []
    assert reader.wrong(2, HOST[:3], (23, 24, 25)) == []
    assert reader.wrong(2, (1,), (1,), paged=False) == []
    whole, valid = source.host[0]["kv"].array[HOST[3]], reader.pools[0]["kv"].array[26]
    shape = (4, 12, 16, 64)
    assert np.array_equal(whole.reshape(shape)[:, :, :4], valid.reshape(shape)[:, :, :4])
    await reader.puller.close()
    assert holder.hold.releases == 1
    assert source.store.counts().leased == 0


@pytest.mark.parametrize("damage", ["0", "3", "slot"])
async def test_a_byte_that_changed_in_host_memory_is_noticed(make: Make, damage: str) -> None:
    source, reader, holder = await pair(make)
    holder.damage = damage
    ticket, _, _ = await ask(reader, source)
    with pytest.raises((ChecksumMismatch, KvLost)):
        await pull(reader, source, ticket)


async def test_what_is_not_there_is_an_empty_answer(make: Make) -> None:
    source, reader, _ = await pair(make)
    foreign = replace(WANTED, page_keys=tuple(bytes([99]) * 32 for _ in KEYS))
    assert await ask(reader, source, foreign) == (b"", 0, "")
    assert await ask(source, reader) == (b"", 0, ""), "a worker that offers nothing"
    assert source.store.counts().leased == 0


async def test_another_epoch_or_layout_is_refused(make: Make) -> None:
    source, reader, holder = await pair(make)
    with pytest.raises(EpochMismatch):
        await ask(reader, source, epoch=source.epoch + 1)
    wrong = question("d", 1, source.epoch, fingerprint(layout(model="another")), REF, WANTED)
    with pytest.raises(LayoutMismatch):
        await source.service._offers.answer(wrong, "", "ipv4:127.0.0.1:1")  # type: ignore[union-attr]
    assert not holder.asked


async def test_no_more_prefixes_are_promised_at_once_than_allowed(make: Make) -> None:
    source, reader, _ = await pair(make)
    refs = [common_pb2.AttemptRef(request_id=f"r{i}", attempt=1) for i in range(3)]
    replies = [await reader.puller.ask(source.address, source.epoch, ref, WANTED, 5.0) for ref in refs]
    assert [reply.HasField("ticket") for reply in replies] == [True, True, False]


async def test_asking_again_ends_the_offer_before(make: Make) -> None:
    source, reader, holder = await pair(make)
    first, _, _ = await ask(reader, source)
    second, _, _ = await ask(reader, source)
    assert holder.hold.releases == 1
    with pytest.raises(KvLost):
        await pull(reader, source, first)
    await pull(reader, source, second)


async def test_another_worker_that_says_the_same_name_ends_no_offer(make: Make) -> None:
    source, reader, holder = await pair(make)
    impostor = await make(reader.worker_id)
    ticket, _, _ = await ask(reader, source)
    other, _, _ = await ask(impostor, source)
    assert source.store.counts().leased == 2
    assert holder.hold.releases == 0
    await pull(reader, source, ticket)
    await pull(impostor, source, other)


def test_what_an_offer_is_known_by_cannot_be_put_together_otherwise() -> None:
    def key(worker_id: str, request_id: str, connection: str = "ipv4:127.0.0.1:1") -> LegKey:
        ref = common_pb2.AttemptRef(request_id=request_id, attempt=1)
        return _key(question(worker_id, 1, 1, b"f", ref, WANTED), connection)

    assert key("a", "b") == key("a", "b")
    others = [("a b", "c"), ("a", "b c"), ("a", "c"), ("b", "c"), ("a', 'b", "c")]
    assert len({key(*names) for names in others}) == len(others)
    assert key("a", "b") != key("a", "b", "ipv4:127.0.0.1:2")


async def test_an_offer_of_another_length_than_it_said_lands_nowhere(make: Make) -> None:
    source, reader, _ = await pair(make)
    ticket, _, _ = await ask(reader, source)
    with pytest.raises(TransferFailed):
        await pull(reader, source, ticket, tokens=64)


async def test_an_offer_nobody_reads_ends_with_its_lease(make: Make) -> None:
    holder = Holder()
    source = await make("p", host_items=16, holder=holder, config={"lease_s": 0.3, "lease_margin_s": 0.1})
    holder.worker = source
    reader = await make("d")
    ticket, _, _ = await ask(reader, source)
    await _until(holder)
    with pytest.raises(KvLost):
        await pull(reader, source, ticket)


async def _until(holder: Holder) -> None:
    assert await asyncio.to_thread(holder.hold.released.wait, 10)


def test_a_question_that_makes_no_sense_is_refused() -> None:
    good = question("d", 1, 1, b"f", REF, WANTED)
    assert wanted_of(good) == WANTED
    short = question("d", 1, 1, b"f", REF, replace(WANTED, page_keys=KEYS[:3]))
    with pytest.raises(InvalidRequest):
        wanted_of(short)
    with pytest.raises(InvalidRequest):
        wanted_of(question("d", 1, 1, b"f", REF, replace(WANTED, page_keys=(b"x",) * 7)))


def test_the_question_for_a_long_prompt_fits_a_message() -> None:
    tokens = tuple(range(200_000))
    wanted = Wanted(tuple(bytes(32) for _ in range(len(tokens) // 16)), tokens, 0, state=False)
    asked = question("d", 1, 1, b"f", REF, wanted)
    assert asked.ByteSize() < 1 << 20
    assert len(wanted_of(asked).tokens) == MAX_TOKENS
