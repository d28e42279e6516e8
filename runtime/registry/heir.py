"""What the router that takes over an address learns from the one that leaves it: the workers registered there.

They renew their records at the old one until it goes. So the new one asks for its list, before it listens itself and
as long as the other goes on, and workers that have come over speak for themselves. The connection was made to the old
process and stays with it; once that has ended it would lead to ourselves, which the name of the registry tells.
"""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import structlog

from protos.v1 import registry_pb2, registry_pb2_grpc
from runtime import rpc
from runtime.config import Config
from runtime.errors import InvalidRequest
from runtime.registry.service import REGISTRY_KEY, RENEWALS_PER_TTL, credentials
from runtime.registry.store import Store, WorkerRecord

FIRST_S = 2.0
"""How long somebody who has the address may take to answer."""

INHERITED_TTLS = 3
"""How long, in times to live, somebody inherited may take to come over after he was last seen at the old one."""

_log = structlog.get_logger("pdserve.registry")


class Heir:
    """Owner calls start() before it listens at `address`, and stop()."""

    def __init__(self, store: Store, config: Config, address: str) -> None:
        self._store = store
        self._config = config
        self._address = address
        self._name = ""
        self._given: dict[str, WorkerRecord] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> bool:
        """Whether somebody is there to inherit from. Then all it knows is known when this returns."""
        channel = rpc.channel(self._address, self._config)
        if not await self._copied(channel):
            await channel.close(None)
            return False
        _log.info("registry_inherited", workers=len(self._given))
        self._task = asyncio.create_task(self._follow(channel), name="registry-heir")
        return True

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        try:
            while await self._copied(channel):  # noqa: ASYNC110  another process
                await asyncio.sleep(self._config.registry_ttl_s / RENEWALS_PER_TTL)
        finally:
            await channel.close(None)

    async def _copied(self, channel: grpc.aio.Channel) -> bool:
        """False when the other one is gone, or is none."""
        stub = registry_pb2_grpc.RegistryStub(channel)
        call = stub.List(registry_pb2.ListRequest(), timeout=FIRST_S, metadata=credentials(self._config))
        try:
            reply = await call
            names = [value for key, value in await call.initial_metadata() if key == REGISTRY_KEY]
        except grpc.RpcError as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is not grpc.StatusCode.UNAVAILABLE:
                _log.warning("registry_not_inherited", status=str(error.code()))
            return False
        if not names or (self._name and names[0] != self._name):
            return False
        self._name = str(names[0])
        known = (await self._store.snapshot()).records
        for record in reply.workers:
            if known.get(record.worker_id) in (None, self._given.get(record.worker_id)):
                self._given[record.worker_id] = record
                with contextlib.suppress(InvalidRequest):
                    await self._store.put(record, INHERITED_TTLS * self._config.registry_ttl_s)
        return True
