"""A worker short of a prefix pulls it from another one's cache: tokens as from a cold run, and never a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from engine.api import EngineRequest, Sink
from engine.order import due_at
from kvtransfer.inprocess import Faults, InProcessTransport
from protos.v1 import common_pb2, kvsource_pb2
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import Answer, Router, request
from tests.integration.pd.workers import PATIENT, WorkerProcess, baseline

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

MODELS = {"oracle": (False, 90), "tiny-kimi": (True, 500)}


def source(worker: WorkerProcess, tokens: int, budget_ms: int = 10_000) -> common_pb2.PrefixSource:
    name = worker.parts.store._mint._worker_id if isinstance(worker, LocalWorker) else "source"
    return common_pb2.PrefixSource(
        worker_id=name, epoch=worker.epoch, address=worker.address, tokens=tokens, budget_ms=budget_ms
    )


@dataclass
class Fleet:
    """Two prefill workers, a decode worker, and one that fetches nothing: its answers are those of a cold run."""

    model: str
    p: LocalWorker
    q: LocalWorker
    d: LocalWorker
    cold: LocalWorker
    routers: list[Router]
    seeds: int = 0

    @property
    def state(self) -> bool:
        return MODELS[self.model][0]

    def prompt(self, length: int = 300) -> list[int]:
        """Another one every time."""
        self.seeds += 1
        vocabulary = MODELS[self.model][1]
        return [int(t) for t in np.random.default_rng(self.seeds).integers(4, vocabulary, length)]

    async def router(self, prefill: WorkerProcess, decode: WorkerProcess | None = None) -> Router:
        router = await Router(prefill, decode or self.d).open()
        self.routers.append(router)
        return router

    async def cold_answer(self, tokens: list[int], **options: Any) -> list[list[int]]:
        return (await (await self.router(self.cold, self.cold)).local(request(tokens, **options))).tokens

    async def warm(self, worker: LocalWorker, tokens: list[int], **options: Any) -> Answer:
        return await (await self.router(worker)).disaggregated(request(tokens, **options))

    async def fetched(self, worker: LocalWorker, tokens: list[int], named: common_pb2.PrefixSource) -> Answer:
        """An answer of `worker` and D that is a cold run's, whatever came of the fetch."""
        answer = await (await self.router(worker)).disaggregated(request(tokens, prefix_source=named))
        assert answer.tokens == await self.cold_answer(tokens)
        await self.idle()
        return answer

    async def idle(self) -> None:
        await baseline(self.p, self.q, self.d, seconds=5.0)

    def outcomes(self, worker: LocalWorker) -> dict[str, float]:
        found = next(iter(worker.parts.meter._fetches.collect())).samples
        return {s.labels["outcome"]: s.value for s in found if s.name.endswith("_total")}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(MODELS))
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    model = request.param
    more: dict[str, Any] = {"max_batch": 8, "chunk_tokens": 256, "lease_s": 3.0, "lease_margin_s": 0.5, **PATIENT}
    workers = [LocalWorker(role, config(model, **more)) for role in ("prefill", "prefill", "decode", "both")]
    await asyncio.gather(*(worker.start() for worker in workers))
    p, q, d, cold = workers
    made = Fleet(model, p, q, d, cold, [])
    yield made
    await asyncio.gather(*(router.close() for router in made.routers))
    await asyncio.gather(*(worker.stop() for worker in workers))


def wire(worker: LocalWorker) -> InProcessTransport:
    transport = worker.parts.transport
    assert isinstance(transport, InProcessTransport)
    return transport


@pytest.fixture
def q_reads(fleet: Fleet) -> Any:
    """Faults of what Q reads, gone after the test."""
    faults = wire(fleet.q).faults = Faults()
    yield faults
    wire(fleet.q).faults = Faults()


def missed(answer: Answer) -> bool:
    assert answer.prefill is not None
    return answer.prefill.fetched_tokens == 0 and answer.prefill.cached_tokens == 0


async def test_a_prefix_of_another_prefill_worker_is_not_computed_again(fleet: Fleet) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    answer = await fleet.fetched(fleet.q, tokens, source(fleet.p, 288))
    assert answer.prefill is not None
    assert answer.prefill.fetched_tokens == answer.prefill.cached_tokens == 288
    assert answer.prefill.transfer_bytes > 0
    assert answer.prefill.fetch_s > 0


