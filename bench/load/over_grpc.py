"""This package's own API: `Generate` of pdserve.v1.Inference."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from bench.load.plan import Tokens, Turn
from bench.load.results import FAILED, PARTS, REFUSED
from bench.load.target import Address, Answer, Card, Unanswered
from protos.v1 import inference_pb2, inference_pb2_grpc
from runtime import rpc
from runtime.errors import PermissionDenied, Unauthenticated, WorkerLost
from runtime.rpc_errors import ERROR_KEY

CONNECTIONS = 4
"""Router processes share a port by connection: one connection would load one of them alone."""

LOOK_S = 10.0
_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009  the stubs do not know it


class GrpcTarget:
    def __init__(self, address: Address, stubs: list[Any]) -> None:
        self._address = address
        self._stubs = itertools.cycle(stubs)
        self._metadata = (("authorization", f"Bearer {address.api_key}"),) if address.api_key else ()

    @classmethod
    @asynccontextmanager
    async def opened(cls, address: Address) -> AsyncIterator[GrpcTarget]:
        async with AsyncExitStack() as stack:
            config = address.config()
            channels = [rpc.channel(address.address, config) for _ in range(CONNECTIONS)]
            for channel in channels:
                stack.push_async_callback(channel.close, None)
            yield cls(address, [inference_pb2_grpc.InferenceStub(channel) for channel in channels])

    async def cards(self) -> list[Card]:
        try:
            with rpc.translated():
                reply = await next(self._stubs).ListModels(
                    inference_pb2.ListModelsRequest(), timeout=LOOK_S, metadata=self._metadata
                )
        except WorkerLost as exc:
            raise WorkerLost(f"no router answers at {self._address.address} (gRPC)") from exc
        except (Unauthenticated, PermissionDenied) as exc:
            raise Unauthenticated(f"the router refuses the key ({exc.reason})", field="api_key") from exc
        return [Card(card.id, card.max_model_len, card.vocab_size, True) for card in reply.models]

    def request(self, turn: Turn, tokens: Tokens, key: str) -> Any:
        address = self._address
        made = inference_pb2.GenerateRequest(
            model=address.model,
            temperature=address.temperature,
            ignore_eos=address.ignore_eos,
            return_ledger=address.ledger,
            return_token_ids=True,
        )
        if turn.output:
            made.max_tokens = turn.output
        if turn.text and address.chat:
            made.chat.messages.add(role="user", content=turn.text)
        elif turn.text:
            made.prompt = turn.text
        else:
            made.prompt_tokens.ids.extend(tokens.tolist())
        return made, (*self._metadata, ("x-session-id", key))

    async def ask(self, request: Any, answer: Answer) -> None:
        message, metadata = request
        call = next(self._stubs).Generate(message, metadata=metadata)
        started = whole = False
        try:
            while (event := await call.read()) is not _EOF:  # to its status: who leaves before is counted as cancelled
                started = True
                whole = _ends(event, answer) or whole
            if not whole:  # the status of a call that ended without an end
                raise Unanswered(FAILED, "stream_lost" if started else (await call.code()).name)
        except grpc.aio.AioRpcError as exc:
            if not whole:
                raise _unanswered(exc, started) from exc
        finally:
            call.cancel()


def _ends(event: inference_pb2.GenerateEvent, answer: Answer) -> bool:
    """Takes one event; whether it is the last of an answer that is whole."""
    kind = event.WhichOneof("event")
    if kind == "delta":
        answer.chunk()
        answer.tokens += event.delta.token_ids
    elif kind == "completed":
        usage = event.completed.usage
        answer.prompt, answer.output, answer.cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        if event.completed.HasField("ledger"):
            answer.parts = tuple(getattr(event.completed.ledger, name) for name in PARTS)
        return True
    elif kind == "failed":
        raise Unanswered(FAILED, event.failed.reason)
    return False


def _unanswered(exc: grpc.aio.AioRpcError, started: bool) -> Unanswered:
    """An error that the router explains before the answer begins is a refusal; without its word the way was broken."""
    metadata: Any = exc.trailing_metadata() or ()
    explained = any(key == ERROR_KEY for key, _ in metadata)
    if explained and not started:
        return Unanswered(REFUSED, f"{exc.code().name} {rpc.from_rpc_error(exc).reason}")
    if explained:
        return Unanswered(FAILED, rpc.from_rpc_error(exc).reason)
    return Unanswered(FAILED, "unreachable" if exc.code() is grpc.StatusCode.UNAVAILABLE else exc.code().name)
