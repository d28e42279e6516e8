"""One request through the fleet: reserve -> prefill -> hand off -> decode -> stream -> settle.

A Dispatch owns everything its request holds (both legs with their reservations, stream entries and charges) and
settles exactly once: whatever ends it, the first terminal event counts, a second is dropped and counted, and leaving
run() gives everything back on every path, cancellation included. What the workers say is turned into text by Progress,
a pure state machine; this file only decides where things go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router import policy
from router.booking import Booking
from router.codec import Codec
from router.fleet import Fleet
from router.legs import DecodeLeg, PrefillLeg
from router.progress import GOES_ON, LENGTH, Finish, Progress
from router.request import Ledger, Outcome, Reply, Work
from router.worker import Worker
from runtime import errors
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import Cancelled, DeadlineExceeded, KvLost, PdserveError, WorkerLost
from runtime.metrics import Metrics

MAX_DECODE_ATTEMPTS = 3
_log = structlog.get_logger("pdserve.router.dispatch")


class Dispatcher:
    """What all requests share. run() is one request's life after rendering."""

    def __init__(
        self, fleet: Fleet, codec: Codec, config: Config, clock: Clock, router_id: str, metrics: Metrics
    ) -> None:
        self.fleet = fleet
        self.codec = codec
        self.config = config
        self.clock = clock
        self.router_id = router_id
        self.booking = Booking(fleet, config.max_queue, config.queue_timeout_s, clock)
        self.eos = codec.eos
        self.duplicates = metrics.counter(
            "pdserve_router_duplicate_terminals", "Second terminal events of a request, dropped"
        )
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, work: Work, reply: Reply) -> Outcome:
        """Raises PdserveError; asyncio.CancelledError when the client went away. Nothing is held afterwards."""
        return await Dispatch(self, work, reply).run()

    def spawn(self, job: Coroutine[Any, Any, None]) -> None:
        """A farewell to a worker that must survive the request's own cancellation."""
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)


