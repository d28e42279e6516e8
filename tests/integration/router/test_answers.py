"""One prefill and one decode worker behind the router: what a client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import openai
import pytest

from tests.integration.router.scripted import LENGTH, STOP, Leg, ScriptedWorker
from tests.integration.router.sites import Site, config, site


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


async def test_an_answer_is_the_first_token_of_prefill_and_the_rest_of_decode(pair: Site) -> None:
    status, body = await pair.complete(return_ledger=True)

    assert status == 200
    assert body["choices"][0]["text"] == "abcd"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (body["ledger"]["prefill_worker"], body["ledger"]["decode_worker"]) == ("prefill-1", "decode-1")
    assert (body["ledger"]["prefill_pid"], body["ledger"]["decode_pid"]) == (1, 2)
    assert body["ledger"]["transfer_bytes"] == 64
    await pair.quiet()


async def test_both_workers_are_told_the_same_request(pair: Site) -> None:
    """Public report T163 (llm-d/llm-d-router#411)."""
    await pair.complete(seed=7, temperature=0.5, stop_token_ids=[9])

    prefill, decode = pair.worker("prefill").submitted[0], pair.worker("decode").submitted[0]
    assert prefill.work.tokens == decode.work.tokens == list(b"hello")
    assert prefill.work.sampling == decode.work.sampling
    assert prefill.work.sampling.seed == 7
    assert sorted(prefill.work.sampling.stop_token_ids) == [9, 258]
    assert prefill.work.prompt_len == 5
    assert prefill.ref.request_id == decode.ref.request_id
    assert len(prefill.work.salt) == 32
    assert 0 < prefill.work.remaining_ms <= 600_000


async def test_a_stream_has_the_same_text_and_ends_once(pair: Site) -> None:
    events = await pair.events("/v1/completions", {"prompt": "hello", "max_tokens": 4, "stream": True})

    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcd"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("length") == 1


async def test_a_chat_stream_begins_with_the_role(pair: Site) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}

    chunks = [json.loads(event) for event in (await pair.events("/v1/chat/completions", body))[:-1]]

    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abc"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
async def test_usage_is_streamed_when_asked_for_and_only_then(pair: Site, options: object, wanted: bool) -> None:
    """Public report T148 (vllm-project/vllm#36379; BerriAI/litellm#25410)."""
    body = {"prompt": "hello", "max_tokens": 2, "stream": True, "stream_options": options}

    chunks = [json.loads(event) for event in (await pair.events("/v1/completions", body))[:-1]]

    assert bool(chunks[-1].get("usage")) is wanted
    assert (chunks[-1]["choices"] == []) is wanted
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])


async def test_prompts_times_n_give_every_choice_once_in_order(pair: Site) -> None:
    """Public report T059 (openai/openai-python#90; ai-dynamo/dynamo#3953); T010 (vllm-project/vllm#50559)."""
    status, body = await pair.complete(prompt=["x", "yy"], n=2)

    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 16
    by_prompt = {bytes(leg.work.tokens): leg.ref.request_id for leg in pair.worker("prefill").submitted}
    assert len(set(by_prompt.values())) == 2
    events = await pair.events("/v1/completions", {"prompt": ["x", "yy"], "n": 2, "max_tokens": 3, "stream": True})
    ends = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert sorted(end["index"] for end in ends if end["finish_reason"]) == [0, 1, 2, 3]
    await pair.quiet()


async def test_an_answer_that_ends_with_its_first_token_moves_nothing(pair: Site) -> None:
    waiting = asyncio.Event()

    async def never(leg: Leg) -> None:
        waiting.set()
        await asyncio.Event().wait()

    pair.worker("decode").decode = never

    status, body = await pair.complete(max_tokens=1)

    assert (status, body["choices"][0]["text"]) == (200, "a")
    await pair.quiet(prefill_confirmed=False)
    assert len(pair.worker("prefill").released) == 1
    assert len(pair.worker("decode").cancelled) == 1


