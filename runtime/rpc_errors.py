"""The server interceptor that turns errors of handlers into gRPC statuses and refuses oversized messages."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import structlog
from google.protobuf.message import DecodeError

from runtime.errors import InvalidRequest, PayloadTooLarge, PdserveError, let_go

MAX_MESSAGE_BYTES = 1 << 20
ERROR_KEY = "pdserve-error-bin"
_MAX_TEXT = 1024  # characters: trailers over 8 KB are dropped by peers

# The stubs make these generic; at run time they are not.
if TYPE_CHECKING:
    ServicerContext = grpc.aio.ServicerContext[Any, Any]
    RpcMethodHandler = grpc.RpcMethodHandler[Any, Any]
    ServerInterceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    ServicerContext = grpc.aio.ServicerContext
    RpcMethodHandler = grpc.RpcMethodHandler
    ServerInterceptor = grpc.aio.ServerInterceptor

_log = structlog.get_logger("pdserve.rpc")


@dataclass(frozen=True, slots=True)
class _Unparsed:
    """Stands in for a unary request that could not be taken: what a deserializer raises there becomes UNKNOWN, with
    the exception's text."""

    error: PdserveError


class ErrorInterceptor(ServerInterceptor):
    """PdserveError -> its status, with ErrorDetail in the trailing metadata; anything else -> INTERNAL without text.

    A handler that aborts by itself, or is cancelled, is left alone.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
            return cast("RpcMethodHandler", None)
        return _wrap(handler, handler_call_details.method)


def _wrap(handler: Any, method: str) -> RpcMethodHandler:
    """Choose by the four shapes of a call. Handlers are coroutines or async generators."""
    if handler.request_streaming:
        parse = _limited(handler.request_deserializer, raises=True)
        if handler.response_streaming:
            make, call = grpc.stream_stream_rpc_method_handler, _streaming(handler.stream_stream, method)
        else:
            make, call = grpc.stream_unary_rpc_method_handler, _unary(handler.stream_unary, method)
    else:
        parse = _limited(handler.request_deserializer, raises=False)
        if handler.response_streaming:
            make, call = grpc.unary_stream_rpc_method_handler, _streaming(handler.unary_stream, method)
        else:
            make, call = grpc.unary_unary_rpc_method_handler, _unary(handler.unary_unary, method)
    wrapped: RpcMethodHandler = make(call, request_deserializer=parse, response_serializer=handler.response_serializer)
    return wrapped


def _limited(parse: Callable[[bytes], Any] | None, *, raises: bool) -> Callable[[bytes], Any]:
    """Refuse what is too large before parsing it, and what is no message of its kind. In a stream the handler's own
    read raises; a unary handler never starts."""

    def take(data: bytes) -> Any:
        if len(data) > MAX_MESSAGE_BYTES:
            raise _too_large()
        try:
            return parse(data) if parse else data
        except DecodeError:
            raise InvalidRequest("the message cannot be read", field="message") from None

    def deserialize(data: bytes) -> Any:
        try:
            return take(data)
        except PdserveError as error:
            if raises:
                raise
            return _Unparsed(error)

    return deserialize


def _unary(call: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def handle(request: Any, context: ServicerContext) -> Any:
        try:
            if isinstance(request, _Unparsed):
                raise request.error
            return await call(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as exc:  # noqa: BLE001  the RPC boundary
            await _abort(context, exc, method)

    return handle


def _streaming(call: Callable[..., Any], method: str) -> Callable[..., Awaitable[None]]:
    async def handle(request: Any, context: ServicerContext) -> None:
        try:
            if isinstance(request, _Unparsed):
                raise request.error
            result = call(request, context)
            if inspect.isawaitable(result):
                await result
            else:
                await _pump(result, context)
        except grpc.aio.AbortError:
            raise
        except Exception as exc:  # noqa: BLE001  the RPC boundary
            await _abort(context, exc, method)

    return handle


async def _pump(messages: AsyncIterator[Any], context: ServicerContext) -> None:
    """Write what an async generator yields, and close it at once when the call ends (its `finally` frees things)."""
    try:
        async for message in messages:
            await context.write(message)
    finally:
        close = getattr(messages, "aclose", None)
        if close is not None:
            await close()


async def _abort(context: ServicerContext, exc: Exception, method: str) -> NoReturn:
    if isinstance(exc, PdserveError):
        error = exc
    else:
        _log.error("handler_failed", method=method, exc_info=exc)
        error = PdserveError("internal error")
    let_go(exc)
    await context.abort(error.row.grpc_status, error.message[:_MAX_TEXT], trailing(error))
    raise AssertionError("abort raises")


def trailing(error: PdserveError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata of an error: the ErrorDetail, and gRPC's own pushback where there is one."""
    detail = error.detail()
    detail.message = detail.message[:_MAX_TEXT]
    detail.limit = detail.limit[:_MAX_TEXT]
    entries: list[tuple[str, str | bytes]] = [(ERROR_KEY, detail.SerializeToString())]
    if error.retry_after_ms:
        entries.append(("grpc-retry-pushback-ms", str(error.retry_after_ms)))
    return tuple(entries)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge("the message is too large", field="message", limit=f"{MAX_MESSAGE_BYTES} bytes")