class Dispatch:
    def __init__(self, shared: Dispatcher, work: Work, reply: Reply) -> None:
        self.shared = shared
        self.work = work
        self.reply = reply
        self.ledger = Ledger()
        params = work.params
        stop_tokens = frozenset(work.sampling.stop_token_ids)
        decoder = shared.codec.decoder(skip_special=params.skip_special)
        self.progress = Progress.of(params, decoder, work.tokens, stop_tokens)
        self.prefill: PrefillLeg | None = None
        self.decode: DecodeLeg | None = None
        self.local = False
        self.source: Worker | None = None  # where the prompt is computed
        self.ticket: prefill_pb2.TicketIssued | None = None
        self.first_seen = False  # the first token of every choice is there
        self.handed_over = False
        self.ended_choices: set[int] = set()  # as the decode worker told
        self.early: list[decode_pb2.ChoiceTokens] = []  # D may be ahead of P's answer
        self.refused_decode: set[str] = set()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the first token is there
        self.moved_at = 0.0  # the last progress
        self._replacing: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        try:
            await self._reserve()
            self._submit()
            await self._watch()
            return self._outcome()
        except asyncio.CancelledError:
            self._end(Cancelled("the client went away"))
            raise
        except PdserveError as error:
            self._end(error)
            raise
        finally:
            self._give_back()

    # reserve

    async def _reserve(self) -> None:
        started = self._now()
        choice = await self.shared.booking.book(self.work.most_tokens, self.work.deadline, self._attempt)
        self.ledger.queue_s = self._now() - started - self.ledger.route_s
        self.local = isinstance(choice, policy.Local)

    async def _attempt(self, choice: policy.Pair | policy.Local) -> dict[str, PdserveError]:
        """Book at every worker of the choice at once; all or nothing."""
        started = self._now()
        legs: list[PrefillLeg | DecodeLeg] = []
        try:
            if isinstance(choice, policy.Local):
                self.decode = self._decode_leg(choice.worker, local=True)
                legs = [self.decode]
            else:
                self.prefill, self.decode = (
                    self._prefill_leg(choice.prefill),
                    self._decode_leg(choice.decode, local=False),
                )
                legs = [self.prefill, self.decode]
        except KeyError:  # it left between choice and attempt
            for leg in legs:
                leg.close("refused")
            return {"decode": WorkerLost("the worker left")}
        answers = await asyncio.gather(*(self._book(leg, isinstance(choice, policy.Local)) for leg in legs))
        refusals = {leg.name: error for leg, error in zip(legs, answers, strict=True) if error is not None}
        if refusals:
            for leg in legs:
                leg.close("refused")
            self.prefill = self.decode = None
        self.ledger.route_s = self._now() - started
        return refusals

    async def _book(self, leg: PrefillLeg | DecodeLeg, local: bool) -> PdserveError | None:
        work = self.work
        needs = common_pb2.Needs(prompt_tokens=len(work.tokens), choices=work.params.n)
        if leg.name == "prefill" or local:
            needs.prefill_tokens = len(work.tokens)
        if leg.name == "decode":
            needs.headroom_tokens = min(self.shared.config.headroom_tokens, work.sampling.max_tokens)
        if leg.worker.has_slots:
            needs.slots = work.params.n
        return await leg.reserve(self.shared.router_id, needs, self._remaining_ms())

    def _prefill_leg(self, worker_id: str) -> PrefillLeg:
        worker = self._worker(worker_id)
        self.ledger.prefill_attempts += 1
        ref = common_pb2.AttemptRef(request_id=self.work.request_id, attempt=self.ledger.prefill_attempts)
        charge = worker.charge(prefill_tokens=len(self.work.tokens), requests=1)
        return PrefillLeg(self, worker, ref, charge, self.shared.spawn)

    def _decode_leg(self, worker_id: str, *, local: bool) -> DecodeLeg:
        worker = self._worker(worker_id)
        self.ledger.decode_attempts += 1
        ref = common_pb2.AttemptRef(request_id=self.work.request_id, attempt=self.ledger.decode_attempts)
        charge = worker.charge(prefill_tokens=len(self.work.tokens) if local else 0, requests=1)
        return DecodeLeg(self, worker, ref, charge, self.shared.spawn)

    def _worker(self, worker_id: str) -> Worker:
        worker = self.shared.fleet.worker(worker_id)
        if worker is None:
            raise KeyError(worker_id)
        return worker

    # prefill, hand off, decode

    def _submit(self) -> None:
        """Both at once: D allocates while P computes."""
        assert self.decode is not None
        self.source = self.prefill.worker if self.prefill is not None else self.decode.worker
        self.ledger.prefill_worker = self.source.id
        self.ledger.decode_worker = self.decode.worker.id
        self.moved_at = self._now()
        if self.prefill is not None:
            self.prefill.submit(self._wire(self.prefill.ref))
        self.decode.submit(self._wire(self.decode.ref), local=self.local)

    def _wire(self, ref: common_pb2.AttemptRef) -> common_pb2.WorkRequest:
        work = self.work
        return common_pb2.WorkRequest(
            ref=ref,
            tokens=work.tokens,
            prompt_len=len(work.tokens),
            sampling=work.sampling,
            n=work.params.n,
            salt=work.salt,
            remaining_ms=self._remaining_ms(),
            traceparent=work.traceparent,
        )

    def prefill_event(self, leg: PrefillLeg, event: prefill_pb2.PrefillEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "ticket":
            self.ticket = event.ticket
            if self.decode is not None:
                self.decode.ticket(event.ticket)
        elif kind == "prompt_logprobs":
            self.reply.prompt_logprobs(event.prompt_logprobs.offset, event.prompt_logprobs.entries)
        elif kind == "done":
            self._prefilled(leg, event.done)
        elif kind == "failed":
            leg.over()
            self._source_failed(errors.from_detail(event.failed))

    def _prefilled(self, leg: PrefillLeg, done: prefill_pb2.PrefillDone) -> None:
        """P's whole answer: the first token of every choice. From here D's tokens count."""
        if leg.done:
            return
        leg.done = True
        leg.charge.close()
        self.ledger.prefill = done.times
        for first in done.first:
            logprobs = [first.logprob] if first.HasField("logprob") else []
            self._accept(first.choice, 0, [first.token], logprobs, first.finish)
        if any(sequence == 0 for sequence in self.progress.next_sequences()):
            self._source_failed(WorkerLost("the prefill worker left out a choice", reason="sequence_gap"))
            return
        self.first_seen = True
        early, self.early = self.early, []
        for tokens in early:
            self._tokens(tokens)
        if self.handed_over:
            leg.over()

    def decode_event(self, leg: DecodeLeg, event: decode_pb2.DecodeEvent) -> None:
        if leg is not self.decode:
            return  # a superseded attempt
        kind = event.WhichOneof("event")
        if kind == "tokens":
            self._ended(leg, event.tokens)
            if self.local or self.first_seen:
                self._tokens(event.tokens)
            else:
                self.early.append(event.tokens)
        elif kind == "prompt_logprobs":
            self.reply.prompt_logprobs(event.prompt_logprobs.offset, event.prompt_logprobs.entries)
        elif kind == "handoff":
            self._handed_over(event.handoff)
        elif kind == "failed":
            leg.over()
            error = errors.from_detail(event.failed.error)
            self._decode_failed(leg, KvLost(error.message, reason=error.reason) if event.failed.kv_lost else error)

    def _handed_over(self, handoff: decode_pb2.HandoffDone) -> None:
        """D confirmed to P itself: the prefill leg is over as soon as its answer is here."""
        self.handed_over = True
        self.ledger.handoff = handoff.times
        if self.prefill is not None and self.prefill.done:
            self.prefill.over()

    def _ended(self, leg: DecodeLeg, tokens: decode_pb2.ChoiceTokens) -> None:
        if tokens.finish == GOES_ON:
            return
        self.ended_choices.add(tokens.choice)
        if tokens.HasField("times"):
            self.ledger.decode = tokens.times
        if len(self.ended_choices) >= self.work.params.n:
            leg.over()

    def _tokens(self, tokens: decode_pb2.ChoiceTokens) -> None:
        self._accept(tokens.choice, tokens.first_sequence, tokens.tokens, tokens.logprobs, tokens.finish)

    def _accept(
        self, index: int, sequence: int, tokens: Sequence[int], logprobs: Sequence[common_pb2.TokenLogprob], finish: int
    ) -> None:
        if self.done.done():
            return
        if finish > common_pb2.FINISH_REASON_LENGTH:
            self.settle(_worker_gave_up(finish))
            return
        self.moved_at = self._now()
        try:
            delta, finished = self.progress.accept(index, sequence, tokens, logprobs, finish)
        except PdserveError as error:
            self.settle(error)
            return
        if delta is not None:
            if not self.begun.done():
                self.begun.set_result(None)
                self.ledger.first_token_s = self.moved_at - self.work.arrived
            if not self.work.scoring:
                self.reply.delta(delta)
        if finished is not None:
            self.reply.finished(Finish(finished.choice, LENGTH) if self.work.scoring else finished)
        if self.progress.finished:
            self.settle(None)
        elif finished is not None and finish == GOES_ON and self.decode is not None:
            self.decode.end_choice(index)

    def step(self) -> None:
        self.reply.step()

    def next_sequences(self) -> list[int]:
        return self.progress.next_sequences()

    # failures

    def leg_lost(self, leg: PrefillLeg | DecodeLeg, error: PdserveError) -> None:
        if leg is self.prefill:
            if not leg.done:
                self._source_failed(error)
            # after its answer, D finds out whether the pages are still to be had
        elif leg is self.decode:
            self._decode_failed(leg, error)

    def _source_failed(self, error: PdserveError) -> None:
        self.settle(error)

    def _decode_failed(self, leg: PrefillLeg | DecodeLeg, error: PdserveError) -> None:
        """Before D has confirmed, the same ticket may go to another D; later the answer cannot go on here."""
        again = (
            not self.local
            and not self.handed_over
            and error.row.retryable
            and not isinstance(error, KvLost)
            and max(self.progress.next_sequences()) <= 1
            and self.ledger.decode_attempts < MAX_DECODE_ATTEMPTS
        )
        if not again or self.done.done():
            self.settle(error)
            return
        self.early.clear()
        self.ended_choices.clear()
        self.refused_decode.add(leg.worker.id)
        self._replacing = asyncio.create_task(self._replace(error))

    async def _replace(self, cause: PdserveError) -> None:
        """Another decode worker for the pages that P holds. A failure here is the first one's."""
        try:
            placed = await self._place_again()
        except PdserveError as error:
            cause, placed = error, False
        if not placed:
            self.settle(cause)

    async def _place_again(self) -> bool:
        assert self.source is not None
        while self.ledger.decode_attempts < MAX_DECODE_ATTEMPTS and not self.done.done():
            worker_id = policy.choose_decode(
                self.shared.fleet.states(), self.work.most_tokens, self.source.group, frozenset(self.refused_decode)
            )
            if worker_id is None:
                break
            self.refused_decode.add(worker_id)
            leg = self._decode_leg(worker_id, local=False)
            self.decode = leg
            if await self._book(leg, local=False) is not None:
                continue
            try:
                leg.submit(self._wire(leg.ref), local=False)
            except WorkerLost:
                leg.close("lost")
                continue
            self.ledger.decode_worker = leg.worker.id
            if self.ticket is not None:
                leg.ticket(self.ticket)
            return True
        return False

    # stream until settled

    async def _watch(self) -> None:
        """Wait for the end, with the timers that find a frozen worker."""
        while not self.done.done():
            limit, error = self._next_timer()
            pause = limit - self._now()
            if pause <= 0:
                raise error
            # The first token changes the timer that counts, so it wakes this up once.
            events = (self.done,) if self.begun.done() else (self.done, self.begun)
            await asyncio.wait(events, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        self.done.result()

    def _next_timer(self) -> tuple[float, PdserveError]:
        config = self.shared.config
        if self.progress.started:
            silence = config.inter_token_timeout_s
            error = WorkerLost("no token came in time", reason="inter_token_timeout", limit=f"{silence:g} s")
        else:
            silence = config.first_token_timeout_s
            error = WorkerLost(
                "the first token did not come in time", reason="first_token_timeout", limit=f"{silence:g} s"
            )
        if self.work.deadline <= self.moved_at + silence:
            return self.work.deadline, DeadlineExceeded("the request's deadline passed")
        return self.moved_at + silence, error

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

    def _end(self, error: PdserveError) -> None:
        """The request's own end (a timer, the client, a refusal), unless the workers were first."""
        if not self.done.done():
            self.settle(error)

    def _give_back(self) -> None:
        if self._replacing is not None:
            self._replacing.cancel()
        for leg in (self.prefill, self.decode):
            if leg is not None:
                leg.close("settled")

    def _outcome(self) -> Outcome:
        self.ledger.total_s = self._now() - self.work.arrived
        prompt = len(self.work.tokens)
        return Outcome(
            request_id=self.work.request_id,
            prompt_tokens=prompt,
            completion_tokens=0 if self.work.scoring else self.progress.completion_tokens,
            cached_tokens=min(self.ledger.cached_tokens, prompt),
            ledger=self.ledger.wire(),
        )

    def _remaining_ms(self) -> int:
        """Raises DeadlineExceeded."""
        left = int((self.work.deadline - self._now()) * 1000)
        if left <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        return left

    def _now(self) -> float:
        return self.shared.clock.monotonic()


def _worker_gave_up(finish: int) -> PdserveError:
    if finish == common_pb2.FINISH_REASON_DEADLINE:
        return DeadlineExceeded("the request's deadline passed")
    if finish == common_pb2.FINISH_REASON_CANCELLED:
        return WorkerLost("the worker cancelled the request", reason="worker_cancelled")
    return WorkerLost("the worker failed the request", reason="worker_failed")
