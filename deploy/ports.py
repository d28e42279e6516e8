"""Free ports of a loopback address."""

from __future__ import annotations

import contextlib
import random
import socket

from runtime.config import Config
from runtime.errors import InvalidRequest

NOT_EPHEMERAL = range(20_000, 32_768)
"""What Linux gives nobody who did not ask for it: a port from there is still free when a slow process binds it."""

TRIES = 64


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports nobody listens on now. They are not kept: bind soon."""
    with contextlib.ExitStack() as stack:
        return [_bound(stack.enter_context(socket.socket()), host) for _ in range(count)]


def _bound(one: socket.socket, host: str) -> int:
    for port in random.sample(NOT_EPHEMERAL, TRIES):
        with contextlib.suppress(OSError):
            one.bind((host, port))
            return port
    one.bind((host, 0))
    return int(one.getsockname()[1])


def settle(listen: str, field: str) -> str:
    """`listen` with a real port in place of 0, so that a restarted process gets the same one.

    Raises InvalidRequest naming `field` when the address cannot be had.
    """
    host, _, port = listen.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not int(port):
                return f"{host}:{_bound(probe, host.strip('[]'))}"
            probe.bind((host.strip("[]"), int(port)))
            return listen
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not host:port"
        raise InvalidRequest(f"cannot listen on {listen}: {why}", field=field) from None


def admin_addresses(config: Config) -> list[str]:
    """Where each router process answers /metrics. One alone may do so on its HTTP port (""); several that share that
    port need one each: the ports from that of admin_listen on, or any of the loopback's."""
    if config.routers == 1:
        return [settle(config.admin_listen, "admin_listen") if config.admin_listen else ""]
    if not config.admin_listen:
        return [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", config.routers)]
    host, _, port = config.admin_listen.rpartition(":")
    if not port.isdigit() or not int(port):
        raise InvalidRequest("several routers count from this port: name one", field="admin_listen", limit="host:port")
    return [settle(f"{host}:{int(port) + number}", "admin_listen") for number in range(config.routers)]
