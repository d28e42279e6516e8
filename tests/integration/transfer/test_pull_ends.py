"""What ends or spoils a pull: the transport's faults, leases, fences, restarts; over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvtransfer.checksum import memory
from kvtransfer.inprocess import Faults
from kvtransfer.puller import Puller
from kvtransfer.source import State
from kvtransfer.transport import LocalRank
from runtime import faults
from runtime.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    KvLost,
    PdserveError,
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
    wire,
)
from tests.integration.transfer.worker import Worker

# --- what goes wrong in the transport -----------------------------------------------------------------------------


async def test_one_corrupted_byte_is_detected_and_the_source_let_go(pair: tuple[Worker, Worker]) -> None:
    source, reader = pair
    wire(reader).faults = Faults(corrupt=True)
    dest = reader.destination(MINE, TOKENS)
    with pytest.raises(ChecksumMismatch, match="checksums of"):
        await pull(reader, source, computed(source), dest)
    await until(lambda: hold_of(dest).releases == 1)  # another read of this pull may still have been in flight
    await ended(source, State.RELEASED)


async def test_a_byte_corrupted_at_the_fail_point_is_detected(pair: tuple[Worker, Worker]) -> None:
    source, reader = pair
    with faults.armed("kv.bytes=corrupt:0*1"), pytest.raises(ChecksumMismatch):
        await pull(reader, source, computed(source), reader.destination(MINE, TOKENS))


@pytest.mark.parametrize("component", ["kv", "recurrent"])
async def test_pages_and_state_are_checked_each_by_itself(
    pair: tuple[Worker, Worker], component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = pair

    def damage(puller: Puller, rank: LocalRank, part: Any) -> None:
        if part.paged == (component == "kv"):
            region = rank.info.by_component[component]
            memory(region)[part.items[0] * region.stride] ^= 1

    monkeypatch.setattr(Puller, "_corrupt", damage)
    with pytest.raises(ChecksumMismatch, match=component):
        await pull(reader, source, computed(source), reader.destination(MINE, TOKENS))


@pytest.mark.parametrize("fault", [Faults(truncate=True), Faults(fail=True)])
async def test_a_short_or_refused_read_fails_the_pull_and_the_next_one_succeeds(
    pair: tuple[Worker, Worker], fault: Faults
) -> None:
    source, reader = pair
    ticket = computed(source)
    wire(reader).faults = fault
    dest = reader.destination(MINE, TOKENS)
    with pytest.raises(TransferFailed):
        await pull(reader, source, ticket, dest)
    await until(lambda: hold_of(dest).releases == 1)  # another read of this pull may still have been in flight
    wire(reader).faults = Faults()
    await pull(reader, source, ticket, reader.destination(MINE, TOKENS), fence=2)
    assert reader.wrong(7, PAGES, MINE) == []


async def test_a_read_that_never_ends_fails_in_time_and_its_pages_stay_in_quarantine(make: Make) -> None:
    source = await make("p")
    reader = await make("d", config={"transfer_timeout_s": 0.2})
    wire(reader).faults = Faults(drop=True)
    dest = reader.destination(MINE, TOKENS)
    with pytest.raises(TransferFailed):
        await pull(reader, source, computed(source), dest)
    assert hold_of(dest).releases == 0
    assert reader.puller.quarantined_pages() == len(MINE)
    assert reader.puller.unhealthy() == ""
    for flight in wire(reader)._tasks.values():
        flight.over_at -= reader.config.quarantine_s + 1
    assert "quarantine" in reader.puller.unhealthy()
    await wire(reader).disconnect("p/0/1")
    await until(lambda: hold_of(dest).releases == 1)
    assert reader.puller.unhealthy() == ""
    assert reader.puller.quarantined_pages() == 0


async def test_a_cancelled_reads_destination_is_released_only_after_the_late_write(pair: tuple[Worker, Worker]) -> None:
    """Public report T115 (sgl-project/sglang#35049; sgl-project/sglang#32564); T159 (vllm-project/vllm#46283)."""
    source, reader = pair
    gate = asyncio.Event()
    wire(reader).faults = Faults(gate=gate)
    dest = reader.destination(MINE, TOKENS)
    running = asyncio.create_task(pull(reader, source, computed(source), dest))
    await until(lambda: wire(reader)._tasks != {})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert hold_of(dest).releases == 0
    assert wire(reader).quarantined() > 0
    gate.set()
    await until(lambda: hold_of(dest).releases == 1)
    assert reader.wrong(7, PAGES, MINE) == []


async def test_a_pull_may_be_cancelled_at_any_moment_and_nothing_stays_behind(pair: tuple[Worker, Worker]) -> None:
    source, reader = pair
    await reader.puller.connect(source.address)
    for steps in range(1, 61):  # a task that never ran has not taken the hold
        ticket = computed(source, f"r{steps}")
        dest = reader.destination(MINE, TOKENS)
        running = asyncio.create_task(pull(reader, source, ticket, dest))
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda hold=hold_of(dest): hold.releases == 1)  # type: ignore[misc]
        source.store.release(source.key(f"r{steps}"))
    await until(lambda: not wire(reader)._tasks and not reader.puller._background)
    assert reader.puller.quarantined_pages() == 0


