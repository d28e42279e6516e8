"""Decode workers that give running choices away when they are asked, and a fleet of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.integration.router.honest import History, choices_of, first_of, honest_prefill, text, token
from tests.integration.router.scripted import GO_ON, LENGTH, Leg, ScriptedWorker, scored, until
from tests.integration.router.sites import Site, config, site


@dataclass
class Movable:
    """A decode script that says everything up to `stop_at`, then waits for `go`, and gives away what it is asked for.

    answer: what it does when asked, instead of that. pull: what it does with a continuation's ticket, instead of
    confirming."""

    stop_at: int = 1 << 30
    go: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    answer: Callable[[Leg], Any] | None = None
    pull: Callable[[Leg], Any] | None = None

    async def __call__(self, leg: Leg) -> None:
        start = first_of(leg)
        if not leg.local:
            await leg.ticket.wait()
            if self.pull is not None and leg.work.ref.attempt > 1:
                await self.pull(leg)
                return
            leg.handed_over()
            start += 1
        open_choices = list(choices_of(leg))
        limit = leg.work.sampling.max_tokens
        for sequence in range(start, limit):
            while open_choices and not await self._may_go_on(leg, sequence, open_choices):
                pass
            if not open_choices:
                return
            for c in open_choices:
                finish = LENGTH if sequence == limit - 1 else GO_ON
                leg.tokens(sequence, token(sequence, c), choice=c, finish=finish, logprobs=leg.work.sampling.logprobs)
            await asyncio.sleep(0)

    async def _may_go_on(self, leg: Leg, sequence: int, open_choices: list[int]) -> bool:
        """False: it waited, or gave something away. An own answer is its last."""
        if leg.wanted and self.answer is not None:
            await self.answer(leg)
            open_choices.clear()
        elif leg.wanted:
            choice = leg.wanted.pop(0)
            open_choices.remove(choice)
            give_away(leg, choice, sequence)
        elif sequence >= self.stop_at and not self.go.is_set():
            self.waiting += 1
            leg.asked.clear()
            await either(leg.asked, self.go)
        else:
            return True
        return False


async def either(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def give_away(leg: Leg, choice: int, sequence: int) -> None:
    """The choice leaves before it says `sequence`."""
    newest = token(sequence - 1, choice)
    leg.send(
        handed_over=decode_pb2.HandedOver(
            choice=choice,
            token_count=leg.work.prompt_len + sequence - 1,
            first=common_pb2.FirstToken(choice=choice, token=newest, logprob=scored(newest)),
            ticket=prefill_pb2.TicketIssued(ticket=b"continuation", source_address="127.0.0.1:2"),
        )
    )


class Fleet:
    """One prefill worker and decode workers d0, d1, ... of which the first ones to come say up to stop_at."""

    def __init__(self, decodes: int, stop_at: int) -> None:
        self.p = ScriptedWorker("prefill", "p0")
        self.p.prefill = honest_prefill
        self.d = [ScriptedWorker("decode", f"d{i}") for i in range(decodes)]
        for worker in self.d:
            worker.described.features.append("handover")
            worker.decode = Movable(stop_at)

    def script(self, worker: ScriptedWorker) -> Movable:
        assert isinstance(worker.decode, Movable)
        return worker.decode

    def go(self) -> None:
        """Everybody says all it has to."""
        for worker in self.d:
            self.script(worker).go.set()

    async def holder(self) -> ScriptedWorker:
        """The decode worker whose stream has come to the stop."""
        await until(lambda: any(self.script(worker).waiting for worker in self.d))
        return next(worker for worker in self.d if self.script(worker).waiting)

    def others(self, worker: ScriptedWorker) -> list[ScriptedWorker]:
        return [other for other in self.d if other is not worker]


@asynccontextmanager
async def running(decodes: int = 2, stop_at: int = 10, **settings: Any) -> AsyncIterator[tuple[Site, Fleet]]:
    fleet = Fleet(decodes, stop_at)
    async with site(fleet.p, *fleet.d, settings=config(moves_pressure_s=0.05, **settings)) as made:
        yield made, fleet


def moves(made: Site, outcome: str, reason: str = "drain") -> float:
    return made.metric("pdserve_moves_total", reason=reason, outcome=outcome)


def whole(seen: History, count: int = 40) -> bool:
    return (seen.texts, seen.finishes, seen.errors) == ({0: text(count)}, {0: "length"}, [])
