from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime import rpc
from runtime.config import Config
from runtime.errors import NotFound
from runtime.health import Health, HealthService

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def test_ready_needs_every_check_and_names_what_fails() -> None:
    state = {"model": False, "registered": True}
    health = Health({name: lambda name=name: state[name] for name in state})  # type: ignore[misc]
    assert health.ready().failing == ("model",)
    state["model"] = True
    assert health.ready().ok


def test_draining_takes_readiness_but_not_life() -> None:
    health = Health({})
    health.draining = True
    assert health.live().ok
    assert health.ready().failing == ("draining",)


def test_what_is_not_alive_is_not_ready() -> None:
    health = Health({"model": lambda: True}, {"engine": lambda: False})
    assert health.live().failing == ("engine",)
    assert health.ready().failing == ("engine",)


async def test_the_grpc_health_service_answers_and_watches() -> None:
    health = Health({})
    server = rpc.server(Config())
    HealthService(health, ["pdserve.v1.Decode"]).add_to(server)
    address = rpc.bind(server, "127.0.0.1:0", Config())
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)

        watch = stub.Watch(health_pb2.HealthCheckRequest(service="pdserve.v1.Decode"))
        strange = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert [await check(""), await check("pdserve.v1.Decode"), await check("live")] == [SERVING] * 3
        assert (await watch.read()).status == SERVING
        assert (await strange.read()).status == UNKNOWN
        health.draining = True
        async with asyncio.timeout(5):
            assert (await watch.read()).status == NOT_SERVING
        assert [await check(""), await check("live")] == [NOT_SERVING, SERVING]
        with pytest.raises(NotFound), rpc.translated():
            await check("nobody")
        watch.cancel()
        strange.cancel()
    await server.stop(0)
