"""Requests that stand in a file: a trace (Mooncake, Azure), or prompts as JSON lines, packed by gzip or not."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from bench.load.plan import Row
from bench.sim.trace import load
from runtime.errors import InvalidRequest


def trace_rows(path: str, *, skip: int, longest: int) -> tuple[Row, ...]:
    """Behind the first `skip` requests, without those of more than `longest` tokens (0 = all), prompt and answer
    together. Raises InvalidRequest (field "trace")."""
    entries = load(path, skip=skip)
    rows = [Row(entry.at, entry.prompt_tokens, entry.output_tokens, entry.blocks) for entry in entries]
    kept = tuple(row for row in rows if not longest or row.prompt + row.output <= longest)
    if not kept:
        raise InvalidRequest(
            f"all {len(rows)} requests of the trace are longer", field="longest", limit=f"{longest} tokens"
        )
    return kept


def prompt_rows(path: str, output: int) -> tuple[Row, ...]:
    """A line: {"prompt": TEXT, "output_tokens": N}, or a bare JSON string; without a number of its own an answer has
    `output` tokens at most. Raises InvalidRequest (field "prompts")."""
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as exc:
        raise InvalidRequest(f"the prompts in {path} cannot be read", field="prompts") from exc
    rows = tuple(_row(number, line, output) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
    if not rows:
        raise InvalidRequest(f"there are no prompts in {path}", field="prompts", limit="at least 1")
    return rows


def _row(number: int, line: str, output: int) -> Row:
    try:
        content: Any = json.loads(line)
    except ValueError as exc:
        raise InvalidRequest(f"line {number} is no JSON", field="prompts") from exc
    given = content if isinstance(content, dict) else {"prompt": content}
    prompt, tokens = given.get("prompt"), given.get("output_tokens", output)
    if not isinstance(prompt, str) or not prompt:
        raise InvalidRequest(f"line {number} has no text as its prompt", field="prompts", limit='{"prompt": TEXT}')
    try:
        prompt.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(f"line {number}: its prompt is no text", field="prompts", limit="UTF-8") from exc
    if type(tokens) is not int or tokens < 1:
        raise InvalidRequest(f"line {number}: output_tokens is no whole number", field="prompts", limit="from 1 on")
    return Row(output=tokens, text=prompt)
