"""Worker processes with a disk: a hybrid's states after a kill, and prefixes for another worker from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.v1 import common_pb2
from tests.integration.pd.conftest import Start
from tests.integration.pd.router_client import Router, request
from tests.integration.pd.workers import WorkerProcess, eventually
from tests.integration.tiers.test_worker import tier

pytestmark = pytest.mark.slow

KIMI = {"PDSERVE_DETERMINISTIC": "true"}


def flags(folder: Path) -> dict[str, Any]:
    return {
        "model": "tiny-kimi",
        "kv_pool_tokens": 1024,
        "state_slots": 6,
        "host_pool_tokens": 2048,
        "disk_pool_bytes": 64 << 20,
        "disk_pool_dir": folder,
        "headroom_tokens": 8,
    }


def prompt(number: int, length: int = 400) -> list[int]:
    return [4 + (number * 7 + i * i) % 480 for i in range(length)]


async def filled(start: Start, folder: Path) -> tuple[WorkerProcess, list[list[list[int]]]]:
    """A worker whose disk has the pages and states of prompts that are not above it any more; their answers."""
    worker = await start("both", KIMI, worker_id="w", **flags(folder))
    router = await Router(worker, worker).open()
    answers = [(await router.local(request(prompt(i)))).tokens for i in range(8)]

    async def written() -> bool:
        disk = tier(await worker.load(), "disk")
        return disk.states_published >= 7 and disk.pages_published >= 7 * 24

    await eventually(written)
    await router.close()
    return worker, answers


async def test_a_killed_hybrid_worker_resumes_from_the_states_on_its_disk(start: Start, tmp_path: Path) -> None:
    worker, answers = await filled(start, tmp_path)
    await worker.kill()

    other = await start("both", KIMI, worker_id="w", **flags(tmp_path))
    router = await Router(other, other).open()
    cached = 0
    for i in range(4):
        answer = await router.local(request(prompt(i)))
        assert answer.tokens == answers[i]
        assert answer.final is not None
        cached += answer.final.cached_tokens
    assert cached >= 3 * 384
    disk = tier(await other.load(), "disk")
    assert disk.hit_states >= 3
    assert tier(await other.load(), "host").faults == 0
    await router.close()


async def test_a_restarted_workers_disk_serves_another_worker(start: Start, tmp_path: Path) -> None:
    worker, answers = await filled(start, tmp_path)
    await worker.kill()
    holder = await start("prefill", KIMI, worker_id="w", transport="nixl", **flags(tmp_path))
    cold = await start("both", KIMI, model="tiny-kimi", kv_pool_tokens=4096, transport="nixl")
    router = await Router(cold, cold).open()

    found = common_pb2.PrefixSource(
        worker_id="source", epoch=holder.epoch, address=holder.address, tokens=384, budget_ms=20_000
    )
    answer = await router.local(request(prompt(0), prefix_source=found))

    assert answer.tokens == answers[0]
    assert answer.final is not None
    assert answer.final.fetched_tokens == 384
    assert tier(await holder.load(), "disk").hit_states == 1
    await router.close()
