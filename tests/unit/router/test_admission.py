"""Keys, salts, permits and the line."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from router.admission.admission import Ask
from router.admission.line import Line
from router.admission.tenants import Keys, Permits, Salts, Tenant
from runtime.clock import FakeClock
from runtime.config import Config
from runtime.errors import InvalidRequest, QuotaExceeded, Saturated, Unauthenticated


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def keys(tmp_path: Path, text: str) -> Keys:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    return Keys.load(Config(api_keys_file=str(file)))


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    found = keys(tmp_path, f"{digest('k1')}: {{tenant: acme, max_inflight: 3}}\n{digest('k2')}: {{tenant: other}}\n")

    assert found.tenant("Bearer k1") == Tenant("acme", 3)
    assert found.tenant("bearer k2") == Tenant("other")


@pytest.mark.parametrize(
    "header", ["", "k1", "Bearer", "Bearer ", "Bearer wrong", "Basic k1", "Bearer k1 k1", "Bearer \ud800"]
)
def test_anything_but_a_configured_key_is_refused(tmp_path: Path, header: str) -> None:
    found = keys(tmp_path, f"{digest('k1')}: {{tenant: acme}}\n")

    with pytest.raises(Unauthenticated):
        found.tenant(header)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "k1: {tenant: a}",
        f"{hashlib.sha256(b'').hexdigest()}: {{tenant: a}}",
        f"{hashlib.sha256(b'k').hexdigest()}: {{tenant: ''}}",
        f"{hashlib.sha256(b'k').hexdigest()}: a",
        f"{hashlib.sha256(b'k').hexdigest()}: {{tenant: a, admin: true}}",
        f"{hashlib.sha256(b'k').hexdigest()}: {{tenant: a, max_inflight: -1}}",
        "a: [",
    ],
)
def test_a_file_that_would_let_somebody_in_by_mistake_stops_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        keys(tmp_path, text)

    assert refused.value.field == "api_keys_file"


def test_a_missing_file_of_keys_is_not_an_open_door(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        Keys.load(Config(api_keys_file=str(tmp_path / "none.yaml")))


def test_salts_never_meet() -> None:
    salts = Salts("secret")

    values = {
        salts.of(Tenant("org_1"), "2345"),
        salts.of(Tenant("org_12345"), ""),
        salts.of(Tenant("org_1"), ""),
        salts.of(Tenant(""), "org_12345"),
        Salts("other").of(Tenant("org_1"), ""),
    }

    assert len(values) == 5
    assert salts.of(Tenant("org_1"), "x") == Salts("secret").of(Tenant("org_1"), "x")
    assert Salts("").of(Tenant("a"), "") != Salts("").of(Tenant("a"), "")


def test_a_tenant_over_its_limit_is_told_so_and_others_are_not_touched() -> None:
    permits = Permits(10)
    small, other = Tenant("small", 2), Tenant("other")

    with permits.hold(small, 2), permits.hold(other, 1):
        with pytest.raises(QuotaExceeded), permits.hold(small, 1):
            pass
        with pytest.raises(Saturated), permits.hold(other, 8):
            pass
        assert permits.inflight == 3

    assert permits.inflight == 0


def test_a_permit_comes_back_when_its_request_fails() -> None:
    permits = Permits(1)

    with pytest.raises(ZeroDivisionError), permits.hold(Tenant("a"), 1):
        raise ZeroDivisionError

    assert permits.inflight == 0


def ask(number: int, due: float = 0.0, tenant: str = "default") -> Ask:
    return Ask(f"r{number}", tenant, arrived=0.0, due=due, deadline=1e9, prefill_s=1.0, tokens=10)


async def placed(line: Line, asks: list[Ask], gate: asyncio.Event, leave: int = -1) -> list[str]:
    """Who gets a place, one at a time once the gate opens; the one at `leave` has gone by then."""
    order: list[str] = []

    async def wait(one: Ask) -> None:
        async with line.place(one) as place:
            await place.turn()
            await gate.wait()
            await place.turn()  # somebody more urgent may have come
            order.append(one.request_id)
            place.taken()

    tasks = [asyncio.create_task(wait(one)) for one in asks]
    await asyncio.sleep(0.01)
    if leave >= 0:
        tasks[leave].cancel()
    gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(line) == 0
    return order


async def test_the_line_is_first_come_first_served_among_equals_and_a_leaver_does_not_hold_it_up() -> None:
    asks = [ask(number) for number in range(4)]
    assert await placed(Line(5, FakeClock()), asks, asyncio.Event(), leave=1) == ["r0", "r2", "r3"]


async def test_the_more_urgent_goes_first_although_it_came_later() -> None:
    asks = [ask(0, due=9.0), ask(1, due=5.0), ask(2, due=1.0)]
    assert await placed(Line(5, FakeClock()), asks, asyncio.Event()) == ["r2", "r1", "r0"]


async def test_tenants_take_turns_by_their_weights_however_many_one_brings() -> None:
    line = Line(50, FakeClock(), [Tenant("greedy"), Tenant("modest", weight=2.0)])
    asks = [ask(number, tenant="greedy") for number in range(8)] + [ask(10 + i, tenant="modest") for i in range(4)]
    order = await placed(line, asks, asyncio.Event())
    assert [name in ("r10", "r11", "r12", "r13") for name in order[:6]].count(True) == 4


async def test_a_full_line_takes_nobody_and_one_of_no_places_neither() -> None:
    line = Line(1, FakeClock())
    async with line.place(ask(0)):
        with pytest.raises(Saturated) as refused:
            async with line.place(ask(1)):
                pass
        assert (refused.value.reason, refused.value.retry_after_ms > 0) == ("queue_full", True)
    with pytest.raises(Saturated):
        async with Line(0, FakeClock()).place(ask(2)):
            pass


async def test_a_tenants_tokens_per_second_are_its_own_fault() -> None:
    clock = FakeClock()
    line = Line(5, clock, [Tenant("a", tokens_per_s=10.0, burst_tokens=20.0)])
    for number in range(2):
        line.check(ask(number, tenant="a"))
        line.passed(ask(number, tenant="a"))
    with pytest.raises(QuotaExceeded):
        line.check(ask(3, tenant="a"))
    line.check(ask(4, tenant="b"))
    clock.advance(1.5)
    line.check(ask(5, tenant="a"))


@pytest.mark.parametrize(
    "limits",
    ["weight: 0", "weight: -1", "weight: x", "max_waiting: 1.5", "tokens_per_s: .nan", "priority: 1000", "colour: red"],
)
def test_a_tenants_limits_are_checked_by_name(tmp_path: Path, limits: str) -> None:
    with pytest.raises(InvalidRequest):
        keys(tmp_path, f"{digest('k')}: {{tenant: a, {limits}}}")


async def test_a_turn_that_passes_to_another_tenant_by_what_one_has_used_wakes_that_tenants_request() -> None:
    line = Line(5, FakeClock())
    order: list[str] = []
    forever = float("inf")
    running = Ask("run", "a", 0.0, 1.0, forever)
    line.passed(running)

    async def waits(name: str, tenant: str) -> None:
        async with line.place(Ask(name, tenant, 0.0, 2.0 if tenant == "a" else 3.0, forever)) as place:
            assert await place.turn(10.0)
            if name == "a1":
                looked.set()
                await charged.wait()  # a look that found nobody
                assert await place.turn(10.0)
            place.taken()
            order.append(name)

    looked, charged = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        group.create_task(waits("a1", "a"))
        await looked.wait()
        group.create_task(waits("b1", "b"))
        await asyncio.sleep(0)
        line.over("run", prefill_s=50.0)
        charged.set()
    assert order == ["b1", "a1"]


async def test_time_in_the_line_counts_as_want_of_room_only_while_there_is_none() -> None:
    clock = FakeClock()
    line = Line(5, clock)
    async with line.place(ask(1)):
        clock.advance(40.0)
        assert line.short_s == 0.0, "workers are only busy"
        line.short(True)
        clock.advance(3.0)
        line.short(False)
        clock.advance(40.0)
        assert line.short_s == 3.0
        line.short(True)
        clock.advance(1.0)
    clock.advance(9.0)
    assert line.short_s == 4.0, "nobody waits any more"


async def test_whoever_must_give_way_does_not_count_as_waiting_behind() -> None:
    """`predicted` keeps prefill workers free for those behind: not one of priority, for those it goes before."""
    line = Line(10, FakeClock())
    waiting = [replace(ask(number), priority=priority) for number, priority in enumerate((1, 1, 0, 0, -1))]
    async with AsyncExitStack() as places:
        for one in waiting:
            await places.enter_async_context(line.place(one))
        assert [line.behind(priority) for priority in (-2, -1, 0, 1)] == [0, 0, 2, 4]
        line.placed("r4")
    assert line.behind(1) == 0
