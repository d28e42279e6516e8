"""Traces of real requests: Mooncake's (with hashes of 512-token blocks) and Azure's (lengths alone).

A hash id stands for 512 tokens drawn with the id as seed, so equal ids are equal text, and prompts get the same page
keys a router would make of those tokens. Keys are kept on a grid of `unit_tokens`: coarser than a page, so that a
simulated pool has fewer, larger units; they are a subset of the real page keys.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.hashing import LINK_TOKENS, root
from runtime.errors import InvalidRequest

BLOCK_TOKENS = 512
VOCABULARY = 32_000
_PRIVATE = 1 << 40
"""Hash ids of prompts that share nothing begin here."""


@dataclass(frozen=True, slots=True)
class Entry:
    """at: seconds since the trace's first request. tenant and priority: traces name none."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    tenant: str = ""
    priority: int = 0


def load(path: str | Path, limit: int = 0, skip: int = 0) -> list[Entry]:
    """`limit` entries (0 = all) behind the first `skip`, in order of time. Raises InvalidRequest (field "trace")."""
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as exc:
        raise _bad(f"the trace {path} cannot be read") from exc
    try:
        entries = _mooncake(text) if text.lstrip().startswith("{") else _azure(text)
    except (ValueError, KeyError, TypeError, csv.Error) as exc:
        raise _bad(f"the trace is neither Mooncake JSON lines nor an Azure CSV ({exc})") from exc
    entries.sort(key=lambda entry: entry.at)
    chosen = entries[skip : skip + limit] if limit else entries[skip:]
    if not chosen:
        raise _bad("the trace is empty" if not entries else f"the trace has only {len(entries)} requests")
    first = chosen[0].at
    return [Entry(e.at - first, e.prompt_tokens, e.output_tokens, e.blocks) for e in chosen]


def _mooncake(text: str) -> list[Entry]:
    entries = []
    for line in text.splitlines():
        if line.strip():
            row = json.loads(line)
            prompt = _count(row["input_length"])
            blocks = tuple(_count(block) for block in row["hash_ids"])
            if prompt < 1 or len(blocks) * BLOCK_TOKENS < prompt:
                raise ValueError("a prompt longer than its blocks")
            at = float(row["timestamp"]) / 1000
            if not math.isfinite(at):
                raise ValueError("a timestamp that is no time")
            entries.append(Entry(at, prompt, max(_count(row["output_length"]), 1), blocks))
    return entries


def _azure(text: str) -> list[Entry]:
    entries = []
    for index, row in enumerate(csv.DictReader(io.StringIO(text))):
        prompt = max(_count(int(row["ContextTokens"])), 1)
        first = _PRIVATE + index * 1024
        blocks = tuple(range(first, first + -(-prompt // BLOCK_TOKENS)))
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        entries.append(Entry(at, prompt, max(_count(int(row["GeneratedTokens"])), 1), blocks))
    return entries


def _count(value: Any) -> int:
    """A length or a hash id as it stands: nothing is rounded or clamped. Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return value


def tokens_of(block: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The 512 tokens of a hash id."""
    drawn = np.random.default_rng(block).integers(0, VOCABULARY, BLOCK_TOKENS, dtype=np.uint32)
    return drawn.astype("<u4")


class TraceKeys:
    """Keys of one prompt on the coarse grid (router.keys.Keys)."""

    __slots__ = ("_link_list", "_per_link", "keys", "tokens", "unit_tokens")

    def __init__(self, keys: list[bytes], tokens: int, unit_tokens: int) -> None:
        self.keys = keys
        self.tokens = tokens
        self.unit_tokens = unit_tokens
        self._per_link = LINK_TOKENS // unit_tokens
        self._link_list = keys[self._per_link - 1 :: self._per_link]

    def links(self) -> Sequence[bytes]:
        return self._link_list

    def units(self, link: int) -> Sequence[bytes]:
        return self.keys[link * self._per_link : (link + 1) * self._per_link]


class KeyBook:
    """Makes keys of prompts; a block behind a prefix is hashed once. unit_tokens divides 256."""

    def __init__(self, unit_tokens: int = 64, salt: bytes = b"") -> None:
        if unit_tokens < 16 or LINK_TOKENS % unit_tokens or unit_tokens % 16:
            raise InvalidRequest("units are 16, 32, 64, 128 or 256 tokens", field="unit_tokens")
        self.unit_tokens = unit_tokens
        self._root = root(salt, "sim", "sim")
        self._known: dict[tuple[bytes, int], list[bytes]] = {}

    def of(self, entry: Entry) -> TraceKeys:
        keys: list[bytes] = []
        previous = self._root
        for block in entry.blocks:
            made = self._known.get((previous, block))
            if made is None:
                made = self._known[(previous, block)] = self._block(previous, block)
            keys += made
            previous = made[-1]
        del keys[entry.prompt_tokens // self.unit_tokens :]
        return TraceKeys(keys, entry.prompt_tokens, self.unit_tokens)

    def _block(self, previous: bytes, block: int) -> list[bytes]:
        data = tokens_of(block).tobytes()
        step = 4 * self.unit_tokens
        keys = []
        for start in range(0, len(data), 4 * LINK_TOKENS):
            hasher = hashlib.sha256(previous)
            for at in range(start, start + 4 * LINK_TOKENS, step):
                hasher.update(data[at : at + step])
                keys.append(hasher.digest())
            previous = keys[-1]
        return keys


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="trace")
