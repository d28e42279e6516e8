"""The short way of plain requests: the answers are those of the server library, whatever comes and in which parts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from router.api import lane, replies
from router.api.server import READ_AHEAD_BYTES, Protocol
from tests.integration.router.scripted import Leg, ScriptedWorker, until
from tests.integration.router.sites import Site, config, site


class Wire(asyncio.Transport):
    """A transport to a client that a test plays: what was written, and whether it is closed or reading."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += bytes(data)

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


ANSWER = re.compile(rb"HTTP/[12]\.[01] (\d+) ")


class Client:
    """One connection, by the lane or without it."""

    def __init__(self, made: Site, *, by_lane: bool = True) -> None:
        server: Any = made.router._runners[0].server
        self.wire = Wire()
        self.protocol: Protocol = server()
        if not by_lane:
            self.protocol._endpoints = {}
        self.protocol.connection_made(self.wire)

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            for _ in range(3):  # the server sees each by itself
                await asyncio.sleep(0)
            self.protocol.data_received(part)

    def statuses(self) -> list[int]:
        return [int(status) for status in ANSWER.findall(self.wire.written)]

    async def answered(self, *statuses: int, closed: bool = False) -> None:
        await until(lambda: self.whole() >= len(statuses) and self.wire.closed is closed)
        assert self.statuses() == list(statuses)

    def whole(self) -> int:
        """Answers that have their end."""
        return len(self.answers())

    def answers(self) -> list[tuple[int, dict[str, str], bytes]]:
        """(status, headers, body) of those that are whole, without what differs from request to request."""
        found, rest = [], self.wire.written
        while b"\r\n\r\n" in rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            if "content-length" in headers:
                length = int(headers["content-length"])
                body, rest = rest[:length], rest[length:]
                if len(body) < length:
                    break
            elif headers.get("transfer-encoding") == "chunked":
                body, end, rest = rest.partition(b"0\r\n\r\n")
                if not end:
                    break
                body = told(body)
            else:
                body = b""
            for name in ("date", "x-request-id"):
                headers.pop(name, None)
            body = re.sub(rb'"(id|created)":[^,]*', b"", body)
            found.append((int(first.split(" ")[1]), headers, body))
        return found

    def gone(self) -> None:
        self.wire.closed = True
        self.protocol.connection_lost(None)


def told(stream: bytes) -> bytes:
    """A stream's chunks as one text, wherever they were divided."""
    events = re.findall(rb"data: (.*)\n\n", stream)
    choices = [json.loads(event)["choices"][0] for event in events if event != b"[DONE]"]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    return b"%b %b %d" % (text.encode(), str(choices[-1]["finish_reason"]).encode(), events.count(b"[DONE]"))


@pytest.fixture
async def pair() -> AsyncIterator[Site]:
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode")) as made:
        yield made


def post(body: bytes, *lines: bytes, path: bytes = b"/v1/completions", version: bytes = b"HTTP/1.1") -> bytes:
    head = [b"POST %b %b" % (path, version), b"Host: x", b"Content-Type: application/json", *lines]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", b""]) + body


def asking(**fields: Any) -> bytes:
    return json.dumps({"prompt": "abc", "max_tokens": 3} | fields).encode()


CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
GOOD = post(asking())
TE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"

