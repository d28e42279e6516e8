"""A client that goes away at any stage leaves nothing behind on either worker, within a second and without a lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from protos.v1 import common_pb2, decode_pb2
from tests.integration.pd.conftest import ORACLE
from tests.integration.pd.router_client import Router, request
from tests.integration.pd.workers import WorkerProcess, baseline

pytestmark = pytest.mark.asyncio(loop_scope="module")

Pair = tuple[WorkerProcess, WorkerProcess]
LONG = [(i * 13) % 250 for i in range(2000)]  # four chunks of a slow engine
SHORT = LONG[:100]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Pair]:
    """A slow engine on both sides, and reads that take their time; no prefix cache, so that every run is a whole one.
    The lease is long: what frees the pages in this file is never the lease."""
    flags = {**ORACLE, "lease_s": 60}
    slow = {"PDSERVE_PREFIX_CACHE": "false", "PDSERVE_FAULTS": "engine.step=delay:0.05"}
    p = WorkerProcess("prefill", flags, slow)
    d = WorkerProcess("decode", flags, {**slow, "PDSERVE_FAULTS": "engine.step=delay:0.02,kv.read=delay:0.3"})
    try:
        await asyncio.gather(p.start(), d.start())
        yield p, d
    finally:
        codes = await p.stop(), await d.stop()
    assert codes == (0, 0), f"{p.log()}\n{d.log()}"


@pytest_asyncio.fixture(loop_scope="module")
async def router(pair: Pair) -> AsyncIterator[Router]:
    router = await Router(*pair).open()
    yield router
    await router.close()


async def gone(router: Router, work: common_pb2.WorkRequest) -> None:
    """Cancel, and nothing is held; and nothing more is said of the request."""
    await router.cancel(work)
    await baseline(router.p.worker, router.d.worker)
    while not router.d.queue(work.ref).empty():
        router.d.queue(work.ref).get_nowait()
    await asyncio.sleep(0.05)
    assert router.d.queue(work.ref).empty(), "a cancelled request still speaks"


async def test_while_it_waits_for_its_turn(router: Router) -> None:
    first = request(LONG)
    waiting = request([5, *LONG])
    await router.submit_both(first)
    await router.submit_both(waiting)
    await router.forward(first)
    await router.cancel(waiting)
    await gone(router, first)


async def test_while_it_is_submitted(router: Router) -> None:
    work = request(LONG)
    await router.submit_both(work)
    await gone(router, work)


async def test_in_prefill(router: Router) -> None:
    """Public report T034 (ai-dynamo/dynamo#13691)."""
    work = request(LONG)
    await router.submit_both(work)
    await router.forward(work)
    assert (await router.p.worker.load()).running == 1
    await gone(router, work)


async def test_between_prefill_and_decode(router: Router) -> None:
    work = request(SHORT)
    await router.submit_both(work)
    await router.p.next(work.ref)
    assert (await router.p.next(work.ref)).WhichOneof("event") == "done"
    await gone(router, work)


async def test_while_its_pages_are_read(router: Router) -> None:
    work = request(SHORT)
    await router.submit_both(work)
    await router.forward(work)
    await router.p.next(work.ref)
    await asyncio.sleep(0.1)  # inside the 0.3 s that a read takes here
    assert router.d.queue(work.ref).empty()
    await gone(router, work)


async def test_in_decode(router: Router) -> None:
    work = request(SHORT, max_tokens=1000)
    await router.submit_both(work)
    await router.forward(work)
    assert (await router.d.next(work.ref)).WhichOneof("event") == "handoff"
    for _ in range(3):
        assert (await router.d.next(work.ref)).WhichOneof("event") == "tokens"
    await gone(router, work)


async def test_in_decode_of_several_choices(router: Router) -> None:
    work = request(SHORT, max_tokens=1000, n=4, temperature=1.0)
    await router.submit_both(work)
    await router.forward(work)
    await router.d.next(work.ref)
    await router.d.next(work.ref)
    await gone(router, work)


async def test_before_the_submit_arrives(router: Router) -> None:
    work = request(SHORT)
    await router.cancel(work)
    await router.submit_both(work)
    assert (await router.p.next(work.ref)).failed.reason == "cancelled"
    assert (await router.d.next(work.ref)).failed.error.reason == "cancelled"
    await baseline(router.p.worker, router.d.worker)


async def test_fifty_times_after_prefill_and_before_decode_has_heard_of_it(router: Router) -> None:
    """Public report T093 (ai-dynamo/dynamo#13855; llm-d/llm-d#1138)."""
    for index in range(50):
        work = request([index, *SHORT[:31]])
        await router.p.send(submit=work)
        await router.p.next(work.ref)
        assert (await router.p.next(work.ref)).WhichOneof("event") == "done"
        await router.p.send(cancel=common_pb2.Cancel(ref=work.ref))
        await baseline(router.p.worker)
    assert (await router.d.worker.load()).running == 0


async def test_one_of_many_and_the_others_go_on(router: Router) -> None:
    works = [request([index, *SHORT], max_tokens=12) for index in range(8)]
    for work in works:
        await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    alone = [await router.local(request(list(works[0].tokens), max_tokens=12))]
    await router.d.send(cancel=common_pb2.Cancel(ref=works[3].ref))
    tokens: list[int] = []
    while True:
        event = (await router.d.next(works[0].ref)).tokens
        tokens += event.tokens
        if event.finish:
            break
    assert [tokens] == alone[0].tokens
    await baseline(router.d.worker, seconds=3)
