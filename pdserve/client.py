"""The Python client over gRPC: AsyncClient, and Client for code without an event loop.

Errors are those of runtime.errors, whatever way they come: as a status before the stream, or as its failed end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Self, TypeVar, Unpack, cast

import grpc

from pdserve.results import Event, Gathering, Generation, Model, Options, Rendered, event_of
from protos.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from runtime import errors, rpc
from runtime.config import Config
from runtime.errors import InvalidRequest, WorkerLost

DEFAULT_TIMEOUT_S = 600.0
Prompt = str | Sequence[int]
Message = Mapping[str, str]
_T = TypeVar("_T")


class AsyncClient:
    """Talks to one router. Use as `async with AsyncClient("host:port") as client`, or close() it.

    api_key: sent as a bearer token. tls_cert, tls_key, tls_ca: PEM files, all three or none.
    """

    def __init__(
        self, address: str, *, api_key: str = "", tls_cert: str = "", tls_key: str = "", tls_ca: str = ""
    ) -> None:
        config = Config.load({"tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca})
        self._address = address
        self._channel = rpc.channel(address, config)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Drop the connection; requests under way are cancelled."""
        await self._channel.close(None)

    # --- generate

    def generate_stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncIterator[Event]:
        """Events of a completion: Started, Deltas, a Finished per choice, Completed. prompt: text or token ids.

        Leaving the loop early cancels the request. Raises what runtime.errors has, at any point of the stream.
        """
        request = _request(options)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.prompt_tokens.ids.extend(prompt)
            request.prompt_tokens.SetInParent()
        return self._stream(request, options)

    def chat_stream(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> AsyncIterator[Event]:
        """Like generate_stream, for a chat: messages with role and content, or one user message's text."""
        request = _request(options)
        request.chat.CopyFrom(_chat(messages))
        return self._stream(request, options)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """The whole completion of `prompt` (text or token ids)."""
        return await _gather(self.generate_stream(prompt, **options))

    async def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Generation:
        """The whole answer to a chat."""
        return await _gather(self.chat_stream(messages, **options))

    async def _stream(self, request: inference_pb2.GenerateRequest, options: Options) -> AsyncIterator[Event]:
        timeout = options.get("timeout", DEFAULT_TIMEOUT_S)
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        heard = False
        try:
            with _translated(lambda: _gone(self._address) if heard else unanswered(self._address)):
                async for wire in call:
                    heard = True
                    event = event_of(wire)
                    if isinstance(event, common_pb2.ErrorDetail):
                        raise errors.from_detail(event, grpc.StatusCode.UNKNOWN)
                    yield event
                    if wire.HasField("completed"):
                        return
            raise WorkerLost("the stream ended without an end", reason="stream_lost")
        finally:
            call.cancel()

    # --- text and tokens

    async def tokenize(
        self, text: str | Sequence[Message], *, model: str = "", add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a chat rendered by the model's template."""
        request = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
        if isinstance(text, str):
            request.text = text
        else:
            request.chat.CopyFrom(_chat(text))
        return tuple((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        request = inference_pb2.DetokenizeRequest(model=model, token_ids=token_ids)
        return cast(str, (await self._call(self._stub.Detokenize, request)).text)

    async def render(self, messages: str | Sequence[Message], *, model: str = "") -> Rendered:
        """A chat as text and tokens, without generating."""
        request = inference_pb2.RenderRequest(model=model, chat=_chat(messages))
        reply = await self._call(self._stub.Render, request)
        return Rendered(reply.text, tuple(reply.token_ids))

    async def models(self) -> tuple[Model, ...]:
        reply = await self._call(self._stub.ListModels, inference_pb2.ListModelsRequest())
        return tuple(map(Model.of, reply.models))

    async def _call(self, method: Any, request: Any) -> Any:
        with _translated(lambda: unanswered(self._address)):
            return await method(request, timeout=DEFAULT_TIMEOUT_S, metadata=self._metadata)


class Client:
    """AsyncClient for ordinary code, on a thread of its own. Safe to use from several threads."""

    def __init__(
        self, address: str, *, api_key: str = "", tls_cert: str = "", tls_key: str = "", tls_ca: str = ""
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdserve-client", daemon=True)
        self._thread.start()

        async def make() -> AsyncClient:
            return AsyncClient(address, api_key=api_key, tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca)

        self._client = self._run(make())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """The whole completion of `prompt` (text or token ids)."""
        return self._run(self._client.generate(prompt, **options))

    def chat(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Generation:
        """The whole answer to a chat: messages with role and content, or one user message's text."""
        return self._run(self._client.chat(messages, **options))

    def generate_stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Event]:
        """Events of a completion; leaving the loop early (and dropping the iterator) cancels the request."""
        return self._iterate(self._client.generate_stream(prompt, **options))

    def chat_stream(self, messages: str | Sequence[Message], **options: Unpack[Options]) -> Iterator[Event]:
        return self._iterate(self._client.chat_stream(messages, **options))

    def tokenize(
        self, text: str | Sequence[Message], *, model: str = "", add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        return self._run(self._client.tokenize(text, model=model, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        return self._run(self._client.detokenize(token_ids, model=model))

    def render(self, messages: str | Sequence[Message], *, model: str = "") -> Rendered:
        return self._run(self._client.render(messages, model=model))

    def models(self) -> tuple[Model, ...]:
        return self._run(self._client.models())

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _iterate(self, events: AsyncIterator[Event]) -> Iterator[Event]:
        turn = asyncio.Lock()  # after Ctrl-C the interrupted step still runs; a generator is closed only at rest

        async def following() -> Event | None:
            async with turn:
                return await anext(events, None)

        async def close() -> None:
            async with turn:
                await events.aclose()  # type: ignore[attr-defined]

        try:
            while (event := self._run(following())) is not None:
                yield event
        finally:
            if not self._loop.is_closed():
                self._run(close())


@contextmanager
def _translated(unreachable: Callable[[], str]) -> Iterator[None]:
    """rpc.translated, and what to say of a connection that is not there: the user has named its address."""
    try:
        with rpc.translated():
            yield
    except WorkerLost as error:
        if rpc.unreachable(error.__cause__):
            raise WorkerLost(unreachable(), reason=error.reason) from error.__cause__
        raise


def unanswered(address: str) -> str:
    """What to look at when nobody answers at a router's gRPC address."""
    hint = "does it run, is this its gRPC address (not the HTTP one), is TLS on at both ends or at none?"
    return f"no router answers at {address}: {hint}"


def _gone(address: str) -> str:
    return f"the connection to the router at {address} was lost"


async def _gather(events: AsyncIterator[Event]) -> Generation:
    gathering = Gathering()
    async with aclosing(cast(Any, events)) as stream:
        async for event in stream:
            gathering.add(event)
    return gathering.result()


def _request(options: Options) -> inference_pb2.GenerateRequest:
    """The wire request of these options. Raises InvalidRequest naming an option of a wrong name or type."""
    request = inference_pb2.GenerateRequest()
    for key, value in options.items():
        if key == "timeout" or value is None:
            continue
        try:
            _set(request, key, value)
        except (TypeError, ValueError, AttributeError):
            raise InvalidRequest(f"{key} has a wrong type, value or name", field=key) from None
    return request


def _set(request: inference_pb2.GenerateRequest, key: str, value: Any) -> None:
    if key == "logit_bias":
        request.logit_bias.update(value)
    elif key == "stop" and isinstance(value, str):
        request.stop.append(value)
    elif key in ("stop", "stop_token_ids"):
        getattr(request, key).extend(value)
    elif key == "retention":
        request.retention.CopyFrom(common_pb2.Retention(**value))
    else:
        setattr(request, key, value)


def _chat(messages: str | Sequence[Message]) -> inference_pb2.ChatMessages:
    """Raises InvalidRequest for a message without role and content, or with anything else."""
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    try:
        return inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(**dict(one)) for one in listed])
    except (TypeError, ValueError):
        raise InvalidRequest("a message has role, content and maybe name, all text", field="messages") from None
