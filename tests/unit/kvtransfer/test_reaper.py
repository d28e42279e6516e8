"""An end that goes wrong is one hand-off's: other holds are released, watchers are told, and the reaper goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvtransfer.checksum import wsum64
from kvtransfer.inprocess import InProcessTransport
from kvtransfer.layout import Rank
from kvtransfer.service import KvSourceService
from kvtransfer.source import HandoffStore, State
from kvtransfer.tickets import TicketMint
from kvtransfer.transport import Incarnation, LocalRank
from kvtransfer.types import Layout, LegKey
from runtime.clock import FakeClock
from runtime.errors import PdserveError
from tests.unit.kvtransfer.support import LEASE_S, PAGES, TOKENS, World, key


@dataclass
class BadHold:
    """A hold whose release is a bug."""

    releases: int = 0

    def release(self) -> None:
        self.releases += 1
        raise ValueError("the pool refuses")


class GoodHold:
    def __init__(self) -> None:
        self.released = asyncio.Event()

    def release(self) -> None:
        self.released.set()


def handed_over(store: HandoffStore, k: LegKey, hold: BadHold | GoodHold) -> bytes:
    ticket = store.open(k, pages=PAGES, token_count=TOKENS, ready=0, hold=hold)
    store.final(k, state_length=TOKENS, first=[])
    return ticket


END: dict[str, Callable[[HandoffStore], object]] = {
    "expire": lambda store: store.expire(),
    "release": lambda store: store.release(key()),
    "fail": lambda store: store.fail(key(), PdserveError("the step failed")),
    "close": lambda store: store.close(),
}


@pytest.mark.parametrize("how", END)
def test_a_watcher_is_told_though_the_release_of_the_hold_fails(how: str) -> None:
    world, hold = World(), BadHold()
    ticket = world.store.open(key(), pages=PAGES, token_count=TOKENS, ready=0, hold=hold)
    watch = world.watch(ticket)
    if how == "expire":
        world.final()
    woken = world.wakes
    world.clock.advance(LEASE_S + 1)
    with pytest.raises(ValueError, match="refuses"):
        END[how](world.store)
    assert world.wakes == woken + 1
    assert world.store.poll(watch).error is not None
    assert world.store.counts().pages == 0
    assert hold.releases == 1  # a second try would free what is somebody else's by then


def test_closing_ends_every_hand_off_though_some_fail() -> None:
    world = World()
    goods = [GoodHold(), GoodHold()]
    for k, hold in (("a", goods[0]), ("b", BadHold()), ("c", goods[1])):
        handed_over(world.store, key(k), hold)
    with pytest.raises(ValueError, match="refuses"):
        world.store.close()
    assert all(good.released.is_set() for good in goods)
    assert world.store.counts().pages == 0


async def test_the_reaper_survives_holds_that_raise_and_ends_the_other_leases(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    store = HandoffStore(TicketMint("p", 7, b"f" * 32), clock, 0.01)
    rank = LocalRank(Rank("p/0/7", b"", ()), InProcessTransport(Incarnation("p", 0, 7)), wsum64)
    service = KvSourceService("p", 7, Layout((), "model", 512), [rank], store)
    service.start()
    goods: list[GoodHold] = []
    for index in range(4):  # bad ones before, between and after
        handed_over(store, key(f"bad{index}"), BadHold())
        goods.append(GoodHold())
        handed_over(store, key(f"good{index}"), goods[-1])
    handed_over(store, key("last"), BadHold())
    clock.advance(1)
    async with asyncio.timeout(10):
        for good in goods:
            await good.released.wait()
    later = GoodHold()
    handed_over(store, key("later"), later)
    clock.advance(1)
    async with asyncio.timeout(10):
        await later.released.wait()
    assert store.state(key("bad0")) is State.EXPIRED
    assert "the end of a hand-off failed" in caplog.text
    await service.close()