async def test_the_next_turn_of_a_conversation_goes_to_a_cold_worker_with_the_end_of_the_last_one(fleet: Fleet) -> None:
    tokens = fleet.prompt(200)
    first = await fleet.warm(fleet.p, tokens, max_tokens=21)
    turn = [*tokens, *first.tokens[0], *fleet.prompt(40)]
    answer = await fleet.fetched(fleet.q, turn, source(fleet.d, 220))
    assert answer.prefill is not None
    assert answer.prefill.cached_tokens == (220 if fleet.state else 208), "the turn's end, or its last full page"


async def test_a_decode_worker_that_prefills_itself_fetches_too(fleet: Fleet) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    fleet.d.parts.engine.cache.clear()
    router = await fleet.router(fleet.p)
    answer = await router.local(request(tokens, prefix_source=source(fleet.p, 288)))
    assert answer.tokens == await fleet.cold_answer(tokens)
    assert answer.final is not None
    assert answer.final.fetched_tokens == answer.final.cached_tokens == 288
    await fleet.idle()


async def test_what_is_here_already_is_not_fetched(fleet: Fleet) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    await fleet.fetched(fleet.q, tokens, source(fleet.p, 288))
    before = fleet.outcomes(fleet.q).get("here", 0)
    again = await fleet.fetched(fleet.q, tokens, source(fleet.p, 288))
    assert again.prefill is not None
    assert again.prefill.fetched_tokens == 0
    assert again.prefill.cached_tokens == 288
    assert fleet.outcomes(fleet.q)["here"] == before + 1


async def test_another_tenants_equal_prompt_is_not_there(fleet: Fleet) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens, salt=b"one tenant")
    answer = await fleet.fetched(fleet.q, tokens, source(fleet.p, 288))
    assert missed(answer)


async def test_a_corrupted_byte_is_a_miss_and_nothing_is_published(fleet: Fleet, q_reads: Faults) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    q_reads.corrupt = True
    answer = await fleet.fetched(fleet.q, tokens, source(fleet.p, 288))
    assert missed(answer)
    assert fleet.outcomes(fleet.q)["checksum_mismatch"] >= 1


async def test_a_fetch_that_takes_longer_than_its_budget_is_a_miss_whose_pages_stay_until_it_is_quiet(
    fleet: Fleet, q_reads: Faults
) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    q_reads.gate = asyncio.Event()
    router = await fleet.router(fleet.q)
    answer = await router.disaggregated(request(tokens, prefix_source=source(fleet.p, 288, budget_ms=200)))
    assert missed(answer)
    assert (await fleet.q.load()).quarantined_pages > 0
    q_reads.gate.set()
    await fleet.idle()
    assert answer.tokens == await fleet.cold_answer(tokens)


