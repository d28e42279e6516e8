"""A handshake leaves a peer that is known, or nothing: whatever it fails on, and whenever it is given up."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from kvtransfer.nixl import NixlTransport
from kvtransfer.transport import Agent, Incarnation
from runtime.errors import TransferFailed
from tests.integration.transfer.conftest import Make
from tests.integration.transfer.pulling import MINE, PAGES, TOKENS, computed, pull, wire
from tests.integration.transfer.worker import layout


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.mark.parametrize("when", ["before the connect runs", "while it runs", "after it has run"])
async def test_a_handshake_cancelled_around_its_connect_leaves_no_agent(make: Make, when: str) -> None:
    source, reader = await make("p", transport="nixl"), await make("d", transport="nixl")
    transport = reader.ranks[0].transport
    assert isinstance(transport, NixlTransport)
    owner = transport._owner
    begun, go, ran = threading.Event(), threading.Event(), threading.Event()
    connect = owner.connect

    def held(incarnation: Incarnation, agent: Agent) -> None:
        begun.set()
        _wait(go)
        connect(incarnation, agent)

    class Held:
        """The thread, with its connect held up."""

        def __getattr__(self, name: str) -> Any:
            return held if name == "connect" else getattr(owner, name)

    transport._owner = Held()  # type: ignore[assignment]
    blocked = threading.Event()
    if when == "before the connect runs":
        owner.submit(ran.set)
        owner.submit(partial(_wait, blocked))
        _wait(ran)
        async with asyncio.timeout(60):
            while owner._commands.qsize():  # noqa: ASYNC110  until the thread has taken what it waits in
                await asyncio.sleep(0.001)
    connecting = asyncio.create_task(reader.puller.connect(source.address))
    waits_for = owner._commands.qsize if when == "before the connect runs" else begun.is_set
    async with asyncio.timeout(60):
        while not waits_for():  # noqa: ASYNC110  another thread's queue
            await asyncio.sleep(0.001)
    if when == "after it has run":
        owner.submit(ran.set)
        go.set()
        _wait(ran)  # without a turn of the loop: it has not heard yet
    connecting.cancel()
    await asyncio.wait([connecting])
    blocked.set()
    go.set()
    await asyncio.gather(*reader.puller._peers._closing)
    await transport.disconnect("nobody")  # in order: everything before it has run

    assert connecting.cancelled()
    assert owner._peers == {}
    await pull(reader, source, computed(source), reader.destination(MINE, TOKENS))
    assert reader.wrong(7, PAGES, MINE) == []
    assert list(owner._peers) == ["p/0/1"]


@pytest.mark.parametrize("refuses", range(4))
async def test_where_one_rank_cannot_connect_no_rank_keeps_an_agent(
    make: Make,
    refuses: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, reader = await make("p", shape=layout(2)), await make("d", shape=layout(2))
    connects = 0
    kind = type(wire(reader))
    honest = kind.connect

    async def connect(transport: Any, incarnation: Incarnation, agent: Agent) -> None:
        nonlocal connects
        connects += 1
        if connects == refuses + 1:
            raise TransferFailed("the agent was refused")
        await honest(transport, incarnation, agent)

    monkeypatch.setattr(kind, "connect", connect)
    with pytest.raises(TransferFailed):
        await reader.puller._peers.get(source.address, 5.0)
    await asyncio.gather(*reader.puller._peers._closing)
    assert [rank.transport._peers for rank in reader.ranks] == [{}, {}]
    await reader.puller.connect(source.address)
    assert [len(rank.transport._peers) for rank in reader.ranks] == [2, 2]


async def test_a_source_met_by_two_addresses_serves_by_both_until_both_are_dropped(make: Make) -> None:
    source, reader = await make("p"), await make("d")
    peers, first = reader.puller._peers, source.address
    second = first.replace("127.0.0.1", "localhost")
    for turn, address in enumerate([first, second, first, second]):
        source.address = address
        ticket = computed(source, f"r{turn}")
        await pull(reader, source, ticket, reader.destination(MINE, TOKENS))
    assert set(peers._peers) == {first, second}
    await peers.drop(peers._peers[first])
    await pull(reader, source, computed(source, "again"), reader.destination(MINE, TOKENS))
    await peers.drop(peers._peers[second])
    assert wire(reader)._peers == {}


async def test_of_too_many_sources_the_one_not_used_for_longest_is_forgotten_and_met_again(make: Make) -> None:
    reader, a, b, c = [await make(name) for name in ("d", "a", "b", "c")]
    peers = reader.puller._peers
    peers._most = 2
    for source in (a, b, a, c):
        await reader.puller.connect(source.address)
    assert set(peers._peers) == {a.address, c.address}
    assert set(wire(reader)._peers) == {"a/0/1", "c/0/1"}
    assert len(peers._locks) == 0, "nobody is at any address"
    await pull(reader, b, computed(b), reader.destination(MINE, TOKENS))
    assert reader.wrong(7, PAGES, MINE) == []
    assert set(peers._peers) == {c.address, b.address}


async def test_a_source_that_is_read_from_is_not_forgotten_for_another(make: Make) -> None:
    reader, a, b, c = [await make(name) for name in ("d", "a", "b", "c")]
    peers = reader.puller._peers
    peers._most = 1
    await reader.puller.connect(a.address)
    with peers.using(peers._peers[a.address]):
        for source in (b, c):
            await reader.puller.connect(source.address)
        assert set(peers._peers) == {a.address, c.address}


async def test_two_who_come_to_an_address_at_once_shake_hands_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = await make("p"), await make("d")
    peers = reader.puller._peers
    shaken = 0
    honest = peers._shake

    async def shake(*arguments: Any) -> Any:
        nonlocal shaken
        shaken += 1
        return await honest(*arguments)

    monkeypatch.setattr(peers, "_shake", shake)
    first, second = await asyncio.gather(*(peers.get(source.address, 5.0) for _ in range(2)))
    assert first is second
    assert shaken == 1
