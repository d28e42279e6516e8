"""A request that is over is freed at once, and nothing is kept of it that the collector has to look at: what waits for
the collector costs a busy router a fifth of its time, and each time it looks, the requests of 10 to 80 ms."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest

from bench._null_workers import ROLES, serve
from router.app import Router
from tests.integration.router.scripted import FILES, ScriptedWorker, until
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


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_of_a_request_is_in_a_cycle(stream: bool, uncollected: list[object]) -> None:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        body = {"prompt": "hello", "max_tokens": 4, "stream": stream}
        for _ in range(2):
            async with made.http.post("/v1/completions", json=body) as response:
                assert response.status == 200
                await response.read()
        await made.quiet()

        gc.collect()

        ours = {f"{type(left).__module__}.{type(left).__qualname__}" for left in uncollected}
        assert not [name for name in ours if name.startswith("router.")]


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
