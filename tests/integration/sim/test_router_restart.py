"""`pdserve restart --part routers`: other router processes at the same addresses, and no request is the wiser."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from deploy.state import ClusterRecord
from pdserve import AsyncClient
from runtime.errors import PdserveError
from tests.cluster_tools import ForegroundCluster, run_pdserve, until
from tests.unit.runtime.servers import RedisServer

FLAGS = ["--sim=sim-h100-8b", "--prefill=2", "--decode=2", "--model=oracle", "--http-listen=127.0.0.1:0"]


class Load:
    """Clients of all kinds. ended: how their requests did, by kind; "completed" is all one wants to see."""

    def __init__(self, record: ClusterRecord) -> None:
        self._record = record
        self._over = asyncio.Event()
        self.ended: Counter[tuple[str, str]] = Counter()

    async def http(self, kind: str, *, stream: bool, keep: bool) -> None:
        connector = aiohttp.TCPConnector(force_close=not keep)
        async with aiohttp.ClientSession(f"http://{self._record.http}", connector=connector) as session:
            while not self._over.is_set():
                try:
                    self.ended[kind, await self._ask(session, stream)] += 1
                except aiohttp.ClientError as error:
                    self.ended[kind, repr(error)] += 1

    async def _ask(self, session: aiohttp.ClientSession, stream: bool) -> str:
        body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stream": stream}
        async with session.post("/v1/completions", json=body) as answer:
            text = await answer.text()
        whole = text.endswith("data: [DONE]\n\n") and '"error"' not in text if stream else answer.status == 200
        return "completed" if whole else f"{answer.status} {text[-200:]}"

    async def grpc(self, kind: str, *, keep: bool) -> None:
        while not self._over.is_set():
            async with AsyncClient(self._record.grpc) as client:
                while not self._over.is_set():
                    try:
                        await client.generate("hello", max_tokens=40, ignore_eos=True)
                        self.ended[kind, "completed"] += 1
                    except PdserveError as error:
                        self.ended[kind, repr(error)] += 1
                    if not keep:
                        break

    def completed(self) -> Counter[str]:
        return Counter({kind: count for (kind, how), count in self.ended.items() if how == "completed"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        both = (False, True)
        clients = [self.http(f"http {keep=} {stream=}", keep=keep, stream=stream) for keep in both for stream in both]
        clients += [self.grpc(f"grpc {keep=}", keep=keep) for keep in both]
        tasks = [asyncio.create_task(client) for client in clients]
        try:
            yield
        finally:
            self._over.set()
            await asyncio.gather(*tasks)

    async def goes_on(self) -> None:
        """Until every kind of client has had answers since now."""
        before = self.completed()
        async with asyncio.timeout(60):
            while len(+(self.completed() - before)) < 6:  # noqa: ASYNC110  other processes
                await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("routers", [1, 2])
async def test_routers_are_replaced_under_load_and_no_request_fails(tmp_path: Path, routers: int) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    shared = [f"--routers={routers}", f"--registry={redis.url}"] if routers > 1 else []
    cluster = ForegroundCluster(tmp_path, *FLAGS, *shared)
    try:
        await asyncio.to_thread(cluster.until_ready)
        before = await asyncio.to_thread(until, lambda: cluster.record.routers, 10)
        load = Load(cluster.record)
        async with load.running():
            await load.goes_on()
            done = await asyncio.to_thread(run_pdserve, "restart", "--part=routers", *cluster.flags)
            await load.goes_on()
        assert done.returncode == 0, done.stderr
        assert {how for _, how in load.ended} == {"completed"}, load.ended
        after = cluster.record.routers
        assert len(after) == routers
        assert not set(after) & set(before)
        assert {one["state"] for one in cluster.status()["workers"]} == {"ready"}
        assert len(cluster.status()["workers"]) == 4
    finally:
        await asyncio.to_thread(cluster.stop)
        redis.kill()


@pytest.mark.slow
def test_a_router_that_does_not_come_to_serve_leaves_the_old_one_and_says_so(tmp_path: Path) -> None:
    """A file that has been broken since the start."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{'ab' * 32}: {{tenant: acme}}\n")
    cluster = ForegroundCluster(tmp_path, *FLAGS, f"--api-keys-file={keys}")
    try:
        cluster.until_ready()
        before = until(lambda: cluster.record.routers, 10)
        keys.write_text("nonsense\n")
        done = run_pdserve("restart", "--part=routers", *cluster.flags)
        assert (done.returncode, "ended before it served" in done.stderr) == (1, True), done.stderr
        assert cluster.record.routers == before
        assert cluster.status()["serving"]
        keys.write_text(f"{'ab' * 32}: {{tenant: acme}}\n")
        assert run_pdserve("restart", "--part=routers", *cluster.flags).returncode == 0
        assert cluster.record.routers != before
        os.kill(cluster.record.routers[0], signal.SIGKILL)
        crashed = cluster.record.routers
        until(lambda: cluster.record.routers != crashed, 20, "another router in its place")
        workers = run_pdserve("restart", "--part=routers", "--worker=decode-0", *cluster.flags)
        assert (workers.returncode, "worker" in workers.stderr) == (2, True)
    finally:
        cluster.stop()
