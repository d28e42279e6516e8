"""A server that ends requests in every way one can: how is said by the first token of a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from aiohttp import web

from protos.v1 import inference_pb2, inference_pb2_grpc
from runtime import rpc
from runtime.config import Config
from runtime.errors import QuotaExceeded, Saturated

WHOLE, REFUSES, BREAKS, DROPS, NO_END, SILENT, SLOW, BUSY, EMPTY, CUT_OFF = range(10)
CACHED = 3


class Server(inference_pb2_grpc.InferenceServicer):
    """asked: the prompts, in order; at_once: the most requests that were under way together."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.sessions: list[str] = []
        self.running = self.at_once = 0
        self.slow_s = 0.05
        self.tells_tokens = True

    @asynccontextmanager
    async def one(self, prompt: list[int], session: str) -> AsyncIterator[None]:
        self.asked.append(prompt)
        self.sessions.append(session)
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        try:
            if prompt[0] == SILENT:
                await asyncio.sleep(3600)
            if prompt[0] == SLOW:
                await asyncio.sleep(self.slow_s)
            yield
        finally:
            self.running -= 1

    # --- HTTP

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        async with self.one(prompt, request.headers["x-session-id"]):
            kind, count = prompt[0], body["max_tokens"]
            if kind in (REFUSES, BUSY):
                status = 429 if kind == REFUSES else 503
                return web.json_response({"error": {"message": "no", "code": f"reason_{status}"}}, status=status)
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            if kind == DROPS:
                assert request.transport is not None
                request.transport.abort()
                return reply
            await self._events(reply, prompt, 0 if kind == EMPTY else count)
            return reply

    async def _events(self, reply: web.StreamResponse, prompt: list[int], count: int) -> None:
        async def say(event: Any) -> None:
            await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        for number in range(count):
            tokens = {"token_ids": [number]} if self.tells_tokens else {}
            await say({"choices": [{"index": 0, "text": "x", **tokens}]})
            if prompt[0] == BREAKS and number:
                await say({"error": {"message": "no", "code": "worker_lost"}})
                return
            if prompt[0] == CUT_OFF and number:
                return
        await say({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        details = {"prompt_tokens_details": {"cached_tokens": CACHED}}
        await say({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count, **details}})
        if prompt[0] != NO_END:
            await reply.write(b"data: [DONE]\n\n")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": 1000}]})

    # --- gRPC

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        Event = inference_pb2.GenerateEvent
        prompt = list(request.prompt_tokens.ids)
        session = str(dict(context.invocation_metadata())["x-session-id"])
        async with self.one(prompt, session):
            if prompt[0] == REFUSES:
                raise QuotaExceeded("no", reason="reason_429")
            if prompt[0] == BUSY:
                raise Saturated("no", reason="reason_503")
            if prompt[0] == DROPS:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "")
            yield Event(started=inference_pb2.GenerateStarted(prompt_tokens=len(prompt)))
            for number in range(0 if prompt[0] == EMPTY else request.max_tokens):
                yield Event(delta=inference_pb2.ChoiceDelta(text="x", token_ids=[number]))
                if prompt[0] == BREAKS and number:
                    yield Event(failed=Saturated("no", reason="worker_lost").detail())
                    return
                if prompt[0] in (NO_END, CUT_OFF) and number:
                    return
            count = 0 if prompt[0] == EMPTY else request.max_tokens
            usage = inference_pb2.Usage(prompt_tokens=len(prompt), completion_tokens=count, cached_tokens=CACHED)
            ledger = inference_pb2.Ledger(queue_s=0.25, prefill_s=0.5) if request.return_ledger else None
            yield Event(completed=inference_pb2.Completed(usage=usage, ledger=ledger))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsReply:  # noqa: N802
        card = inference_pb2.ModelCard(id="scripted", max_model_len=1000, vocab_size=50)
        return inference_pb2.ListModelsReply(models=[card])


def server() -> Server:
    return Server()  # type: ignore[abstract]  # nobody asks for the rest


@asynccontextmanager
async def over_http(server: Server) -> AsyncIterator[str]:
    """Its URL."""
    app = web.Application()
    app.add_routes([web.post("/v1/completions", server.completions), web.get("/v1/models", server.models)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def over_grpc(server: Server) -> AsyncIterator[str]:
    """Its host:port."""
    config = Config()
    made = rpc.server(config)
    inference_pb2_grpc.add_InferenceServicer_to_server(server, made)
    address = rpc.bind(made, "127.0.0.1:0", config)
    await made.start()
    try:
        yield address
    finally:
        await made.stop(0)
