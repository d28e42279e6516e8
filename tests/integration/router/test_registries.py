"""Where workers come from: those with the registry's token where clients need keys, over mutual TLS, from Redis."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog.testing

from protos.v1 import registry_pb2, registry_pb2_grpc
from runtime import rpc
from runtime.errors import PdserveError, Unauthenticated, WorkerLost
from runtime.registry.service import TOKEN_KEY
from tests.integration.router.scripted import ScriptedWorker, until
from tests.integration.router.sites import Site, config, serving, site
from tests.unit.runtime.certificates import Authority
from tests.unit.runtime.servers import RedisServer

KEY = {"Authorization": "Bearer one"}


def keys(folder: Path) -> str:
    file = folder / "keys.yaml"
    file.write_text(f"{hashlib.sha256(b'one').hexdigest()}: {{tenant: a}}\n")
    return str(file)


async def register(made: Site, metadata: tuple[tuple[str, str], ...]) -> PdserveError | None:
    """Try to bring a worker of one's own."""
    async with rpc.channel(made.router.grpc, made.router.config) as channel:
        call: Any = registry_pb2_grpc.RegistryStub(channel).Register(metadata=metadata)  # type: ignore[call-arg]
        try:
            with rpc.translated():
                await call.write(registry_pb2.WorkerRecord(worker_id="mine", epoch=1, address="127.0.0.1:1"))
                await call.read()
        except (PdserveError, asyncio.InvalidStateError):
            pass
        code = await call.code()
        return None if code in (grpc.StatusCode.OK, None) else rpc.from_rpc_error(await _error(call))


async def _error(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details(), None
    )


async def test_with_keys_only_workers_with_the_token_register_and_api_clients_see_no_worker(tmp_path: Path) -> None:
    settings = config(api_keys_file=keys(tmp_path), registry_token="token")
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=settings) as made:
        status, _, _ = await made.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers=KEY)
        assert status == 200

        for metadata in ((), (("authorization", "Bearer one"),), ((TOKEN_KEY, "tokem"),), ((TOKEN_KEY, ""),)):
            async with asyncio.timeout(5):
                assert isinstance(await register(made, metadata), Unauthenticated), metadata
            async with rpc.channel(made.router.grpc, settings) as channel:
                with pytest.raises(Unauthenticated), rpc.translated():
                    await registry_pb2_grpc.RegistryStub(channel).List(
                        registry_pb2.ListRequest(), metadata=metadata, timeout=5
                    )
        assert {worker.id for worker in made.workers} == {state.worker_id for state in made.router.fleet.states()}


async def test_with_keys_and_no_token_nobody_registers(tmp_path: Path) -> None:
    settings = config(api_keys_file=keys(tmp_path))
    async with site(ScriptedWorker("prefill"), settings=settings, wait=False) as made:
        async with asyncio.timeout(5):
            assert isinstance(await register(made, ()), Unauthenticated)
        assert made.router.fleet.states() == []


async def test_a_token_alone_keeps_stray_processes_out_and_status_can_still_ask() -> None:
    settings = config(registry_token="token")
    async with site(ScriptedWorker("prefill"), settings=settings) as made:
        async with asyncio.timeout(5):
            assert isinstance(await register(made, ()), Unauthenticated)
        async with rpc.channel(made.router.grpc, config()) as channel:
            listed = await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=5)
        assert [record.worker_id for record in listed.workers] == ["prefill-1"]


@pytest.mark.parametrize(("host", "times"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
async def test_without_keys_and_token_whoever_comes_may_register_and_the_router_says_so_once(
    host: str, times: int
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with site(ScriptedWorker("prefill"), settings=config(grpc_listen=f"{host}:0")):  # which has registered
            pass
    said = [line for line in logs if line["event"] == "open_to_the_network"]
    assert [line["log_level"] for line in said] == ["warning"] * times
    assert all("registry_token" in str(line["doors"]) for line in said)


async def test_mutual_tls_from_client_to_worker(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ours")
    settings = config(**authority.issue("router"), registry_token="token")
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=settings) as made:
        status, body = await made.complete()
        assert (status, body["choices"][0]["text"]) == (200, "abcd")

        stranger = Authority.create(tmp_path / "theirs").issue("router")
        for target in (made.router.grpc, made.worker("decode").address):
            async with rpc.channel(target, config(**stranger)) as channel:
                with pytest.raises(WorkerLost), rpc.translated():  # no connection comes about
                    await registry_pb2_grpc.RegistryStub(channel).List(registry_pb2.ListRequest(), timeout=2)
            async with grpc.aio.insecure_channel(target) as plain:
                with pytest.raises(grpc.aio.AioRpcError):
                    await registry_pb2_grpc.RegistryStub(plain).List(registry_pb2.ListRequest(), timeout=2)


# --- Redis


@pytest.fixture
def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:  # type: ignore[misc]
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_workers_come_from_redis_and_the_routers_own_registry_is_not_asked(redis: RedisServer) -> None:
    settings = config(registry=redis.url)
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=settings) as made:
        assert (await made.complete())[0] == 200


async def test_where_workers_are_in_redis_nobody_registers_at_the_router(redis: RedisServer) -> None:
    async with site(ScriptedWorker("prefill"), settings=config(registry=redis.url)) as made:
        async with asyncio.timeout(5):
            assert isinstance(await register(made, ()), Unauthenticated)


async def test_no_request_waits_for_redis(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public report T075 (BerriAI/litellm#35273). Who waits for it here waits longer than any machine stands still."""
    monkeypatch.setattr("runtime.registry.redis._TIMEOUT_S", 100.0)
    async with site(
        ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=config(registry=redis.url, registry_ttl_s=100.0)
    ) as made:
        redis.pause()
        try:
            async with asyncio.timeout(50):
                for _ in range(20):
                    assert (await made.complete())[0] == 200
        finally:
            redis.resume()


async def test_a_redis_that_hangs_for_longer_than_records_live_costs_no_worker(redis: RedisServer) -> None:
    settings = config(registry=redis.url, registry_ttl_s=1.0)
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=settings) as made:
        redis.pause()
        try:
            await until(lambda: made.metric("pdserve_registry_outages_total") > 0)
            missed = time.monotonic() + 2 * settings.registry_ttl_s
            while time.monotonic() < missed:
                assert (await made.complete())[0] == 200
                await asyncio.sleep(0.05)
        finally:
            redis.resume()
        await until(lambda: made.router.health.ready().ok)
        assert (await made.complete())[0] == 200


async def test_a_redis_that_restarts_empty_is_filled_again_and_a_new_worker_pairs(redis: RedisServer) -> None:
    """Public report T147 (kvcache-ai/Mooncake#2246)."""
    settings = config(registry=redis.url, registry_ttl_s=1.0)
    old = [ScriptedWorker(role, f"{role}-{number}") for role in ("prefill", "decode") for number in (1, 2)]
    async with site(*old, settings=settings) as made:
        redis.kill()
        redis.start()

        started = time.monotonic()
        while time.monotonic() < started + 2 * settings.registry_ttl_s:
            assert (await made.complete())[0] == 200
            await asyncio.sleep(0.02)
        assert {state.worker_id for state in made.router.fleet.states() if state.usable} == {w.id for w in old}

        new = ScriptedWorker("prefill", "prefill-3")
        async with serving(new, made.router):
            await until(lambda: any(s.worker_id == new.id and s.usable for s in made.router.fleet.states()))
            for number in range(8):
                assert (await made.complete(prompt=f"call {number}"))[0] == 200
            assert new.submitted, "the new worker gets its share"
