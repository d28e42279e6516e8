"""What strangers on the network may do to a process that listens beyond loopback, and which key stops them. Pure: who
starts a process says it, once."""

from __future__ import annotations

from runtime.addresses import is_loopback
from runtime.config import Config

_READ = "what goes over {} can be read and changed on its way: set tls_cert, tls_key and tls_ca"


def of_router(config: Config) -> list[str]:
    """Of a router with this configuration, whose ports may be settled already; empty where only this machine can come
    in."""
    found = []
    http, grpc = beyond(config.http_listen), beyond(config.grpc_listen)
    known = bool(config.api_keys_file)
    if http and not known:
        found.append(f"whoever reaches {config.http_listen} may ask, as anybody: set api_keys_file")
    if not grpc:
        return found
    if not (known or config.tls_cert):
        found.append(f"whoever reaches {config.grpc_listen} may ask, as anybody: set api_keys_file")
    if not config.tls_cert:
        found.append(_READ.format(config.grpc_listen))
    if not (config.registry or known or config.tls_cert or config.registry_token):
        found.append(
            f"whoever reaches {config.grpc_listen} may register as a worker and be sent prompts: set registry_token"
        )
    return found


def of_worker(config: Config) -> list[str]:
    """Of a worker with this configuration."""
    return [_READ.format(config.listen)] if beyond(config.listen) and not config.tls_cert else []


def beyond(listen: str) -> bool:
    """Whether others than this machine can come in at a listen address."""
    return bool(listen) and not is_loopback(listen.rpartition(":")[0])
