"""Commands on their way to a worker: when they are worth collecting, and how many of them become one message."""

from __future__ import annotations

from collections.abc import Sequence

from protos.v1 import common_pb2

TOKENS_PER_MESSAGE = 100_000
"""Token ids are varints of at most 5 bytes: half a MiB, under the 1 MiB limit with everything else."""

COLLECT_S = 0.002
"""Under pressure commands are collected for so long: a message costs as much as a dozen commands, and so does the one
that answers it."""

WORTH = 2
"""Commands that must be expected to come in that time: what collects nothing would only be late, five times on a
request's way."""

_MEMORY = 16.0


class Density:
    """How densely commands leave: smoothed seconds from one to the next."""

    def __init__(self) -> None:
        self._gap_s = COLLECT_S
        self._at = 0.0

    @property
    def worth_collecting(self) -> bool:
        return self._gap_s * WORTH <= COLLECT_S

    def sent(self, count: int, now: float) -> None:
        """A pause of any length counts as one of COLLECT_S: what came before it is not forgotten."""
        gap = min((now - self._at) / count, COLLECT_S)
        self._gap_s += min(count / _MEMORY, 1.0) * (gap - self._gap_s)
        self._at = now


_BATCH_TAG = b"\x82\x01"
"""Field 16 of both commands, of known length."""


def batched(commands: Sequence[bytes]) -> bytes:
    """What a command with these in its `batch` is serialised to. To put them in would copy each of them once, and write
    it out once more."""
    parts: list[bytes | bytearray] = []
    for command in commands:
        size = len(command)
        length = bytearray()
        while size > 127:
            length.append(size & 127 | 128)
            size >>= 7
        length.append(size)
        parts += (_BATCH_TAG, length, command)
    return b"".join(parts)


def split_tokens(work: common_pb2.WorkRequest) -> list[common_pb2.TokenChunk]:
    """Leave the first part of the tokens in `work` and return the rest, so that no message passes 1 MiB."""
    if len(work.tokens) <= TOKENS_PER_MESSAGE:
        return []
    tokens, chunks = list(work.tokens), []
    del work.tokens[TOKENS_PER_MESSAGE:]
    work.more_tokens = True
    for offset in range(TOKENS_PER_MESSAGE, len(tokens), TOKENS_PER_MESSAGE):
        part = tokens[offset : offset + TOKENS_PER_MESSAGE]
        more = offset + TOKENS_PER_MESSAGE < len(tokens)
        chunks.append(common_pb2.TokenChunk(ref=work.ref, offset=offset, tokens=part, more=more))
    return chunks
