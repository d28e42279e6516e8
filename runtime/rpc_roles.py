"""Who may call what, by the role in a peer's certificate (`tls_roles`).

A certificate of our CA says that somebody belongs to us, not what for: without this a stolen worker certificate asks
other workers to drain and reads every prompt. A role is a DNS name "<role>.pdserve", or anything before it
("prefill-0.worker.pdserve"), in the subject alternative names; a certificate may hold several. What is called is looked
up by service: one that is not in the table (health, reflection) is open to whoever has a certificate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc

from runtime.errors import PermissionDenied
from runtime.rpc_errors import RpcMethodHandler, ServerInterceptor, ServicerContext

SUFFIX = "pdserve"
ALLOWED: dict[str, frozenset[str]] = {
    "pdserve.v1.Prefill": frozenset({"router"}),
    "pdserve.v1.Decode": frozenset({"router"}),
    "pdserve.v1.Worker": frozenset({"router", "operator"}),
    "pdserve.v1.KvSource": frozenset({"worker"}),
    "pdserve.v1.Registry": frozenset({"worker", "router", "operator"}),
    "pdserve.v1.Inference": frozenset({"client", "router", "operator"}),
}


class RoleInterceptor(ServerInterceptor):
    """Raises PermissionDenied for a peer without a role that the service is for. Runs inside the error interceptor."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        allowed = ALLOWED.get(handler_call_details.method.split("/")[1])
        if handler is None or allowed is None:
            return cast("RpcMethodHandler", handler)
        return _guarded(handler, allowed)


def roles(context: ServicerContext) -> frozenset[str]:
    """What the peer's certificate says it is."""
    names = context.auth_context().get("x509_subject_alternative_name", ())
    found = [name.decode("utf-8", "replace").lower().split(".") for name in names]
    return frozenset(labels[-2] for labels in found if len(labels) > 1 and labels[-1] == SUFFIX)


def _guarded(handler: Any, allowed: frozenset[str]) -> RpcMethodHandler:
    def check(context: ServicerContext) -> None:
        if not roles(context) & allowed:
            wanted = " or ".join(f"{role}.{SUFFIX}" for role in sorted(allowed))
            raise PermissionDenied("this certificate is not for that", reason="wrong_role", limit=wanted)

    def unary(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def handle(request: Any, context: ServicerContext) -> Any:
            check(context)
            return await call(request, context)

        return handle

    def streaming(call: Callable[..., Any]) -> Callable[..., Any]:
        def handle(request: Any, context: ServicerContext) -> Any:
            check(context)
            return call(request, context)

        return handle

    shapes = {
        (False, False): (grpc.unary_unary_rpc_method_handler, unary, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, streaming, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, unary, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, streaming, handler.stream_stream),
    }
    make, around, call = shapes[bool(handler.request_streaming), bool(handler.response_streaming)]
    made: RpcMethodHandler = make(
        around(call), request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
    return made
