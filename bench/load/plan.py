"""What is sent and when: the same for the same seed, however many processes share the work.

A session is what one user does: one request, or the turns of a conversation, each sent when the one before is answered.
Everything about session number k follows from the seed and k, so a process makes its own share and needs nobody else's.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from bench.sim.trace import BLOCK_TOKENS, tokens_of

Tokens = np.ndarray[Any, np.dtype[np.uint32]]
Range = tuple[int, int]
"""A length, drawn evenly from both ends on."""

Dataset = Literal["random", "shared-prefix", "conversations", "trace", "prompts"]
Arrival = Literal["closed", "burst", "poisson", "times"]
"""closed: a session begins when another ends; burst: all at once; times: those of the trace."""

_CONTENT, _LENGTHS, _PREFIX, _ARRIVALS, _OWNERS = range(5)
"""What a random generator is for: draws of one kind tell nothing of another."""

_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a file. blocks: hash ids of a trace; text: a prompt as it stands. output 0: the server's own."""

    at: float = 0.0
    prompt: int = 0
    output: int = 0
    blocks: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole run. requests, duration_s, concurrency: 0 = no such limit. speed: times the trace's own."""

    dataset: Dataset
    arrival: Arrival
    seed: int = 1
    requests: int = 0
    duration_s: float = 0.0
    rate: float = 0.0
    speed: float = 1.0
    concurrency: int = 0
    input: Range = (512, 512)
    output: Range = (64, 64)
    groups: int = 1
    prefix: int = 0
    turns: int = 1
    think_s: float = 0.0
    vocab: int = 32_000
    rows: tuple[Row, ...] = ()

    @classmethod
    def of_json(cls, raw: dict[str, Any]) -> Plan:
        rows = tuple(Row(**{**row, "blocks": tuple(row["blocks"])}) for row in raw["rows"])
        return cls(**{**raw, "input": tuple(raw["input"]), "output": tuple(raw["output"]), "rows": rows})

    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, as far as they are known before the start."""
        if self.rows:
            return max(row.prompt + row.output for row in self.rows)
        return self.prefix + self.turns * (self.input[1] + self.output[1])


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that follow from their seed. A single number is a trace's hash id."""

    seed: tuple[int, ...]
    count: int

    def tokens(self, vocab: int) -> Tokens:
        if len(self.seed) == 1:
            return tokens_of(self.seed[0])[: self.count] % np.uint32(vocab)
        return np.random.default_rng(self.seed).integers(0, vocab, self.count, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Turn:
    """number: of the request in the whole run. pieces: what is said now, behind everything said before."""

    number: int
    pieces: tuple[Piece, ...]
    output: int
    text: str = ""

    def tokens(self, vocab: int) -> Tokens:
        made = [piece.tokens(vocab) for piece in self.pieces]
        return np.concatenate(made) if made else np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Session:
    """at: seconds after the start; in a closed loop it begins when there is room. key: the same for what belongs
    together."""

    number: int
    at: float
    turns: tuple[Turn, ...]
    key: str


def sessions(plan: Plan, part: int = 0, of: int = 1) -> Iterator[Session]:
    """The share of one of `of` processes, in order of time. All shares together are sessions(plan)."""
    talks = conversations(plan.rows) if plan.dataset == "trace" else []
    owners, limit = _owners(plan, of, talks), _limit(plan)
    for number, at in enumerate(_arrivals(plan)):
        if (limit is not None and number >= limit) or (plan.duration_s and at >= plan.duration_s):
            return
        if next(owners) == part:
            key = f"s{plan.seed}-{talks[number] if talks else number}"
            yield Session(number, at, _turns(plan, number), key)


def concurrency(plan: Plan, part: int, of: int) -> int:
    """A process's share of the requests in flight; 0 = no limit."""
    return plan.concurrency // of + (part < plan.concurrency % of)


def _limit(plan: Plan) -> int | None:
    """Sessions, where their number is known."""
    most = [-(-plan.requests // plan.turns)] if plan.requests else []
    if plan.dataset in ("trace", "prompts"):
        most.append(len(plan.rows))
    return min(most) if most else None


def _arrivals(plan: Plan) -> Iterator[float]:
    """When each session begins, for as many as are asked for."""
    if plan.arrival == "times":
        yield from (row.at / plan.speed for row in plan.rows)
    elif plan.arrival == "poisson":
        draws, last = np.random.default_rng((plan.seed, _ARRIVALS)), 0.0
        while True:
            for wait in draws.exponential(1 / plan.rate, _CHUNK).tolist():
                last += wait
                yield last
    else:
        yield from itertools.repeat(0.0)


def _owners(plan: Plan, of: int, talks: Sequence[int]) -> Iterator[int]:
    """Whose each session is. A Poisson process that is thinned by chance is one in every part, too; in a closed loop
    all get the same; requests of a trace that continue one another stay together."""
    if talks:
        yield from _by_conversation(talks, of)
    elif plan.arrival == "poisson" and of > 1:
        draws = np.random.default_rng((plan.seed, _OWNERS))
        while True:
            yield from draws.integers(0, of, _CHUNK).tolist()
    else:
        yield from itertools.cycle(range(of))


def _by_conversation(talks: Sequence[int], of: int) -> Iterator[int]:
    """A new conversation goes to the process that has had the fewest requests."""
    loads = [(0, part) for part in range(of)]
    owner: dict[int, int] = {}
    counts = [0] * of
    for talk in talks:
        if talk not in owner:
            while loads[0][0] != counts[loads[0][1]]:  # has got later turns since it was put there
                heapq.heapreplace(loads, (counts[loads[0][1]], loads[0][1]))
            owner[talk] = loads[0][1]
        counts[owner[talk]] += 1
        yield owner[talk]


def conversations(rows: Sequence[Row]) -> list[int]:
    """A number per row, the same for rows that continue one another: whose prompt begins with all full blocks of an
    earlier one. One full block alone is a system prompt that strangers share."""
    ends: dict[int, int] = {}
    found = []
    for number, row in enumerate(rows):
        full = row.blocks[: row.prompt // BLOCK_TOKENS]
        talk = next((ends[block] for block in reversed(full[1:]) if block in ends), number)
        if len(full) > 1:
            ends[full[-1]] = talk
        found.append(talk)
    return found


def _turns(plan: Plan, number: int) -> tuple[Turn, ...]:
    first = number * plan.turns
    if plan.rows:
        row = plan.rows[number]
        return (Turn(first, _blocks(row), row.output, row.text),)
    draws = np.random.default_rng((plan.seed, _LENGTHS, number))
    turns = plan.turns if not plan.requests else min(plan.turns, plan.requests - first)
    made = []
    for turn in range(turns):
        count, output = (int(draws.integers(low, high + 1)) for low, high in (plan.input, plan.output))
        pieces = [Piece((plan.seed, _CONTENT, number, turn), count)]
        if plan.prefix and not turn:
            pieces.insert(0, Piece((plan.seed, _PREFIX, int(draws.integers(plan.groups))), plan.prefix))
        made.append(Turn(first + turn, tuple(pieces), output))
    return tuple(made)


def _blocks(row: Row) -> tuple[Piece, ...]:
    left = row.prompt - np.arange(len(row.blocks)) * BLOCK_TOKENS
    return tuple(
        Piece((block,), min(int(count), BLOCK_TOKENS))
        for block, count in zip(row.blocks, left, strict=True)
        if count > 0
    )