# what is sent; the statuses of the answers; whether the connection ends with them
CASES: dict[str, tuple[bytes, list[int], bool]] = {
    "plain": (GOOD, [200], False),
    "chat": (post(CHAT, path=b"/v1/chat/completions"), [200], False),
    "stream": (post(asking(stream=True)), [200], False),
    "chat stream": (post(CHAT[:-1] + b', "stream": true}', path=b"/v1/chat/completions"), [200], False),
    "no json": (post(b"{"), [400], False),
    "empty body": (post(b""), [400], False),
    "unknown field": (post(asking(nonsense=1)), [400], False),
    "unsupported": (post(asking(tools=[])), [400], False),
    "other model": (post(asking(model="other")), [404], False),
    "too long": (post(asking(prompt="x" * 20_000)), [400], False),
    "two in a row": (GOOD + GOOD, [200, 200], False),
    "good then bad": (GOOD + post(b"["), [200, 400], False),
    "kept alive": (post(asking(), b"Connection: keep-alive"), [200], False),
    "closed": (post(asking(), b"Connection: close"), [200], True),
    "closed stream": (post(asking(stream=True), b"Connection: close"), [200], True),
    "http 1.0": (post(asking(), version=b"HTTP/1.0"), [200], True),
    "http 1.0 stream": (post(asking(stream=True), version=b"HTTP/1.0"), [200], True),
    "http 2": (post(asking(), version=b"HTTP/2.0"), [200], True),
    "packed": (post(asking(), b"Content-Encoding: gzip"), [415], False),
    "chunked": (TE % (len(asking()), asking()), [200], False),
    "chunked and counted": (post(asking(), b"Transfer-Encoding: chunked"), [400], True),
    "chunked in other letters": (post(asking(), b"tRANSFER-eNCODING: chunked"), [400], True),
    "counted twice": (post(asking(), b"Content-Length: 5"), [400], True),
    "counted with a sign": (GOOD.replace(b"Length: ", b"Length: +"), [400], True),
    "counted with a blank": (GOOD.replace(b"Length:", b"Length :"), [400], True),
    "counted by two": (GOOD.replace(b"Length: ", b"Length: 1,"), [400], True),
    "two hosts": (post(asking(), b"Host: y"), [400], True),
    "no host": (GOOD.replace(b"Host: x\r\n", b""), [400], True),
    "folded": (post(asking(), b"X: y\r\n z"), [400], True),
    "bare feed": (post(asking(), b"X: y\nZ: a"), [400], True),
    "a zero": (post(asking(), b"X: y\0"), [400], True),
    "a header too long": (post(asking(), b"X: " + b"y" * 20_000), [431], True),
    "headers too many": (post(asking(), *(b"X-%d: y" % n for n in range(200))), [400], True),
    "a strange name": (post(asking(), b"X Y: z"), [400], True),
    "more headers than plain": (post(asking(), *(b"X-%d: y" % n for n in range(80))), [200], False),
    "other path": (post(asking(), path=b"/v1/nothing"), [404], False),
    "a query": (post(asking(), path=b"/v1/completions?x=1"), [200], False),
    "whole address": (post(asking(), path=b"http://x/v1/completions"), [200], False),
    "doubled slash": (post(asking(), path=b"//v1/completions"), [404], False),
    "other method": (GOOD.replace(b"POST", b"PUT", 1), [405], False),
    "asked first": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", [200], False),
    "after another": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + GOOD, [200, 200], False),
}


def parts(data: bytes) -> Iterator[list[bytes]]:
    """Whole; byte by byte; halves at the end of the head and around it, and at places all over."""
    yield [data]
    if len(data) < 1000:
        yield [data[place : place + 1] for place in range(len(data))]
    end = data.find(b"\r\n\r\n")
    for place in {1, end, end + 2, end + 4, end + 5, len(data) - 1, *range(7, min(len(data), 600), 41)}:
        if 0 < place < len(data):
            yield [data[:place], data[place:]]


@pytest.mark.parametrize("case", CASES)
async def test_the_answer_is_the_librarys_however_the_bytes_come(pair: Site, case: str) -> None:
    data, statuses, closed = CASES[case]
    library = Client(pair, by_lane=False)
    await library.send(data)
    await library.answered(*statuses, closed=closed)

    clients = [(cut, Client(pair)) for cut in parts(data)]
    await asyncio.gather(*(client.send(*cut) for cut, client in clients))

    for _, client in clients:
        await client.answered(*statuses, closed=closed)
        assert client.answers() == library.answers()


