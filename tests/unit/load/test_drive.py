"""A process's requests against a server that ends them in every way: each leaves one result that says which."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.load import drive as drives
from bench.load.drive import Drive
from bench.load.plan import Plan, Tokens, Turn, sessions
from bench.load.results import COMPLETED, CUT, FAILED, REFUSED, Result
from bench.load.target import Address, Answer, Card, Target, opened
from deploy.ports import free_ports
from runtime.errors import WorkerLost
from tests.integration.router.scripted import until
from tests.unit.load import scripted
from tests.unit.load.scripted import Server

LOOP = Plan("random", "closed", seed=3, requests=12, concurrency=4, input=(5, 9), output=(4, 4), vocab=50)


class Marked:
    """A target whose prompts begin with a token that the server obeys."""

    def __init__(self, target: Target, kinds: Callable[[int], int]) -> None:
        self._target, self._kinds = target, kinds

    async def cards(self) -> list[Card]:
        return await self._target.cards()

    def request(self, turn: Turn, tokens: Tokens, key: str) -> Any:
        marked = tokens.copy()
        marked[0] = self._kinds(turn.number)
        return self._target.request(turn, marked, key)

    async def ask(self, request: Any, answer: Answer) -> None:
        await self._target.ask(request, answer)


class Bench:
    def __init__(self, server: Server, target: Target) -> None:
        self.server, self.target = server, target

    def drive(self, plan: Plan, kinds: Callable[[int], int] = lambda _: scripted.WHOLE, timeout_s: float = 20) -> Drive:
        return Drive(Marked(self.target, kinds), plan, 0, 1, timeout_s, time.perf_counter)

    async def results(self, plan: Plan, *more: Any, **options: Any) -> list[Result]:
        drive = self.drive(plan, *more, **options)
        await drive.run(asyncio.Event())
        assert drive.begun == len(drive.results), "every request has one result"
        return sorted(drive.results, key=lambda result: result.number)


@pytest.fixture(params=["http", "grpc"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    server = scripted.server()
    async with AsyncExitStack() as stack:
        over = scripted.over_http if request.param == "http" else scripted.over_grpc
        at = await stack.enter_async_context(over(server))
        address = Address(request.param, at, "scripted", token_ids=True, ledger=True)
        yield Bench(server, await stack.enter_async_context(opened(address)))


@pytest.mark.parametrize(
    ("kind", "state", "reasons"),
    [
        (scripted.WHOLE, COMPLETED, {""}),
        (scripted.EMPTY, COMPLETED, {""}),
        (scripted.REFUSES, REFUSED, {"429 reason_429", "RESOURCE_EXHAUSTED reason_429"}),
        (scripted.BUSY, REFUSED, {"503 reason_503", "UNAVAILABLE reason_503"}),
        (scripted.BREAKS, FAILED, {"worker_lost"}),
        (scripted.DROPS, FAILED, {"connection_lost", "unreachable"}),
        (scripted.NO_END, FAILED, {"stream_lost"}),
        (scripted.CUT_OFF, FAILED, {"stream_lost"}),
    ],
)
async def test_a_request_ends_as_the_server_ended_it_and_the_next_ones_go_on(
    bench: Bench, kind: int, state: str, reasons: set[str]
) -> None:
    results = await bench.results(LOOP, lambda number: kind if number == 5 else scripted.WHOLE)
    assert [result.number for result in results] == list(range(12))
    assert [result.state for result in results if result.number != 5] == [COMPLETED] * 11
    assert results[5].state == state
    assert results[5].reason in reasons
    assert results[5].due <= results[5].sent <= results[5].end


async def test_an_answer_is_measured_chunk_by_chunk(bench: Bench) -> None:
    one, *_ = await bench.results(replace(LOOP, requests=1))
    assert (one.asked_prompt, one.asked_output) == (one.prompt, one.output)
    assert one.cached == scripted.CACHED
    assert one.sent <= one.first <= one.last <= one.end
    assert len(one.gaps) == one.output - 1
    assert float(one.gaps.sum()) == pytest.approx(one.last - one.first, abs=1e-5)
    assert one.tpot == pytest.approx((one.last - one.first) / 3)


async def test_prompts_arrive_token_for_token_with_their_session(bench: Bench) -> None:
    results = await bench.results(LOOP)
    due = list(sessions(LOOP))
    wanted = {session.key: [scripted.WHOLE, *session.turns[0].tokens(50)[1:].tolist()] for session in due}
    assert dict(zip(bench.server.sessions, bench.server.asked, strict=True)) == wanted
    assert [len(session.turns[0].tokens(50)) for session in due] == [result.prompt for result in results]


async def test_a_silent_server_costs_the_timeout(bench: Bench) -> None:
    kinds = {2: scripted.SILENT}
    results = await bench.results(LOOP, lambda number: kinds.get(number, scripted.WHOLE), timeout_s=0.3)
    assert (results[2].state, results[2].reason) == (FAILED, "timeout")
    assert results[2].latency >= 0.3
    assert sum(result.state == COMPLETED for result in results) == 11


async def test_a_closed_loop_keeps_its_number_in_flight_and_no_more(bench: Bench) -> None:
    await bench.results(LOOP, lambda _: scripted.SLOW)
    assert bench.server.at_once == 4


async def test_a_request_counts_from_when_it_was_due_however_long_it_waits_for_a_place(bench: Bench) -> None:
    bench.server.slow_s = 0.1
    plan = replace(LOOP, arrival="burst", requests=5, concurrency=1)
    results = await bench.results(plan, lambda _: scripted.SLOW)
    assert bench.server.at_once == 1
    ordered = sorted(result.ttft for result in results)
    assert all(ttft >= 0.1 * (place + 1) for place, ttft in enumerate(ordered)), "the fifth waited for four"
    assert max(result.held for result in results) >= 0.4
    assert {result.due for result in results} == {0.0}


async def test_a_server_that_stands_still_does_not_keep_the_next_requests_from_being_sent(bench: Bench) -> None:
    plan = replace(LOOP, arrival="poisson", rate=200.0, concurrency=0, requests=20)
    drive, stop = bench.drive(plan, lambda _: scripted.SILENT), asyncio.Event()
    running = asyncio.create_task(drive.run(stop))
    await until(lambda: bench.server.running == 20)  # none is answered
    stop.set()
    await running
    results = sorted(drive.results, key=lambda result: result.number)
    assert [result.due for result in results] == [session.at for session in sessions(plan)]
    assert all(result.sent >= result.due for result in results)
    assert all(result.late + result.held == pytest.approx(result.sent - result.due) for result in results)


async def test_of_many_that_are_due_at_once_the_first_are_sent_before_the_last_are_made(bench: Bench) -> None:
    plan = replace(LOOP, arrival="burst", requests=300, concurrency=0)
    made: list[bool] = []
    sent = asyncio.Event()

    class Watched(Marked):
        def request(self, turn: Turn, tokens: Tokens, key: str) -> Any:
            made.append(sent.is_set())
            return super().request(turn, tokens, key)

        async def ask(self, request: Any, answer: Answer) -> None:
            sent.set()
            await super().ask(request, answer)

    target = Watched(bench.target, lambda _: scripted.WHOLE)
    await Drive(target, plan, 0, 1, 20, time.perf_counter).run(asyncio.Event())
    assert len(made) == 300
    assert not made[0]
    assert made[-1]


async def test_turns_carry_what_was_said_before_and_come_one_after_the_other(bench: Bench) -> None:
    plan = replace(LOOP, dataset="conversations", turns=3, requests=3, concurrency=1, think_s=0.05)
    results = await bench.results(plan)
    first, second, third = bench.server.asked
    answer = [0, 1, 2, 3]
    assert second[1 : len(first) + 4] == [*first[1:], *answer]
    assert third[1 : len(second) + 4] == [*second[1:], *answer]
    assert [result.prompt for result in results] == [len(first), len(second), len(third)]
    assert len(set(bench.server.sessions)) == 1
    for before, after in itertools.pairwise(results):
        assert after.due == pytest.approx(before.last + 0.05)
        assert after.sent >= after.due


async def test_turns_after_one_that_failed_are_not_sent_and_told(bench: Bench) -> None:
    plan = replace(LOOP, dataset="conversations", turns=4, requests=8, concurrency=1)
    results = await bench.results(plan, lambda number: scripted.BUSY if number == 1 else scripted.WHOLE)
    assert [result.state for result in results] == [COMPLETED, REFUSED, CUT, CUT, *[COMPLETED] * 4]
    assert {result.reason for result in results[2:4]} == {drives.NOT_REACHED}
    assert len(bench.server.asked) == 6


async def test_a_stop_cuts_short_what_is_under_way_or_waits_and_begins_nothing(bench: Bench) -> None:
    plan = replace(LOOP, arrival="burst", requests=6, concurrency=2)
    drive, stop = bench.drive(plan, lambda number: scripted.SILENT if number else scripted.WHOLE), asyncio.Event()
    running = asyncio.create_task(drive.run(stop))
    await until(lambda: len(drive.results) == 1 and bench.server.running == 2)
    stop.set()
    await running
    assert len(drive.results) == drive.begun == 6
    states = [result.state for result in sorted(drive.results, key=lambda result: result.number)]
    assert states == [COMPLETED, *[CUT] * 5]
    waited = [result for result in drive.results if not result.sent]
    assert len(waited) == 3, "they were due, and never sent"


async def test_after_its_duration_a_run_begins_nothing_and_ends_what_it_began(bench: Bench) -> None:
    bench.server.slow_s = 0.2
    plan = replace(LOOP, requests=0, duration_s=0.5, concurrency=2)
    results = await bench.results(plan, lambda _: scripted.SLOW)
    assert {result.state for result in results} == {COMPLETED}
    assert max(result.due for result in results) < 0.5
    assert max(result.end for result in results) >= 0.5


async def test_the_card_tells_what_the_server_takes(bench: Bench) -> None:
    (card,) = await bench.target.cards()
    assert (card.model, card.context) == ("scripted", 1000)


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_where_nobody_listens_the_look_says_so_and_a_request_fails(kind: Any) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    at = f"http://127.0.0.1:{port}" if kind == "http" else f"127.0.0.1:{port}"
    async with opened(Address(kind, at)) as target:
        with pytest.raises(WorkerLost, match=at):
            await target.cards()
        drive = Drive(target, replace(LOOP, requests=2), 0, 1, 20, time.perf_counter)
        await drive.run(asyncio.Event())
    assert [(result.state, result.reason) for result in drive.results] == [(FAILED, "unreachable")] * 2


async def test_a_conversation_with_a_server_that_tells_no_tokens_ends_with_that_reason() -> None:
    server = scripted.server()
    server.tells_tokens = False
    plan = replace(LOOP, dataset="conversations", turns=2, requests=2, concurrency=1)
    async with scripted.over_http(server) as url, opened(Address("http", url, token_ids=True)) as target:
        results = await Bench(server, target).results(plan)
    assert [(result.state, result.reason) for result in results] == [(COMPLETED, ""), (CUT, drives.NO_TOKENS)]
    assert results[0].output == 4


async def test_texts_are_sent_as_they_stand() -> None:
    server = scripted.server()
    turn = Turn(0, (), 5, "Grüße")
    async with scripted.over_http(server) as url:
        async with opened(Address("http", url, "m")) as target:
            assert '"prompt":"Grüße","max_tokens":5' in target.request(turn, np.zeros(0, np.uint32), "k")[0].decode()
        async with opened(Address("http", url, "m", chat=True)) as target:
            said = target.request(turn, np.zeros(0, np.uint32), "k")[0].decode()
            assert '"messages":[{"role":"user","content":"Grüße"}]' in said
    async with opened(Address("grpc", "127.0.0.1:1", chat=True)) as target:
        assert target.request(turn, np.zeros(0, np.uint32), "k")[0].chat.messages[0].content == "Grüße"
