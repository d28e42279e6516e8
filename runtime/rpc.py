"""gRPC servers and channels as this system makes them, and the one place where errors become statuses and back.

Failures this answers: a peer that freezes (keepalive alone does not see it, the HTTP/2 ping timeout does), an oversized
message that looks like a full queue (both are RESOURCE_EXHAUSTED in gRPC), an exception's text that reaches a client,
and two servers that silently share one port. Deadlines are passed on by callers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from protos.v1 import common_pb2
from runtime import errors
from runtime.config import Config
from runtime.errors import InvalidRequest, PayloadTooLarge, PdserveError
from runtime.rpc_errors import ERROR_KEY, MAX_MESSAGE_BYTES, ErrorInterceptor, ServerInterceptor, ServicerContext
from runtime.rpc_roles import RoleInterceptor

__all__ = [
    "ERROR_KEY",
    "MAX_MESSAGE_BYTES",
    "bind",
    "channel",
    "check_size",
    "from_rpc_error",
    "peer_identity",
    "server",
    "translated",
]


TRANSPORT_LIMIT_BYTES = 4 * MAX_MESSAGE_BYTES
"""What gRPC itself refuses. Above MAX_MESSAGE_BYTES, so that the answer to an oversized message is ours."""

_COMMON_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", TRANSPORT_LIMIT_BYTES),
    ("grpc.max_send_message_length", -1),  # the receiver refuses, with a status that says why
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 2000),  # without it a frozen peer is never noticed
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),  # below our clients' keepalive: no GOAWAY
    ("grpc.so_reuseport", 0),  # a taken port is an error, not a second listener
]
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_COMMON_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # to connect: a first packet that is lost is sent again after 1 s
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # closing a channel closes its connection
]


def server(
    config: Config, interceptors: Sequence[ServerInterceptor] = (), *, shares_port: bool = False
) -> grpc.aio.Server:
    """A server without port or service; errors of every handler become statuses (see ErrorInterceptor).

    `interceptors` run inside the error interceptor, so they may raise PdserveError too. shares_port: other processes
    of this user may listen at the same address, if they say so, too. TLS itself is a matter of the port, see bind();
    with `tls_roles` the role in a peer's certificate decides here what it may call.
    """
    roles = [RoleInterceptor()] if config.tls_roles else []
    options = dict(_SERVER_OPTIONS) | {"grpc.so_reuseport": int(shares_port)}
    return grpc.aio.server(interceptors=[ErrorInterceptor(), *roles, *interceptors], options=list(options.items()))


def bind(server: grpc.aio.Server, listen: str, config: Config) -> str:
    """Add a port (with mutual TLS where configured) and return "host:port" as really bound.

    Raises InvalidRequest when the address is malformed, taken or not ours.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest("listen must be host:port", field="listen", limit="host:port, port 0..65535")
    try:
        if config.tls_cert:
            bound = server.add_secure_port(listen, _server_credentials(config))
        else:
            bound = server.add_insecure_port(listen)
    except RuntimeError:
        bound = 0
    if not bound:
        raise InvalidRequest("the listen address is taken or not one of this machine", field="listen")
    return f"{host}:{bound}"


def channel(address: str, config: Config) -> grpc.aio.Channel:
    """A channel to one of our servers. Connects lazily, reconnects within 2 s, shares no connection with others."""
    if config.tls_cert:
        return grpc.aio.secure_channel(address, _channel_credentials(config), options=_CHANNEL_OPTIONS)
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)


def check_files(config: Config) -> None:
    """Raises InvalidRequest for a TLS file that cannot be read."""
    if config.tls_cert:
        _pem(config)


def from_rpc_error(exc: grpc.RpcError) -> PdserveError:
    """The PdserveError a peer raised, or the one that fits the transport's status. Never has the transport's text."""
    status = exc.code() if isinstance(exc, grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    if isinstance(exc, grpc.aio.AioRpcError):
        detail = _detail(exc)
        if detail is not None:
            return errors.from_detail(detail, status)
        if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (exc.details() or ""):
            return _too_large(TRANSPORT_LIMIT_BYTES)
    return errors.from_status(status)


def unreachable(exc: BaseException | None) -> bool:
    """Whether a call failed on its way: nobody there, or the connection lost. A peer's own word is no such failure."""
    if not isinstance(exc, grpc.aio.AioRpcError):
        return False
    return exc.code() is grpc.StatusCode.UNAVAILABLE and _detail(exc) is None


@contextmanager
def translated() -> Iterator[None]:
    """Turn an RpcError of the body into the PdserveError it stands for."""
    try:
        yield
    except grpc.RpcError as exc:
        raise from_rpc_error(exc) from exc


def check_size(message: Message) -> None:
    """Raises PayloadTooLarge for what a peer would refuse; call it where a message's size is not bounded by design."""
    if message.ByteSize() > MAX_MESSAGE_BYTES:
        raise _too_large(MAX_MESSAGE_BYTES)


def peer_identity(context: ServicerContext) -> str:
    """Who calls, by its verified certificate: first DNS or URI name, else common name. "" without mutual TLS."""
    auth = context.auth_context()
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        for name in auth.get(key, ()):
            return name.decode("utf-8", "replace")
    return ""


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge("the message is too large", field="message", limit=f"{limit} bytes")


def _detail(exc: grpc.aio.AioRpcError) -> common_pb2.ErrorDetail | None:
    metadata: Iterable[Any] = exc.trailing_metadata() or ()
    for key, value in metadata:
        if key == ERROR_KEY and isinstance(value, bytes):
            try:
                return common_pb2.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def _server_credentials(config: Config) -> grpc.ServerCredentials:
    cert, key, ca = _pem(config)
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def _channel_credentials(config: Config) -> grpc.ChannelCredentials:
    cert, key, ca = _pem(config)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def _pem(config: Config) -> tuple[bytes, bytes, bytes]:
    found: list[bytes] = []
    for name in ("tls_cert", "tls_key", "tls_ca"):
        try:
            found.append(Path(getattr(config, name)).read_bytes())
        except OSError as exc:
            raise InvalidRequest(f"{name} cannot be read", field=name) from exc
    return found[0], found[1], found[2]
