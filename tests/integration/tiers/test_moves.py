"""A request that pressure has put aside goes on at another worker, read from host memory by the same transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from protos.v1 import decode_pb2
from tests.integration.hybrid.test_handoff import tokens_of
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import Collected, Link, request
from tests.integration.pd.test_moves import Two, collect, continuation
from tests.integration.pd.workers import baseline, eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["oracle", "tiny-kimi"])
async def two(request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    flags: dict[str, Any] = {"host_pool_tokens": 1024, "host_poison": True}
    a, b = (LocalWorker("decode", config(request.param).model_copy(update=flags)) for _ in range(2))
    for worker in (a, b):
        await worker.start()
    links = Link(a, "decode", "router"), Link(b, "decode", "router")
    for link in links:
        await link.open()
    yield Two(a, b, *links)
    for link in links:
        await link.close()
    await asyncio.gather(a.stop(), b.stop())


def put_aside(worker: LocalWorker, request_id: str) -> None:
    """What pressure does to a running request, without the pressure; it is to leave from there."""
    engine = worker.parts.engine
    scheduler = engine._scheduler

    def swap() -> None:
        seq = next(s for s in scheduler._running if s.request.spec.key.request_id == request_id)
        scheduler._preempt(seq)
        scheduler.handover(seq.request.spec.key, 0)

    assert engine._between_steps(swap)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 4, "presence_penalty": 0.5}])
async def test_it_goes_on_from_host_memory(two: Two, fields: dict[str, Any]) -> None:
    tokens = [t % 250 for t in tokens_of(70, 1)]
    alone = await two.alone(request(tokens, max_tokens=150, **fields))
    work = request(tokens, max_tokens=150, **fields)
    said = Collected(0, 0)
    await two.to_a.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
    while len(said.tokens.get(0, [])) < 5:
        said.add((await two.to_a.next(work.ref)).tokens)

    put_aside(two.a, work.ref.request_id)
    while (event := await two.to_a.next(work.ref)).WhichOneof("event") == "tokens":
        said.add(event.tokens)
    gone = event.handed_over
    tiers = two.a.parts.engine.tiers
    assert tiers is not None
    assert tiers.host.pool.referenced == -(-gone.token_count // 16), "its bytes wait on the host"
    assert (await two.a.load()).pages_free == (await two.a.load()).pages_total, "and nowhere else"

    onward = continuation(work, said.tokens[0], gone)
    await two.to_b.send(submit=decode_pb2.DecodeSubmit(request=onward, fence=2))
    await two.to_b.send(ticket=decode_pb2.DecodeTicket(ref=onward.ref, ticket=gone.ticket))
    await collect(two.to_b, onward.ref, said)

    assert said.tokens == alone.tokens
    assert tiers.counts.swapped_in == 0
    await baseline(two.a, two.b)

    async def freed() -> bool:
        return tiers.host.pool.referenced == 0 and tiers.host_slots.referenced == 0

    await eventually(freed)