async def test_a_plain_request_goes_the_short_way_again_and_again_whatever_was_between(pair: Site) -> None:
    client = Client(pair)
    seen: list[bool] = []
    inner = client.protocol._endpoints["/v1/completions"]

    async def endpoint(asked: lane.Taken) -> None:
        seen.append(True)
        await inner(asked)

    client.protocol._endpoints = {"/v1/completions": endpoint}
    head, _, body = GOOD.partition(b"\r\n\r\n")
    for number, cut in enumerate(([GOOD], [head + b"\r\n\r\n", body], [GOOD[:-5], GOOD[-5:-2], GOOD[-2:]]), start=1):
        await client.send(*cut)
        await client.answered(*[200] * number)
    assert len(seen) == 3

    await client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    await client.answered(*[200] * 4)
    await client.send(GOOD)
    await client.answered(*[200] * 5)
    assert len(seen) == 4

    await client.send(GOOD[:30], GOOD[30:])  # a head in two parts: from here on only the library knows where it stands
    await client.answered(*[200] * 6)
    await client.send(GOOD)
    await client.answered(*[200] * 7)
    assert len(seen) == 4


@contextmanager
def held(made: Site) -> Iterator[asyncio.Event]:
    """Answers wait for the event."""
    goes_on = asyncio.Event()
    worker = made.worker("prefill")
    usual = worker.prefill

    async def waits(leg: Leg) -> None:
        await goes_on.wait()
        await usual(leg)

    worker.prefill = waits
    yield goes_on
    worker.prefill = usual


async def test_a_request_behind_another_waits_for_its_answer(pair: Site) -> None:
    client = Client(pair)
    with held(pair) as goes_on:
        await client.send(GOOD)
        await until(lambda: len(pair.worker("prefill").submitted) == 1)
        await client.send(post(asking(prompt="second")), GOOD)
        assert client.statuses() == []
        assert len(pair.worker("prefill").submitted) == 1
        goes_on.set()

    await client.answered(200, 200, 200)
    assert [bytes(leg.work.tokens) for leg in pair.worker("prefill").submitted] == [b"abc", b"second", b"abc"]


async def test_what_may_be_sent_ahead_is_bounded(pair: Site) -> None:
    client = Client(pair)
    with held(pair) as goes_on:
        await client.send(GOOD)
        behind = post(asking(prompt="x" * 5000))
        count = 0
        while client.wire.reading:
            await client.send(behind)
            count += 1
        assert READ_AHEAD_BYTES <= count * len(behind) <= READ_AHEAD_BYTES + 2 * len(behind)
        goes_on.set()

    await client.answered(*[200] * (count + 1))
    assert client.wire.reading


@pytest.mark.parametrize("part", [GOOD, GOOD[:-4]])
async def test_a_client_that_goes_away_ends_its_request(pair: Site, part: bytes) -> None:
    client = Client(pair)
    with held(pair):
        await client.send(part)
        await until(lambda: pair.router.metrics.value("pdserve_requests_inflight") == 1)

        client.gone()

        await until(lambda: pair.router.metrics.value("pdserve_requests_inflight") == 0)
    await pair.quiet()
    assert pair.router.metrics.value("pdserve_requests_total", {"outcome": "cancelled", "reason": "cancelled"}) == 1


async def test_a_body_that_does_not_come_is_408_and_the_rest_of_it_no_request(
    pair: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "BODY_TIMEOUT_S", 0.01)
    client = Client(pair)
    await client.send(GOOD[:-4])
    await client.answered(408)

    await client.send(GOOD[-4:-2], GOOD[-2:] + GOOD)

    await client.answered(408, 200)


async def test_a_body_over_the_limit_is_refused_before_it_has_come(tmp_path: Path) -> None:
    async with site(settings=config(max_body_bytes=1000)) as made:
        client = Client(made)
        big = post(b"x" * 5000)
        await client.send(big[:300])
        await client.answered(413)
        await client.send(big[300:], post(b"x" * 1000))
        await client.answered(413, 400)


async def test_who_is_not_known_is_told_at_once_and_may_try_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"{hashlib.sha256(b'one').hexdigest()}: {{tenant: a}}\n")
    settings = config(api_keys_file=str(file), cors_origins="https://page.example", registry_token="token")
    async with site(ScriptedWorker("prefill"), ScriptedWorker("decode"), settings=settings) as made:
        client, library = Client(made), Client(made, by_lane=False)
        sent = post(asking(), b"Authorization: Bearer two", b"Origin: https://page.example")
        for one in (client, library):
            await one.send(sent[:-4])
            await one.answered(401)
            await one.send(sent[-4:], post(asking(), b"authorization: bearer one", b"origin: https://page.example"))
            await one.answered(401, 200)
        assert client.answers() == library.answers()
        assert client.answers()[1][1]["access-control-allow-origin"] == "https://page.example"


