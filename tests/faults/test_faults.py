"""Workers that die and clients that leave, on a real cluster: every request ends, everything held comes back.

The model is the oracle, whose tokens depend on every page, with steps slowed down so that there is a middle to hit.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from deploy.fleet import Fleet
from pdserve import AsyncClient, Delta
from protos.v1 import common_pb2
from runtime.config import Config
from runtime.errors import PdserveError
from tests.cluster_tools import ForegroundCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEP_S, READ_S = 0.1, 0.4
LONG = "a prompt that takes a good while to compute, " * 130  # 5850 tokens, 12 chunks, so at least 12 steps
SHORT = "a short one"
PREFILL, DECODE = "prefill-0", "decode-0"


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForegroundCluster]:
    """One prefill and one decode worker whose every step and every read of pages takes a while."""
    faults = {"PDSERVE_FAULTS": f"engine.step=delay:{STEP_S},kv.read=delay:{READ_S}"}
    flags = ["--model=oracle", "--threads=1", "--max-batched-tokens=512", "--kv-pool-tokens=32768"]
    cluster = ForegroundCluster(tmp_path_factory.mktemp("slow"), *flags, env=faults)
    try:
        yield cluster.until_ready()
    finally:
        cluster.stop()


@dataclass(slots=True)
class Watcher:
    """The workers as they describe themselves."""

    fleet: Fleet

    async def record(self, name: str) -> Any:
        return next((one for one in await self.fleet.workers() if one.worker_id == name), None)

    async def load(self, name: str) -> common_pb2.Load:
        record = await self.record(name)
        assert record is not None
        return (await self.fleet.describe(record.address)).load

    async def idle(self, name: str) -> bool:
        """Whether a worker holds nothing for anybody: every page free or only cached."""
        load = await self.load(name)
        held = load.running + load.waiting + load.leases + load.pages_reserved + load.quarantined_pages
        return held == 0 and load.pages_free == load.pages_total

    async def both_idle(self) -> bool:
        return await self.idle(PREFILL) and await self.idle(DECODE)

    async def busy(self, name: str) -> bool:
        return (await self.load(name)).running > 0

    async def kill(self, name: str) -> int:
        """SIGKILL to the worker process; returns the epoch that died."""
        record = await self.record(name)
        os.kill(record.pid, signal.SIGKILL)
        return int(record.epoch)

    async def is_back(self, name: str, dead: int) -> bool:
        record = await self.record(name)
        return record is not None and record.ready and record.epoch > dead


@asynccontextmanager
async def watching(cluster: ForegroundCluster) -> AsyncIterator[tuple[Watcher, AsyncClient]]:
    record = cluster.record
    async with Fleet(record.grpc, Config.load({})) as fleet, AsyncClient(record.grpc) as client:
        watcher = Watcher(fleet)
        await until(watcher.both_idle, 5)
        yield watcher, client


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> float:
    """Wait for it; returns how long it took. Fails after `seconds`."""
    start = time.monotonic()
    while True:
        if await condition():
            return time.monotonic() - start
        assert time.monotonic() - start < seconds, f"{condition} did not come true within {seconds} s"
        await asyncio.sleep(0.02)


async def failure(task: asyncio.Task[Any], seconds: float) -> PdserveError:
    """The error a request ends with, within so long."""
    with pytest.raises(PdserveError) as caught:
        await asyncio.wait_for(task, seconds)
    return caught.value


async def next_request_is_right(watcher: Watcher, client: AsyncClient, expected: str) -> None:
    async def again() -> bool:
        try:
            return (await client.generate(SHORT, max_tokens=8, temperature=0)).text == expected
        except PdserveError as error:
            if not error.row.retryable:  # else the router sees the new worker a moment later
                raise
            return False

    await until(again, 20)
    await until(watcher.both_idle, 2)


async def test_a_prefill_worker_killed_in_its_work_ends_the_request_and_comes_back(slow: ForegroundCluster) -> None:
    async with watching(slow) as (watcher, client):
        expected = (await client.generate(SHORT, max_tokens=8, temperature=0)).text
        request = asyncio.create_task(client.generate(LONG, max_tokens=8, temperature=0))
        await until(lambda: watcher.busy(PREFILL), 5)

        dead = await watcher.kill(PREFILL)
        error = await failure(request, 1.0)
        assert error.row.retryable
        await until(lambda: watcher.idle(DECODE), 1.0)

        await until(lambda: watcher.is_back(PREFILL, dead), 30)
        await next_request_is_right(watcher, client, expected)


async def test_a_decode_worker_killed_in_its_work_ends_the_request_and_comes_back(slow: ForegroundCluster) -> None:
    async with watching(slow) as (watcher, client):
        expected = (await client.generate(SHORT, max_tokens=8, temperature=0)).text
        deltas: asyncio.Queue[Delta] = asyncio.Queue()

        async def follow() -> None:
            async for event in client.generate_stream(SHORT, max_tokens=200, temperature=0, ignore_eos=True):
                if isinstance(event, Delta):
                    deltas.put_nowait(event)

        request = asyncio.create_task(follow())
        for _ in range(3):
            await asyncio.wait_for(deltas.get(), 10)

        dead = await watcher.kill(DECODE)
        error = await failure(request, 1.0)
        assert error.row.retryable
        await until(lambda: watcher.idle(PREFILL), 1.0)

        await until(lambda: watcher.is_back(DECODE, dead), 30)
        await next_request_is_right(watcher, client, expected)


class HttpStream:
    """A streaming completion over a bare socket, which can be dropped as a vanished client would."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, address: str, prompt: str) -> HttpStream:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        wish = {
            "model": "oracle",
            "prompt": prompt,
            "max_tokens": 200,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        body = json.dumps(wish).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\n\r\n" + body)
        await writer.drain()
        return cls(reader, writer)

    async def events(self, count: int) -> None:
        """Wait for so many events with data."""
        while count:
            line = await asyncio.wait_for(self._reader.readline(), 20)
            assert line, "the stream ended early"
            count -= line.startswith(b"data: {")

    def drop(self) -> None:
        self._writer.transport.abort()


