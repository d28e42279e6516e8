"""A request that is over is freed at once, and nothing is kept of it that the collector has to look at: what waits for
the collector costs a busy router a fifth of its time, and each time it looks, the requests of 10 to 80 ms."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest

from bench._null_workers import ROLES, serve
from pdserve.client import AsyncClient
from protos.v1 import common_pb2, decode_pb2
from router.app import Router
from runtime.errors import PdserveError
from tests.integration.router.scripted import FILES, Leg, ScriptedWorker, until
from tests.integration.router.sites import config, site


@pytest.fixture
def uncollected() -> Iterator[list[object]]:
    """What only the collector would free, from now to the reading."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def ends(leg: Leg) -> None:
    await leg.ticket.wait()
    leg.handed_over()
    leg.send(failed=decode_pb2.DecodeFailed(error=common_pb2.ErrorDetail(reason="worker_failed", message="no")))


def good(prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
    """Every request goes well."""


def refused(prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
    decode.refuse = common_pb2.ErrorDetail(reason="no_room", message="no", retryable=True)


def too_long(prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
    prefill.refuse = common_pb2.ErrorDetail(reason="invalid_request", message="no")


def failing(prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
    decode.decode = ends


def gone(prefill: ScriptedWorker, decode: ScriptedWorker) -> None:
    prefill.advertised = decode.advertised = {"ready": False}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ["hello", "you"]])
@pytest.mark.parametrize("fate", [good, refused, too_long, failing, gone])
async def test_nothing_of_a_request_is_in_a_cycle(
    fate: Callable[[ScriptedWorker, ScriptedWorker], None],
    prompt: str | list[str],
    stream: bool,
    uncollected: list[object],
) -> None:
    """However it ended: the garbage of five hundred refusals would stop everybody for 40 ms."""
    workers = ScriptedWorker("prefill"), ScriptedWorker("decode")
    fate(*workers)
    hurried = config(retries=0, queue_timeout_s=0.1)
    async with site(*workers, settings=hurried, wait=fate is not gone) as made:
        body = {"prompt": prompt, "max_tokens": 4, "stream": stream}
        for _ in range(2):
            async with made.http.post("/v1/completions", json=body) as response:
                assert ('"error":{' in await response.text()) == (fate is not good)
        await made.quiet()

        gc.collect()

        assert not ours(uncollected)


@pytest.mark.parametrize("fate", [good, refused, too_long, failing, gone])
async def test_nothing_of_a_call_over_grpc_is_in_a_cycle(
    fate: Callable[[ScriptedWorker, ScriptedWorker], None], uncollected: list[object]
) -> None:
    workers = ScriptedWorker("prefill"), ScriptedWorker("decode")
    fate(*workers)
    hurried = config(retries=0, queue_timeout_s=0.1)
    async with site(*workers, settings=hurried, wait=fate is not gone) as made:
        async with AsyncClient(made.router.grpc) as client:
            for _ in range(2):
                with contextlib.nullcontext() if fate is good else pytest.raises(PdserveError):
                    await client.generate("hello", max_tokens=4)
        await made.quiet()

        gc.collect()

        assert not ours(uncollected)


def ours(uncollected: list[object]) -> list[str]:
    names = {f"{type(left).__module__}.{type(left).__qualname__}" for left in uncollected}
    return sorted(name for name in names if name.startswith("router."))


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    """With workers that keep nothing of a request, and take reservations over their streams."""
    made = await Router.start(config())
    workers = [asyncio.create_task(serve(role, made.grpc, FILES, [97, 98], 1)) for role in ROLES]
    try:
        await until(lambda: sum(state.usable for state in made.fleet.states()) == len(workers))
        yield made
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await made.close()


@pytest.fixture
def young() -> Iterator[Callable[[], Counter[str]]]:
    """What the collector would look at next time, by type: all that was made since and is still there."""
    gc.collect()
    gc.disable()
    try:
        yield lambda: Counter(type(known).__qualname__ for known in gc.get_objects(generation=0))
    finally:
        gc.enable()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_collector_has_no_more_to_look_at_after_many_requests_than_after_few(
    stream: bool, router: Router, young: Callable[[], Counter[str]]
) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "stream": stream}
    async with aiohttp.ClientSession(f"http://{router.http}") as http:

        async def ask(times: int) -> Counter[str]:
            for _ in range(times):
                async with http.post("/v1/completions", json=body) as response:
                    assert response.status == 200
                    await response.read()
            return young()

        few = await ask(150)  # caches that fill up once are full
        many = await ask(250)

    assert not {name: more for name, more in (many - few).items() if more >= 200}
