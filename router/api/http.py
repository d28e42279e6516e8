"""The HTTP face: OpenAI's endpoints and the operator's, over aiohttp.web.

Every route but health asks for a key when keys are configured, unknown routes included. Every error has the same small
JSON body, `x-pd-reason` and `x-request-id`. A client's own request id is a label in logs; the id is always ours.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
import structlog
from aiohttp import web

from router.admission.tenants import Tenant
from router.api import answer, entity, failures, replies, schema, shapes
from router.api.asked import Asked, ServedRequest
from router.api.cors import Cors
from router.api.front import Call, Front, Prepared
from router.api.lane import Endpoint, Taken
from router.api.replies import ChatStream, Collected, CompletionStream, EchoedPrompt, Frame
from router.api.sink import KeepAlive, Sink
from router.params import Params
from router.request import Outcome, Reply
from router.stats import Record
from runtime.errors import Cancelled, InvalidRequest, PdserveError, let_go
from runtime.health import Health, Report
from runtime.ids import new_request_id
from runtime.metrics import CONTENT_TYPE, Metrics

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Generating = Callable[[Asked], Awaitable[web.StreamResponse | None]]
"""Answers; what it returns is for the server library, which is None where it has no part in it."""

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
LABEL_HEADER = "x-request-id"
SESSION_HEADER = "x-session-id"
REASON_HEADER = "x-pd-reason"
MAX_LABEL = 128

_log = structlog.get_logger("pdserve.router.http")
REQUEST_ID = web.RequestKey("request_id", str)
TENANT = web.RequestKey("tenant", Tenant)


class HttpFace:
    """Handlers over one Front. app() is what the server runs; admin_app() the operator's routes alone."""

    def __init__(
        self, front: Front, health: Health, metrics: Metrics, observe: Callable[[], None], defaults: Params
    ) -> None:
        self._front = front
        self._health = health
        self._metrics = metrics
        self._observe = observe
        self._defaults = defaults
        self._created = int(front.clock.wall())
        self._cors = Cors(front.config.cors_origins)

    def app(self, *, with_metrics: bool = True) -> web.Application:
        app = web.Application(middlewares=[self._middleware()], client_max_size=self._front.config.max_body_bytes)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", self._served(self.chat)),
            ("POST", "/v1/completions", self._served(self.completions)),
            ("POST", "/v1/chat/completions/render", self.render_chat),
            ("POST", "/v1/completions/render", self.render_completion),
            ("POST", "/v1/chat/completions/derender", self.derender_chat),
            ("POST", "/v1/completions/derender", self.derender_completion),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:.+}", self.model),
            ("GET", "/health/live", self.live),
            ("GET", "/health/ready", self.ready),
            ("GET", "/health", self.ready),  # what load balancers in front of other servers ask
        ]
        if with_metrics:
            routes.append(("GET", "/metrics", self.metrics))
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        return app

    def direct(self) -> dict[tuple[str, str], Handler]:
        """The generating endpoints with everything around them, for a server that needs no router."""
        around = self._middleware()

        def wrapped(handler: Handler) -> Handler:
            async def handle(request: web.Request) -> web.StreamResponse:
                response: web.StreamResponse = await around(request, handler)
                return response

            return handle

        return {
            ("POST", "/v1/chat/completions"): wrapped(self._served(self.chat)),
            ("POST", "/v1/completions"): wrapped(self._served(self.completions)),
        }

    def lane(self) -> dict[str, Endpoint]:
        """The same for requests that the server library has no part in."""
        return {"/v1/chat/completions": self._taken(self.chat), "/v1/completions": self._taken(self.completions)}

    @staticmethod
    def _served(handler: Generating) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            asked = ServedRequest(request, request[REQUEST_ID], request[TENANT])
            try:
                response = await handler(asked)
            except Exception as exc:  # raises again, always: what is begun cannot become an error page
                if not asked.begun or isinstance(exc, ConnectionError):
                    raise
                _log.error("answer_broke", exc_info=exc)
                if request.transport is not None:
                    request.transport.close()  # the library would begin another one
                raise ConnectionResetError("the answer broke off") from exc
            assert response is not None
            return response

        return handle

    def _taken(self, handler: Generating) -> Endpoint:
        async def handle(asked: Taken) -> None:
            try:
                asked.tenant = self._front.keys.tenant(asked.headers.get("authorization", ""))
                await handler(asked)
                return
            except PdserveError as error:
                response = self._failed(error)
            except ConnectionError:
                raise
            except Exception as exc:  # noqa: BLE001  the RPC boundary
                _log.error("handler_failed", exc_info=exc)
                response = self._failed(PdserveError("internal error"))
            self._finished(response, asked.request_id, asked.headers)
            asked.transport().write(answer.refusal(response))
            if response.keep_alive is False:
                raise ConnectionResetError("the answer was the connection's last")

        return handle

    def admin_app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware()])
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health/live", self.live)
        app.router.add_get("/health/ready", self.ready)
        app.router.add_get("/health", self.ready)
        return app

    # generation

    async def chat(self, asked: Asked) -> web.StreamResponse | None:
        with self._front.stats.request(asked.tenant.name, asked.request_id) as record:
            body = await self._read(asked, schema.ChatBody)
            chat = schema.chat_of(body.messages, body.add_generation_prompt, self._front.limits)
            params = schema.params_of(body, self._defaults)
            call = self._call(asked, record, [chat], params, body.model, "messages", body.user)
            await self._front.permits.gather(call.tenant, 1)
            with self._front.permits.hold(call.tenant, 1):
                prepared = await self._front.prepare(call)
                frame = self._frame("chatcmpl", call, body.include_usage)
                if params.stream:
                    return await self._stream(asked, record, prepared, frame, ChatStream)
                collected = Collected(params.n)
                record.completed(await self._front.generate(prepared, [collected]))
                return self._answer(asked, replies.chat_body(frame, collected, record.outcomes))

    async def completions(self, asked: Asked) -> web.StreamResponse | None:
        with self._front.stats.request(asked.tenant.name, asked.request_id) as record:
            body = await self._read(asked, schema.CompletionBody)
            prompts = schema.prompts_of(body.prompt, self._front.limits)
            params = schema.params_of(body, self._defaults)
            call = self._call(asked, record, prompts, params, body.model, "prompt", body.user)
            await self._front.permits.gather(call.tenant, len(prompts))
            with self._front.permits.hold(call.tenant, len(prompts)):
                prepared = await self._front.prepare(call)
                pairs = zip(prompts, prepared.works, strict=True)
                echoes = [await self._echo(prompt, work.tokens, params) for prompt, work in pairs]
                frame = self._frame("cmpl", call, body.include_usage)
                if params.stream:
                    return await self._stream(asked, record, prepared, frame, CompletionStream, echoes)
                collected = [Collected(params.n) for _ in prepared.works]
                record.completed(await self._front.generate(prepared, collected))
                return self._answer(asked, replies.completion_body(frame, collected, echoes, record.outcomes))

    async def _echo(self, prompt: Any, tokens: Sequence[int], params: Params) -> EchoedPrompt:
        if not params.echo:
            return EchoedPrompt()
        text = (
            prompt
            if isinstance(prompt, str)
            else await self._front.codec.decode_long(tokens, skip_special=params.skip_special)
        )
        return EchoedPrompt(text, tuple(tokens))

    def _call(
        self,
        asked: Asked,
        record: Record,
        prompts: Sequence[Any],
        params: Params,
        model: str | None,
        name: str,
        user: str,
    ) -> Call:
        record.label = (asked.headers.get(LABEL_HEADER, "") or user)[:MAX_LABEL]
        return Call(
            prompts=prompts,
            params=params,
            model=model,
            field=name,
            traceparent=asked.headers.get("traceparent", ""),
            session=(asked.headers.get(SESSION_HEADER, "") or params.retention.session or user)[:MAX_LABEL],
            tenant=asked.tenant,
            request_id=asked.request_id,
        )

    async def _read(self, asked: Asked, kind: type[schema.B]) -> schema.B:
        return schema.parse(await asked.body(self._front.config.max_body_bytes), kind)

    async def _parsed(self, request: web.Request, kind: type[schema.B]) -> schema.B:
        return schema.parse(await entity.read(request, self._front.config.max_body_bytes), kind)

    def _answer(self, asked: Asked, body: dict[str, Any]) -> web.StreamResponse | None:
        if not asked.plain:
            return _json(body)
        headers = {LABEL_HEADER: asked.request_id} | self._cors.answer(asked.headers)
        made = answer.whole(orjson.dumps(body), headers)
        asked.transport().write(made)
        return asked.written()

    def _frame(self, prefix: str, call: Call, include_usage: bool) -> Frame:
        return Frame(
            id=f"{prefix}-{call.request_id}",
            created=int(self._front.clock.wall()),
            model=self._front.model,
            params=call.params,
            codec=self._front.codec,
            include_usage=include_usage,
        )

    async def _stream(
        self,
        asked: Asked,
        record: Record,
        prepared: Prepared,
        frame: Frame,
        kind: type[ChatStream] | type[CompletionStream],
        echoes: Sequence[EchoedPrompt] = (),
    ) -> web.StreamResponse | None:
        run: asyncio.Task[list[Outcome]]
        sink = Sink(self._front.config.stream_buffer_bytes, lambda: self._slow(run))
        made: list[Reply] = [
            ChatStream(frame, sink)
            if kind is ChatStream
            else CompletionStream(frame, sink, place * frame.params.n, echoes[place])
            for place in range(len(prepared.works))
        ]
        run = asyncio.create_task(self._front.generate(prepared, made))
        with KeepAlive(sink, self._front.config.sse_keepalive_s) as alive:
            try:
                run.add_done_callback(lambda _: sink.want())
                await sink.wanted
                if run.done() and not sink.waits:
                    run.result()  # an error before the first byte still has its status
                await sink.open(asked, {LABEL_HEADER: record.request_id} | self._cors.answer(asked.headers))
                alive.opened()
                outcomes = await run
            except asyncio.CancelledError:
                if sink.slow and run.cancelled():  # it was cut off, not gone by itself
                    record.failed(Cancelled("the client reads too slowly", reason="slow_client"))
                    raise ConnectionResetError("the client reads too slowly") from None
                raise
            except Exception as exc:  # raises again, or ends what has begun with the error
                if not sink.opened or isinstance(exc, ConnectionError):
                    raise
                return await self._broken_off(record, sink, exc)
            finally:
                await _ended(run)
        record.completed(outcomes)
        replies.write_end(frame, kind.kind, sink, record.outcomes)
        return await sink.finish()

    async def _broken_off(self, record: Record, sink: Sink, error: Exception) -> web.StreamResponse | None:
        """A stream that has begun ends with an error."""
        known = failures.known(error)
        let_go(error)
        record.failed(known)
        sink.write(b"data: " + orjson.dumps(shapes.error_body(known)) + b"\n\n")
        return await sink.finish()

    def _slow(self, run: asyncio.Task[list[Outcome]]) -> None:
        self._front.stats.slow_client()
        run.cancel()

    # text and tokens

    async def render_chat(self, request: web.Request) -> web.Response:
        body = await self._parsed(request, schema.RenderChatBody)
        self._front.check_model(body.model)
        chat = schema.chat_of(body.messages, body.add_generation_prompt, self._front.limits)
        rendered = await self._front.render(chat)
        return _json({"model": self._front.model, "prompt": rendered.text, "token_ids": rendered.tokens})

    async def render_completion(self, request: web.Request) -> web.Response:
        body = await self._parsed(request, schema.RenderCompletionBody)
        self._front.check_model(body.model)
        prompts = schema.prompts_of(body.prompt, self._front.limits)
        tokens = [await self._front.tokens(prompt, "prompt") for prompt in prompts]
        return _json({"model": self._front.model, "prompts": [{"token_ids": ids} for ids in tokens]})

    async def derender_chat(self, request: web.Request) -> web.Response:
        text = await self._derendered(request)
        return _json({"message": {"role": "assistant", "content": text}})

    async def derender_completion(self, request: web.Request) -> web.Response:
        return _json({"text": await self._derendered(request)})

    async def _derendered(self, request: web.Request) -> str:
        body = await self._parsed(request, schema.DerenderBody)
        self._front.check_model(body.model)
        return await self._text("token_ids", body.token_ids, skip=body.skip_special_tokens)

    async def tokenize(self, request: web.Request) -> web.Response:
        front = self._front
        body = await self._parsed(request, schema.TokenizeBody)
        front.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if body.prompt is not None:
            tokens = await front.codec.encode(body.prompt, add_special=body.add_special_tokens, field="prompt")
        else:
            chat = schema.chat_of(body.messages or [], body.add_generation_prompt, front.limits)
            tokens = (await front.render(chat)).tokens
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": front.limits.context, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [shapes.token_name(front.codec, token) for token in tokens]
        return _json(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self._parsed(request, schema.DetokenizeBody)
        self._front.check_model(body.model)
        return _json({"prompt": await self._text("tokens", body.tokens, skip=body.skip_special_tokens)})

    async def _text(self, name: str, given: Any, *, skip: bool) -> str:
        tokens = [] if given == [] else schema.token_list(given, name, self._front.limits)
        return await self._front.codec.decode_long(tokens, skip_special=skip)

    # operation

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        self._front.check_model(request.match_info["model"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._front.model,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "max_model_len": self._front.limits.context,
            "vocab_size": self._front.limits.vocab_size,
        }

    async def live(self, request: web.Request) -> web.Response:
        return _health(self._health.live())

    async def ready(self, request: web.Request) -> web.Response:
        return _health(self._health.ready())

    async def metrics(self, request: web.Request) -> web.Response:
        self._observe()
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    # around every request

    def _middleware(self) -> Any:
        @web.middleware
        async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
            request_id = new_request_id()
            request[REQUEST_ID] = request_id
            try:
                if request.method == "OPTIONS":  # a browser asks before it shows its key
                    return web.Response(status=204, headers=self._cors.preflight(request.headers))
                if request.path not in OPEN_PATHS:
                    request[TENANT] = self._front.keys.tenant(request.headers.get("Authorization", ""))
                response = await handler(request)
            except web.HTTPException as exc:
                response = self._failed(
                    failures.of_library(exc, self._front.config.max_body_bytes), exc.headers.get("Allow")
                )
            except PdserveError as error:
                response = self._failed(error)
            except ConnectionError:
                raise
            except Exception as exc:  # noqa: BLE001  the RPC boundary
                _log.error("handler_failed", path=request.path[:64], exc_info=exc)
                response = self._failed(PdserveError("internal error"))
            if not response.prepared:
                self._finished(response, request_id, request.headers)
            return response

        return around

    def _finished(self, response: web.StreamResponse, request_id: str, asked: Mapping[str, str]) -> None:
        response.headers.setdefault(LABEL_HEADER, request_id)
        response.headers.setdefault("Server", "pdserve")
        response.headers.update(self._cors.answer(asked))

    def _failed(self, error: PdserveError, allow: str | None = None) -> web.Response:
        self._front.stats.refused(error)
        let_go(error)
        response = _json(shapes.error_body(error), status=failures.status(error))
        response.headers[REASON_HEADER] = error.reason
        if error.retry_after_ms or error.row.retryable:
            response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
        if response.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if allow:
            response.headers["Allow"] = allow
        if error.reason == entity.MALFORMED:  # nobody can tell where the next request begins
            response.force_close()
        return response


async def _ended(run: asyncio.Task[list[Outcome]]) -> None:
    """However the handler leaves, what it started is over."""
    if not run.done():
        run.cancel()
        await asyncio.wait((run,))
    if not run.cancelled():
        run.exception()


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _health(report: Report) -> web.Response:
    status = "ok" if report.ok else "unavailable"
    return _json({"status": status, "failing": list(report.failing)}, status=200 if report.ok else 503)
