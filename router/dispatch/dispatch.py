"""One request from reservation to its one terminal event, over as many passages through the fleet as it takes.

A Dispatch owns its passages and settles exactly once: whatever ends it, the first terminal event counts, a second is
dropped and counted, and leaving run() gives everything back on every path, cancellation included. What the workers say
is turned into text by Progress, a pure state machine; what to do after a failure is decided by `continuity`, purely;
this file only carries it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import structlog

from protos.v1 import common_pb2, decode_pb2
from router.admission.tenants import Tenant
from router.dispatch import continuity
from router.dispatch.bells import LATE_S
from router.dispatch.booking import Booking
from router.dispatch.continuity import Piece, RetryBudget
from router.dispatch.legs import DepartedLeg
from router.dispatch.moves import Moves
from router.dispatch.onward import Onward
from router.dispatch.passage import Passage
from router.request import Ledger, Outcome, Reply, Work
from router.text.codec import Codec
from router.text.progress import GOES_ON, LENGTH, Delta, Finish, Progress
from router.workers.fleet import Fleet
from router.workers.planner import Planner
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import DeadlineExceeded, PdserveError, WorkerLost
from runtime.metrics import Metrics

PATIENCE_S = 0.5
"""How long a request that could go on waits for a worker that is not there: its client hears within a second."""

_log = structlog.get_logger("pdserve.router.dispatch")


class Dispatcher:
    """What all requests share. run() is one request's life after rendering."""

    def __init__(
        self,
        fleet: Fleet,
        planner: Planner,
        codec: Codec,
        config: Config,
        clock: Clock,
        router_id: str,
        metrics: Metrics,
        tenants: Iterable[Tenant] = (),
    ) -> None:
        self.fleet = fleet
        self.planner = planner
        self.codec = codec
        self.config = config
        self.clock = clock
        self.router_id = router_id
        self.booking = Booking(fleet, planner, config, clock, metrics, tenants)
        self.budget = RetryBudget()
        self.pressure = fleet.pressure
        self.eos = codec.eos
        self.duplicates = metrics.counter(
            "pdserve_router_duplicate_terminals", "Second terminal events of a request, dropped"
        )
        self.retries = metrics.counter(
            "pdserve_router_retries", "Passages after a failure, before and after the first token", ["kind"]
        )
        self.out_of_budget = metrics.counter("pdserve_router_retries_refused", "Retries the budget did not allow")
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: set[Dispatch] = set()
        self.moves = Moves(self, metrics, self._passages)

    async def run(self, work: Work, reply: Reply) -> Outcome:
        """Raises PdserveError; asyncio.CancelledError when the client went away. Nothing is held afterwards."""
        self.budget.request()
        dispatch = Dispatch(self, work, reply)
        self._live.add(dispatch)
        try:
            return await dispatch.run()
        finally:
            self._live.discard(dispatch)
            self.booking.line.over(work.request_id, **dispatch.used())

    def _passages(self) -> Iterator[Passage]:
        """All that are under way."""
        for dispatch in self._live:
            yield from dispatch.passages

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        """A farewell to a worker that must survive the request's own cancellation."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def start(self) -> None:
        """From now on the event loop's load is watched, and requests are moved as the fleet has need."""
        self._watcher = asyncio.create_task(self.pressure.run(), name="pressure")
        if self.config.moves:
            self.moves.start()

    _watcher: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        await self.moves.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)


