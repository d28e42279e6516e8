"""What never reaches a worker: bad bodies, bad headers, missing keys, prompts that do not fit."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.router.scripted import ScriptedWorker, until
from tests.integration.router.sites import Site, config, site


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


async def raw(made: Site, data: bytes) -> bytes:
    """Bytes in, bytes out, until the server closes."""
    host, _, port = made.router.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [""]}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": [259]}, "prompt"),
    ("/v1/completions", {"prompt": [-1]}, "prompt"),
    ("/v1/completions", {"prompt": "x", "n": 10**9}, "n"),
    ("/v1/completions", {"prompt": "x", "stop": ["s"] * 100}, "stop"),
    ("/v1/completions", {"prompt": "x", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    ("/v1/chat/completions", {"messages": [5] * 12_000}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 10**10}, "top_logprobs"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {"tokens": [1, "x"]}, "tokens"),
    ("/v1/completions/derender", {"token_ids": [True]}, "token_ids"),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD)
async def test_a_bad_request_is_answered_with_its_field_and_no_worker_hears_of_it(
    pair: Site, path: str, body: dict[str, Any], field: str
) -> None:
    """Public report T037 (vllm-project/vllm#7283; vllm-project/vllm#7746); T117 (vllm-project/vllm#49239)."""
    async with pair.http.post(path, json=body) as response:
        text = await response.text()
        answer = json.loads(text)

    assert response.status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == field
    assert len(text) < 4096
    assert len(response.headers["x-request-id"]) == 32
    assert response.headers["x-pd-reason"] == answer["error"]["code"]
    assert all(worker.reserved == [] for worker in pair.workers)


@pytest.mark.parametrize("streamed", [False, True])
async def test_prompts_at_the_edge_of_the_context(streamed: bool) -> None:
    """Public report T042 (llm-d/llm-d-inference-sim#596; vllm-project/vllm#765)."""
    settings = config(max_model_len=2048)
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=settings) as made:
        for length, expected in ((2047, 200), (2048, 400), (2049, 400), (50_000, 400), (3_000_000, 400)):
            started = time.perf_counter()
            async with made.http.post(
                "/v1/completions", json={"prompt": "x" * length, "max_tokens": 1, "stream": streamed}
            ) as response:
                text = await response.text()
            assert response.status == expected, text
            if expected == 400:
                assert json.loads(text)["error"]["code"] == "context_length_exceeded"
            assert time.perf_counter() - started < 1

        assert len(made.worker("prefill").submitted) == 1


async def test_a_body_over_the_limit_is_refused_while_it_is_read() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 64 << 20:
            sent += 64 << 10
            yield b"x" * (64 << 10)

    async with site(settings=config(max_body_bytes=100_000)) as made:
        status, body, _ = await made.post("/v1/completions", {"prompt": "y" * 200_000})
        assert (status, body["error"]["code"]) == (413, "payload_too_large")
        try:
            async with made.http.post("/v1/completions", data=endless()) as response:
                assert response.status == 413
        except aiohttp.ClientConnectionError:
            pass  # the server closed while the client was still sending
        assert sent < 32 << 20


async def test_what_is_not_http_or_too_much_of_it_gets_a_small_answer_of_ours(pair: Site) -> None:
    secret = b"s3cr3t" * 10

    too_long = await raw(pair, b"GET /health/live HTTP/1.1\r\nHost: x\r\nX-Big: " + secret * 500 + b"\r\n\r\n")
    garbage = await raw(pair, b"\x00\x01" + secret + b"\r\n\r\n")
    odd = await raw(pair, b"GET /health/live HTTP/1.1\r\nBad Header: " + secret + b"\r\n\r\n")

    assert [answer.split(b" ", 2)[1] for answer in (too_long, garbage, odd)] == [b"431", b"400", b"400"]
    for answer in (too_long, garbage, odd):
        assert secret not in answer
        assert b'"error"' in answer
        assert len(answer) < 2048
    assert (await pair.complete())[0] == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_methods_and_paths_have_the_same_error_body(pair: Site, method: str) -> None:
    async with pair.http.request(method, "/v1/completions") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
    async with pair.http.request(method, "/v1/x/../y") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_path")


async def test_addresses_and_tickets_of_a_client_are_refused_and_never_dialled(pair: Site) -> None:
    """Public report T052 (llm-d/llm-d-router#242; llm-d/llm-d-router#979); T074 (BerriAI/litellm#37053)."""
    forged: tuple[dict[str, Any], ...] = (
        {"kv_transfer_params": {"host": "127.0.0.1:6379"}},
        {"api_base": "http://x"},
        {"headers": {}},
    )
    for body in forged:
        status, _ = await pair.complete(**body)
        assert status == 400
    status, _, _ = await pair.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 2}, headers={"X-Prefiller-Host-Port": "127.0.0.1:6379"}
    )
    assert status == 200


