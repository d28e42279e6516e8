"""The chosen policy over real streams: who gets what, caches listened to, and accounts that come back to nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvtransfer.hashing import page_keys, root
from protos.v1 import common_pb2, worker_pb2
from router.policy.keys import PromptKeys
from tests.integration.router.scripted import FILES, LENGTH, Leg, ScriptedWorker, until
from tests.integration.router.sites import Site, config, site

POLICIES = ["least_load", "predicted", "round_robin", "power_of_two", "session_affinity", "dynamo", "sgl"]
STORED = worker_pb2.CacheEvent.KIND_STORED
REMOVED = worker_pb2.CacheEvent.KIND_REMOVED


class CachingWorker(ScriptedWorker):
    """Its cache feed says what the test puts into `feed`; every subscription is noted."""

    def __init__(self, role: str, worker_id: str) -> None:
        super().__init__(role, worker_id)
        self.asked: list[tuple[int, int]] = []
        self.feed: asyncio.Queue[worker_pb2.CacheEventBatch | None] = asyncio.Queue()
        self.snapshot: list[bytes] = []
        self.at = 1

    async def CacheEvents(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.CacheEventBatch]:  # noqa: N802
        self.asked.append((request.epoch, request.after_sequence))
        if request.after_sequence == 0 or request.epoch != self.epoch:
            yield worker_pb2.CacheEventBatch(
                first_sequence=self.at,
                events=[worker_pb2.CacheEvent(kind=STORED, page_keys=self.snapshot, tier="device")],
                snapshot=True,
                snapshot_end=True,
                epoch=self.epoch,
            )
        while (batch := await self.feed.get()) is not None:
            yield batch

    def says(self, kind: int, keys: list[bytes], *, sequence: int) -> None:
        event = worker_pb2.CacheEvent(kind=worker_pb2.CacheEvent.Kind.ValueType(kind), page_keys=keys, tier="device")
        self.feed.put_nowait(worker_pb2.CacheEventBatch(first_sequence=sequence, events=[event], epoch=self.epoch))


def fleet(prefills: int = 3, decodes: int = 2) -> list[CachingWorker]:
    workers = [CachingWorker("prefill", f"p{i}") for i in range(prefills)]
    workers += [CachingWorker("decode", f"d{i}") for i in range(decodes)]
    for worker in workers:
        worker.load = common_pb2.Load(pages_free=10_000, pages_total=10_000)
    return workers


def idle(made: Site) -> bool:
    ledger = made.router.planner.ledger
    ledger.check()
    return len(ledger) == 0


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_serves_spreads_and_books_nothing_for_good(policy: str) -> None:
    workers = fleet()
    async with site(*workers, settings=config(policy=policy)) as made:
        answers = await asyncio.gather(*(made.complete(prompt=f"call {i} " * 20, max_tokens=6) for i in range(30)))

        assert {status for status, _ in answers} == {200}
        assert {body["choices"][0]["text"] for _, body in answers} == {"abcdef"}
        prefills = Counter(worker.id for worker in workers for leg in worker.submitted if worker.role == "prefill")
        assert sum(prefills.values()) + sum(leg.local for w in workers for leg in w.submitted) == 30
        if policy != "session_affinity":
            assert len({worker.id for worker in workers if worker.submitted}) >= 3
        await made.quiet()
        assert idle(made)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_lost_worker_costs_no_request_under_any_policy(policy: str) -> None:
    workers = fleet()
    async with site(*workers, settings=config(policy=policy)) as made:
        calls = [asyncio.create_task(made.complete(prompt=f"call {i}", max_tokens=30)) for i in range(20)]
        await until(lambda: sum(len(worker.submitted) for worker in workers) > 10)
        await workers[0].die()

        answers = await asyncio.gather(*calls)
        assert {(status, len(body["choices"][0]["text"])) for status, body in answers} == {(200, 30)}
        await until(lambda: idle(made))


async def test_a_session_stays_with_its_pair() -> None:
    workers = fleet()
    async with site(*workers, settings=config(policy="session_affinity")) as made:
        for turn in range(6):
            status, _, _ = await made.post(
                "/v1/completions", {"prompt": f"turn {turn}", "max_tokens": 2}, headers={"x-session-id": "one"}
            )
            assert status == 200
        assert sorted(len(worker.submitted) for worker in workers) == [0, 0, 0, 6, 6]


# --- caches


def keys_of(made: Site, prompt: str) -> list[bytes]:
    return page_keys(root(_salt(made), FILES.name, FILES.fingerprint()), list(prompt.encode()))


def _salt(made: Site) -> bytes:
    return next(leg.work.salt for worker in made.workers for leg in worker.submitted)


PROMPT = "a prompt that is known already " * 40


async def used(made: Site, prompt: str = PROMPT) -> str:
    """The prefill worker that gets this prompt."""
    prefills = [worker for worker in made.workers if worker.role == "prefill"]
    before = {worker.id: len(worker.submitted) for worker in prefills}
    status, _ = await made.complete(prompt=prompt, max_tokens=2)
    assert status == 200
    return next(worker.id for worker in prefills if len(worker.submitted) > before[worker.id])


@pytest.mark.parametrize("policy", ["predicted", "dynamo", "sgl"])
async def test_a_prompt_goes_where_its_pages_are_and_no_longer_when_they_are_gone(policy: str) -> None:
    workers = fleet(decodes=1)
    async with site(*workers, settings=config(policy=policy)) as made:
        assert (await made.complete(prompt="teach me the salt, please", max_tokens=2))[0] == 200
        keys = keys_of(made, PROMPT)
        index = made.router.planner.index
        owner = workers[2]
        bit = index.bit(owner.id)
        await until(lambda: all(index.synced(worker.id) for worker in workers))

        async def finds_them(leg: Leg) -> None:
            leg.ticket_issued()
            leg.first(ord("a"), cached=16 * len(keys))

        owner.says(STORED, keys, sequence=2)
        owner.prefill = finds_them
        await until(lambda: index.position(owner.id)[1] >= 2)
        assert [await used(made) for _ in range(3)] == [owner.id] * 3

        owner.says(REMOVED, keys, sequence=3)
        await until(lambda: index.position(owner.id)[1] >= 3)
        found = index.match(PromptKeys(root(_salt(made), FILES.name, FILES.fingerprint()), list(PROMPT.encode())))
        assert found.get(bit) is None


async def test_a_gap_in_the_feed_and_a_lost_one_are_made_up_for() -> None:
    workers = fleet(prefills=1, decodes=1)
    owner = workers[0]
    async with site(*workers, settings=config(policy="predicted")) as made:
        index = made.router.planner.index
        await until(lambda: index.synced(owner.id))
        assert owner.asked == [(0, 0)]

        owner.snapshot, owner.at = [b"k" * 32], 9
        owner.says(STORED, [b"x" * 32], sequence=7)  # 2 to 6 were missed
        await until(lambda: index.position(owner.id) == (owner.epoch, 9))
        assert made.metric("pdserve_router_cache_feed_snapshots_total") == 1

        owner.feed.put_nowait(None)  # the stream ends
        await until(lambda: len(owner.asked) == 3)
        assert owner.asked[2] == (owner.epoch, 9), "it goes on where it was"


async def test_tenants_that_look_alike_do_not_share_what_is_known_of_caches() -> None:
    workers = fleet(prefills=2, decodes=1)
    async with site(*workers, settings=config(policy="predicted")) as made:
        assert (await made.complete(prompt="teach me the salt, please", max_tokens=2))[0] == 200
        index = made.router.planner.index
        await until(lambda: all(index.synced(worker.id) for worker in workers))
        workers[0].says(STORED, keys_of(made, PROMPT), sequence=2)
        await until(lambda: index.position(workers[0].id)[1] >= 2)

        await made.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "cache_salt": "mine"})

        served = next(leg.work for worker in workers for leg in worker.submitted if len(leg.work.tokens) == len(PROMPT))
        keys = PromptKeys(root(served.salt, FILES.name, FILES.fingerprint()), list(PROMPT.encode()))
        assert index.match(keys) == {}


async def test_what_workers_report_is_learned() -> None:
    workers = fleet(prefills=1, decodes=1)
    async with site(*workers, settings=config(policy="predicted")) as made:
        speeds = made.router.planner.speeds
        before = speeds.prefill_s("p0", 300, 0)
        for i in range(40):
            await made.complete(prompt=f"{i:03d}" * 100, max_tokens=8)
        assert speeds.prefill_s("p0", 300, 0) == pytest.approx(0.01, rel=0.3)  # as the scripted worker says
        assert before != pytest.approx(0.01, rel=0.3)
        assert speeds.output.expect(300, 100) < 100
        assert speeds.ttft_error.count > 30  # those computed where they decode report no seconds here
        async with made.http.get("/metrics") as response:
            assert "pdserve_router_ttft_prediction_error" in await response.text()


async def test_a_prompt_computed_where_it_decodes_is_off_the_workers_queue_at_its_first_token() -> None:
    (worker,) = workers = [CachingWorker("both", "b0")]
    worker.load = common_pb2.Load(pages_free=10_000, pages_total=10_000)
    more = asyncio.Event()

    async def one_token_and_a_pause(leg: Leg) -> None:
        leg.tokens(0, ord("a"))
        await more.wait()
        leg.tokens(1, ord("b"), finish=LENGTH)

    worker.decode = one_token_and_a_pause
    async with site(*workers, settings=config(policy="predicted")) as made:
        call = asyncio.create_task(made.complete(prompt="what decodes is no queue", max_tokens=2))
        await until(lambda: worker.submitted != [])
        view = made.router.planner.ledger.view("b0")
        assert view is not None
        await until(lambda: not view.work)

        assert (view.decoding, view.prefill_tokens) == (1, 0)
        more.set()
        assert (await call)[0] == 200
        assert made.router.planner.speeds.ttft_error.count == 1
        await made.quiet()
        assert idle(made)


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_a_worker_that_says_it_is_idle_and_refuses_is_not_asked_by_every_request(policy: str) -> None:
    workers = fleet(prefills=3, decodes=2)
    liar = workers[0]
    liar.refuse = common_pb2.ErrorDetail(reason="saturated", retryable=True)
    async with site(*workers, settings=config(policy=policy)) as made:
        for number in range(60):
            status, _ = await made.complete(prompt=f"{number} may I?", max_tokens=2)
            assert status == 200
        assert 1 <= len(liar.reserved) <= 15

        liar.refuse = None
        worker = made.router.fleet.worker(liar.id)
        assert worker is not None
        worker.reported(common_pb2.Load(pages_free=9_000, pages_total=10_000, sequence=1000))
        await asyncio.gather(*(made.complete(prompt=f"{number} and now?", max_tokens=2) for number in range(30)))
        assert liar.submitted != [], "what it says now is news"
        await made.quiet()


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_a_worker_that_grants_and_then_fails_is_left_alone_and_costs_no_request(policy: str) -> None:
    workers = fleet(prefills=3, decodes=2)
    liar = workers[0]

    async def fails(leg: Leg) -> None:
        leg.send(failed=common_pb2.ErrorDetail(reason="saturated", retryable=True, message="on second thought"))

    liar.prefill = fails
    async with site(*workers, settings=config(policy=policy)) as made:
        statuses = [(await made.complete(prompt=f"{number} may I?", max_tokens=2))[0] for number in range(60)]
        assert statuses == [200] * 60
        assert len(liar.submitted) <= 15
        await made.quiet()


class Gappy(CachingWorker):
    """Nothing it says of its cache follows what it said before."""

    async def CacheEvents(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.CacheEventBatch]:  # noqa: N802
        self.asked.append((request.epoch, request.after_sequence))
        yield worker_pb2.CacheEventBatch(first_sequence=99, epoch=self.epoch)


async def test_a_cache_feed_that_never_fits_is_asked_now_and_then_and_not_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.workers.planner.RETRY_S", 60.0)
    workers = [Gappy("prefill", "p0"), *fleet(prefills=1, decodes=1)[1:]]
    async with site(*workers, settings=config(policy="predicted")) as made:
        for number in range(20):
            status, _ = await made.complete(prompt=f"{number} is there time?", max_tokens=2)
            assert status == 200
        assert 1 <= len(workers[0].asked) <= 2
