from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.v1 import (
    common_pb2,
    decode_pb2_grpc,
    kvsource_pb2,
    kvsource_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from runtime import rpc
from runtime.config import Config
from runtime.errors import (
    InvalidRequest,
    PayloadTooLarge,
    PdserveError,
    PermissionDenied,
    QuotaExceeded,
    Saturated,
    TicketInvalid,
    Unsupported,
    WorkerLost,
)
from runtime.health import Health, HealthService
from tests.unit.runtime.certificates import Authority

SECRET = "/home/someone/secret"


class Registry(registry_pb2_grpc.RegistryServicer):
    """Unary and bidirectional calls that fail as the caller asks; `ended` is set when a stream's handler ends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended = asyncio.Event()
        self.identity = ""

    async def List(self, request: Any, context: Any) -> registry_pb2.ListReply:  # noqa: N802
        self.identity = rpc.peer_identity(context)
        if self.error:
            raise self.error
        return registry_pb2.ListReply()

    async def Register(self, request_iterator: Any, context: Any) -> AsyncIterator[registry_pb2.RegisterAck]:  # noqa: N802
        try:
            async for record in request_iterator:
                if self.error and record.gone:
                    raise self.error
                yield registry_pb2.RegisterAck(ttl_ms=record.pid)
        finally:
            self.ended.set()


class Source(kvsource_pb2_grpc.KvSourceServicer):
    """A server-streaming call, written as a coroutine that writes to its context."""

    async def Watch(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await context.write(kvsource_pb2.WatchEvent())
        raise TicketInvalid("the ticket is of another epoch")

    async def Handshake(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError

    async def OfferPrefix(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError

    async def Renew(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.ABORTED, "by itself")

    async def Release(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError


@asynccontextmanager
async def serving(servicer: Registry, config: Config | None = None) -> AsyncIterator[tuple[str, Any]]:
    """(address, stub) of a running server."""
    config = config or Config()
    server = rpc.server(config)
    registry_pb2_grpc.add_RegistryServicer_to_server(servicer, server)
    kvsource_pb2_grpc.add_KvSourceServicer_to_server(Source(), server)
    address = rpc.bind(server, "127.0.0.1:0", config)
    await server.start()
    channel = rpc.channel(address, config)
    try:
        yield address, registry_pb2_grpc.RegistryStub(channel)
    finally:
        await channel.close(None)
        await server.stop(0)


def raw_call(channel: Any, method: str) -> Any:
    """A unary call with bytes as its request."""
    return channel.unary_unary(method)


async def test_an_error_crosses_the_wire_whole() -> None:
    error = InvalidRequest("n is too large", field="n", limit="4", reason="n_too_large", retry_after_ms=9)
    async with serving(Registry(error)) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.List(registry_pb2.ListRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    again = rpc.from_rpc_error(caught.value)
    assert type(again) is InvalidRequest
    assert again.detail() == error.detail()
    metadata: Any = caught.value.trailing_metadata()
    assert ("grpc-retry-pushback-ms", "9") in list(metadata)


async def test_another_exception_is_internal_and_says_nothing() -> None:
    async with serving(Registry(ValueError(SECRET))) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.List(registry_pb2.ListRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in str(caught.value)
    assert rpc.from_rpc_error(caught.value).reason == "internal"


async def test_a_stream_fails_with_the_same_detail_after_its_first_messages() -> None:
    async with serving(Registry(Saturated("no room", retry_after_ms=100))) as (_, stub):
        call = stub.Register()
        await call.write(registry_pb2.WorkerRecord(pid=7))
        assert (await call.read()).ttl_ms == 7
        await call.write(registry_pb2.WorkerRecord(gone=True))
        with pytest.raises(PdserveError, match="no room") as caught, rpc.translated():
            await call.read()
    assert type(caught.value) is Saturated


async def test_a_handler_that_writes_to_its_context_fails_with_detail_too() -> None:
    async with serving(Registry()) as (address, _):
        channel = rpc.channel(address, Config())
        call = kvsource_pb2_grpc.KvSourceStub(channel).Watch(kvsource_pb2.WatchRequest())
        assert await call.read() == kvsource_pb2.WatchEvent()
        with pytest.raises(TicketInvalid, match="another epoch"), rpc.translated():
            await call.read()
        await channel.close(None)


async def test_a_handler_that_aborts_by_itself_is_left_alone() -> None:
    async with serving(Registry()) as (address, _):
        channel = rpc.channel(address, Config())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await kvsource_pb2_grpc.KvSourceStub(channel).Renew(kvsource_pb2.RenewRequest())
        assert caught.value.code() is grpc.StatusCode.ABORTED
        await channel.close(None)


async def test_an_unknown_method_is_unsupported() -> None:
    async with serving(Registry()) as (address, _):
        channel = rpc.channel(address, Config())
        with pytest.raises(Unsupported), rpc.translated():
            await raw_call(channel, "/pdserve.v1.Registry/Nothing")(b"")
        await channel.close(None)


@pytest.mark.parametrize("size", [rpc.MAX_MESSAGE_BYTES + 1, 5 * rpc.MAX_MESSAGE_BYTES])
async def test_an_oversized_message_is_told_from_a_full_server(size: int) -> None:
    record = registry_pb2.WorkerRecord(node="x" * size)
    async with serving(Registry()) as (address, stub):
        call = stub.Register()
        await call.write(record)
        with pytest.raises(PayloadTooLarge), rpc.translated():
            await call.read()
        channel = rpc.channel(address, Config())
        unary = raw_call(channel, "/pdserve.v1.Registry/List")
        with pytest.raises(PayloadTooLarge), rpc.translated():
            await unary(record.SerializeToString())
        await channel.close(None)


async def test_what_is_no_message_is_the_callers_fault_and_nothing_of_the_parser_shows() -> None:
    garbage = b"\xff\xff\xff\xff"
    async with serving(Registry()) as (address, _):
        channel: Any = rpc.channel(address, Config())
        stream = channel.stream_stream("/pdserve.v1.Registry/Register")()
        await stream.write(garbage)
        for call in (
            stream.read,
            lambda: raw_call(channel, "/pdserve.v1.Registry/List")(garbage),
            channel.unary_stream("/pdserve.v1.KvSource/Watch")(garbage).read,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "protobuf" not in str(caught.value)
            assert rpc.from_rpc_error(caught.value).detail().field == "message"
        await channel.close(None)


async def test_a_message_of_just_the_limit_passes() -> None:
    record = registry_pb2.WorkerRecord(pid=3)
    record.node = "x" * (rpc.MAX_MESSAGE_BYTES - record.ByteSize() - 4)
    assert record.ByteSize() == rpc.MAX_MESSAGE_BYTES
    rpc.check_size(record)
    async with serving(Registry()) as (_, stub):
        call = stub.Register()
        await call.write(record)
        assert (await call.read()).ttl_ms == 3
        call.cancel()
    with pytest.raises(PayloadTooLarge):
        rpc.check_size(registry_pb2.WorkerRecord(node="x" * rpc.MAX_MESSAGE_BYTES))


async def test_a_long_text_does_not_overflow_the_trailers() -> None:
    async with serving(Registry(InvalidRequest("é" * 100_000, limit="y" * 100_000))) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.List(registry_pb2.ListRequest())
    assert rpc.from_rpc_error(caught.value).message == "é" * 1024


async def test_a_garbled_detail_falls_back_to_the_status() -> None:
    metadata = grpc.aio.Metadata((rpc.ERROR_KEY, b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), metadata, SECRET, SECRET)
    assert type(rpc.from_rpc_error(error)) is QuotaExceeded
    assert SECRET not in str(rpc.from_rpc_error(error))


async def test_a_cancelled_stream_runs_the_handlers_cleanup() -> None:
    servicer = Registry()
    async with serving(servicer) as (_, stub):
        call = stub.Register()
        await call.write(registry_pb2.WorkerRecord())
        await call.read()
        call.cancel()
        async with asyncio.timeout(5):
            await servicer.ended.wait()


async def test_nobody_there_is_a_lost_worker() -> None:
    async with serving(Registry()) as (address, _):
        pass
    channel = rpc.channel(address, Config())
    with pytest.raises(WorkerLost), rpc.translated():
        await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=5)
    await channel.close(None)


@pytest.mark.parametrize("listen", ["", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "203.0.113.7:0"])
async def test_a_bad_listen_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rpc.bind(rpc.server(Config()), listen, Config())
    assert caught.value.field == "listen"


async def test_two_servers_never_share_a_port() -> None:
    async with serving(Registry()) as (address, _):
        with pytest.raises(InvalidRequest, match="taken"):
            rpc.bind(rpc.server(Config()), address, Config())


async def test_with_tls_both_sides_prove_who_they_are(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    config = Config.load(authority.issue("router-1"))
    servicer = Registry()
    async with serving(servicer, config) as (address, stub):
        await stub.List(registry_pb2.ListRequest(), timeout=5)
        assert servicer.identity == "router-1"
        other = Authority.create(tmp_path / "other").issue("router-1")
        expired = authority.issue("router-2", expired=True)
        for stranger in (Config(), Config.load(other), Config.load(expired)):
            channel = rpc.channel(address, stranger)
            with pytest.raises(WorkerLost), rpc.translated():
                await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=5)
            await channel.close(None)


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("worker.pdserve", True),
        ("prefill-0.worker.pdserve", True),
        ("operator.pdserve", True),
        ("client.pdserve", False),
        ("worker.pdserve.example", False),
        ("worker", False),
    ],
)
async def test_with_roles_a_certificate_opens_only_what_it_is_for(tmp_path: Path, name: str, *, may: bool) -> None:
    authority = Authority.create(tmp_path / "ca")
    config = Config.load({**authority.issue("router.pdserve"), "tls_roles": True})
    servicer = Registry()
    async with serving(servicer, config) as (address, _):
        channel = rpc.channel(address, Config.load(authority.issue(name)))
        call = registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=5)
        if may:
            await call
            assert servicer.identity == name
        else:
            with pytest.raises(PermissionDenied) as refused, rpc.translated():
                await call
            assert refused.value.reason == "wrong_role"
            assert servicer.identity == ""
        await channel.close(None)


async def test_a_workers_certificate_opens_neither_another_workers_administration_nor_the_front_door(
    tmp_path: Path,
) -> None:
    """A stream and a unary call; a router may make both, and the one that needs no role is open."""
    authority = Authority.create(tmp_path / "ca")
    config = Config.load({**authority.issue("any.worker.pdserve"), "tls_roles": True})
    server = rpc.server(config)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker_pb2_grpc.WorkerServicer(), server)  # type: ignore[abstract]
    decode_pb2_grpc.add_DecodeServicer_to_server(decode_pb2_grpc.DecodeServicer(), server)  # type: ignore[abstract]
    HealthService(Health({})).add_to(server)
    address = rpc.bind(server, "127.0.0.1:0", config)
    await server.start()
    seen: dict[str, list[str]] = {}
    for name in ("worker.pdserve", "router.pdserve"):
        channel = rpc.channel(address, Config.load(authority.issue(name)))
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        stream: Any = decode_pb2_grpc.DecodeStub(channel).Open  # the stubs ask for an iterator
        calls = (worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(), timeout=5), stream().read())
        seen[name] = [await _reason(call) for call in calls]
        await channel.close(None)
    await server.stop(None)
    assert seen == {"worker.pdserve": ["wrong_role", "wrong_role"], "router.pdserve": ["internal", "internal"]}, (
        "a router gets as far as the methods, which this test leaves out"
    )


async def _reason(call: Awaitable[Any]) -> str:
    with pytest.raises(PdserveError) as refused, rpc.translated():
        await call
    return refused.value.reason


async def test_a_missing_certificate_file_is_named(tmp_path: Path) -> None:
    config = Config.load({key: str(tmp_path / "none") for key in ("tls_cert", "tls_key", "tls_ca")})
    with pytest.raises(InvalidRequest) as caught:
        rpc.bind(rpc.server(config), "127.0.0.1:0", config)
    assert caught.value.field == "tls_cert"


_FROZEN_PEER = """
import asyncio, sys
from protos.v1 import registry_pb2, registry_pb2_grpc
from runtime import rpc
from runtime.config import Config

class Registry(registry_pb2_grpc.RegistryServicer):
    async def Register(self, request_iterator, context):
        async for record in request_iterator:
            yield registry_pb2.RegisterAck(ttl_ms=1)

async def main():
    server = rpc.server(Config())
    registry_pb2_grpc.add_RegistryServicer_to_server(Registry(), server)
    print(rpc.bind(server, "127.0.0.1:0", Config()), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own, which prints its address."""
    process = subprocess.Popen([sys.executable, "-c", _FROZEN_PEER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


async def test_a_frozen_peer_is_noticed_by_the_transport(peer: subprocess.Popen[str]) -> None:
    assert peer.stdout is not None
    channel = rpc.channel(peer.stdout.readline().strip(), Config())
    call: Any = registry_pb2_grpc.RegistryStub(channel).Register()  # type: ignore[call-arg]
    await call.write(registry_pb2.WorkerRecord())
    await call.read()
    os.kill(peer.pid, signal.SIGSTOP)
    with pytest.raises(WorkerLost), rpc.translated():
        async with asyncio.timeout(15):
            await call.read()
    await channel.close(None)


def test_an_error_detail_is_what_the_contract_says() -> None:
    assert [field.name for field in common_pb2.ErrorDetail.DESCRIPTOR.fields] == [
        "reason", "message", "retryable", "retry_after_ms", "field", "limit", "kind",
    ]  # fmt: skip