# --- keys


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[Site]:
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"{hashlib.sha256(b'one').hexdigest()}: {{tenant: a, max_inflight: 2}}\n"
        f"{hashlib.sha256(b'two').hexdigest()}: {{tenant: b}}\n"
    )
    settings = config(api_keys_file=str(file), registry_token="token")
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=settings) as made:
        yield made


async def test_every_route_but_health_wants_a_key(locked: Site) -> None:
    """Public report T043 (vllm-project/vllm#58144; vllm-project/vllm#18892)."""
    face = locked.router._face
    routes = {(route.method, route.resource.canonical) for route in face.app().router.routes() if route.resource}
    assert len(routes) > 12
    odd = {("GET", path) for path in ("/V1/models", "/v1//models", "/v1/../metrics", "/nothing", "/health/live/")}
    for method, path in sorted(routes | odd):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
            async with locked.http.request(method, path.replace("{model}", "x"), headers=headers) as response:
                expected = path in ("/health", "/health/live", "/health/ready")
                assert (response.status != 401) is expected, (method, path)
    doubled = await raw(locked, b"GET //v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 401 " in doubled.splitlines()[0]
    async with locked.http.get("/v1/models", headers={"Authorization": "Bearer one"}) as response:
        assert response.status == 200


async def test_tenants_have_salts_of_their_own(locked: Site) -> None:
    async def salt(key: str, **fields: Any) -> bytes:
        body = {"prompt": "same", "max_tokens": 2} | fields
        status, _, _ = await locked.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
        assert status == 200
        return locked.worker("prefill").submitted[-1].work.salt

    assert await salt("one") == await salt("one")
    assert (
        len(
            {await salt("one"), await salt("two"), await salt("one", cache_salt="x"), await salt("two", cache_salt="x")}
        )
        == 4
    )


async def test_hints_for_the_cache_reach_a_worker_under_the_tenants_salt(locked: Site) -> None:
    async def sent(key: str, **fields: Any) -> Any:
        body = {"prompt": "same", "max_tokens": 2, "prompt_cache_key": "talk"} | fields
        status, _, _ = await locked.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
        assert status == 200
        return locked.worker("prefill").submitted[-1].work.retention

    one = await sent("one", prompt_cache_retention="24h", cache_retention={"priority": -2})
    assert (one.priority, one.ttl_ms) == (-2, 24 * 3600 * 1000)
    assert one.session == (await sent("one")).session != (await sent("two")).session


async def test_a_tenants_own_limit_is_429(locked: Site) -> None:
    status, body, headers = await locked.post(
        "/v1/completions", {"prompt": ["x", "y", "z"]}, headers={"Authorization": "Bearer one"}
    )

    assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "quota_exceeded", "1")


# --- the other endpoints


async def test_text_and_tokens_go_both_ways(pair: Site) -> None:
    _, tokenized, _ = await pair.post("/tokenize", {"prompt": "héllo<|im_end|>", "return_token_strs": True})
    assert tokenized["tokens"] == list("héllo<|im_end|>".encode())
    assert (tokenized["count"], tokenized["max_model_len"]) == (16, 8192)
    assert len(tokenized["token_strs"]) == 16
    _, text, _ = await pair.post("/detokenize", {"tokens": tokenized["tokens"]})
    assert text == {"prompt": "héllo<|im_end|>"}

    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    _, rendered, _ = await pair.post("/v1/chat/completions/render", {"messages": messages})
    assert rendered["prompt"] == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    _, counted, _ = await pair.post("/tokenize", {"messages": messages})
    assert counted["tokens"] == rendered["token_ids"]
    _, plain, _ = await pair.post("/v1/completions/render", {"prompt": ["a", "b"]})
    assert plain["prompts"] == [{"token_ids": [97]}, {"token_ids": [98]}]

    _, chat, _ = await pair.post("/v1/chat/completions/derender", {"token_ids": [104, 105, 258]})
    assert chat == {"message": {"role": "assistant", "content": "hi"}}
    _, back, _ = await pair.post("/v1/completions/derender", {"token_ids": [104, 105]})
    assert back == {"text": "hi"}
    assert all(worker.reserved == [] for worker in pair.workers)


async def test_models_and_health_and_metrics(pair: Site) -> None:
    async with pair.http.get("/v1/models/oracle") as response:
        card = await response.json()
        assert (card["max_model_len"], card["vocab_size"]) == (8192, 259)
    async with pair.http.get("/v1/models/other") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
    async with pair.http.get("/health/ready") as response:
        assert response.status == 200
    await pair.complete()
    async with pair.http.get("/metrics") as response:
        text = await response.text()
    assert 'pdserve_requests_total{outcome="completed",reason=""} 1.0' in text
    assert 'pdserve_router_workers_usable{role="decode"} 1.0' in text
    assert "pdserve_requests_inflight 0.0" in text