async def test_the_requests_deadline_ends_the_pull(pair: tuple[Worker, Worker]) -> None:
    source, reader = pair
    ticket = source.open("r", PAGES, TOKENS)
    dest = reader.destination(MINE, TOKENS)
    await reader.puller.connect(source.address)
    with pytest.raises(DeadlineExceeded):
        await pull(reader, source, ticket, dest, seconds=0.2)
    assert hold_of(dest).releases == 1


# --- leases and fences --------------------------------------------------------------------------------------------


async def test_renewals_keep_a_long_pull_alive(make: Make) -> None:
    config = {"lease_s": 1.5, "lease_margin_s": 0.1}
    source, reader = await make("p", config=config), await make("d", config=config)
    gate = asyncio.Event()
    wire(reader).faults = Faults(gate=gate)
    running = asyncio.create_task(pull(reader, source, computed(source), reader.destination(MINE, TOKENS)))
    await until(lambda: bool(wire(reader)._tasks))
    await asyncio.sleep(1.6)  # more than a lease
    gate.set()
    await running
    assert reader.wrong(7, PAGES, MINE) == []


async def test_a_reader_that_cannot_renew_gives_up_before_the_source_does(make: Make) -> None:
    config = {"lease_s": 1.2, "lease_margin_s": 0.9}
    source, reader = await make("p", config=config), await make("d", config=config)
    gate = asyncio.Event()
    wire(reader).faults = Faults(gate=gate)
    dest = reader.destination(MINE, TOKENS)
    with faults.armed("kv.renew=drop"), pytest.raises(KvLost):
        await pull(reader, source, computed(source), dest)
    assert source.store.state(source.key("r")) is State.FINAL
    gate.set()
    await until(lambda: hold_of(dest).releases == 1)
    await ended(source, State.EXPIRED)


async def test_bytes_that_arrive_after_the_lease_do_not_count(make: Make) -> None:
    config = {"lease_s": 0.6, "lease_margin_s": 0.2}
    source, reader = await make("p", config=config), await make("d", config=config)
    with faults.armed("kv.renew=drop", "kv.verify=delay:0.7*1"), pytest.raises(KvLost):
        await pull(reader, source, computed(source), reader.destination(MINE, TOKENS))


async def test_a_release_by_the_router_ends_the_pull(pair: tuple[Worker, Worker]) -> None:
    source, reader = pair
    ticket = source.open("r", PAGES, TOKENS)
    running = asyncio.create_task(pull(reader, source, ticket, reader.destination(MINE, TOKENS)))
    await until(lambda: bool(source.store._leases))
    source.store.release(source.key("r"))
    with pytest.raises(KvLost):
        await running