async def test_tokens_of_decode_that_overtake_the_first_one_wait_for_it(pair: Site) -> None:
    decoded = asyncio.Event()

    async def late(leg: Leg) -> None:
        leg.ticket_issued()
        await decoded.wait()
        leg.first(ord("a"))

    async def early(leg: Leg) -> None:
        leg.tokens(1, *b"bc")
        leg.tokens(3, ord("d"), finish=LENGTH)
        decoded.set()

    pair.worker("prefill").prefill, pair.worker("decode").decode = late, early

    _, body = await pair.complete()

    assert body["choices"][0]["text"] == "abcd"


async def test_repeated_tokens_are_dropped_and_a_gap_ends_the_request(once: Site) -> None:
    async def repeats(leg: Leg) -> None:
        leg.tokens(0, *b"ab")
        leg.tokens(1, *b"bcd", finish=LENGTH)

    once.worker("decode").decode = repeats
    _, body = await once.complete()
    assert body["choices"][0]["text"] == "abcd"

    async def gap(leg: Leg) -> None:
        leg.tokens(3, ord("d"))
        await asyncio.Event().wait()

    once.worker("decode").decode = gap
    status, body = await once.complete()
    assert (status, body["error"]["code"]) == (503, "sequence_gap")
    await once.quiet(prefill_confirmed=False)


async def test_a_stop_string_ends_the_answer_and_the_work(pair: Site) -> None:
    """Public report T018 (vllm-project/vllm#57052)."""

    async def endless(leg: Leg) -> None:
        for sequence, token in enumerate(b"bcd and on and on", start=1):
            leg.tokens(sequence, token)
            await asyncio.sleep(0.002)
        await asyncio.Event().wait()

    pair.worker("decode").decode = endless

    _, body = await pair.complete(stop=["cd"], max_tokens=100)

    assert body["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": "ab",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "cd",
    }
    assert body["usage"]["completion_tokens"] == 4  # up to the token that completed the stop
    await pair.quiet()
    assert len(pair.worker("decode").cancelled) == 1


async def test_the_token_that_ended_the_answer_is_counted_and_not_shown(pair: Site) -> None:
    async def ends(leg: Leg) -> None:
        leg.tokens(1, ord("b"))
        leg.tokens(2, 258, finish=STOP)

    pair.worker("decode").decode = ends

    for extra, text in (({}, "ab"), ({"stop_token_ids": [120]}, "ab")):
        _, body = await pair.complete(max_tokens=9, **extra)
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 3


async def test_cached_tokens_are_those_of_the_worker_that_ran_the_prompt(pair: Site) -> None:
    """Public report T128 (vllm-project/vllm#47136; llm-d/llm-d-router#1012)."""

    async def cached(leg: Leg) -> None:
        leg.ticket_issued()
        leg.first(ord("a"), cached=4)

    pair.worker("prefill").prefill = cached

    _, body = await pair.complete()

    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_max_tokens_is_clamped_to_the_contexts_room(pair: Site) -> None:
    async def one(leg: Leg) -> None:
        leg.tokens(1, ord("b"), finish=LENGTH)

    pair.worker("decode").decode = one

    await pair.complete(max_tokens=1_000_000)

    assert pair.worker("decode").submitted[-1].work.sampling.max_tokens == 8192 - 5


