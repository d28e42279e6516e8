"""Workers give choices away when nobody expects it: before they are asked, several at once, with nothing said yet."""

from __future__ import annotations

import asyncio

import pytest

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from runtime.errors import Saturated
from tests.integration.router.honest import history, token
from tests.integration.router.moving import give_away, moves, running, whole
from tests.integration.router.scripted import GO_ON, LENGTH, STOP, Leg, ScriptedWorker, decode_answers, until
from tests.integration.router.sites import site


@pytest.mark.parametrize("refuses", [False, True])
async def test_what_leaves_while_room_is_still_asked_for_goes_on_once(refuses: bool) -> None:
    answer = asyncio.Event()
    async with running(decodes=3) as (made, fleet):
        call = asyncio.create_task(history(made))
        source = await fleet.holder()
        for worker in fleet.others(source):
            worker.on_reserve = answer.wait  # type: ignore[assignment]  # what it returns is nobody's business
            fleet.script(worker).go.set()
        source.advertise(draining=True)
        await until(lambda: any(worker.reserved for worker in fleet.others(source)))
        target = next(worker for worker in fleet.others(source) if worker.reserved)
        (other,) = (worker for worker in fleet.others(source) if worker is not target)
        if refuses:
            target.refuse = Saturated("full").detail()
        other.on_reserve = None

        (leg,) = source.legs.values()
        leg.wanted.append(0)
        leg.asked.set()
        await until(lambda: bool(other.submitted))
        answer.set()

        assert whole(await call)
        assert len(fleet.p.submitted) == 1, "nothing was computed again"
        assert moves(made, "moved") == 1
        await made.quiet()


async def test_what_is_given_away_before_anything_was_said_is_computed_elsewhere() -> None:
    """A lie: the state of all but the newest token of a prompt is nobody's to go on with."""
    lies = [True]

    async def lie(leg: Leg) -> None:
        if lies:
            lies.clear()
            leg.send(
                handed_over=decode_pb2.HandedOver(
                    token_count=leg.work.prompt_len - 1,
                    first=common_pb2.FirstToken(token=leg.work.tokens[-1]),
                    ticket=prefill_pb2.TicketIssued(ticket=b"t", source_address="127.0.0.1:2"),
                )
            )
            return
        await decode_answers(leg)

    workers = [ScriptedWorker("both", f"b{i}") for i in range(2)]
    for worker in workers:
        worker.decode = lie
    async with site(*workers) as made:
        status, body = await made.complete()
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        await made.quiet(prefill_confirmed=False)


async def test_choices_that_leave_together_ahead_of_the_prompts_answer_and_ended_meanwhile() -> None:
    """A drain in the middle of a prompt: D says tokens and gives both choices away before P's answer is here."""
    answered = asyncio.Event()

    async def prefill(leg: Leg) -> None:
        leg.ticket_issued()
        await answered.wait()
        leg.first(token(0, 0), token(0, 1))

    async with running(decodes=2) as (made, fleet):
        fleet.p.prefill = prefill

        async def early(leg: Leg) -> None:
            await leg.ticket.wait()
            leg.handed_over()
            for choice in range(2):
                leg.tokens(1, token(1, choice), choice=choice, finish=GO_ON)
            for choice in range(2):
                give_away(leg, choice, 2)
            await asyncio.sleep(0)
            answered.set()

        scripts = [fleet.script(worker) for worker in fleet.d]
        for worker, script in zip(fleet.d, scripts, strict=True):

            async def play(leg: Leg, script: object = script) -> None:
                await (early if leg.work.n == 2 else script)(leg)  # type: ignore[operator]

            worker.decode = play
            script.go.set()
        stop = chr(token(0, 1)) + chr(token(1, 1))
        status, body = await asyncio.wait_for(made.complete(n=2, stop=stop, max_tokens=6), 4)
        assert status == 200
        assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
        await made.quiet()


async def test_room_for_a_choice_that_ends_by_itself_is_given_back_at_once() -> None:
    """The other choice goes on, and its worker owes no answer for the one that has ended."""
    more = asyncio.Event()

    async def ends_one(leg: Leg) -> None:
        leg.tokens(10, token(10, 1), choice=1, finish=STOP)
        await more.wait()
        for sequence in range(10, 40):
            leg.tokens(sequence, token(sequence, 0), choice=0, finish=LENGTH if sequence == 39 else GO_ON)

    async with running() as (made, fleet):
        call = asyncio.create_task(history(made, n=2))
        source = await fleet.holder()
        (target,) = fleet.others(source)
        fleet.script(source).answer = ends_one
        passage = next(iter(made.router.dispatcher._passages()))
        assert made.router.dispatcher.moves.move(passage, 1, "drain")
        await until(lambda: moves(made, "ended") == 1)
        await until(lambda: not target.reservations)
        assert not call.done()
        more.set()
        seen = await call
        assert (seen.finishes, seen.errors) == ({0: "length", 1: "stop"}, [])
        await made.quiet()