class Dispatch:
    """Owner of its passages (passage.Owner)."""

    def __init__(self, shared: Dispatcher, work: Work, reply: Reply) -> None:
        self.shared = shared
        self._now = shared.clock.monotonic
        self.work = work
        self.reply = reply
        self.ledger = Ledger()
        decoder = shared.codec.decoder(skip_special=work.params.skip_special)
        self.progress = Progress.of(work.params, decoder, work.tokens, frozenset(work.sampling.stop_token_ids))
        self.passages: list[Passage] = []
        self._made: list[Passage] = []
        self._computed_at = 0.0  # when its first token came
        self.scored = 0  # prompt positions whose log-probabilities are out
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._again: set[asyncio.Task[None]] = set()

    async def run(self) -> Outcome:
        try:
            work = self.work
            first = Passage(self, self.shared, continuity.whole(work.request_id, work.tokens, work.params.n), {})
            self.passages.append(first)
            self._made.append(first)
            try:
                await first.place()
            except PdserveError as error:
                if first.over or first.decode is None:
                    raise
                first.close("not sent")
                self.failed(first, error, lost=True)  # a worker left between its booking and the submission
            await self.done
            return self._outcome()
        finally:
            self._end()
            self._give_back()
            for passage in self._made:
                passage.forget()
            self._made.clear()

    def used(self) -> dict[str, float]:
        """What its tenant is charged: seconds of prefill, bytes moved, and tokens times the seconds they were held at a
        decode worker, by this router's clock: also of one whose client went away. 0 = not known, as predicted."""
        times, made = self.ledger, self.progress.completion_tokens
        source = times.prefill if times.prefill.ByteSize() else times.decode
        held_s = self._now() - self._computed_at if self._computed_at else 0.0
        moved = times.handoff.transfer_bytes + times.prefill.transfer_bytes
        held = (len(self.work.tokens) + made / 2) * held_s
        return {"prefill_s": source.prefill_s, "moved": float(moved), "token_seconds": held}

    # passage.Owner

    def accept(
        self,
        choice: int,
        sequence: int,
        tokens: Sequence[int],
        logprobs: Sequence[common_pb2.TokenLogprob],
        finish: int,
    ) -> None:
        if self.done.done():
            return
        if not self._computed_at:
            self._computed_at = self._now()
            self.shared.booking.line.computed(self.work.request_id)
        delta, finished = self.progress.accept(choice, sequence, tokens, logprobs, finish)
        self._say(delta, finished)
        if self.progress.finished:
            self.settle(None)
        elif finished is not None:
            for passage in [passage for passage in self.passages if choice in passage.choices]:
                passage.choice_over(choice)
                if finish == GOES_ON:  # a stop string: the worker does not know
                    passage.end_choice(choice)
                    self._close_idle(passage)

    def _say(self, delta: Delta | None, finished: Finish | None) -> None:
        if delta is not None:
            if not self.ledger.first_token_s:
                self.ledger.first_token_s = self._now() - self.work.arrived
            if not self.work.scoring:
                self.reply.delta(delta)
        if finished is not None:
            self.reply.finished(Finish(finished.choice, LENGTH) if self.work.scoring else finished)

    def _close_idle(self, passage: Passage) -> None:
        """A passage none of whose choices goes on has nothing left to do."""
        if passage in self.passages and not self.open_choices(passage.choices):
            self.passages.remove(passage)
            passage.close("settled")

    def open_choices(self, choices: Sequence[int]) -> list[int]:
        return [index for index in choices if self.progress.choices[index].finish is None]

    def next_sequence(self, choice: int) -> int:
        return self.progress.choices[choice].next_sequence

    def prompt_logprobs(self, offset: int, entries: Sequence[common_pb2.TokenLogprob]) -> None:
        """Once each, whoever computes the prompt again."""
        fresh = entries[max(self.scored + 1 - offset, 0) :]
        if fresh:
            self.scored = offset + len(entries) - 1
            self.reply.prompt_logprobs(offset + len(entries) - len(fresh), fresh)

    def step(self) -> None:
        self.reply.step()

    def failed(self, passage: Passage, error: PdserveError, lost: bool) -> None:
        """Go on elsewhere with what `passage` leaves open, or end."""
        if passage in self.passages:
            self.passages.remove(passage)
        if self.done.done():
            return
        choices, piece = self.progress.choices, replace(passage.piece, choices=passage.choices)
        room = self.shared.codec.context - len(self.work.tokens)
        for index in continuity.exhausted(choices, piece.choices, self.work.sampling.max_tokens, room):
            self._say(*self.progress.end(index))
        if self.progress.finished:
            self.settle(None)
            self.reply.step()
            return
        left = continuity.pieces(piece, self.work.request_id, self.work.tokens, choices)
        if left and not self._may_go_on(error, piece, lost):
            self.settle(error)
            return
        for one in left:
            self._go_on(one, passage.avoid, error)

    def moved(self, passage: Passage) -> None:
        """A passage was sent or has begun: another timer counts."""
        self._arm()

    def onward(self, passage: Passage, choice: int) -> Piece:
        work = self.work
        return continuity.onward(passage.piece, work.request_id, work.tokens, self.progress.choices, choice)

    def departed(self, passage: Passage, left: DepartedLeg, body: decode_pb2.HandedOver) -> None:
        """The choice goes on at another worker, from what it has left."""
        choice = self.progress.choices[body.choice]
        if choice.finish is not None:  # a stop string, in what it said last
            left.close("settled")
            self._close_idle(passage)
            return
        known = len(self.work.tokens) + choice.next_sequence
        if body.token_count + 1 != known or choice.tokens[-1:] != [body.first.token]:
            raise WorkerLost("what the worker gives away is not what it has said", reason="sequence_gap")
        move = passage.moves.pop(body.choice, None)
        piece = self.onward(passage, choice.index)
        onward = move.departed() if move is not None else Onward(self, self.shared, piece, passage.avoid, left.worker)
        self.passages.append(onward)
        self._made.append(onward)
        self._close_idle(passage)
        onward.go_on(piece, left, body.ticket)
        self._arm()

    # going on

    def _may_go_on(self, error: PdserveError, piece: Piece, lost: bool) -> bool:
        if not continuity.worth_it(error, piece, self.shared.config.retries):
            return False
        if (lost and piece.retry == 0) or self.shared.budget.take(self._now()):
            return True
        self.shared.out_of_budget.inc()
        return False

    def _go_on(self, piece: Piece, avoid: dict[str, frozenset[str]], cause: PdserveError) -> None:
        kind = "continue" if piece.first_sequence else "retry"
        self.shared.retries.labels(kind).inc()
        _log.info(kind, request_id=piece.request_id, reason=cause.reason, tokens=piece.first_sequence)
        passage = Passage(self, self.shared, piece, avoid)
        self.passages.append(passage)
        self._made.append(passage)
        task = asyncio.create_task(self._place(passage, cause))
        self._again.add(task)
        task.add_done_callback(self._again.discard)

    async def _place(self, passage: Passage, cause: PdserveError) -> None:
        """The client is told the first failure, not that nobody could repair it."""
        try:
            await passage.place(PATIENCE_S)
        except PdserveError as error:
            if self.done.done():
                return
            sent = passage.decode is not None
            passage.close("not sent")
            if sent:
                self.failed(passage, error, lost=True)
            else:
                self.settle(error if isinstance(error, DeadlineExceeded) else cause)
        except Exception as exc:  # noqa: BLE001  supervises: a bug ends this request, and is heard of
            _log.error("retry_failed", request_id=self.work.request_id, exc_info=exc)
            self.settle(PdserveError("internal error"))

    # timers

    def _arm(self) -> None:
        """Wake up when the first timer of a passage can have run out, or the request's deadline."""
        limit = self.work.deadline
        for passage in self.passages:
            if passage.moved_at is not None:
                limit = min(limit, passage.moved_at + passage.silence_s)
        if self._timer is not None:
            if self._rings_at <= limit:  # it will look again then: most requests are over before that
                return
            self._timer.cancel()
        self._rings_at = limit
        self._timer = self.loop.call_later(max(limit - self._now(), 0.0), self._tick)

    def _tick(self) -> None:
        """Progress since then only moves the timers: they are looked at when they run out, not at every token."""
        self._timer = None
        now = self._now()
        if self.done.done():
            return
        if now >= self.work.deadline:
            self.settle(DeadlineExceeded("the request's deadline passed"))
            return
        late = now - self._rings_at
        for passage in list(self.passages):
            if passage.moved_at is None:
                continue
            if late > LATE_S:  # nobody was silent, this router did not listen: what was said meanwhile is read next
                passage.moved_at += late
            elif now >= passage.moved_at + passage.silence_s:
                passage.timed_out()
        if not self.done.done():
            self._arm()

    # settle

    def settle(self, error: PdserveError | None) -> None:
        """The one terminal event of the workers; None = completed. A later one is dropped and counted."""
        if self.done.done():
            self.shared.duplicates.inc()
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # marks it as seen: nobody waits for it when the client has gone
        self._give_back()

    def _end(self) -> None:
        """The request's own end (the client, a refusal), unless the workers were first: nobody waits any more."""
        if not self.done.done():
            self.done.set_result(None)

    def _give_back(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._again:
            task.cancel()
        passages, self.passages = self.passages, []
        for passage in passages:
            passage.close("settled")

    def _outcome(self) -> Outcome:
        self.ledger.total_s = self._now() - self.work.arrived
        prompt = len(self.work.tokens)
        return Outcome(
            request_id=self.work.request_id,
            prompt_tokens=prompt,
            completion_tokens=0 if self.work.scoring else self.progress.completion_tokens,
            cached_tokens=min(self.ledger.cached_tokens, prompt),
            ledger=self.ledger,
        )
