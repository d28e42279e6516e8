"""Workers that are told to end, or to take nothing new, as real processes: what still finishes and what is said."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import common_pb2, decode_pb2, worker_pb2
from runtime import rpc
from runtime.errors import Draining
from tests.integration.pd.conftest import Start
from tests.integration.pd.inprocess import LocalWorker, config
from tests.integration.pd.router_client import LONG, SHORT, Collected, Link, Router, request
from tests.integration.pd.workers import SLOW, VERY_SLOW, WorkerProcess, at_once, baseline, eventually


async def _status(worker: WorkerProcess, service: str) -> int:
    assert worker.channel is not None
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def _says(worker: WorkerProcess, status: int) -> bool:
    return await _status(worker, "") == status


async def _drains(worker: WorkerProcess) -> bool:
    return bool((await worker.describe()).draining)


async def test_a_decode_worker_told_to_end_finishes_what_runs_and_takes_nothing_new(start: Start) -> None:
    (d,) = await at_once(start("decode", SLOW))
    router = await Router(d, d).open()
    work = request(SHORT, max_tokens=40)
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    collected = Collected(0, 0)
    collected.add((await router.d.next(work.ref)).tokens)
    serving = health_pb2.HealthCheckResponse
    assert await _status(d, "") == serving.SERVING
    d.signal(signal.SIGTERM)
    await eventually(lambda: _says(d, serving.NOT_SERVING))
    assert await _status(d, "live") == serving.SERVING
    assert (await d.describe()).draining
    while True:  # it accepts until its word has spread, then refuses
        ask = common_pb2.ReserveRequest(
            ref=request([1]).ref, needs=common_pb2.Needs(prompt_tokens=1, choices=1), remaining_ms=1000
        )
        refusal = (await d.decode.Reserve(ask)).refusal
        if refusal.reason == "draining":
            break
        await asyncio.sleep(0.05)
    assert refusal.retryable
    late = request(SHORT)
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=late, local=True))
    assert (await router.d.next(late.ref)).failed.error.reason == "draining"
    while not collected.finish:
        collected.add((await router.d.next(work.ref)).tokens)
    assert len(collected.tokens[0]) == 40
    assert await d.wait() == 0


async def test_a_prefill_worker_told_to_end_waits_until_its_hand_off_is_read(start: Start) -> None:
    """Public report T050 (vllm-project/vllm#36666; vllm-project/vllm#36964)."""
    p, d = await at_once(start("prefill", lease_s=20), start("decode"))
    router = await Router(p, d).open()
    work = request(SHORT)
    await router.p.send(submit=work)
    ticket = (await router.p.next(work.ref)).ticket
    first = (await router.p.next(work.ref)).done.first
    p.signal(signal.SIGTERM)
    await asyncio.sleep(1.0)
    assert p.process is not None
    assert p.process.returncode is None
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, fence=1))
    await router.d.send(ticket=decode_pb2.DecodeTicket(ref=work.ref, ticket=ticket))
    assert (await router.d.next(work.ref)).WhichOneof("event") == "handoff"
    assert await p.wait(5) == 0
    collected = Collected(0, 0)
    collected.first(first)
    while not collected.finish:
        collected.add((await router.d.next(work.ref)).tokens)
    assert len(collected.tokens[0]) == 8


async def test_a_hand_off_nobody_reads_holds_a_draining_worker_for_its_lease_only(start: Start) -> None:
    (p,) = await at_once(start("prefill", lease_s=1.5))
    link = Link(p, "prefill", "r")
    await link.open()
    work = request(SHORT)
    await link.send(submit=work)
    await link.next(work.ref)
    await link.next(work.ref)
    began = time.monotonic()
    p.signal(signal.SIGTERM)
    assert await p.wait(6) == 0
    assert 1.0 < time.monotonic() - began < 4.0


async def test_what_does_not_finish_in_time_is_handed_back_with_a_reason(start: Start) -> None:
    (d,) = await at_once(start("decode", SLOW, drain_timeout_s=0.5))
    link = Link(d, "decode", "r")
    await link.open()
    work = request(SHORT, max_tokens=4000)
    await link.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    await link.next(work.ref)
    d.signal(signal.SIGTERM)
    while (event := await link.next(work.ref)).WhichOneof("event") == "tokens":
        pass
    assert event.failed.error.reason == "draining"
    assert event.failed.error.retryable
    assert await d.wait(5) == 0
    await link.ended.wait()
    assert link.error is not None
    assert isinstance(rpc.from_rpc_error(link.error), Draining)


async def test_a_second_signal_ends_a_worker_at_once(start: Start) -> None:
    (d,) = await at_once(start("decode", SLOW))
    link = Link(d, "decode", "r")
    await link.open()
    work = request(SHORT, max_tokens=4000)
    await link.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    await link.next(work.ref)
    d.signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    began = time.monotonic()
    d.signal(signal.SIGTERM)
    assert await d.wait(5) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 1.0


async def test_a_drain_that_is_taken_back_before_it_has_spread_leaves_a_worker_that_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.worker.PROPAGATION_S", 600.0)
    d = await LocalWorker("both", config("oracle")).start()
    router = await Router(d, d).open()
    long = asyncio.ensure_future(d.admin.Drain(worker_pb2.DrainRequest(drain=True, timeout_ms=600_000)))
    await eventually(lambda: _drains(d))
    await d.admin.Drain(worker_pb2.DrainRequest(drain=False))
    await long
    assert not await _drains(d)
    monkeypatch.undo()
    assert len((await router.local(request([1, 2, 3]))).tokens[0]) == 8
    await router.close()
    assert await d.stop() == 0


async def test_a_drain_asked_for_by_call_can_be_taken_back(start: Start) -> None:
    (d,) = await at_once(start("decode"))
    router = await Router(d, d).open()
    reply = await d.admin.Drain(worker_pb2.DrainRequest(drain=True, timeout_ms=2000))
    assert (reply.running, reply.leases) == (0, 0)
    work = request(SHORT)
    await router.d.send(submit=decode_pb2.DecodeSubmit(request=work, local=True))
    assert (await router.d.next(work.ref)).failed.error.reason == "draining"
    await d.admin.Drain(worker_pb2.DrainRequest(drain=False))
    assert len((await router.local(request(SHORT))).tokens[0]) == 8
    assert not (await d.describe()).draining


async def test_a_bad_configuration_is_refused_with_its_own_status(start: Start) -> None:
    worker = WorkerProcess("decode", {"model": "/does/not/exist", "listen": "127.0.0.1:0"})
    with pytest.raises(AssertionError, match="the worker ended"):
        await worker.start()
    assert await worker.wait() == 2
    assert "model" in worker.log()


async def test_a_kv_source_that_is_shut_down_says_so_to_its_readers(start: Start) -> None:
    p, d = await at_once(start("prefill", VERY_SLOW, drain_timeout_s=0.2), start("decode"))
    router = await Router(p, d).open()
    work = request(LONG * 3, max_tokens=2)
    await router.submit_both(work)
    await router.forward(work)
    p.signal(signal.SIGTERM)
    failed = (await router.d.next(work.ref)).failed
    assert failed.kv_lost
    assert await p.wait() == 0
    await baseline(d)