@pytest.mark.parametrize("lie", [-16, 16, 500])
async def test_a_source_that_lies_about_what_it_offers_is_a_miss(
    fleet: Fleet, lie: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    offers = fleet.p.parts.source._offers
    assert offers is not None
    honest = offers.answer

    async def lying(
        request: kvsource_pb2.OfferPrefixRequest, identity: str, connection: str
    ) -> kvsource_pb2.OfferPrefixReply:
        reply = await honest(request, identity, connection)
        reply.token_count += lie
        return reply

    monkeypatch.setattr(offers, "answer", lying)
    assert missed(await fleet.fetched(fleet.q, tokens, source(fleet.p, 288)))


async def test_a_prompt_of_whole_pages_that_is_here_is_not_sought(fleet: Fleet) -> None:
    tokens = fleet.prompt(288)
    await fleet.warm(fleet.q, tokens)
    before = fleet.outcomes(fleet.q).get("here", 0)
    await fleet.fetched(fleet.q, tokens, source(fleet.p, 287))
    assert fleet.outcomes(fleet.q)["here"] == before + (0 if fleet.state else 1)


@pytest.mark.parametrize("wrong", ["epoch", "nobody", "no budget", "cold"])
async def test_a_source_that_is_gone_or_has_nothing_is_a_miss(fleet: Fleet, wrong: str) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    named = source(fleet.p, 288)
    match wrong:
        case "epoch":
            named.epoch += 1
        case "nobody":
            named.address = "127.0.0.1:9"
        case "no budget":
            named.budget_ms = 0
        case "cold":
            named = source(fleet.cold, 288)
    assert missed(await fleet.fetched(fleet.q, tokens, named))


async def test_a_request_cancelled_while_its_prefix_comes_leaves_nothing_behind(fleet: Fleet, q_reads: Faults) -> None:
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    q_reads.gate = asyncio.Event()
    router = await fleet.router(fleet.q)
    work = request(tokens, prefix_source=source(fleet.p, 288))
    await router.submit_both(work)
    await begun(fleet.q)
    await router.cancel(work)
    async with asyncio.timeout(10):
        while not (await fleet.q.load()).quarantined_pages:  # noqa: ASYNC110  only asked for
            await asyncio.sleep(0.005)
    q_reads.gate.set()
    await fleet.idle()
    assert fleet.q.parts.prefill.busy() == 0


async def test_a_prompt_whose_prefix_is_on_its_way_is_work_that_its_worker_reports(
    fleet: Fleet, q_reads: Faults
) -> None:
    """It is in no queue yet; what was booked for it says so until it is."""
    tokens = fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    q_reads.gate = asyncio.Event()
    router = await fleet.router(fleet.q)
    work = request(tokens, prefix_source=source(fleet.p, 288))
    needs = common_pb2.Needs(prompt_tokens=300, choices=1, prefill_tokens=300, slots=int(fleet.state))
    reserved = await fleet.q.prefill.Reserve(common_pb2.ReserveRequest(ref=work.ref, needs=needs, remaining_ms=60_000))
    work.reservation_id = reserved.reservation_id
    asked = asyncio.create_task(router.disaggregated(work))
    await begun(fleet.q)
    assert (await fleet.q.load()).queued_prefill_tokens == 300
    q_reads.gate.set()
    answer = await asked
    assert answer.prefill is not None
    assert answer.prefill.fetched_tokens == 288
    await fleet.idle()
    assert (await fleet.q.load()).queued_prefill_tokens == 0


@pytest.mark.parametrize("due_ms", [None, 700])
async def test_a_prompt_whose_prefix_is_on_its_way_keeps_its_place(
    fleet: Fleet, q_reads: Faults, monkeypatch: pytest.MonkeyPatch, due_ms: int | None
) -> None:
    """Whatever comes meanwhile comes after it: it is due when it came, or when its router says."""
    tokens, other = fleet.prompt(), fleet.prompt()
    await fleet.warm(fleet.p, tokens)
    q_reads.gate = asyncio.Event()
    engine, seen = fleet.q.parts.engine, dict[str, EngineRequest]()
    submit = engine.submit

    def seeing(work: EngineRequest, sink: Sink) -> None:
        seen[work.key.request_id] = work
        submit(work, sink)

    monkeypatch.setattr(engine, "submit", seeing)
    router, told = await fleet.router(fleet.q), {} if due_ms is None else {"due_ms": due_ms}
    first = request(tokens, prefix_source=source(fleet.p, 288), **told)
    asked = asyncio.create_task(router.disaggregated(first))
    await begun(fleet.q)
    second = request(other, **told)
    await router.disaggregated(second)
    assert first.ref.request_id not in seen
    q_reads.gate.set()
    await asked
    due = [due_at(work.due, work.priority, time.monotonic()) for work in seen.values()]
    assert list(seen) == [second.ref.request_id, first.ref.request_id]
    assert due[1] < due[0]
    await fleet.idle()


async def begun(worker: LocalWorker) -> None:
    """It reads from a peer."""
    async with asyncio.timeout(10):
        while not wire(worker)._tasks:  # noqa: ASYNC110  a read of another part
            await asyncio.sleep(0.005)


async def test_no_more_is_fetched_at_once_than_allowed(fleet: Fleet, q_reads: Faults) -> None:
    prompts = [fleet.prompt() for _ in range(6)]
    for tokens in prompts:
        await fleet.warm(fleet.p, tokens)
    q_reads.gate = asyncio.Event()
    before = fleet.outcomes(fleet.q).get("busy", 0)
    router = await fleet.router(fleet.q)
    asks = [request(tokens, prefix_source=source(fleet.p, 288)) for tokens in prompts]
    answers = [asyncio.create_task(router.disaggregated(work)) for work in asks]
    async with asyncio.timeout(10):
        while fleet.outcomes(fleet.q).get("busy", 0) < before + 2:  # noqa: ASYNC110  a count of another part
            await asyncio.sleep(0.005)
    q_reads.gate.set()
    fetched = [a.prefill.fetched_tokens for a in await asyncio.gather(*answers) if a.prefill is not None]
    assert sorted(fetched) == [0, 0, 288, 288, 288, 288]
    await fleet.idle()
