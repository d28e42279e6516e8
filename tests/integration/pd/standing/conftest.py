"""One prefill and one decode worker that stay up for every test of this folder. Each leaves them at their baseline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.integration.pd.conftest import ORACLE
from tests.integration.pd.router_client import Router
from tests.integration.pd.workers import WorkerProcess, baseline


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def pair() -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    p, d = WorkerProcess("prefill", dict(ORACLE)), WorkerProcess("decode", dict(ORACLE))
    try:
        await asyncio.gather(p.start(), d.start())
        yield p, d
    finally:
        codes = await p.stop(), await d.stop()
    assert codes == (0, 0), f"{p.log()}\n{d.log()}"


@pytest_asyncio.fixture(loop_scope="package")
async def router(pair: tuple[WorkerProcess, WorkerProcess]) -> AsyncIterator[Router]:
    router = await Router(*pair).open()
    yield router
    await router.close()
    await baseline(*pair)
