"""Workers that all say the same at the same place, and what a client sees of them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from protos.v1 import common_pb2
from tests.integration.router.scripted import GO_ON, LENGTH, Leg, ScriptedWorker, scored, until
from tests.integration.router.sites import Site


def token(sequence: int, choice: int) -> int:
    """What every honest worker says at this place, whoever it is."""
    return ord("a") + (sequence + 7 * choice) % 26


def text(count: int, choice: int = 0, start: int = 0) -> str:
    return bytes(token(i, choice) for i in range(start, count)).decode()


def first_of(leg: Leg) -> int:
    """The first sequence a leg has to say, after checking what it was told of the answer so far."""
    work = leg.work
    known = list(work.tokens[work.prompt_len :])
    assert known == [token(i, work.choice) for i in range(len(known))], "told another answer than the client has"
    return len(known)


def choices_of(leg: Leg) -> range:
    return range(leg.work.choice, leg.work.choice + leg.work.n)


async def honest_prefill(leg: Leg) -> None:
    start = first_of(leg)
    leg.ticket_issued()
    finish = LENGTH if leg.work.sampling.max_tokens == start + 1 else GO_ON
    firsts = [
        common_pb2.FirstToken(
            choice=c,
            token=token(start, c),
            finish=common_pb2.FinishReason.ValueType(finish),
            logprob=scored(token(start, c)) if leg.work.sampling.logprobs else None,
        )
        for c in choices_of(leg)
    ]
    leg.send(done={"first": firsts, "times": common_pb2.StageTimes(prefill_s=0.01, pid=1)})


@dataclass
class Decoding:
    """A decode script: every leg says up to `stop_at` (sequence), then waits for `go`; with go set it says all."""

    stop_at: int = 1 << 30
    go: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0

    async def __call__(self, leg: Leg) -> None:
        start = first_of(leg)
        if not leg.local:
            await leg.ticket.wait()
            leg.handed_over()
            start += 1
        limit = leg.work.sampling.max_tokens
        for sequence in range(start, limit):
            if sequence >= self.stop_at and not self.go.is_set():
                self.waiting += 1
                await self.go.wait()
            for c in choices_of(leg):
                leg.tokens(
                    sequence,
                    token(sequence, c),
                    choice=c,
                    finish=LENGTH if sequence == limit - 1 else GO_ON,
                    logprobs=leg.work.sampling.logprobs,
                )
            await asyncio.sleep(0)


def fleet(prefills: int = 2, decodes: int = 2) -> list[ScriptedWorker]:
    workers = [ScriptedWorker("prefill", f"p{i}") for i in range(prefills)]
    workers += [ScriptedWorker("decode", f"d{i}") for i in range(decodes)]
    for worker in workers:
        worker.prefill = honest_prefill
        worker.decode = Decoding()
    return workers


@dataclass
class History:
    """One streamed request as its client saw it."""

    texts: dict[int, str]
    finishes: dict[int, str]
    errors: list[str]
    done: int

    @classmethod
    def of(cls, events: list[str]) -> History:
        seen = cls({}, {}, [], 0)
        for event in events:
            assert seen.done + len(seen.errors) == 0, "an event after the end"
            if event == "[DONE]":
                seen.done += 1
                continue
            body = json.loads(event)
            if "error" in body:
                seen.errors.append(body["error"]["code"])
                continue
            for choice in body["choices"]:
                index = choice["index"]
                assert index not in seen.finishes, "text after the finish"
                seen.texts[index] = seen.texts.get(index, "") + choice["text"]
                if choice["finish_reason"]:
                    seen.finishes[index] = choice["finish_reason"]
        assert seen.done + len(seen.errors) == 1, "not exactly one end"
        return seen


STREAM = {"prompt": "hello", "max_tokens": 40, "stream": True}


async def history(made: Site, **fields: Any) -> History:
    return History.of(await made.events("/v1/completions", STREAM | fields))


async def busy(made: Site, role: str) -> ScriptedWorker:
    """The one worker of a role that has a leg whose script waits."""
    workers = [worker for worker in made.workers if worker.role == role]
    await until(lambda: any(worker.legs for worker in workers))
    return next(worker for worker in workers if worker.legs)


def hold_decodes(made: Site, stop_at: int) -> dict[str, Decoding]:
    scripts = {}
    for worker in made.workers:
        if worker.role == "decode":
            scripts[worker.id] = Decoding(stop_at)
            worker.decode = scripts[worker.id]
    return scripts
