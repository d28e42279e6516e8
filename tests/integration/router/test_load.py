"""`bench serve` at the door of a real router: keys and certificates, over both APIs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from bench.load.target import Address
from bench.serve import looked_up
from router.app import Router
from runtime.errors import InvalidRequest, PdserveError, Unauthenticated
from tests.integration.router.sites import config
from tests.unit.runtime.certificates import Authority


def addresses(router: Router, **more: Any) -> list[Address]:
    return [Address("http", f"http://{router.http}", **more), Address("grpc", router.grpc, **more)]


async def test_a_key_opens_the_door_and_a_wrong_one_is_refused_by_name(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"{hashlib.sha256(b'secret').hexdigest()}: {{tenant: acme}}\n")
    router = await Router.start(config(api_keys_file=str(keys), registry_token="token"))
    try:
        for address in addresses(router, api_key="secret"):
            card = await looked_up(address, "")
            assert (card.model, card.context, card.vocab, card.ours) == ("oracle", 8192, 259, True)
        for address in addresses(router, api_key="guessed"):
            with pytest.raises(Unauthenticated) as refused:
                await looked_up(address, "")
            assert refused.value.field == "api_key"
        for address in addresses(router, api_key="secret"):
            with pytest.raises(InvalidRequest) as unknown:
                await looked_up(address, "gpt")
            assert (unknown.value.field, unknown.value.limit) == ("model", "oracle")
    finally:
        await router.close()


async def test_certificates_open_grpc_and_nothing_else_does(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca")
    router = await Router.start(config(**authority.issue("router")))
    tls: dict[str, Any] = dict(authority.issue("client"))
    try:
        assert (await looked_up(Address("grpc", router.grpc, **tls), "")).model == "oracle"
        with pytest.raises(PdserveError, match=f"no router answers at {router.grpc}"):
            await looked_up(Address("grpc", router.grpc), "")
    finally:
        await router.close()
