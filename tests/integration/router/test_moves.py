"""Running requests leave a worker by plan: the client sees one stream, and nothing is computed again."""

from __future__ import annotations

import asyncio

import pytest

from protos.v1 import common_pb2
from router.dispatch.moving import Need
from runtime.errors import Saturated
from tests.integration.router.honest import history, text, token
from tests.integration.router.moving import moves, running, whole
from tests.integration.router.scripted import ScriptedWorker, until
from tests.integration.router.sites import Site


@pytest.mark.parametrize("stop_at", [2, 10, 39])
async def test_a_drained_worker_gives_its_streams_away_and_the_client_sees_one(stop_at: int) -> None:
    async with running(stop_at=stop_at) as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(target).go.set()

        source.advertise(draining=True)

        assert whole(await call)
        (leg,) = target.submitted
        work = leg.work
        assert (list(work.tokens), work.prompt_len) == (
            [*b"hello", *(token(i, 0) for i in range(stop_at - 1))],
            5,
        ), "all the state holds: everything said but the newest token"
        assert (leg.local, work.n, work.choice, work.ref.attempt) == (False, 1, 0, 2)
        assert len(fleet.p.submitted) == 1, "nothing was computed again"
        await until(lambda: moves(made, "moved") == 1)
        assert made.metric("pdserve_move_seconds_count", reason="drain") == 1
        assert made.metric("pdserve_router_retries_total", kind="continue") == 0
        await until(lambda: not source.legs)
        await made.quiet()
        assert made.metric("pdserve_requests_total", outcome="completed", reason="") == 1


async def test_what_moves_is_booked_where_it_goes_and_given_back_everywhere() -> None:
    async with running(policy="predicted") as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        source.advertise(draining=True)
        await until(lambda: bool(fleet.script(target).waiting))
        views = {view.worker_id: view for view in made.router.planner.ledger.views()}
        assert (views[source.id].decoding, views[target.id].decoding) == (0, 1)
        fleet.go()
        assert whole(await call)
        await made.quiet()
        assert all(view.held_tokens == view.decoding == 0 for view in views.values())


async def test_a_worker_that_will_only_compute_prompts_gives_its_streams_away() -> None:
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        fleet.script(fleet.others(source)[0]).go.set()
        source.advertise(role=common_pb2.ROLE_PREFILL)
        assert whole(await call)
        await until(lambda: moves(made, "moved", "role") == 1)


async def test_many_streams_leave_a_few_at_a_time_and_none_fails() -> None:
    async with running(moves_at_once=2) as (made, fleet):
        calls = [asyncio.create_task(history(made)) for _ in range(8)]
        await until(lambda: sum(fleet.script(worker).waiting for worker in fleet.d) == 8)
        source, target = fleet.d
        fleet.script(target).go.set()
        here = len(source.legs)

        source.advertise(draining=True)
        await until(lambda: not source.legs)

        assert all(whole(seen) for seen in await asyncio.gather(*calls))
        await until(lambda: moves(made, "moved") == here)
        await made.quiet()


async def test_what_nobody_has_room_for_stays_and_finishes_where_it_is() -> None:
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        fleet.others(source)[0].refuse = Saturated("full").detail()
        source.advertise(draining=True)
        await until(lambda: moves(made, "refused") >= 1)
        assert source.handovers == [], "nobody is asked for what has no other place"
        fleet.go()
        assert whole(await call)
        await made.quiet()


async def test_a_lone_worker_keeps_what_it_has() -> None:
    async with running(decodes=1) as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        source.advertise(draining=True)
        await until(lambda: moves(made, "refused") >= 1)
        fleet.go()
        assert whole(await call)


async def test_moves_may_be_switched_off() -> None:
    async with running(moves=False) as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        source.advertise(draining=True)
        await until(lambda: sum(state.usable for state in made.router.fleet.states()) == 2)
        assert not made.router.dispatcher.moves._tasks, "nobody looks"
        fleet.go()
        assert whole(await call)


async def test_a_worker_that_cannot_give_away_is_not_asked() -> None:
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        worker = made.router.fleet.worker(source.id)
        assert worker is not None
        assert worker.facts is not None
        worker.facts.features.remove("handover")
        source.advertise(draining=True)
        await until(lambda: sum(state.usable for state in made.router.fleet.states()) == 2)
        made.router.dispatcher.moves.look()
        assert not made.router.dispatcher.moves._under_way
        fleet.go()
        assert whole(await call)


async def test_every_choice_moves_by_itself_with_its_own_noise() -> None:
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made, n=2))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(target).go.set()
        source.advertise(draining=True)
        seen = await call
        assert seen.texts == {0: text(40), 1: text(40, 1)}
        assert {(leg.work.n, leg.work.choice) for leg in target.submitted} == {(1, 0), (1, 1)}
        assert len({leg.work.ref.request_id for leg in target.submitted}) == 2
        await made.quiet()


async def test_log_probabilities_and_stop_strings_span_the_move() -> None:
    async with running(stop_at=6) as (made, fleet):
        call = asyncio.create_task(made.complete(max_tokens=40, stop="efgh", logprobs=1))
        source = await fleet.holder()
        fleet.script(fleet.others(source)[0]).go.set()
        source.advertise(draining=True)
        status, body = await call
        choice = body["choices"][0]
        assert (status, choice["text"], choice["finish_reason"]) == (200, "abcd", "stop")
        assert choice["logprobs"]["tokens"] == list("abcdefgh")
        assert body["usage"]["completion_tokens"] == 8
        await made.quiet()


# --- pressure


def load(worker: ScriptedWorker, made: Site, swapped: int) -> None:
    """What it reports from now on."""
    sequence = worker.load.sequence + 1
    worker.load = common_pb2.Load(pages_total=100, pages_free=100, sequence=sequence, swapped=swapped)
    known = made.router.fleet.worker(worker.id)
    assert known is not None
    known.reported(worker.load)


async def test_a_worker_short_of_memory_gives_one_request_to_one_that_has_room() -> None:
    async with running() as (made, fleet):
        calls = [asyncio.create_task(history(made)) for _ in range(4)]
        await until(lambda: sum(fleet.script(worker).waiting for worker in fleet.d) == 4)
        source = max(fleet.d, key=lambda worker: fleet.script(worker).waiting)
        load(fleet.others(source)[0], made, swapped=0)
        load(source, made, swapped=1)
        await until(lambda: moves(made, "moved", "pressure") == 1)
        load(source, made, swapped=0)  # that was enough
        assert len(source.handovers) == 1
        fleet.go()
        assert all(whole(seen) for seen in await asyncio.gather(*calls))
        assert moves(made, "moved", "pressure") == 1
        await made.quiet()


async def test_pressure_is_not_carried_to_a_worker_that_has_it_too() -> None:
    async with running() as (made, fleet):
        call = asyncio.create_task(history(made))
        await fleet.holder()
        made.router.dispatcher.moves._need = Need(after_s=0)
        for worker in fleet.d:
            load(worker, made, swapped=1)
        made.router.dispatcher.moves.look()
        assert not made.router.dispatcher.moves._under_way
        fleet.go()
        assert whole(await call)
