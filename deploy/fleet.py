"""What is alive, asked of the router: the registry's records and whether it serves. No Ray, no state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import common_pb2, registry_pb2, registry_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime import rpc
from runtime.config import Config
from runtime.registry.service import credentials

CALL_TIMEOUT_S = 5.0


class Fleet:
    """A view through one router. Errors are the exception tree of runtime.errors."""

    def __init__(self, router: str, config: Config) -> None:
        self._config = config
        self._channel = rpc.channel(router, config)
        self._registry = registry_pb2_grpc.RegistryStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def workers(self) -> Sequence[registry_pb2.WorkerRecord]:
        """Every registered worker, by name."""
        with rpc.translated():
            reply = await self._registry.List(
                registry_pb2.ListRequest(), timeout=CALL_TIMEOUT_S, metadata=credentials(self._config)
            )
        return sorted(reply.workers, key=lambda record: record.worker_id)

    async def serving(self) -> bool:
        """Whether the router takes requests (its readiness, as gRPC health has it)."""
        try:
            reply = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def describe(self, address: str) -> worker_pb2.DescribeReply:
        """A worker's own description."""
        async with rpc.channel(address, self._config) as channel:
            with rpc.translated():
                stub = worker_pb2_grpc.WorkerStub(channel)
                return await stub.Describe(worker_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_S)

    async def drain(self, address: str, on: bool, timeout_s: float = 0.0) -> tuple[int, int]:
        """Take a worker out of the choice (and wait until it is empty, so long at most), or put it back. Returns the
        requests and the hand-offs it still holds."""
        async with rpc.channel(address, self._config) as channel:
            with rpc.translated():
                reply = await worker_pb2_grpc.WorkerStub(channel).Drain(
                    worker_pb2.DrainRequest(drain=on, timeout_ms=int(timeout_s * 1000)),
                    timeout=timeout_s + CALL_TIMEOUT_S,
                )
        return reply.running, reply.leases

    async def set_role(self, address: str, role: common_pb2.Role.ValueType) -> None:
        """What a worker is chosen for from now on."""
        async with rpc.channel(address, self._config) as channel:
            with rpc.translated():
                await worker_pb2_grpc.WorkerStub(channel).SetRole(
                    worker_pb2.SetRoleRequest(role=role), timeout=CALL_TIMEOUT_S
                )

    async def until_serving(self, every_s: float = 0.1) -> None:
        while True:
            if await self.serving():
                return
            await asyncio.sleep(every_s)
