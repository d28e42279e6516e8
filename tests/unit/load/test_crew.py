"""Load generators that do not come to their end: who is not let go, and who fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bench.load.crew import READY_S, Crew, patience_s
from bench.load.loader import Job
from bench.load.plan import Plan
from bench.load.target import Address

PLAN = Plan("random", "closed", requests=8, concurrency=8, input=(5, 5), output=(4, 4), vocab=50)
JOB = Job(Address("http", "http://127.0.0.1:1", "m", timeout_s=60.0), PLAN, warm=PLAN)


async def test_a_stop_in_the_warm_up_loses_no_load_generator() -> None:
    asked, stop = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        jobs = [replace(JOB, address=replace(JOB.address, address=url), part=part, of=2) for part in range(2)]
        async with Crew(jobs) as crew:
            ready = asyncio.create_task(crew.ready(stop))
            async with asyncio.timeout(60):
                await asked.wait()
            stop.set()
            assert not await ready
    assert [(one.lost, one.results) for one in crew.loaders] == [(False, [])] * 2


async def test_one_that_fails_in_the_run_is_lost_and_its_last_words_are_known() -> None:
    broken = replace(PLAN, arrival="poisson", rate=0.0)  # there is no such option
    async with Crew([replace(JOB, plan=broken, warm=None), replace(JOB, warm=None)]) as crew:
        assert await crew.ready(asyncio.Event())
        await crew.run(asyncio.Event(), lambda: None)
    assert [one.lost for one in crew.loaders] == [True, False]
    assert crew.why.startswith("ZeroDivisionError")
    assert [result.reason for result in crew.loaders[1].results] == ["unreachable"] * 8, "the other goes on"


@pytest.mark.parametrize(("requests", "of", "rounds"), [(1, 1, 1), (8, 1, 1), (9, 1, 2), (24, 3, 4), (1000, 8, 125)])
def test_a_warm_up_has_the_time_it_may_take(requests: int, of: int, rounds: int) -> None:
    """With eight places for all, and a timeout of a minute."""
    jobs = [replace(JOB, part=part, of=of, warm=replace(PLAN, requests=requests)) for part in range(of)]
    assert max(patience_s(job) for job in jobs) == READY_S + 60 * rounds
    assert patience_s(replace(JOB, warm=None)) == READY_S
