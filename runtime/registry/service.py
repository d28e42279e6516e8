"""The embedded registry: workers of a cluster without Redis register here, at the router.

A registration lives one TTL after its last message. The stream itself proves nothing (a frozen worker keeps it open),
and its loss removes nothing at once: the worker has one TTL to come back, from a new connection.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator

import grpc

from protos.v1 import registry_pb2, registry_pb2_grpc
from runtime.config import Config
from runtime.errors import RegistryUnavailable, Unauthenticated
from runtime.registry.store import Store, WorkerRecord
from runtime.rpc_errors import ServicerContext

RENEWALS_PER_TTL = 3
TOKEN_KEY = "pdserve-registry-token"
REGISTRY_KEY = "pdserve-registry"
"""Which one has answered: a name for this life of it."""


def credentials(config: Config) -> tuple[tuple[str, str], ...]:
    """The metadata of a call to somebody's embedded registry."""
    return ((TOKEN_KEY, config.registry_token),) if config.registry_token else ()


class RegistryService(registry_pb2_grpc.RegistryServicer):
    """gRPC face of a Store. Every record is answered by one RegisterAck, which is the worker's proof of being known.

    It shares its port with the API, and who may ask questions may not bring workers: with `registry_token` set (`up`
    makes one up) a worker must show it to register. Where clients need a key or a certificate it is needed to list
    workers, too, and without a token configured nobody may do either. A router that keeps its workers in Redis lets
    them register there, not here, unless it has a token. A router of its own without any of these takes whoever comes:
    that is for experiments, and beyond loopback the router says so (runtime.exposure).
    """

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._ttl_s = config.registry_ttl_s
        self._token = config.registry_token
        self._guarded = bool(config.api_keys_file or config.tls_cert)
        self._embedded = not config.registry
        self._name = secrets.token_hex(8)
        self._leaving = False

    def add_to(self, server: grpc.aio.Server) -> None:
        registry_pb2_grpc.add_RegistryServicer_to_server(self, server)

    def leave(self) -> None:
        """Workers are sent away as they renew, to whoever listens here next."""
        self._leaving = True

    async def Register(  # noqa: N802
        self, request_iterator: AsyncIterator[WorkerRecord], context: ServicerContext
    ) -> AsyncIterator[registry_pb2.RegisterAck]:
        if self._guarded or self._token or not self._embedded:
            self._admit(context)
        ttl_ms = int(self._ttl_s * 1000)
        ack = registry_pb2.RegisterAck(ttl_ms=ttl_ms, renew_every_ms=max(1, ttl_ms // RENEWALS_PER_TTL))
        async for record in request_iterator:
            self._stay()
            if record.gone:
                await self._store.remove(record.worker_id, record.epoch)
            else:
                await self._store.put(record, self._ttl_s)
            yield ack

    async def List(  # noqa: N802
        self, request: registry_pb2.ListRequest, context: ServicerContext
    ) -> registry_pb2.ListReply:
        if self._guarded:
            self._admit(context)
        self._stay()
        snapshot = await self._store.snapshot()
        await context.send_initial_metadata(((REGISTRY_KEY, self._name),))
        return registry_pb2.ListReply(workers=[snapshot.records[key] for key in sorted(snapshot.records)])

    def _stay(self) -> None:
        """Raises RegistryUnavailable."""
        if self._leaving:
            raise RegistryUnavailable("this registry is leaving")

    def _admit(self, context: ServicerContext) -> None:
        """Raises Unauthenticated."""
        metadata = dict(context.invocation_metadata() or ())
        shown = metadata.get(TOKEN_KEY, "")
        shown = shown if isinstance(shown, str) else ""
        if not self._token or not hmac.compare_digest(shown.encode(), self._token.encode()):
            raise Unauthenticated("the registry is for workers with its token", reason="registry_token")