async def test_who_is_refused_in_the_middle_and_says_no_more_is_let_go(pair: Site) -> None:
    client = Client(pair)
    client.protocol._lingering_time = 0.01
    await client.send(post(asking(), b"X: y")[:-4].replace(b"Length: ", b"Length: 99999999"))
    await client.answered(413, closed=True)


# --- the connection's own times


async def test_an_idle_connections_timer_leaves_one_alone_that_is_being_answered(pair: Site) -> None:
    client = Client(pair)
    protocol = cast(Any, client.protocol)
    with held(pair) as goes_on:
        await client.send(GOOD)
        protocol._next_keepalive_close_time = 0.0
        protocol._process_keepalive()
        assert not client.wire.closed
        goes_on.set()
    await client.answered(200)
    assert protocol._keepalive_handle is not None

    protocol._next_keepalive_close_time = 0.0
    protocol._process_keepalive()
    assert client.wire.closed


async def test_a_connection_that_is_to_close_does_so_after_its_answer_and_an_idle_one_at_once(pair: Site) -> None:
    busy, idle = Client(pair), Client(pair)
    await idle.send(GOOD)
    await idle.answered(200)
    with held(pair) as goes_on:
        await busy.send(GOOD[:-4])
        for one in (busy, idle):
            one.protocol.close()
        await busy.send(GOOD[-4:])
        await until(lambda: len(pair.worker("prefill").submitted) == 2)
        assert (busy.wire.closed, idle.wire.closed) == (False, True)
        goes_on.set()
    await busy.answered(200, closed=True)


@pytest.mark.parametrize("patience", [5.0, 0.01])
async def test_a_shutdown_waits_for_the_answer_as_long_as_it_may(pair: Site, patience: float) -> None:
    client = Client(pair)
    with held(pair) as goes_on:
        await client.send(GOOD)
        await until(lambda: len(pair.worker("prefill").submitted) == 1)
        ending = asyncio.create_task(client.protocol.shutdown(patience))
        await asyncio.sleep(0)
        if patience > 1:
            goes_on.set()
        await ending
    assert client.wire.closed
    assert client.statuses() == ([200] if patience > 1 else [])
    await pair.quiet()


async def test_a_fault_of_ours_is_500_and_nothing_of_it_is_told(pair: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(pair.router.front, "prepare", breaks)
    client, library = Client(pair), Client(pair, by_lane=False)
    for one in (client, library):
        await one.send(GOOD)
        await one.answered(500)
    assert client.answers() == library.answers()
    assert b"secret" not in client.wire.written


@pytest.mark.parametrize("by_lane", [True, False])
async def test_a_fault_after_the_answer_has_begun_ends_the_connection_and_is_no_second_answer(
    pair: Site, monkeypatch: pytest.MonkeyPatch, by_lane: bool
) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(replies, "write_end", breaks)
    for line in (b"X: y", b"Connection: close"):
        client = Client(pair, by_lane=by_lane)
        await client.send(post(asking(stream=True), line))
        await until(lambda made=client: made.wire.closed)  # type: ignore[misc]
        assert client.statuses() == [200]
        assert client.answers() == [], "it has no end: who reads it knows that it broke off"
        assert b"secret" not in client.wire.written


async def test_a_body_that_nobody_wants_is_not_kept_while_its_refusal_waits_to_be_read(
    pair: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(pair)
    client.protocol.pause_writing()
    monkeypatch.setattr(client.wire, "get_write_buffer_size", lambda: 1)
    await client.send(GOOD[:-4].replace(b"Length: ", b"Length: 99999999"))
    await until(lambda: client.statuses() == [413])
    await client.send(*[b"x" * 100_000] * 10)
    assert not cast(Any, client.protocol)._taken._come


async def test_the_connection_is_the_librarys_own(pair: Site) -> None:
    assert isinstance(Client(pair).protocol, web.RequestHandler)
