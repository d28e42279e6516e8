"""SSE frames straight to the transport: whole, bounded, and never to a closed one."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest

from router.api.replies import ChatStream, Frame, write_end
from router.api.sink import Sink
from router.params import Params
from router.request import Ledger, Outcome
from router.text.progress import LENGTH, Delta, Finish


class Transport:
    """Records writes; `waiting` is what the client has not read."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.waiting = 0
        self.closing = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.closing, "written to a closed transport"
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted = self.closing = True


class Client:
    """A sink on a transport, opened as open() would."""

    def __init__(self, limit: int = 1000) -> None:
        self.transport = Transport()
        self.slow = 0
        self.sink = Sink(limit, self._slow)

    def _slow(self) -> None:
        self.slow += 1

    def open(self) -> None:
        cast(Any, self.sink)._transport = self.transport
        self.sink.flush()


async def test_frames_before_the_response_is_open_wait_and_ask_for_it() -> None:
    client = Client()
    client.sink.write(b"one")
    assert not client.sink.wanted.done()
    client.sink.flush()
    assert client.sink.wanted.done()
    assert client.transport.writes == []

    client.open()

    assert client.transport.writes == [b"3\r\none\r\n"]


async def test_the_frames_of_one_step_are_one_write() -> None:
    client = Client()
    client.open()

    for frame in (b"a", b"b", b"c"):
        client.sink.write(frame)
    client.sink.flush()
    client.sink.flush()

    assert client.transport.writes == [b"3\r\nabc\r\n"]


async def test_a_client_that_does_not_read_is_cut_off_once() -> None:
    client = Client(limit=10)
    client.open()
    client.transport.waiting = 11

    for _ in range(3):
        client.sink.write(b"x")
        client.sink.flush()

    assert client.slow == 1
    assert client.transport.aborted
    assert len(client.transport.writes) == 1


async def test_a_closed_transport_is_left_alone() -> None:
    client = Client()
    client.open()
    client.transport.closing = True

    client.sink.write(b"x")
    client.sink.flush()

    assert client.transport.writes == []


class NoCodec:
    """Chunks without log-probabilities need no codec."""


@pytest.mark.parametrize("usage", [False, True])
async def test_every_chunk_is_json_that_says_what_it_should(usage: bool) -> None:
    client = Client(limit=1 << 20)
    client.open()
    params = Params(stream=True)
    frame = Frame("id", 1, 'a "model"', params, cast(Any, NoCodec()), include_usage=usage)
    stream = ChatStream(frame, client.sink)
    outcome = Outcome("id", 3, 2, 1, Ledger())

    stream.delta(Delta(0, 'he said "hi"\n\u2028', (1, 2)))
    stream.delta(Delta(0, "", (3,)))
    stream.finished(Finish(0, LENGTH))
    stream.step()
    write_end(frame, "chat.completion.chunk", client.sink, [outcome])
    client.sink.flush()

    data = b"".join(client.transport.writes)
    events = [part for part in data.split(b"\n\n") if b"data: " in part]
    assert events[-1].endswith(b"data: [DONE]")
    chunks = [orjson.loads(event[event.index(b"{") :]) for event in events[:-1]]
    assert all(chunk["model"] == 'a "model"' for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:3]] == [
        {"role": "assistant", "content": ""},
        {"content": 'he said "hi"\n\u2028'},
        {},
    ]
    assert chunks[2]["choices"][0]["finish_reason"] == "length"
    assert [("usage" in chunk) for chunk in chunks] == [usage] * len(chunks)
    assert len(chunks) == 3 + usage
