"""Who may be used: workers that fit, are ready and not draining; and a router that takes nothing new."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime import rpc
from tests.integration.router.scripted import LENGTH, Leg, ScriptedWorker, layout, until
from tests.integration.router.sites import BODY, Site, config, site


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer_digest": "other"}, "tokenizer_digest_mismatch"),
        ({"model_fingerprint": "other"}, "model_fingerprint_mismatch"),
        ({"vocab_size": 7}, "vocab_size_mismatch"),
        ({"protocol_min": 9, "protocol_max": 9}, "protocol_mismatch"),
        ({"layout": layout(page_tokens=32)}, "page_tokens_mismatch"),
        ({"worker_id": "somebody-else"}, "worker_id_mismatch"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_with_a_metric(change: dict[str, object], reason: str) -> None:
    """Public report T129 (NVIDIA/TensorRT-LLM#14882); T133 (vllm-project/vllm#42895);
    T170 (vllm-project/production-stack#1077)."""
    stranger = ScriptedWorker("both")
    for name, value in change.items():
        if name == "layout":
            stranger.described.layout.CopyFrom(layout(page_tokens=32))
        else:
            setattr(stranger.described, name, value)
    async with site(stranger, wait=False) as made:
        await until(lambda: made.metric("pdserve_router_workers_refused_total", reason=reason) >= 1)

        status, _, _ = await made.post("/v1/completions", BODY)

        assert status == 503
        assert stranger.reserved == []


async def test_a_worker_elsewhere_that_advertises_loopback_is_refused_before_it_is_asked() -> None:
    """Public report T173 (vllm-project/vllm#27083): the address reaches some other process of this machine."""
    stranger = ScriptedWorker("both")
    stranger.advertised["node"] = "another-machine"
    async with site(stranger, wait=False) as made:
        await until(lambda: made.metric("pdserve_router_workers_refused_total", reason="loopback_address") >= 1)

        status, _, _ = await made.post("/v1/completions", BODY)

        assert status == 503
        assert stranger.described_times == 0


async def test_a_worker_is_asked_only_when_its_record_says_ready() -> None:
    late = ScriptedWorker("both")
    late.advertised["ready"] = False
    async with site(late, wait=False) as made:
        await until(lambda: made.router.fleet.worker(late.id) is not None)
        status, _ = await made.complete()
        assert (status, late.described_times) == (503, 0)

        late.advertise(ready=True)

        await until(lambda: made.router.fleet.ready())
        assert late.described_times == 1


async def test_workers_of_different_layouts_are_never_paired() -> None:
    """Public report T133 (vllm-project/vllm#42895)."""
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    decode.described.layout.CopyFrom(layout(chunk_tokens=256))
    async with site(prefill, decode) as made:
        status, _, headers = await made.post("/v1/completions", BODY)

        assert (status, headers["x-pd-reason"]) == (503, "no_compatible_decode_worker")
        assert not made.router.health.ready().ok


async def test_a_worker_that_is_not_ready_or_draining_gets_nothing_new_and_finishes_what_it_has(pair: Site) -> None:
    """Public report T024 (vllm-project/production-stack#1008; vllm-project/router#279)."""
    decode = pair.worker("decode")
    finish = asyncio.Event()

    async def held(leg: Leg) -> None:
        await leg.ticket.wait()
        await finish.wait()
        leg.tokens(1, *b"bcd", finish=LENGTH)

    decode.decode = held
    running = asyncio.create_task(pair.complete())
    await decode.until(lambda: len(decode.submitted) == 1)

    decode.advertise(draining=True)
    await until(lambda: not pair.router.fleet.ready())
    refused, _ = await pair.complete()
    finish.set()

    assert refused == 503
    assert (await running)[0] == 200
    decode.advertise(ready=True, draining=False)
    await until(pair.router.fleet.ready)


async def test_idle_equal_workers_share_the_work() -> None:
    prefills = [ScriptedWorker("prefill", f"p{number}") for number in range(3)]
    async with site(*prefills, ScriptedWorker("decode")) as made:
        for _ in range(30):
            await made.complete(max_tokens=2)

        assert all(len(worker.submitted) == 10 for worker in prefills)


async def test_a_router_that_stops_finishes_what_runs_and_answers_on_each_connection_once_more(pair: Site) -> None:
    decode = pair.worker("decode")
    finish = asyncio.Event()

    async def held(leg: Leg) -> None:
        await leg.ticket.wait()
        await finish.wait()
        leg.tokens(1, *b"bcd", finish=LENGTH)

    answer, decode.decode = decode.decode, held
    events = asyncio.create_task(pair.events("/v1/completions", BODY | {"stream": True}))
    running = asyncio.create_task(pair.complete())
    await decode.until(lambda: len(decode.submitted) == 2)
    decode.decode = answer
    async with pair.http.get("/health/ready") as ready:
        assert ready.status == 200  # on a third connection, which waits now

    draining = asyncio.create_task(pair.router.drain())
    await asyncio.sleep(0)
    assert not pair.router.health.ready().ok
    assert pair.router.health.live().ok
    status, _, headers = await pair.post("/v1/completions", BODY)
    assert (status, headers.get("Connection")) == (200, "close")
    with pytest.raises(aiohttp.ClientConnectorError):  # there is no connection left, and no new one
        await pair.post("/v1/completions", BODY)
    assert not draining.done()
    finish.set()
    assert (await running)[0] == 200
    assert (await events)[-1] == "[DONE]"
    await asyncio.wait_for(draining, 10)


async def test_a_connection_whose_answer_had_begun_may_be_asked_once_more_and_a_silent_one_is_closed(
    pair: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.app.SILENCE_S", 3.0)
    decode = pair.worker("decode")
    finish = asyncio.Event()

    async def held(leg: Leg) -> None:
        await leg.ticket.wait()
        await finish.wait()
        leg.tokens(1, *b"bcd", finish=LENGTH)

    answer, decode.decode = decode.decode, held
    running = asyncio.create_task(pair.complete())
    await decode.until(lambda: len(decode.submitted) == 1)
    draining = asyncio.create_task(pair.router.drain())
    await asyncio.sleep(0.5)
    finish.set()
    assert (await running)[0] == 200
    decode.decode = answer
    status, _, headers = await pair.post("/v1/completions", BODY)
    assert (status, headers.get("Connection")) == (200, "close")
    await asyncio.wait_for(draining, 10)


async def test_a_router_that_stops_cuts_off_what_runs_longer_than_it_may(pair: Site) -> None:
    decode = pair.worker("decode")

    async def held(leg: Leg) -> None:
        await asyncio.Event().wait()

    decode.decode = held
    running = asyncio.create_task(pair.complete())
    await decode.until(lambda: len(decode.submitted) == 1)
    pair.router.config = pair.router.config.model_copy(update={"drain_timeout_s": 0.5})
    await asyncio.wait_for(pair.router.drain(), 5)
    await pair.router.close()
    with pytest.raises(aiohttp.ClientError):
        await running


@pytest.mark.parametrize("policy", ["least_load", "predicted"])
async def test_a_request_waits_for_streams_that_are_being_attached_again(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all of them are, when it was the router that stood still."""
    monkeypatch.setattr("router.workers.links._RETRY_S", 0.3)
    workers = [ScriptedWorker("prefill"), ScriptedWorker("decode")]
    async with site(*workers, settings=config(policy=policy)) as made:
        for worker in workers:
            worker.break_streams()
        await until(lambda: not any(state.usable for state in made.router.fleet.states()))

        status, _ = await made.complete()

        assert status == 200
        await made.quiet()


async def test_a_call_that_never_ends_does_not_keep_a_router_that_stops(pair: Site) -> None:
    async with rpc.channel(pair.router.grpc, pair.router.config) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await asyncio.wait_for(pair.router.drain(), 10)
        await pair.router.close()
