"""A tenant's limits over several routers: never exceeded together, never refused for what another does not use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.admission import Ask
from router.admission.line import Line
from router.admission.tenants import Permits, Tenant
from router.shared.quotas import IDLE_S, SPARE, Lease, Quotas, slot
from runtime.clock import FakeClock
from runtime.errors import QuotaExceeded, RegistryUnavailable
from runtime.metrics import Metrics
from runtime.registry.memory import MemoryStore
from runtime.registry.pools import Claim, Wish

TEN = Tenant("ten", max_inflight=10)
METERED = Tenant("metered", tokens_per_s=100, burst_tokens=1000)


class Flaky(MemoryStore):
    """A Redis that can be away."""

    away = False

    async def claim(self, pool: str, holder: str, wishes: Mapping[str, Wish], ttl_s: float) -> Claim:
        if self.away:
            raise RegistryUnavailable("away")
        return await super().claim(pool, holder, wishes, ttl_s)


class Door:
    """What stands at the door of one router."""

    def __init__(self, store: Flaky, clock: FakeClock, name: str, patience_s: float = 60.0) -> None:
        self.clock = clock
        self.line = Line(100, clock, [TEN, METERED])
        self.permits = Permits(1000)
        self.metrics = Metrics()
        self.quotas = Quotas(store, name, [TEN, METERED], self.line, clock, self.metrics, patience_s)
        self.permits.shares = self.quotas
        self.stack = ExitStack()
        self.admitted = 0
        self.asks = 0

    async def enter(self, tenant: Tenant = TEN, count: int = 1) -> bool:
        await self.permits.gather(tenant, count)
        self.stack.enter_context(self.permits.hold(tenant, count))
        self.admitted += count
        return True

    async def enters(self, tenant: Tenant = TEN, count: int = 1) -> bool:
        """Whether it is admitted when everybody settles once more."""
        try:
            return await self.enter(tenant, count)
        except QuotaExceeded:
            return False

    def leave(self) -> None:
        self.stack.close()
        self.admitted = 0

    def spend(self, tokens: int) -> bool:
        """One request of so many tokens, at once."""
        self.asks += 1
        now = self.clock.monotonic()
        ask = Ask(f"r{self.asks}", METERED.name, now, now + 10, now + 100, tokens=tokens)
        try:
            self.line.check(ask)
        except QuotaExceeded:
            return False
        self.line.passed(ask)
        self.line.over(ask.request_id)
        return True


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Flaky:
    return Flaky(clock)


async def settle(*doors: Door, times: int = 3) -> None:
    """Everybody a few times, and whoever waits has looked."""
    for _ in range(times):
        for door in doors:
            await door.quotas.settle()
            await asyncio.sleep(0)


async def among(doors: list[Door], *calls: Coroutine[Any, Any, bool]) -> list[bool]:
    """The answers, while all routers settle one after the other."""
    asking = [asyncio.create_task(call) for call in calls]
    while not all(task.done() for task in asking):
        await asyncio.sleep(0)
        await settle(*doors, times=1)
    return [task.result() for task in asking]


# --- prompts in flight


async def test_a_router_alone_has_the_whole_limit(store: Flaky, clock: FakeClock) -> None:
    one = Door(store, clock, "one")
    assert await among([one], *(one.enters() for _ in range(10))) == [True] * 10
    assert not await one.enters(), "and no more, at once: its own prompts are at the limit"


async def test_all_routers_together_never_exceed_the_limit_and_use_all_of_it(store: Flaky, clock: FakeClock) -> None:
    doors = [Door(store, clock, f"r{i}") for i in range(3)]
    answers = await among(doors, *(door.enters() for door in doors for _ in range(10)))
    assert sum(answers) == sum(door.admitted for door in doors) == 10


async def test_what_one_router_does_not_use_another_gets(store: Flaky, clock: FakeClock) -> None:
    one, two = Door(store, clock, "one"), Door(store, clock, "two")
    assert await among([one], one.enters()) == [True]
    assert one.quotas.allowed(TEN) > 1, "it keeps some while there is plenty"

    assert await among([two, one], *(two.enters() for _ in range(9))) == [True] * 9
    assert one.quotas.allowed(TEN) == 1


async def test_within_its_share_a_request_waits_for_nobody(store: Flaky, clock: FakeClock) -> None:
    one = Door(store, clock, "one")
    assert await among([one], one.enters()) == [True]
    store.away = True
    for _ in range(one.quotas.allowed(TEN) - 1):
        gathering = one.permits.gather(TEN, 1)
        with pytest.raises(StopIteration):
            gathering.send(None)  # it ends without giving way once
        one.stack.enter_context(one.permits.hold(TEN, 1))


async def test_the_refusal_is_the_one_a_single_router_gives(store: Flaky, clock: FakeClock) -> None:
    one, two = Door(store, clock, "one"), Door(store, clock, "two")
    await among([one], *(one.enters() for _ in range(10)))
    alone = Permits(1000)
    with pytest.raises(QuotaExceeded) as here:
        await among([two, one], two.enter())
    with alone.hold(TEN, 10), pytest.raises(QuotaExceeded) as there, alone.hold(TEN, 1):
        pass
    assert here.value.detail() == there.value.detail()


async def test_a_router_that_died_holds_nothing_for_long(store: Flaky, clock: FakeClock) -> None:
    one, two = Door(store, clock, "one"), Door(store, clock, "two")
    await among([one], *(one.enters() for _ in range(10)))

    clock.advance(3.1)  # nothing more is heard of it
    assert await among([two], two.enters(count=10)) == [True]


async def test_a_tenant_that_is_gone_is_forgotten(store: Flaky, clock: FakeClock) -> None:
    one = Door(store, clock, "one")
    await among([one], one.enters())
    one.leave()
    clock.advance(IDLE_S + 0.1)
    await settle(one)
    assert one.quotas._leases == {}


async def test_without_redis_the_last_share_holds_and_at_least_an_equal_one(store: Flaky, clock: FakeClock) -> None:
    one, two = Door(store, clock, "one"), Door(store, clock, "two")
    assert all(await among([one, two], *(one.enters() for _ in range(8))))

    await settle(one, two)
    store.away = True
    await settle(one, two)
    assert (one.quotas.allowed(TEN), two.quotas.allowed(TEN)) == (8, 5)
    assert all([await two.enters() for _ in range(5)])
    assert not await two.enters()
    assert one.admitted + two.admitted <= 2 * TEN.max_inflight
    assert one.metrics.value("pdserve_router_quotas_shared") == 0

    store.away = False
    await settle(one, two)
    assert two.quotas.allowed(TEN) < two.admitted, "nothing running is cut, nothing new comes until it is paid"
    assert one.quotas.allowed(TEN) + two.quotas.allowed(TEN) <= TEN.max_inflight
    assert one.metrics.value("pdserve_router_quotas_shared") == 1


async def test_a_redis_that_hangs_is_not_waited_for_twice(store: Flaky, clock: FakeClock) -> None:
    one = Door(store, clock, "one", patience_s=0.01)
    assert await one.enters(), "nobody settles: its equal part, which is all of it, is what it has"
    assert await one.enters()


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_whatever_happens_in_whatever_order_the_limit_holds(seed: int) -> None:
    async def play() -> None:
        chance = random.Random(seed)
        clock = FakeClock()
        store = Flaky(clock)
        doors = [Door(store, clock, f"r{i}", patience_s=0.0) for i in range(3)]
        for door in doors:
            await door.quotas.settle()
        for _ in range(60):
            door = chance.choice(doors)
            door.quotas._silent = False
            match chance.randrange(4):
                case 0:
                    door.leave()
                case 1:
                    door.quotas._lease(TEN).short = chance.randrange(4)
                    await door.quotas.settle()
                    door.quotas._lease(TEN).short = 0
                case 2:
                    clock.advance(chance.choice((0.01, 0.3)))
                    for other in doors:  # renewed in time
                        await other.quotas.settle()
                case _:
                    if door.quotas._lease(TEN).used < door.quotas.allowed(TEN):
                        door.stack.enter_context(door.permits.hold(TEN, 1))
                        door.admitted += 1
            assert sum(door.admitted for door in doors) <= TEN.max_inflight
            assert sum(door.quotas.allowed(TEN) for door in doors) <= TEN.max_inflight

    asyncio.run(play())


def test_a_lease_keeps_little_and_nothing_another_lacks() -> None:
    assert Lease(1000, used=5).want(2, 0.0) == 5 + SPARE
    assert Lease(10, used=5).want(2, 0.0) == 6
    assert Lease(10, used=5, others=5).want(2, 0.0) == 5
    assert Lease(1000, used=5, others_short=1).want(2, 0.0) == 5
    assert Lease(10, used=8, short=9).want(2, 0.0) == 10


def test_a_slot_names_nobody() -> None:
    assert slot("a tenant") != slot("another")
    assert "tenant" not in slot("a tenant")


# --- tokens


async def test_a_bucket_is_one_over_all_routers(store: Flaky, clock: FakeClock) -> None:
    one, two = Door(store, clock, "one"), Door(store, clock, "two")
    await settle(one, two, times=1)
    assert one.spend(600)
    await settle(one, two, times=1)
    clock.advance(1.0)  # 100 more
    await settle(one, two, times=1)
    assert not two.spend(600)
    assert two.spend(450)
    await settle(two, times=1)
    clock.advance(1.0)
    await settle(one, times=1)
    assert not one.spend(200)
    assert one.spend(150)


async def test_what_was_taken_too_much_at_once_is_paid_by_the_next(store: Flaky, clock: FakeClock) -> None:
    doors = [Door(store, clock, f"r{i}") for i in range(2)]
    await settle(*doors, times=1)
    assert all(door.spend(1000) for door in doors), "both had seen a full bucket"
    spent = 2000
    for _ in range(300):
        clock.advance(0.1)
        for door in doors:
            spent += 20 if door.spend(20) else 0
        await settle(*doors, times=1)
    assert spent <= METERED.burst_tokens + 30 * METERED.tokens_per_s + 2 * 20
    assert spent >= 0.9 * (METERED.burst_tokens + 30 * METERED.tokens_per_s)


async def test_without_redis_a_bucket_is_divided_as_it_was_used(store: Flaky, clock: FakeClock) -> None:
    one, two = Door(store, clock, "one"), Door(store, clock, "two")
    await settle(one, two, times=1)
    one.spend(300)
    two.spend(100)
    await settle(one, two)
    clock.advance(1.0)
    await settle(one, two)
    clock.advance(60.0)
    store.away = True
    await settle(one, two, times=1)
    assert 700 <= spendable(one) <= 800, "three quarters were its"
    assert spendable(two) == 500, "at least an equal part"

    clock.advance(5.0)
    store.away = False
    await settle(one, two, times=2)
    clock.advance(60.0)
    assert spendable(one) >= 900, "the whole bucket again"


def spendable(door: Door, step: int = 50) -> int:
    total = 0
    while door.spend(step):
        total += step
    return total


async def test_a_counter_that_jumps_or_goes_back_costs_at_most_two_buckets(store: Flaky, clock: FakeClock) -> None:
    one = Door(store, clock, "one")
    await settle(one, times=1)
    clock.advance(1.0)
    await store.add({f"tokens:{slot('metered')}": 2**52}, 60)
    await settle(one, times=1)
    assert not one.spend(10)
    clock.advance(11.0)  # 1100 tokens: back above nothing
    assert one.spend(10)

    store._counters.clear()
    clock.advance(30.0)
    await settle(one, times=1)
    assert one.spend(900)