async def test_a_router_without_workers_is_alive_and_not_ready() -> None:
    async with site() as made, made.http.get("/health/live") as live, made.http.get("/health/ready") as ready:
        assert (live.status, ready.status) == (200, 503)
        async with made.http.get("/health") as usual:
            assert usual.status == 503


async def test_metrics_move_to_the_admin_address_where_one_is_given() -> None:
    async with site(settings=config(admin_listen="127.0.0.1:0")) as made:
        async with made.http.get("/metrics") as response:
            assert response.status == 404
        async with made.http.get(f"http://{made.router.admin}/metrics") as response:
            assert response.status == 200


async def test_health_answers_while_long_prompts_are_tokenized(pair: Site) -> None:
    """Public report T031 (vllm-project/production-stack#1016)."""
    big = [asyncio.create_task(pair.post("/tokenize", {"prompt": "word " * 1500})) for _ in range(8)]

    slowest = 0.0
    for _ in range(10):
        started = time.perf_counter()
        async with pair.http.get("/health/live") as response:
            assert response.status == 200
        slowest = max(slowest, time.perf_counter() - started)
    for task in big:
        assert (await task)[0] == 200

    assert slowest < 1


async def test_a_browser_may_ask_without_a_key_and_only_named_pages_may_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"{hashlib.sha256(b'one').hexdigest()}: {{tenant: a}}\n")
    page = {"Origin": "https://page.example"}
    settings = config(api_keys_file=str(file), cors_origins="https://page.example, https://two.example")
    async with site(settings=settings) as made:
        for path in ("/v1/chat/completions", "/metrics", "/nothing"):
            async with made.http.options(path, headers=page) as response:
                assert response.status == 204
                assert response.headers["Access-Control-Allow-Origin"] == "https://page.example"
                assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
            async with made.http.options(path, headers={"Origin": "https://evil.example"}) as response:
                assert response.status == 204
                assert "Access-Control-Allow-Origin" not in response.headers
        async with made.http.get("/v1/models", headers=page) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (401, page["Origin"])


async def test_without_origins_configured_no_page_may_read(pair: Site) -> None:
    async with pair.http.options("/v1/models", headers={"Origin": "https://page.example"}) as response:
        assert (response.status, response.headers["Allow"]) == (204, "GET, POST, OPTIONS")
        assert "Access-Control-Allow-Origin" not in response.headers
    body = {"prompt": "hello", "max_tokens": 2, "stream": True}
    async with pair.http.post("/v1/completions", json=body, headers={"Origin": "https://page.example"}) as response:
        assert response.status == 200
        assert "Access-Control-Allow-Origin" not in response.headers


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


async def test_a_chunked_body_that_turns_bad_in_a_later_packet_is_answered_at_once(pair: Site) -> None:
    host, _, port = pair.router.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"pro\r\n')
    await until(lambda: pair.router.metrics.value("pdserve_requests_inflight") == 1)  # its handler waits for the rest

    writer.write(b"this is no chunk\r\n")
    async with asyncio.timeout(5):
        answer = await reader.read()  # to the end: the connection cannot go on

    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"malformed_request" in answer
    assert all(worker.reserved == [] for worker in pair.workers)


async def test_a_client_that_closes_its_half_is_taken_for_gone() -> None:
    """A FIN is all one sees of a client that has gone, too; work for nobody costs more than this answer."""
    prefill, decode = ScriptedWorker("prefill"), ScriptedWorker("decode")
    never = asyncio.Event()

    async def waits(leg: Any) -> None:
        await never.wait()

    prefill.prefill = waits
    async with site(prefill, decode) as made:
        host, _, port = made.router.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt": "abc", "max_tokens": 4}'
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: bool(prefill.held()))

        writer.write_eof()

        async with asyncio.timeout(5):
            assert await reader.read() == b""
        await until(lambda: not prefill.held() and not decode.held())
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_the_same_whoever_writes_its_head(pair: Site, stream: bool) -> None:
    """A connection that goes on has its answer written by us, one that ends by the server library."""
    body = json.dumps({"prompt": "abc", "max_tokens": 3, "stream": stream}).encode()
    sent = HEAD + b"Content-Length: %d\r\n" % len(body)
    host, _, port = pair.router.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    heads: list[dict[str, str]] = []
    for last in (b"", b"Connection: close\r\n"):
        writer.write(sent + last + b"\r\n" + body)
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            if stream:
                text = await reader.readuntil(b"0\r\n\r\n")
                assert text.count(b"data: [DONE]") == 1
            else:
                found = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                text = await reader.readexactly(int(found["Content-Length"]))
                assert json.loads(text)["choices"][0]["text"] == "abc"
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        heads.append(dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:] if line))
    assert await reader.read() == b""
    writer.close()
    kept, ended = heads
    assert ended.pop("connection") == "close"
    assert kept.keys() == ended.keys()
    differ = {name for name in kept if kept[name] != ended[name]}
    assert differ <= {"date", "x-request-id"}
