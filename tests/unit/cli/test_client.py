"""The client against a small server that speaks the protocol; the real router is in tests/integration."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve import AsyncClient, Client
from pdserve.results import Completed, Delta, Finished, Logprob, Rendered, Started
from protos.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from runtime import rpc
from runtime.config import Config
from runtime.errors import InvalidRequest, Saturated, WorkerLost

Wire = inference_pb2.GenerateEvent


class Scripted(inference_pb2_grpc.InferenceServicer):
    """Answers by the prompt's text; keeps the last request."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.cancelled = asyncio.Event()
        self.server: Any = None

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Wire]:  # noqa: N802
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if request.prompt == "full":
            raise Saturated("no pair", retry_after_ms=250)
        if request.prompt == "unreachable":
            raise WorkerLost("a worker is not reachable")
        yield Wire(started=inference_pb2.GenerateStarted(request_id="r", model="m", prompt_tokens=3))
        if request.prompt == "endless":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if request.prompt == "cut":
            return
        for index, text in ((0, "Par"), (1, "Lon"), (0, "is")):
            scored = common_pb2.TokenLogprob(token=5, logprob=-0.5, rank=1)
            yield Wire(delta=inference_pb2.ChoiceDelta(index=index, text=text, token_ids=[5], logprobs=[scored]))
        if request.prompt == "lost":
            yield Wire(failed=common_pb2.ErrorDetail(reason="worker_lost", message="gone", retryable=True))
            return
        for index in (1, 0):
            reason = common_pb2.FINISH_REASON_LENGTH if index else common_pb2.FINISH_REASON_STOP
            yield Wire(finished=inference_pb2.ChoiceFinished(index=index, reason=reason, stop_reason="\n" * index))
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=3, total_tokens=6, cached_tokens=1)
        ledger = inference_pb2.Ledger(prefill_pid=1, decode_pid=2, transport="nixl", transfer_bytes=64)
        yield Wire(completed=inference_pb2.Completed(usage=usage, ledger=ledger if request.return_ledger else None))

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.TokenizeReply(token_ids=[len(request.text), len(request.chat.messages)])

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.DetokenizeReply(text="".join(map(chr, request.token_ids)))

    async def Render(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.RenderReply(text=request.chat.messages[0].content, token_ids=[1])

    async def Derender(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.DerenderReply()

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802
        return inference_pb2.ListModelsReply(models=[inference_pb2.ModelCard(id="m", max_model_len=9)])


@pytest.fixture
async def served() -> AsyncIterator[tuple[Scripted, str]]:
    config, servicer = Config.load({}), Scripted()
    servicer.server = server = rpc.server(config)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    address = rpc.bind(server, "127.0.0.1:0", config)
    await server.start()
    yield servicer, address
    await server.stop(None)


async def test_a_stream_is_events_in_order_and_ends_with_completed(served: tuple[Scripted, str]) -> None:
    async with AsyncClient(served[1]) as client:
        events = [event async for event in client.generate_stream("go")]
    assert isinstance(events[0], Started)
    assert events[1] == Delta(0, "Par", (5,), (Logprob(5, -0.5, 1),))
    assert [event.index for event in events if isinstance(event, Finished)] == [1, 0]
    assert isinstance(events[-1], Completed)


async def test_a_generation_gathers_choices_usage_and_ledger(served: tuple[Scripted, str]) -> None:
    async with AsyncClient(served[1], api_key="k") as client:
        got = await client.chat("hello", n=2, return_ledger=True, stop="x", logit_bias={7: 1.5}, seed=2**63)
    assert [choice.text for choice in got.choices] == ["Paris", "Lon"]
    assert got.text == "Paris"
    assert [(choice.finish_reason, choice.stop_reason) for choice in got.choices] == [("stop", ""), ("length", "\n")]
    assert (got.request_id, got.usage.cached_tokens) == ("r", 1)
    assert got.ledger is not None
    assert (got.ledger.prefill_pid, got.ledger.decode_pid, got.ledger.transfer_bytes) == (1, 2, 64)
    request = served[0].requests[-1]
    assert request.chat.messages[0].content == "hello"
    assert (list(request.stop), dict(request.logit_bias), request.seed) == (["x"], {7: 1.5}, 2**63)
    assert not request.HasField("temperature")
    assert served[0].metadata["authorization"] == "Bearer k"


async def test_failures_are_the_exceptions_of_the_server_however_they_come(served: tuple[Scripted, str]) -> None:
    async with AsyncClient(served[1]) as client:
        with pytest.raises(Saturated) as refused:
            await client.generate("full")
        assert (refused.value.message, refused.value.retry_after_ms) == ("no pair", 250)
        with pytest.raises(WorkerLost, match="gone"):
            await client.generate("lost")
        with pytest.raises(WorkerLost, match="without an end"):
            await client.generate("cut")
        with pytest.raises(WorkerLost, match="a worker is not reachable"):
            await client.generate("unreachable")


async def test_a_router_that_is_not_there_is_named_with_what_to_look_at(
    served: tuple[Scripted, str], free_port: int
) -> None:
    address = f"127.0.0.1:{free_port}"
    async with AsyncClient(address) as nobody:
        for call in (nobody.models(), nobody.tokenize("x"), nobody.generate("go"), nobody.chat("go")):
            with pytest.raises(WorkerLost) as refused:
                await call
            assert address in refused.value.message
            assert "gRPC" in refused.value.message
    async with AsyncClient(served[1]) as client:
        stream = client.generate_stream("endless")
        await anext(stream)
        await served[0].server.stop(0)
        with pytest.raises(WorkerLost, match=f"the connection to the router at {served[1]} was lost"):
            await anext(stream)


async def test_leaving_a_stream_cancels_the_request_at_the_server(served: tuple[Scripted, str]) -> None:
    async with AsyncClient(served[1]) as client:
        stream = client.generate_stream("endless")
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(served[0].cancelled.wait(), 5)


@pytest.mark.parametrize("options", [{"max_tokens": "many"}, {"no_such": 1}, {"max_tokens": -1}, {"stop": [1]}])
async def test_a_wrong_option_is_refused_here_by_its_name(
    served: tuple[Scripted, str], options: dict[str, Any]
) -> None:
    async with AsyncClient(served[1]) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("go", **options)
    assert caught.value.field == next(iter(options))


async def test_a_malformed_message_is_refused(served: tuple[Scripted, str]) -> None:
    async with AsyncClient(served[1]) as client:
        with pytest.raises(InvalidRequest):
            await client.chat([{"role": "user", "text": "hello"}])


async def test_the_plain_client_does_the_same_from_ordinary_code(served: tuple[Scripted, str]) -> None:
    def work() -> None:
        with Client(served[1]) as client:
            assert client.generate([1, 2, 3]).text == "Paris"
            assert list(served[0].requests[-1].prompt_tokens.ids) == [1, 2, 3]
            assert [e.text for e in client.chat_stream("go") if isinstance(e, Delta)] == ["Par", "Lon", "is"]
            assert client.tokenize("four") == (4, 0)
            assert client.tokenize([{"role": "user", "content": "x"}]) == (0, 1)
            assert client.detokenize([72, 105]) == "Hi"
            assert client.render("yes") == Rendered("yes", (1,))
            assert [model.id for model in client.models()] == ["m"]
            with pytest.raises(Saturated):
                client.generate("full")
            stream = client.generate_stream("endless")
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        client.close()

    await asyncio.to_thread(work)
    await asyncio.wait_for(served[0].cancelled.wait(), 5)


async def test_ctrl_c_in_a_chat_ends_the_turn_and_the_request_and_not_the_conversation(
    served: tuple[Scripted, str],
) -> None:
    """The signal comes while the client waits for the next piece, which is nearly always."""
    code = (
        "import os, signal, sys, threading\n"
        "from pdserve import Client\n"
        "with Client(sys.argv[1]) as client:\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    try:\n"
        "        list(client.generate_stream('endless'))\n"
        "    except KeyboardInterrupt:\n"
        "        print(client.generate('go').text)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, served[1], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"Paris\n", b"")
    await asyncio.wait_for(served[0].cancelled.wait(), 5)