async def test_max_completion_tokens_wins_over_max_tokens(pair: Site) -> None:
    """Public report T163 (llm-d/llm-d-router#411)."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5, "max_tokens": 9}

    _, answer, _ = await pair.post("/v1/chat/completions", body)

    assert answer["usage"]["completion_tokens"] == 5


async def test_log_probabilities_have_one_entry_per_token(pair: Site) -> None:
    """Public report T131 (sgl-project/sglang#26299; NVIDIA/TensorRT-LLM#11727); T054 (vllm-project/vllm#4795)."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    _, chat, _ = await pair.post("/v1/chat/completions", body)
    entries = chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b", "c", "d"]
    assert entries[1]["bytes"] == [98]
    assert [top["token"] for top in entries[1]["top_logprobs"]] == ["b", "A"]

    _, plain, _ = await pair.post("/v1/chat/completions", body | {"top_logprobs": None})
    assert len(plain["choices"][0]["logprobs"]["content"]) == 4

    _, legacy = await pair.complete(logprobs=1)
    lists = legacy["choices"][0]["logprobs"]
    assert lists["tokens"] == ["a", "b", "c", "d"]
    assert lists["text_offset"] == [0, 1, 2, 3]
    assert lists["token_logprobs"] == [-0.5] * 4

    events = await pair.events("/v1/chat/completions", body | {"stream": True})
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert streamed == entries


async def test_echo_without_tokens_needs_no_worker(pair: Site) -> None:
    """Public report T033 (vllm-project/vllm#6521)."""
    status, body = await pair.complete(prompt="abc", echo=True, max_tokens=0)

    assert (status, body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (200, "abc", "length")
    assert body["usage"]["completion_tokens"] == 0
    assert pair.worker("prefill").submitted == []


async def test_echo_with_log_probabilities_scores_the_prompt(pair: Site) -> None:
    """Public report T033 (vllm-project/vllm#6521)."""
    from protos.v1 import prefill_pb2
    from tests.integration.router.scripted import scored

    async def scores(leg: Leg) -> None:
        leg.ticket_issued()
        leg.send(prompt_logprobs=prefill_pb2.PromptLogprobs(offset=1, entries=[scored(98), scored(99)]))
        leg.first(ord("z"), finish=STOP, logprobs=True)

    pair.worker("prefill").prefill = scores

    _, body = await pair.complete(prompt="abc", echo=True, max_tokens=0, logprobs=1)

    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["usage"]["completion_tokens"] == 0
    assert pair.worker("prefill").submitted[0].work.sampling.prompt_logprobs


async def test_a_clients_request_id_is_a_label_and_never_the_id(pair: Site) -> None:
    """Public report T114 (vllm-project/vllm#15041; vllm-project/vllm#10583)."""
    release = asyncio.Event()

    async def held(leg: Leg) -> None:
        await release.wait()
        leg.tokens(1, ord("b"), finish=LENGTH)

    pair.worker("decode").decode = held
    headers = {"x-request-id": "mine"}
    body = {"prompt": "hello", "max_tokens": 2}
    twice = [asyncio.create_task(pair.post("/v1/completions", body, headers=headers)) for _ in range(2)]
    await pair.worker("decode").until(lambda: len(pair.worker("decode").submitted) == 2)
    release.set()

    answers = [await task for task in twice]

    ids = {answer[2]["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert "mine" not in ids
    assert [answer[1]["choices"][0]["text"] for answer in answers] == ["ab", "ab"]


async def test_the_openai_client_works() -> None:
    """Its first use holds up the event loop, on a busy machine for longer than a worker may be silent."""
    async with (
        site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=config(registry_ttl_s=60)) as pair,
        openai.AsyncOpenAI(base_url=f"http://{pair.router.http}/v1", api_key="none", max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(
            model="oracle", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        assert chat.choices[0].message.content == "abc"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 3

        stream = await client.chat.completions.create(
            model="oracle",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "abc"
        assert chunks[-1].usage is not None

        models = await client.models.list()
        assert [model.id for model in models.data] == ["oracle"]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="oracle", prompt="")
        assert refused.value.param == "prompt"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")


async def test_a_local_request_goes_to_the_one_worker_that_does_both() -> None:
    both = ScriptedWorker("both")
    async with site(both) as made:
        _, body = await made.complete()

        assert body["choices"][0]["text"] == "abcd"
        assert [leg.local for leg in both.submitted] == [True]
        assert body["usage"]["prompt_tokens"] == 5
        await made.quiet(prefill_confirmed=False)


async def test_a_choice_ended_by_a_stop_string_stops_at_its_decode_worker_and_the_others_go_on(pair: Site) -> None:
    decode = pair.worker("decode")

    async def two(leg: Leg) -> None:
        await leg.ticket.wait()
        leg.handed_over()
        leg.tokens(1, *b"xyz", choice=0)
        leg.tokens(1, *b"bcd", choice=1)
        await decode.until(lambda: decode.ended_choices == [0])
        leg.tokens(4, *b"ef", choice=1, finish=LENGTH)
        await asyncio.Event().wait()  # the worker says nothing of choice 0 any more

    decode.decode = two
    status, body = await pair.complete(n=2, stop="yz", max_tokens=6)

    assert status == 200
    assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [("ax", "stop"), ("abcdef", "length")]
    await decode.until(lambda: len(decode.cancelled) == 1)
    await pair.quiet()
