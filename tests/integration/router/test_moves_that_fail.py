"""Moves of running requests in which something goes wrong: the client sees one stream all the same."""

from __future__ import annotations

import asyncio

import pytest

from protos.v1 import decode_pb2
from router.dispatch.onward import Onward
from runtime.errors import DeadlineExceeded, Draining, KvLost
from tests.integration.router.honest import history, honest_prefill, token
from tests.integration.router.moving import give_away, moves, running, whole
from tests.integration.router.scripted import LENGTH, Leg, until


async def test_a_target_that_dies_with_the_ticket_is_replaced_by_another() -> None:
    async def die(leg: Leg) -> None:
        await asyncio.Event().wait()

    async with running(decodes=3) as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        others = fleet.others(source)
        for worker in others:
            fleet.script(worker).pull = die
            fleet.script(worker).go.set()
        source.advertise(draining=True)
        await until(lambda: any(worker.legs for worker in others))
        first = next(worker for worker in others if worker.legs)
        second = next(worker for worker in others if worker is not first)
        fleet.script(second).pull = None

        await first.die()

        assert whole(await call)
        assert len(fleet.p.submitted) == 1, "the same ticket went to another one"
        assert [leg.work.ref.attempt for leg in second.submitted] == [3]
        await until(lambda: moves(made, "moved") == 1)


async def test_lost_pages_are_computed_again_elsewhere_and_given_back() -> None:
    async def lost(leg: Leg) -> None:
        fleet.script(target).pull = None
        failed = decode_pb2.DecodeFailed(error=KvLost("gone").detail(), kv_lost=True)
        leg.send(failed=failed)

    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(target).go.set()
        fleet.script(target).pull = lost
        source.advertise(draining=True)

        assert whole(await call)
        assert moves(made, "failed") == 1
        assert len(fleet.p.submitted) == 2
        assert list(fleet.p.submitted[1].work.tokens) == [*b"hello", *(token(i, 0) for i in range(10))]
        await source.until(lambda: source.ended_choices == [0])
        await made.quiet()


async def test_a_source_that_dies_when_it_is_asked_costs_nothing_but_time() -> None:
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(target).go.set()

        async def silent(leg: Leg) -> None:
            await asyncio.Event().wait()

        fleet.script(source).answer = silent
        source.advertise(draining=True)
        await source.until(lambda: len(source.handovers) == 1)
        await source.die()

        assert whole(await call)
        assert moves(made, "ended") == 1
        await until(lambda: target.held() == 0)
        assert not target.reservations, "what was booked for the move is given back"


async def test_a_client_that_leaves_in_the_move_leaves_nothing_behind() -> None:
    async def wait(leg: Leg) -> None:
        await asyncio.Event().wait()

    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(target).pull = wait
        source.advertise(draining=True)
        await until(lambda: bool(target.legs))

        call.cancel()
        await asyncio.wait([call])

        await until(lambda: target.cancelled != [])
        await source.until(lambda: source.ended_choices == [0])
        assert moves(made, "ended") == 1
        await made.quiet()


async def test_a_choice_that_ends_first_is_answered_by_its_end_alone() -> None:
    async def finish(leg: Leg) -> None:
        leg.tokens(10, token(10, 0), finish=LENGTH)

    async with running() as (made, fleet):
        call = asyncio.create_task(history(made, max_tokens=11))
        source = await fleet.holder()
        fleet.script(source).answer = finish
        source.advertise(draining=True)
        assert whole(await call, 11)
        assert moves(made, "ended") == 1
        await made.quiet()


async def test_a_request_that_has_nothing_to_give_begins_elsewhere_and_is_no_retry_of_the_budget() -> None:
    async def nothing(leg: Leg) -> None:
        leg.send(failed=decode_pb2.DecodeFailed(error=Draining("nothing here").detail()))

    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        fleet.script(fleet.others(source)[0]).go.set()
        fleet.script(source).answer = nothing
        before = made.router.dispatcher.budget._credit
        source.advertise(draining=True)
        assert whole(await call)
        assert made.router.dispatcher.budget._credit == before
        await made.quiet()


async def test_what_is_given_away_and_does_not_fit_what_was_said_is_not_gone_on_with() -> None:
    async def wrong(leg: Leg) -> None:
        give_away(leg, 0, 13)  # three tokens are missing

    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        fleet.script(fleet.others(source)[0]).go.set()
        fleet.script(source).answer = wrong
        source.advertise(draining=True)
        assert whole(await call)
        assert len(fleet.p.submitted) == 2, "computed again from what the client has"
        await source.until(lambda: source.ended_choices == [0])


async def test_a_source_that_comes_too_late_is_gone_on_from_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.dispatch.moves.ANSWER_S", 0.05)
    late = asyncio.Event()

    async def slowly(leg: Leg) -> None:
        await late.wait()
        give_away(leg, 0, 10)

    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(target).go.set()
        fleet.script(source).answer = slowly
        source.advertise(draining=True)
        await until(lambda: moves(made, "no_answer") == 1)
        await until(lambda: not target.reservations)
        late.set()
        assert whole(await call)
        assert len(fleet.p.submitted) == 1


async def test_a_stream_that_breaks_in_the_move_brings_the_answer_when_it_is_back() -> None:
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        fleet.script(fleet.others(source)[0]).go.set()

        async def over_a_break(leg: Leg) -> None:
            hellos = len(source.hellos)
            source.break_streams()
            give_away(leg, 0, 10)  # nobody hears it
            await until(lambda: any(hello.resume for hello in source.hellos[hellos:]))
            give_away(leg, 0, 10)

        fleet.script(source).answer = over_a_break
        source.advertise(draining=True)
        assert whole(await call)
        await until(lambda: moves(made, "moved") == 1)
        assert len(fleet.p.submitted) == 1


async def test_a_choice_that_leaves_before_its_first_token_is_told_waits_for_it() -> None:
    """The prompt's worker and the one that decodes speak over two streams."""
    told = asyncio.Event()

    async def slow_to_tell(leg: Leg) -> None:
        leg.ticket_issued()
        await told.wait()
        await honest_prefill(leg)

    async with running(stop_at=1) as (made, fleet):
        fleet.p.prefill = slow_to_tell
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(target).go.set()
        source.advertise(draining=True)
        await source.until(lambda: len(source.handovers) == 1)
        await until(lambda: not source.legs)
        assert target.submitted == [], "the router does not know yet what it goes on from"

        told.set()

        assert whole(await call)
        assert list(target.submitted[0].work.tokens) == [*b"hello"]
        await until(lambda: moves(made, "moved") == 1)


async def test_a_fault_in_a_move_costs_the_move_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def broken(onward: Onward, worker_id: str) -> bool:
        tried.append(worker_id)
        raise ZeroDivisionError if len(tried) % 2 else DeadlineExceeded("the request's deadline passed")

    monkeypatch.setattr(Onward, "reserve", broken)
    monkeypatch.setattr("router.dispatch.moves.AGAIN_S", 0.0)
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        source.advertise(draining=True)
        await until(lambda: moves(made, "failed") >= 1 and moves(made, "ended") >= 1)
        assert source.handovers == []
        fleet.go()
        assert whole(await call)
        await made.quiet()
        assert not made.router.dispatcher.moves._under_way
