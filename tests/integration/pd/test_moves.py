"""A running choice goes on at another worker: the bytes of its pages and state there, the tokens, and nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from kvtransfer.checksum import memory
from kvtransfer.types import Destination, Pulled, Region
from protos.v1 import common_pb2, decode_pb2
from tests.integration.hybrid.test_handoff import tokens_of
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import Collected, Link, request
from tests.integration.pd.workers import baseline

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
}


@dataclass
class Two:
    """Two decode workers of one model, and a router's stream to each."""

    a: LocalWorker
    b: LocalWorker
    to_a: Link
    to_b: Link

    async def alone(self, work: common_pb2.WorkRequest) -> Collected:
        """The answer of a request that stays where it is."""
        await self.to_a.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
        return await collect(self.to_a, work.ref, Collected(0, 0))

    async def moved(self, work: common_pb2.WorkRequest, after: int) -> Moved:
        """Begin at a; when `after` tokens are there, give it to b."""
        said = Collected(0, 0)
        await self.to_a.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
        while len(said.tokens.get(0, [])) < after:
            said.add((await self.to_a.next(work.ref)).tokens)
        gone = await self.give_away(work, said)
        onward = continuation(work, said.tokens[0], gone)
        await self.to_b.send(submit=decode_pb2.DecodeSubmit(request=onward, fence=2))
        await self.to_b.send(ticket=decode_pb2.DecodeTicket(ref=onward.ref, ticket=gone.ticket))
        before = len(said.tokens[0])
        event = await self.to_b.next(onward.ref)
        assert event.WhichOneof("event") == "handoff", event
        await collect(self.to_b, onward.ref, said)
        return Moved(said, gone, before, event.handoff.times)

    async def give_away(self, work: common_pb2.WorkRequest, said: Collected, choice: int = 0) -> decode_pb2.HandedOver:
        """Ask a for it; what it says before that is taken."""
        await self.to_a.send(handover=decode_pb2.Handover(ref=work.ref, choice=choice))
        while (event := await self.to_a.next(work.ref)).WhichOneof("event") == "tokens":
            said.add(event.tokens)
        assert event.WhichOneof("event") == "handed_over", event
        gone: decode_pb2.HandedOver = event.handed_over
        assert gone.token_count == work.prompt_len + len(said.tokens[choice]) - 1
        assert gone.first.token == said.tokens[choice][-1]
        return gone


@dataclass
class Moved:
    """before: tokens said at the first worker. times: of the transfer."""

    said: Collected
    gone: decode_pb2.HandedOver
    before: int
    times: common_pb2.StageTimes


async def collect(link: Link, ref: common_pb2.AttemptRef, said: Collected) -> Collected:
    while not said.finish:
        event = await link.next(ref)
        if event.WhichOneof("event") == "tokens":
            said.add(event.tokens)
    return said


def continuation(
    work: common_pb2.WorkRequest, said: list[int], gone: decode_pb2.HandedOver, attempt: int = 2
) -> common_pb2.WorkRequest:
    onward = common_pb2.WorkRequest()
    onward.CopyFrom(work)
    onward.ref.attempt = attempt
    onward.ref.request_id += f".{gone.choice}"
    onward.n, onward.choice = 1, gone.choice
    onward.tokens.extend(said[: gone.token_count - work.prompt_len])
    return onward


def region(worker: LocalWorker, region: Region) -> npt.NDArray[np.uint8]:
    return memory(region).reshape(-1, region.stride)


def held(worker: LocalWorker, gone: decode_pb2.HandedOver) -> dict[str, bytes]:
    """The bytes that the ticket's pages and slot have at their source, valid tokens of the last page only left out."""
    store = worker.parts.store
    (handoff,) = store._live.values()
    assert handoff.final is not None
    full = gone.token_count // 16
    return parts(worker, list(handoff.pages[:full]), list(handoff.final.slots))


def parts(worker: LocalWorker, pages: list[int], slots: list[int]) -> dict[str, bytes]:
    engine = worker.parts.engine
    paged = {c.name: c.paged for c in engine.model.components}
    return {r.component: region(worker, r)[pages if paged[r.component] else slots].tobytes() for r in engine.regions()}


SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.slow)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[SMOLLM2, "tiny-kimi", "tiny-kimi records"])
async def two(request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    name, _, records = request.param.partition(" ")
    flags: dict[str, Any] = {"dtype": "float32"}
    if records:
        flags |= {"replay_ssm": True, "deterministic": False}
    a, b = (LocalWorker("decode", config(name).model_copy(update=flags)) for _ in range(2))
    for worker in (a, b):
        await worker.start()
    links = Link(a, "decode", "router"), Link(b, "decode", "router")
    for link in links:
        await link.open()
    yield Two(a, b, *links)
    for link in links:
        await link.close()
    await asyncio.gather(a.stop(), b.stop())


@pytest.mark.parametrize(
    ("after", "options"),
    [
        (1, "seeded"),
        (17, "penalties"),
        pytest.param(16, "greedy", marks=pytest.mark.slow),
        pytest.param(1, "penalties", marks=pytest.mark.slow),
    ],
)
async def test_tokens_are_those_of_a_request_that_stays(two: Two, after: int, options: str) -> None:
    tokens = tokens_of(60, after)
    fields = {"max_tokens": 40, "logprobs": True, "top_logprobs": 5, **OPTIONS[options]}
    alone = await two.alone(request(tokens, **fields))

    moved = await two.moved(request(tokens, **fields), after)

    assert moved.said.tokens == alone.tokens
    assert moved.said.finish == alone.finish
    assert after <= moved.before < 40
    assert [p.token for p in moved.said.logprobs[0]] == moved.said.tokens[0]
    assert moved.gone.first.logprob == moved.said.logprobs[0][moved.before - 1]
    assert moved.times.transfer_pages <= -(-moved.gone.token_count // 16)
    await baseline(two.a, two.b)


async def test_the_bytes_at_the_target_are_those_at_the_source(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    work = request(tokens_of(70, 5), max_tokens=60)
    said = Collected(0, 0)
    await two.to_a.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
    while len(said.tokens.get(0, [])) < 8:
        said.add((await two.to_a.next(work.ref)).tokens)
    gone = await two.give_away(work, said)
    sent = held(two.a, gone)
    onward = continuation(work, said.tokens[0], gone)

    landed: dict[str, bytes] = {}
    pull = two.b.parts.puller.pull

    async def watched(ticket: bytes, address: str, dest: Destination, deadline: float, fence: int) -> Pulled:
        pulled = await pull(ticket, address, dest, deadline, fence)
        landed.update(parts(two.b, list(dest.pages[: gone.token_count // 16]), list(dest.slots)))
        return pulled

    with monkeypatch.context() as patch:
        patch.setattr(two.b.parts.puller, "pull", watched)
        await two.to_b.send(submit=decode_pb2.DecodeSubmit(request=onward, fence=2))
        await two.to_b.send(ticket=decode_pb2.DecodeTicket(ref=onward.ref, ticket=gone.ticket))
        assert (await two.to_b.next(onward.ref)).WhichOneof("event") == "handoff"
    assert landed == sent
    await collect(two.to_b, onward.ref, said)
    await baseline(two.a, two.b)


async def test_one_choice_goes_and_the_other_stays(two: Two) -> None:
    fields = {"max_tokens": 40, "temperature": 1.0, "seed": 5, "n": 2}
    tokens = tokens_of(50, 1)
    work = request(tokens, **fields)
    await two.to_a.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
    alone = Collected(0, 0)
    while len(alone.finish) < 2:
        alone.add((await two.to_a.next(work.ref)).tokens)

    work = request(tokens, **fields)
    said = Collected(0, 0)
    await two.to_a.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
    while len(said.tokens.get(1, [])) < 3:
        said.add((await two.to_a.next(work.ref)).tokens)
    gone = await two.give_away(work, said, choice=1)
    onward = continuation(work, said.tokens[1], gone)
    await two.to_b.send(submit=decode_pb2.DecodeSubmit(request=onward, fence=2))
    await two.to_b.send(ticket=decode_pb2.DecodeTicket(ref=onward.ref, ticket=gone.ticket))
    while 0 not in said.finish:
        said.add((await two.to_a.next(work.ref)).tokens)
    while 1 not in said.finish:
        event = await two.to_b.next(onward.ref)
        if event.WhichOneof("event") == "tokens":
            said.add(event.tokens)

    assert said.tokens == alone.tokens
    assert said.finish == alone.finish
    await baseline(two.a, two.b)


async def test_what_is_called_off_is_given_back_at_once(two: Two) -> None:
    work = request(tokens_of(50, 2), max_tokens=60)
    said = Collected(0, 0)
    await two.to_a.send(submit=decode_pb2.DecodeSubmit(request=work, local=True, fence=1))
    said.add((await two.to_a.next(work.ref)).tokens)
    await two.give_away(work, said)
    assert (await two.a.load()).leases == 1
    await two.to_a.send(cancel=common_pb2.Cancel(ref=work.ref, choices=[0]))
    await baseline(two.a)
