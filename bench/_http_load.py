"""A cheap HTTP client for measuring routers: keep-alive connections, one request at a time on each.

python -m bench._http_load HOST:PORT MODEL MODE CONCURRENCY SECONDS [RATE [SEED]] -> one line of JSON
MODE: short | stream

Without RATE every connection sends its next request as soon as it has its answer (a closed loop: the router is always
full, and latency is CONCURRENCY / throughput, whatever the router does). With RATE (requests per second, all together)
it thinks in between, exponentially distributed, so that a request mostly finds the router idle: what it takes is then
what the router adds. A request that is late because its connection was busy is late from when it was due.
Every connection has had an answer before the time begins then (`warm` of them, not among the requests): sixteen that
are made at once are a burst of their own, a twentieth of half a second's requests. SEED: of when they come.
own_share: of one core that this process used; near 1 it, and not the router, is what is measured. With RATE the answer
has every latency, too (latencies_ms), for who puts several runs together.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

QUESTION = (
    "Summarise in one sentence why a router that predicts seconds can place prompts better than one that counts "
    "requests, and name one thing it must not forget."
)

TIMER_S = 0.002
"""uvloop's timers count milliseconds."""


def body(model: str, *, stream: bool, tokens: int) -> bytes:
    content = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": stream,
    }
    return json.dumps(content).encode()


def request(host: str, content: bytes) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@dataclass
class Seen:
    latencies: list[float] = field(default_factory=list)
    chunks: int = 0
    failed: int = 0


async def _short(reader: asyncio.StreamReader, seen: Seen) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    text = await reader.readexactly(length)
    if b" 200 " not in head[:16] or b'"finish_reason":"length"' not in text:
        seen.failed += 1


async def _stream(reader: asyncio.StreamReader, seen: Seen) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    text = await reader.readuntil(b"0\r\n\r\n")
    seen.chunks += text.count(b"data: ") - 1
    if b" 200 " not in head[:16] or b"data: [DONE]" not in text:
        seen.failed += 1


@dataclass(frozen=True)
class Pace:
    """When a connection begins its requests. think_s: on average between two of a connection; 0 = none."""

    until: float
    think_s: float
    seed: int = 0

    async def starts(self, number: int) -> AsyncIterator[float]:
        """The time from which each request counts."""
        think = random.Random(1000 * self.seed + number)
        due = time.perf_counter()
        while True:
            if self.think_s:
                due += think.expovariate(1 / self.think_s)
                await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            now = time.perf_counter()
            if now >= self.until:
                return
            busy = self.think_s > 0 and now - due > TIMER_S  # later than a timer is: the connection was not free
            yield due if busy else now


class Connection:
    def __init__(self, data: bytes, mode: str, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        self._data = data
        self._read = _short if mode == "short" else _stream
        self._reader, self._writer = streams

    @classmethod
    async def open(cls, address: str, data: bytes, mode: str) -> Connection:
        host, _, port = address.rpartition(":")
        return cls(data, mode, await asyncio.open_connection(host, int(port), limit=1 << 22))

    async def run(self, pace: Pace, number: int, seen: Seen) -> None:
        async for started in pace.starts(number):
            await self.ask(seen)
            seen.latencies.append(time.perf_counter() - started)
        self._writer.close()

    async def ask(self, seen: Seen) -> None:
        self._writer.write(self._data)
        await self._read(self._reader, seen)


def summary(latencies: Sequence[float], *, every: bool) -> dict[str, Any]:
    """Of latencies in seconds. every: with all of them."""
    ordered = sorted(1000 * latency for latency in latencies)
    found: dict[str, Any] = {
        "requests": len(ordered),
        "p50_ms": ordered[len(ordered) // 2],
        "p99_ms": ordered[int(0.99 * len(ordered))],
    }
    return found | {"latencies_ms": ordered} if every else found


async def main(
    address: str, model: str, mode: str, concurrency: int, seconds: float, rate: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    data = request(address, body(model, stream=mode == "stream", tokens=64 if mode == "stream" else 4))
    seen = Seen()
    warm = [await Connection.open(address, data, mode) for _ in range(concurrency if rate else 0)]
    for one in warm:
        await one.ask(seen)
    seen.chunks = 0
    started, own = time.perf_counter(), time.process_time()
    pace = Pace(started + seconds, concurrency / rate if rate else 0.0, seed)

    async def connection(number: int) -> None:
        used = warm[number] if warm else await Connection.open(address, data, mode)
        await used.run(pace, number, seen)

    await asyncio.gather(*(connection(number) for number in range(concurrency)))
    took = time.perf_counter() - started
    return summary(seen.latencies, every=rate > 0) | {
        "warm": len(warm),
        "failed": seen.failed,
        "chunks": seen.chunks,
        "seconds": took,
        "own_share": (time.process_time() - own) / took,
    }


if __name__ == "__main__":
    count, length, per_s, series = [float(given) for given in (*sys.argv[4:], "0", "0")][:4]
    print(json.dumps(uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(count), length, per_s, int(series)))))
