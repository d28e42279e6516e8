from __future__ import annotations

from typing import Any

import pytest

from runtime import exposure
from runtime.config import Config

LOOPBACK = ("127.0.0.1:0", "127.0.0.2:80", "localhost:1", "[::1]:1")
OPEN = ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "node:0", "example.org:1", "127.example.org.evil:1", ":80")
TLS: dict[str, Any] = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
KEYS = {"api_keys_file": "keys.yaml"}
TOKEN = {"registry_token": "t"}
REDIS = {"registry": "redis://r:1"}


def keys_named(config: Config) -> list[str]:
    """What would close each door."""
    return [text.rpartition("set ")[2] for text in exposure.of_router(config)]


@pytest.mark.parametrize("listen", LOOPBACK)
def test_of_what_only_this_machine_can_reach_nothing_is_said(listen: str) -> None:
    config = Config(http_listen=listen, grpc_listen=listen, listen=listen)
    assert exposure.of_router(config) + exposure.of_worker(config) == []


@pytest.mark.parametrize("listen", OPEN)
def test_each_address_beyond_it_is_named(listen: str) -> None:
    assert all(listen in text for text in exposure.of_router(Config(http_listen=listen, grpc_listen=listen)))
    assert len(exposure.of_router(Config(http_listen=listen))) == 1
    assert len(exposure.of_router(Config(grpc_listen=listen))) == 3
    assert len(exposure.of_worker(Config(listen=listen))) == 1
    assert exposure.of_worker(Config(listen=listen, **TLS)) == []


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({}, ["api_keys_file", "api_keys_file", "tls_cert, tls_key and tls_ca", "registry_token"]),
        (KEYS, ["tls_cert, tls_key and tls_ca"]),
        (TLS, ["api_keys_file"]),
        (TLS | KEYS, []),
        (TOKEN, ["api_keys_file", "api_keys_file", "tls_cert, tls_key and tls_ca"]),
        (REDIS, ["api_keys_file", "api_keys_file", "tls_cert, tls_key and tls_ca"]),
    ],
)
def test_the_key_that_is_named_closes_the_door(keys: dict[str, Any], left: list[str]) -> None:
    """HTTP has no certificates of its own: TLS is for gRPC."""
    assert keys_named(Config(http_listen="0.0.0.0:80", grpc_listen="0.0.0.0:81", **keys)) == left
