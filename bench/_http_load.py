"""A cheap HTTP client for measuring routers: keep-alive connections, one request at a time on each.

python -m bench._http_load HOST:PORT MODE CONCURRENCY SECONDS -> one line of JSON. MODE: short | stream
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop

QUESTION = (
    "Summarise in one sentence why a router that predicts seconds can place prompts better than one that counts "
    "requests, and name one thing it must not forget."
)


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


async def _connection(address: str, data: bytes, mode: str, until: float, seen: Seen) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 22)
    read = _short if mode == "short" else _stream
    while time.perf_counter() < until:
        started = time.perf_counter()
        writer.write(data)
        await read(reader, seen)
        seen.latencies.append(time.perf_counter() - started)
    writer.close()


async def main(address: str, model: str, mode: str, concurrency: int, seconds: float) -> dict[str, Any]:
    data = request(address, body(model, stream=mode == "stream", tokens=64 if mode == "stream" else 4))
    seen = Seen()
    started = time.perf_counter()
    until = started + seconds
    await asyncio.gather(*(_connection(address, data, mode, until, seen) for _ in range(concurrency)))
    took = time.perf_counter() - started
    latencies = sorted(seen.latencies)
    return {
        "requests": len(latencies),
        "failed": seen.failed,
        "chunks": seen.chunks,
        "seconds": took,
        "p50_ms": 1000 * latencies[len(latencies) // 2],
        "p99_ms": 1000 * latencies[int(0.99 * len(latencies))],
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))))
