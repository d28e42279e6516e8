"""Running requests leave a worker by plan: the client sees one stream, and nothing is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router.dispatch.moving import Need
from router.dispatch.onward import Onward
from runtime.errors import DeadlineExceeded, Draining, KvLost, Saturated
from tests.integration.router.scripted import GO_ON, LENGTH, Leg, ScriptedWorker, scored, until
from tests.integration.router.sites import Site, config, site
from tests.integration.router.test_continuity import History, choices_of, first_of, history, honest_prefill, text, token


@dataclass
class Movable:
    """A decode script that says everything up to `stop_at`, then waits for `go`, and gives away what it is asked for.

    answer: what it does when asked, instead of that. pull: what it does with a continuation's ticket, instead of
    confirming."""

    stop_at: int = 1 << 30
    go: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    answer: Callable[[Leg], Any] | None = None
    pull: Callable[[Leg], Any] | None = None

    async def __call__(self, leg: Leg) -> None:
        start = first_of(leg)
        if not leg.local:
            await leg.ticket.wait()
            if self.pull is not None and leg.work.ref.attempt > 1:
                await self.pull(leg)
                return
            leg.handed_over()
            start += 1
        open_choices = list(choices_of(leg))
        limit = leg.work.sampling.max_tokens
        for sequence in range(start, limit):
            while open_choices and not await self._may_go_on(leg, sequence, open_choices):
                pass
            if not open_choices:
                return
            for c in open_choices:
                finish = LENGTH if sequence == limit - 1 else GO_ON
                leg.tokens(sequence, token(sequence, c), choice=c, finish=finish, logprobs=leg.work.sampling.logprobs)
            await asyncio.sleep(0)

    async def _may_go_on(self, leg: Leg, sequence: int, open_choices: list[int]) -> bool:
        """False: it waited, or gave something away. An own answer is its last."""
        if leg.wanted and self.answer is not None:
            await self.answer(leg)
            open_choices.clear()
        elif leg.wanted:
            choice = leg.wanted.pop(0)
            open_choices.remove(choice)
            give_away(leg, choice, sequence)
        elif sequence >= self.stop_at and not self.go.is_set():
            self.waiting += 1
            leg.asked.clear()
            await either(leg.asked, self.go)
        else:
            return True
        return False


async def either(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def give_away(leg: Leg, choice: int, sequence: int) -> None:
    """The choice leaves before it says `sequence`."""
    newest = token(sequence - 1, choice)
    leg.send(
        handed_over=decode_pb2.HandedOver(
            choice=choice,
            token_count=leg.work.prompt_len + sequence - 1,
            first=common_pb2.FirstToken(choice=choice, token=newest, logprob=scored(newest)),
            ticket=prefill_pb2.TicketIssued(ticket=b"continuation", source_address="127.0.0.1:2"),
        )
    )


class Fleet:
    """One prefill worker and decode workers d0, d1, ... of which the first ones to come say up to stop_at."""

    def __init__(self, decodes: int, stop_at: int) -> None:
        self.p = ScriptedWorker("prefill", "p0")
        self.p.prefill = honest_prefill
        self.d = [ScriptedWorker("decode", f"d{i}") for i in range(decodes)]
        for worker in self.d:
            worker.described.features.append("handover")
            worker.decode = Movable(stop_at)

    def script(self, worker: ScriptedWorker) -> Movable:
        assert isinstance(worker.decode, Movable)
        return worker.decode

    def go(self) -> None:
        """Everybody says all it has to."""
        for worker in self.d:
            self.script(worker).go.set()

    async def holder(self) -> ScriptedWorker:
        """The decode worker whose stream has come to the stop."""
        await until(lambda: any(self.script(worker).waiting for worker in self.d))
        return next(worker for worker in self.d if self.script(worker).waiting)

    def others(self, worker: ScriptedWorker) -> list[ScriptedWorker]:
        return [other for other in self.d if other is not worker]


@asynccontextmanager
async def running(decodes: int = 2, stop_at: int = 10, **settings: Any) -> AsyncIterator[tuple[Site, Fleet]]:
    fleet = Fleet(decodes, stop_at)
    async with site(fleet.p, *fleet.d, settings=config(moves_pressure_s=0.05, **settings)) as made:
        yield made, fleet


def moves(made: Site, outcome: str, reason: str = "drain") -> float:
    return made.metric("pdserve_moves_total", reason=reason, outcome=outcome)


def whole(seen: History, count: int = 40) -> bool:
    return (seen.texts, seen.finishes, seen.errors) == ({0: text(count)}, {0: "length"}, [])


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


# --- what may go wrong


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
