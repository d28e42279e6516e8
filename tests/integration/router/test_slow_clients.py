"""Clients that say what they want too slowly, or never: their connection ends, nobody works for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partialmethod

import pytest

from router.api import entity, lane, server
from tests.integration.router.scripted import ScriptedWorker
from tests.integration.router.sites import Site, site

HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\n"
SERVED = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LIMIT_S = 0.3


@pytest.fixture
async def hasty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    for module, name in ((server, "HEADER_TIMEOUT_S"), (lane, "BODY_TIMEOUT_S"), (entity, "BODY_TIMEOUT_S")):
        monkeypatch.setattr(module, name, LIMIT_S)
    patient = server.Protocol.__init__  # with what is left of a body that was answered, for ten seconds
    monkeypatch.setattr(server.Protocol, "__init__", partialmethod(patient, lingering_time=LIMIT_S))
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


async def trickled(made: Site, sent: bytes, *, after: bytes = b"") -> bytes:
    """The answer to `sent` and a byte now and then for ever. after: an ordinary request before, on the same
    connection."""
    host, _, port = made.router.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    if after:
        writer.write(after)
        await reader.readuntil(b"}")

    async def drip() -> None:
        while True:
            await asyncio.sleep(LIMIT_S / 5)
            writer.write(b"a")

    writer.write(sent)
    dripping = asyncio.create_task(drip())
    answer = b""
    try:
        async with asyncio.timeout(20):
            while part := await reader.read(4096):
                answer += part
    except ConnectionError:
        pass  # bytes that nobody read reset it
    finally:
        dripping.cancel()
        writer.close()
    return answer


@pytest.mark.parametrize("after", [b"", SERVED], ids=["at once", "after an answer"])
@pytest.mark.parametrize("head", [b"GET /he", HEAD % b"/v1/completions", HEAD % b"/tokenize"])
async def test_headers_that_never_end_end_the_connection(hasty: Site, head: bytes, after: bytes) -> None:
    assert await trickled(hasty, head, after=after) == b""
    assert (await hasty.complete())[0] == 200


@pytest.mark.parametrize("after", [b"", SERVED], ids=["at once", "after an answer"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/chat/completions", b"/tokenize"])
async def test_a_body_that_never_ends_is_answered_with_408_and_the_connection_ends(
    hasty: Site, path: bytes, after: bytes
) -> None:
    request = HEAD % path + b"Content-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"
    answer = await trickled(hasty, request, after=after)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 408 " in head.splitlines()[0]
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert all(worker.reserved == [] for worker in hasty.workers)
    assert hasty.router.front.permits.inflight == 0
    assert (await hasty.complete())[0] == 200