async def test_a_client_that_leaves_in_prefill_frees_everything(slow: ForegroundCluster) -> None:
    async with watching(slow) as (watcher, _):
        stream = await HttpStream.open(slow.record.http, LONG + "1")
        await until(lambda: watcher.busy(PREFILL), 5)
        assert not await watcher.both_idle()
        stream.drop()
        await until(watcher.both_idle, 1.0)


async def test_a_client_that_leaves_in_the_queue_frees_its_own_and_no_more(slow: ForegroundCluster) -> None:
    async with watching(slow) as (watcher, _):
        first = await HttpStream.open(slow.record.http, LONG + "2")
        await until(lambda: watcher.busy(PREFILL), 5)
        before = await watcher.load(DECODE)

        async def second_waits() -> bool:
            load = await watcher.load(DECODE)
            return load.pages_free < before.pages_free or load.pages_reserved > before.pages_reserved

        async def second_is_gone() -> bool:
            load = await watcher.load(DECODE)
            return (load.pages_free, load.pages_reserved) == (before.pages_free, before.pages_reserved)

        second = await HttpStream.open(slow.record.http, LONG + "3")
        await until(second_waits, 5)
        second.drop()
        await until(second_is_gone, 1.0)
        assert await watcher.busy(PREFILL), "the first is still at work"
        await first.events(2)
        first.drop()
        await until(watcher.both_idle, 1.0)


async def test_a_client_that_leaves_in_the_hand_off_frees_everything(slow: ForegroundCluster) -> None:
    async with watching(slow) as (watcher, _):
        stream = await HttpStream.open(slow.record.http, "a prompt for the hand-off, new to everybody")
        await stream.events(1)  # the first token comes from prefill; the pages are still to be read
        load = await watcher.load(PREFILL)
        assert load.leases == 1, "the pages are still held for the decode worker"
        assert not await watcher.both_idle()
        stream.drop()
        await until(watcher.both_idle, 1.0)


async def test_a_client_that_leaves_in_decode_frees_everything(slow: ForegroundCluster) -> None:
    async with watching(slow) as (watcher, _):
        stream = await HttpStream.open(slow.record.http, "a prompt for decode")
        await stream.events(4)
        assert await watcher.busy(DECODE)
        assert not await watcher.both_idle()
        stream.drop()
        await until(watcher.both_idle, 1.0)
