"""Sends one process's share of a plan, and records what becomes of every request.

Open loop: a request counts from when it was due, however late it is sent (a server that stands still does not keep the
next ones from being due). Closed loop: from when its place became free.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.load import results
from bench.load.plan import Plan, Session, Tokens, Turn, concurrency, sessions
from bench.load.results import COMPLETED, CUT, FAILED, Result
from bench.load.target import Answer, Target, Unanswered

STOPPED = "stopped"
NOT_REACHED = "after_a_turn_that_failed"
NO_TOKENS = "the_server_tells_no_token_ids"
_NO_TOKENS: Tokens = np.zeros(0, np.uint32)


class Drive:
    """run() once. begun: requests that were due so far; results: of those that ended, for others to take away."""

    def __init__(
        self, target: Target, plan: Plan, part: int, of: int, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._target, self._plan, self._timeout_s = target, plan, timeout_s
        self._sessions = sessions(plan, part, of)
        self._places = concurrency(plan, part, of)
        self._room = asyncio.Semaphore(self._places) if self._places else contextlib.nullcontext()
        self._clock, self._zero = clock, 0.0
        self.begun = 0
        self.results: list[Result] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Until everything has ended; `stop` ends what is under way at once."""
        self._zero = self._clock()
        work = asyncio.create_task(self._closed() if self._plan.arrival == "closed" else self._open())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, stopping):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def now(self) -> float:
        return self._clock() - self._zero

    # --- when

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._places):
                group.create_task(self._worker(self._sessions))

    async def _worker(self, share: Iterator[Session]) -> None:
        while not self._over(due := self.now()):
            session = next(share, None)
            if session is None:
                return
            await self._session(session, due, self._request(session, session.turns[0], _NO_TOKENS))

    async def _open(self) -> None:
        async with asyncio.TaskGroup() as group:
            for session in self._sessions:
                request = self._request(session, session.turns[0], _NO_TOKENS)
                await self._until(session.at)
                group.create_task(self._session(session, session.at, request))
                await asyncio.sleep(0)  # however many are due at once, the first ones go before the last are made

    async def _until(self, at: float) -> None:
        while (left := at - self.now()) > 0:  # noqa: ASYNC110  timers are rounded, down as well
            await asyncio.sleep(left)

    def _over(self, at: float) -> bool:
        return 0 < self._plan.duration_s <= at

    # --- what

    def _request(self, session: Session, turn: Turn, before: Tokens) -> tuple[Any, Tokens]:
        """What is sent, and the prompt."""
        prompt = _NO_TOKENS if turn.text else np.concatenate((before, turn.tokens(self._plan.vocab)))
        return self._target.request(turn, prompt, session.key), prompt

    async def _session(self, session: Session, due: float, request: tuple[Any, Tokens]) -> None:
        last = len(session.turns) - 1
        for place, turn in enumerate(session.turns):
            answer = await self._turn(turn, due, *request)
            if place == last:
                return
            if answer is None or not answer.tokens:
                self._cut_rest(session, place + 1, NOT_REACHED if answer is None else NO_TOKENS)
                return
            said = np.concatenate((request[1], np.array(answer.tokens, np.uint32)))
            request = self._request(session, session.turns[place + 1], said)
            due = answer.last + self._plan.think_s
            if self._over(due):
                return
            await self._until(due)

    def _cut_rest(self, session: Session, first: int, why: str) -> None:
        for turn in session.turns[first:]:
            self.begun += 1
            self.results.append(Result(turn.number, CUT, why, due=self.now(), asked_output=turn.output))

    async def _turn(self, turn: Turn, due: float, request: Any, prompt: Tokens) -> Answer | None:
        """The answer, if it is whole. Leaves exactly one result behind, whatever happens."""
        self.begun += 1
        result = Result(turn.number, CUT, STOPPED, due, asked_prompt=len(prompt), asked_output=turn.output)
        answer = Answer(self.now)
        woken = self.now()
        try:
            async with self._room if self._plan.arrival != "closed" else contextlib.nullcontext():
                result.sent = self.now()
                result.late, result.held = woken - due, result.sent - woken
                async with asyncio.timeout(self._timeout_s):
                    await self._target.ask(request, answer)
            result.state, result.reason = COMPLETED, ""
            if not answer.first:  # whole, and empty
                answer.first = answer.last = self.now()
        except Unanswered as why:
            result.state, result.reason = why.state, why.reason
        except TimeoutError:
            result.state, result.reason = FAILED, "timeout"
        finally:
            self._end(result, answer)
        return answer if result.state == COMPLETED else None

    def _end(self, result: Result, answer: Answer) -> None:
        result.end = self.now()
        result.first, result.last = answer.first, answer.last
        result.prompt, result.cached, result.parts = answer.prompt, answer.cached, answer.parts
        result.output = answer.output or len(answer.tokens)
        result.gaps = np.array(answer.gaps, np.float32)
        self.results.append(result)


def take(drive: Drive) -> list[list[Any]]:
    """The results so far, packed, and forgotten here."""
    taken, drive.results = drive.results, []
    return results.pack(taken)
