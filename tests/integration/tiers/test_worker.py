"""A worker process with a host and a disk tier: what it reports, and what it finds after it was killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from protos.v1 import common_pb2, worker_pb2
from tests.integration.pd.conftest import Start
from tests.integration.pd.router_client import Collected, Router, request
from tests.integration.pd.workers import WorkerProcess, eventually

PAGE = 2048
POISON = {"PDSERVE_HOST_POISON": "true"}
EVENT = worker_pb2.CacheEvent


def flags(folder: Path) -> dict[str, Any]:
    return {
        "kv_pool_tokens": 1024,
        "host_pool_tokens": 2048,
        "disk_pool_bytes": 1024 * PAGE,
        "disk_pool_dir": folder,
        "headroom_tokens": 8,
    }


def prompt(number: int, length: int = 500) -> list[int]:
    return [(number * 7 + i * i) % 250 for i in range(length)]


def tier(load: common_pb2.Load, name: str) -> common_pb2.TierLoad:
    return next(t for t in load.tiers if t.tier == name)


async def snapshot(worker: WorkerProcess) -> dict[str, int]:
    """Pages by tier, as a router would learn them."""
    counts = {"device": 0, "host": 0, "disk": 0}
    async for batch in worker.admin.CacheEvents(worker_pb2.CacheEventsRequest()):
        for event in batch.events:
            assert event.kind == (EVENT.KIND_STORED if event.tier == "device" else EVENT.KIND_TIER_CHANGED)
            counts[event.tier] += len(event.page_keys)
        if batch.snapshot_end:
            break
    return counts


async def test_a_worker_killed_under_load_serves_from_disk_what_it_had_written(start: Start, tmp_path: Path) -> None:
    worker = await start("both", POISON, worker_id="w", **flags(tmp_path))
    router = await Router(worker, worker).open()
    answers = [(await router.local(request(prompt(i)))).tokens for i in range(6)]
    again = await router.local(request(prompt(0)))
    assert again.tokens == answers[0]
    assert again.final is not None
    assert again.final.cached_tokens == 496

    async def spilled() -> bool:
        return tier(await worker.load(), "disk").pages_published >= 100

    await eventually(spilled)
    load = await worker.load()
    assert tier(load, "host").bytes_down > 100 * PAGE
    assert tier(load, "host").hit_pages > 0
    counts = await snapshot(worker)
    assert counts["device"] > 0
    assert counts["host"] + counts["disk"] > 0

    async def scraped() -> bool:
        return (await worker.scrape())['pdserve_worker_tier_bytes_total{direction="down",tier="disk"}'] > 0

    await eventually(scraped)
    await worker.kill()

    other = await start("both", POISON, worker_id="w", **flags(tmp_path))
    assert (await snapshot(other))["disk"] >= 100
    router = await Router(other, other).open()
    cached = 0
    for i in range(3):
        answer = await router.local(request(prompt(i)))
        assert answer.tokens == answers[i]
        assert answer.final is not None
        cached += answer.final.cached_tokens
    assert cached >= 496
    assert tier(await other.load(), "disk").bytes_up > 0
    assert tier(await other.load(), "host").faults == 0
    await router.close()


async def test_a_hand_off_into_a_small_decode_worker_swaps_and_stays_exact(start: Start, tmp_path: Path) -> None:
    p = await start("prefill")
    d = await start("decode", POISON, kv_pool_tokens=1024, host_pool_tokens=4096, headroom_tokens=8)
    router = await Router(p, d).open()
    work = [request(prompt(i, 200), max_tokens=150) for i in range(4)]
    alone = [(await router.disaggregated(request(prompt(i, 200), max_tokens=150))).tokens for i in range(4)]

    for one in work:
        await router.submit_both(one)

    async def finish(one: common_pb2.WorkRequest) -> list[list[int]]:
        await router.forward(one)
        event = await router.p.next(one.ref)
        assert event.WhichOneof("event") == "done", event
        collected = Collected(0, 0)
        collected.first(event.done.first)
        return (await router._collect(one, collected)).tokens

    together = await asyncio.gather(*(finish(one) for one in work))

    assert together == alone
    host = tier(await d.load(), "host")
    assert host.swapped_out == host.swapped_in > 0
    await router.close()