async def test_a_prompt_that_fails_ends_the_pull_with_its_reason(pair: tuple[Worker, Worker]) -> None:
    """Public report T048 (vllm-project/vllm#50754)."""
    source, reader = pair
    ticket = source.open("r", PAGES, TOKENS)
    running = asyncio.create_task(pull(reader, source, ticket, reader.destination(MINE, TOKENS)))
    await until(lambda: bool(source.store._leases))
    source.store.fail(source.key("r"), PdserveError("the step failed", reason="engine_fault"))
    with pytest.raises(KvLost) as caught:
        await running
    assert caught.value.reason == "engine_fault"


async def test_a_second_decode_worker_takes_over_with_a_higher_fence(make: Make) -> None:
    source, first, second = await make("p"), await make("d1"), await make("d2")
    ticket = source.open("r", PAGES, TOKENS)
    source.fill(7, PAGES)
    source.fill(7, [1], paged=False)
    running = asyncio.create_task(pull(first, source, ticket, first.destination(MINE, TOKENS), fence=1))
    await until(lambda: bool(source.store._leases))
    taking_over = asyncio.create_task(pull(second, source, ticket, second.destination(MINE, TOKENS), fence=2))
    with pytest.raises(TicketInvalid):
        await running
    source.final("r", TOKENS)
    await taking_over
    assert second.wrong(7, PAGES, MINE) == []


async def test_a_release_that_is_lost_leaves_the_pages_to_the_lease(make: Make) -> None:
    config = {"lease_s": 1.0, "lease_margin_s": 0.1}
    source, reader = await make("p", config=config), await make("d", config=config)
    with faults.armed("kv.release=drop"):
        await pull(reader, source, computed(source), reader.destination(MINE, TOKENS))
        await ended(source, State.EXPIRED)
    assert source.holds["r"].releases == 1


# --- restarts -----------------------------------------------------------------------------------------------------


async def test_a_source_restarted_at_its_address_is_met_in_its_new_epoch(make: Make) -> None:
    """Public report T160 (vllm-project/vllm#49238)."""
    old = await make("p", epoch=1)
    reader = await make("d")
    stale = computed(old)
    await pull(reader, old, stale, reader.destination(MINE, TOKENS))
    await old.server.stop(None)
    new = await make("p", epoch=2, listen=old.address)
    await until(lambda: new.address == old.address)

    with pytest.raises(TicketInvalid):
        await pull(reader, new, stale, reader.destination(MINE, TOKENS), fence=2)
    await pull(reader, new, computed(new, salt=9), reader.destination(MINE, TOKENS))

    assert reader.wrong(9, PAGES, MINE) == []
    assert list(wire(reader)._peers) == ["p/0/2"]


async def test_a_pull_that_is_cancelled_while_it_forgets_a_peer_forgets_it_all_the_same(make: Make) -> None:
    source, reader = await make("p"), await make("d")
    await pull(reader, source, computed(source), reader.destination(MINE, TOKENS))
    peers = reader.puller._peers
    (peer,) = peers._peers.values()
    peer.leases._task = asyncio.create_task(asyncio.sleep(60))
    forgetting = asyncio.create_task(peers.drop(peer))
    await asyncio.sleep(0)
    forgetting.cancel()
    await asyncio.wait([forgetting])
    await until(lambda: not peers._closing)
    assert forgetting.cancelled()
    assert wire(reader)._peers == {}


async def test_a_peer_of_another_process_is_refused_by_the_in_process_transport(make: Make) -> None:
    from kvtransfer.transport import Agent, Incarnation

    reader = await make("d")
    with pytest.raises(TransferFailed):
        await wire(reader).connect(Incarnation("p", 0, 1), Agent("p/0/1", b"4711:elsewhere"))


async def test_an_older_incarnation_does_not_replace_a_newer_one(make: Make) -> None:
    from kvtransfer.transport import Agent, Incarnation

    reader, newer = await make("d"), await make("p", epoch=5)
    metadata = newer.ranks[0].info.agent_metadata
    await wire(reader).connect(Incarnation("p", 0, 5), Agent("p/0/5", metadata))
    with pytest.raises(TransferFailed, match="newer"):
        await wire(reader).connect(Incarnation("p", 0, 4), Agent("p/0/4", metadata))
