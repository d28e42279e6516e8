from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.integration.pd.router_client import Router
from tests.integration.pd.workers import WorkerProcess

Start = Callable[..., Awaitable[WorkerProcess]]

ORACLE = {"model": "oracle", "kv_pool_tokens": 16384, "lease_s": 3.0, "lease_margin_s": 0.5, "listen": "127.0.0.1:0"}


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """start(role, **flags, env=...) -> a running worker process of the oracle model; ended after the test."""
    async with AsyncExitStack() as stack:

        async def go(role: str, env: dict[str, str] | None = None, **flags: Any) -> WorkerProcess:
            worker = WorkerProcess(role, {**ORACLE, **flags}, env or {})
            stack.push_async_callback(worker.stop)
            return await worker.start()

        yield go


@pytest.fixture
async def pair(start: Start) -> tuple[WorkerProcess, WorkerProcess]:
    return await start("prefill"), await start("decode")


@pytest.fixture
async def router(pair: tuple[WorkerProcess, WorkerProcess]) -> AsyncIterator[Router]:
    router = await Router(*pair).open()
    yield router
    await router.close()
