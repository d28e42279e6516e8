"""The gRPC face: pdserve.v1.Inference over the same Front as HTTP.

A stream of events per call; a slow client is bounded like an SSE one: events wait in a bounded buffer, then the call is
cancelled. Errors before the first event are the call's status, later ones the stream's one `failed` event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from protos.v1 import common_pb2, inference_pb2, inference_pb2_grpc, prefill_pb2
from router.admission.tenants import Tenant
from router.api import schema
from router.api.front import Call, Chat, Front, Prompt
from router.params import Params, Retention
from router.request import Outcome
from router.stats import Record
from router.text.progress import Delta, Finish
from runtime.errors import DeadlineExceeded, InvalidRequest, PdserveError, QuotaExceeded, let_go
from runtime.ids import new_request_id

Event = inference_pb2.GenerateEvent
MAX_LABEL = 128


class EventBuffer:
    """A request.Reply whose events are taken by the call's own coroutine."""

    def __init__(self, limit_bytes: int, echo: str) -> None:
        self._limit = limit_bytes
        self._echo = echo
        self._events: deque[Event] = deque()
        self._bytes = 0
        self._started: set[int] = set()
        self.wake = asyncio.Event()
        self.overflowed = False

    def put(self, event: Event) -> None:
        size = event.ByteSize()
        if self._bytes + size > self._limit:
            self.overflowed = True
        else:
            self._events.append(event)
            self._bytes += size

    def take(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        self._bytes = 0
        self.wake.clear()
        return events

    def delta(self, delta: Delta) -> None:
        self._start(delta.choice)
        self.put(
            Event(
                delta=inference_pb2.ChoiceDelta(
                    index=delta.choice, text=delta.text, token_ids=delta.tokens, logprobs=delta.logprobs
                )
            )
        )

    def finished(self, finish: Finish) -> None:
        self._start(finish.choice)
        finished = inference_pb2.ChoiceFinished(
            index=finish.choice, reason=common_pb2.FinishReason.ValueType(finish.reason), stop_reason=finish.stop
        )
        self.put(Event(finished=finished))

    def prompt_logprobs(self, offset: int, entries: Sequence[common_pb2.TokenLogprob]) -> None:
        self.put(Event(prompt_logprobs=prefill_pb2.PromptLogprobs(offset=offset, entries=entries)))

    def step(self) -> None:
        self.wake.set()

    def _start(self, choice: int) -> None:
        if self._echo and choice not in self._started:
            self._started.add(choice)
            self.put(Event(delta=inference_pb2.ChoiceDelta(index=choice, text=self._echo)))


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, front: Front, defaults: Params) -> None:
        self._front = front
        self._defaults = defaults
        self._created = int(front.clock.wall())

    def add_to(self, server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServicer_to_server(self, server)

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[Event]:
        front = self._front
        tenant = self._tenant(context)
        with front.stats.request(tenant.name, new_request_id()) as record:
            call = self._call(request, context, tenant, record)
            await front.permits.gather(tenant, 1)
            with front.permits.hold(tenant, 1):
                prepared = await front.prepare(call)
                work = prepared.works[0]
                echo = (
                    front.codec.decode(work.tokens, skip_special=call.params.skip_special) if call.params.echo else ""
                )
                buffer = EventBuffer(front.config.stream_buffer_bytes, echo)
                run = asyncio.create_task(front.generate(prepared, [buffer]))
                run.add_done_callback(lambda _: buffer.wake.set())
                started = inference_pb2.GenerateStarted(
                    request_id=call.request_id, model=front.model, prompt_tokens=len(work.tokens)
                )
                try:
                    async for event in self._events(run, buffer, started):
                        yield event
                    yield _last(run, record, call.params)
                finally:
                    if not run.done():
                        run.cancel()
                        await asyncio.wait((run,))

    async def _echo(self, params: Params, tokens: Sequence[int]) -> str:
        return await self._front.codec.decode_long(tokens, skip_special=params.skip_special) if params.echo else ""

    async def _events(
        self,
        run: asyncio.Task[list[Outcome]],
        buffer: EventBuffer,
        started: inference_pb2.GenerateStarted,
    ) -> AsyncIterator[Event]:
        """Everything but the terminal event. Raises the error of a call that sent nothing."""
        first = True
        while True:
            await buffer.wake.wait()
            ended = run.done()
            events = buffer.take()
            if ended and first and run.exception() is not None:
                run.result()
            if first and (events or ended):
                first = False
                yield Event(started=started)
            for event in events:
                yield event
            if buffer.overflowed:
                raise QuotaExceeded("the client reads too slowly", reason="slow_client")
            if ended:
                return

    async def Render(  # noqa: N802
        self, request: inference_pb2.RenderRequest, context: Any
    ) -> inference_pb2.RenderReply:
        self._check(request.model, context)
        rendered = await self._front.render(self._chat(request.chat))
        return inference_pb2.RenderReply(text=rendered.text, token_ids=rendered.tokens)

    async def Derender(  # noqa: N802
        self, request: inference_pb2.DerenderRequest, context: Any
    ) -> inference_pb2.DerenderReply:
        self._check(request.model, context)
        text = await self._text(request.token_ids, skip=True)
        message = inference_pb2.ChatMessage(role="assistant", content=text)
        return inference_pb2.DerenderReply(message=message, text=text)

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeReply:
        self._check(request.model, context)
        codec, context_len = self._front.codec, self._front.limits.context
        kind = request.WhichOneof("input")
        if kind == "chat":
            tokens = (await self._front.render(self._chat(request.chat))).tokens
        elif kind == "text":
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            tokens = await codec.encode(request.text, add_special=special, field="text")
        else:
            raise InvalidRequest("give either text or chat", field="input")
        return inference_pb2.TokenizeReply(token_ids=tokens, max_model_len=context_len)

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeReply:
        self._check(request.model, context)
        return inference_pb2.DetokenizeReply(text=await self._text(request.token_ids, skip=False))

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsReply:
        self._tenant(context)
        card = inference_pb2.ModelCard(
            id=self._front.model,
            created=self._created,
            owned_by="pdserve",
            max_model_len=self._front.limits.context,
            fingerprint=self._front.fingerprint,
            vocab_size=self._front.limits.vocab_size,
        )
        return inference_pb2.ListModelsReply(models=[card])

    # input

    def _check(self, model: str, context: Any) -> None:
        self._tenant(context)
        self._front.check_model(model or None)

    def _tenant(self, context: Any) -> Tenant:
        metadata = dict(context.invocation_metadata() or ())
        value = metadata.get("authorization", "")
        return self._front.keys.tenant(value if isinstance(value, str) else "")

    async def _text(self, ids: Sequence[int], *, skip: bool) -> str:
        tokens = schema.token_list(list(ids), "token_ids", self._front.limits) if ids else []
        return await self._front.codec.decode_long(tokens, skip_special=skip)

    def _chat(self, chat: inference_pb2.ChatMessages) -> Chat:
        messages: list[dict[str, str]] = []
        for message in chat.messages:
            entry = {"role": message.role, "content": message.content}
            messages.append(entry | ({"name": message.name} if message.name else {}))
        generation = not chat.HasField("add_generation_prompt") or chat.add_generation_prompt
        return schema.chat_of(messages, generation, self._front.limits)

    def _call(self, request: inference_pb2.GenerateRequest, context: Any, tenant: Tenant, record: Record) -> Call:
        prompt, name = self._prompt(request)
        metadata = dict(context.invocation_metadata() or ())
        record.label = str(metadata.get("x-request-id", ""))[:MAX_LABEL]
        return Call(
            prompts=[prompt],
            params=self._params(request),
            model=request.model or None,
            field=name,
            traceparent=str(metadata.get("traceparent", "")),
            session=(str(metadata.get("x-session-id", "")) or request.retention.session)[:MAX_LABEL],
            timeout_s=context.time_remaining(),
            tenant=tenant,
            request_id=record.request_id,
        )

    def _prompt(self, request: inference_pb2.GenerateRequest) -> tuple[Prompt, str]:
        kind = request.WhichOneof("input")
        if kind == "chat":
            return self._chat(request.chat), "chat"
        if kind == "prompt":
            if not request.prompt:
                raise InvalidRequest("the prompt is empty", field="prompt", limit="at least 1 token")
            return request.prompt, "prompt"
        if kind == "prompt_tokens":
            return schema.token_list(
                list(request.prompt_tokens.ids), "prompt_tokens", self._front.limits
            ), "prompt_tokens"
        raise InvalidRequest("give chat, prompt or prompt_tokens", field="input")

    def _params(self, request: inference_pb2.GenerateRequest) -> Params:
        base = self._defaults

        def given(name: str, default: Any) -> Any:
            return getattr(request, name) if request.HasField(name) else default  # type: ignore[arg-type]

        if request.echo and request.WhichOneof("input") == "chat":
            raise InvalidRequest("echo is for prompts, not for chats", field="echo")
        schema.short("cache_salt", request.cache_salt)
        hint = request.retention
        return Params(
            n=given("n", 1),
            temperature=given("temperature", base.temperature),
            top_p=given("top_p", base.top_p),
            top_k=given("top_k", base.top_k),
            min_p=given("min_p", base.min_p),
            repetition_penalty=given("repetition_penalty", base.repetition_penalty),
            presence_penalty=given("presence_penalty", 0.0),
            frequency_penalty=given("frequency_penalty", 0.0),
            logit_bias=tuple(request.logit_bias.items()),
            seed=given("seed", None),
            max_tokens=given("max_tokens", None),
            min_tokens=given("min_tokens", 0),
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            include_stop=request.include_stop_str_in_output,
            skip_special=not request.skip_special_tokens_off,
            logprobs=given("logprobs", None),
            prompt_logprobs=given("prompt_logprobs", None),
            echo=request.echo,
            return_ledger=request.return_ledger,
            return_token_ids=True,
            cache_salt=request.cache_salt,
            retention=Retention(hint.session, hint.priority, hint.ttl_ms),
            stream=True,
        )


def _last(run: asyncio.Task[list[Outcome]], record: Record, params: Params) -> Event:
    """The one terminal event. A passed deadline is the call's status instead: the client's own timer says the same."""
    error = run.exception()
    if isinstance(error, DeadlineExceeded):
        raise error
    if error is not None:
        known = error if isinstance(error, PdserveError) else PdserveError("internal error")
        record.failed(known)
        let_go(error)
        return Event(failed=known.detail())
    record.completed(run.result())
    outcome = record.outcomes[0]
    usage = inference_pb2.Usage(
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        total_tokens=outcome.prompt_tokens + outcome.completion_tokens,
        cached_tokens=outcome.cached_tokens,
    )
    ledger = outcome.ledger.wire() if params.return_ledger else None
    return Event(completed=inference_pb2.Completed(usage=usage, ledger=ledger))
