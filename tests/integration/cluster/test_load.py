"""Load generators on the nodes of a Ray cluster: they start together, and end with the command, however it ends."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from tests.cluster_tools import PDSERVE
from tests.integration.cluster.conftest import HEAD, NODE
from tests.integration.router.scripted import until
from tests.unit.load import scripted
from tests.unit.load.scripted import Server

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]  # a start takes its time on a busy machine


@asynccontextmanager
async def sending(url: str, env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ["--address", f"{HEAD}:{env['PORT']}", "--loaders=3", "--url", url, "--rate=50", "--requests=100000"]
    process = await asyncio.create_subprocess_exec(
        *PDSERVE, "bench", "serve", *words, "--json",
        env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def load_generators(env: dict[str, str], *names: str) -> list[psutil.Process]:
    """What sends, in Ray or out of it, of this Ray cluster."""
    found = []
    for one in psutil.process_iter():
        try:
            command = " ".join(one.cmdline())
            if any(name in command for name in names or ("bench.load.loader", "deploy.ray_load", "LoaderActor")):
                mine = one.environ().get("RAY_AUTH_TOKEN_PATH") == env["RAY_AUTH_TOKEN_PATH"]
                found += [one] if mine else []
        except psutil.Error:
            continue
    return found


async def test_they_are_spread_and_share_the_load_and_ctrl_c_brings_their_results(ray_machines: dict[str, str]) -> None:
    server = scripted.server()
    async with scripted.over_http(server) as url, sending(url, ray_machines) as process:
        await until(lambda: len(server.asked) > 60, 120)
        process.send_signal(signal.SIGINT)
        out, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, errors) == (0, b"")
    found = json.loads(out)
    assert [one["node"] for one in found["load"]["loaders"]] == [HEAD, NODE, HEAD]
    assert all(one["requests"] > 5 for one in found["load"]["loaders"])
    counts = found["requests"]
    assert counts["sum"] == counts["completed"] + counts["cut_short"]
    assert counts["completed"] >= 60
    assert found["stopped"] is True
    await until(lambda: not load_generators(ray_machines), 30)


async def test_when_the_command_is_killed_nothing_sends_any_more(ray_machines: dict[str, str]) -> None:
    server = scripted.server()
    async with scripted.over_http(server) as url, sending(url, ray_machines) as process:
        await until(lambda: len(server.asked) > 20, 120)
        assert len(load_generators(ray_machines)) >= 3
        process.kill()
        await process.wait()
        await until(lambda: not load_generators(ray_machines), 30)
        await until(lambda: server.running == 0)


async def test_a_load_generator_that_is_lost_is_told_and_the_others_go_on(ray_machines: dict[str, str]) -> None:
    server = scripted.server()
    async with scripted.over_http(server) as url, sending(url, ray_machines) as process:
        await until(lambda: len(server.asked) > 20, 120)
        load_generators(ray_machines, "bench.load.loader")[0].kill()
        count = len(server.asked)
        await until(lambda: len(server.asked) > count + 60)
        process.send_signal(signal.SIGINT)
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    found = json.loads(out)
    assert process.returncode == 1
    assert sorted(one["lost"] for one in found["load"]["loaders"]) == [False, False, True]


async def test_a_ray_cluster_that_is_not_there_is_said_in_one_line(free_port: int) -> None:
    server: Server = scripted.server()
    async with scripted.over_http(server) as url:
        process = await asyncio.create_subprocess_exec(
            *PDSERVE, "bench", "serve", "--address", f"127.0.0.1:{free_port}", "--url", url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await asyncio.wait_for(process.communicate(), 200)
    assert (process.returncode, out) == (1, b"")
    assert errors.decode().startswith(f"pdserve: Ray at 127.0.0.1:{free_port} starts no load generators: ")
    assert errors.count(b"\n") == 1
    assert server.asked == []
