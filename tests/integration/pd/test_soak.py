"""Many requests that end in every way there is, in one process whose inside can be looked at: nothing is left."""

from __future__ import annotations

import asyncio
import random

from protos.v1 import common_pb2, decode_pb2
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import Router, request
from tests.integration.pd.workers import baseline


async def _one(router: Router, chance: random.Random) -> str:
    """A request with a random shape and a random end."""
    tokens = [chance.randrange(4) for _ in range(chance.choice([1, 15, 16, 17, 40, 200, 600]))]
    work = request(tokens, max_tokens=chance.randrange(2, 12), n=chance.choice([1, 1, 3]), temperature=1.0, seed=5)
    stages = chance.randrange(8)
    await router.p.send(submit=work)
    if stages == 0:
        await router.cancel(work)
        return "cancelled"
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, fence=1))
    if stages == 1:
        await asyncio.sleep(chance.random() * 0.02)
        await router.cancel(work)
        return "cancelled"
    await router.forward(work)
    if stages == 2:
        await asyncio.sleep(chance.random() * 0.02)
        await router.cancel(work)
        return "cancelled"
    done = (await router.p.next(work.ref)).done
    assert len(done.first) == work.n
    if stages == 3:
        await router.cancel(work)
        return "cancelled"
    finished = 0
    while finished < work.n:
        event = await router.d.next(work.ref)
        kind = event.WhichOneof("event")
        assert kind in ("handoff", "tokens"), event
        finished += kind == "tokens" and bool(event.tokens.finish)
        if stages == 4 and kind == "tokens":
            await router.cancel(work)
            return "cancelled"
    return "done"


async def test_three_hundred_requests_leave_no_page_no_lease_and_no_entry_behind() -> None:
    """Public report T141 (NVIDIA/TensorRT-LLM#12313)."""
    p = await LocalWorker("prefill", config("oracle", reattach_s=0.2)).start()
    d = await LocalWorker("decode", config("oracle", reattach_s=0.2)).start()
    router = await Router(p, d).open()
    chance = random.Random(7)
    ends: list[str] = []
    for _ in range(20):
        ends += await asyncio.gather(*(_one(router, chance) for _ in range(15)))
    assert ends.count("done") > 60
    assert ends.count("cancelled") > 60
    await baseline(p, d, seconds=3)
    await asyncio.sleep(0.7)  # finished legs are remembered twice reattach_s
    for worker in (p, d):
        parts = worker.parts
        parts.engine.check_baseline()
        assert parts.prefill.busy() == parts.decode.busy() == 0
        assert parts.prefill.remembered() == parts.decode.remembered() == 0
        assert parts.store.counts().pages == 0
    await router.close()
    assert await p.stop() == await d.stop() == 0


async def test_two_routers_share_a_pair_and_the_end_of_one_is_nothing_to_the_other() -> None:
    p = await LocalWorker("prefill", config("oracle")).start()
    d = await LocalWorker("decode", config("oracle")).start()
    one, two = await Router(p, d).open(), await Router(p, d).open()
    tokens = list(range(50))
    running = request(tokens, max_tokens=4000)
    await one.d.send(submit=decode_pb2.DecodeSubmit(request=running, local=True))
    await one.d.next(running.ref)
    work = asyncio.create_task(two.disaggregated(request(tokens, max_tokens=60)))
    await asyncio.sleep(0.01)
    await one.close()
    answer = await work
    assert answer.tokens == (await two.local(request(tokens, max_tokens=60))).tokens
    await baseline(p, d)
    assert answer.finish == [common_pb2.FINISH_REASON_LENGTH]
    await two.close()
    assert await p.stop() == await d.stop() == 0
