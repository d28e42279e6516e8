"""One passage of a request through the fleet: reserve -> prefill -> hand off -> decode, at one pair or at one worker.

A passage owns both legs with their reservations, stream entries and charges, and gives all of it back in close(), on
every path. It knows nothing of other passages: tokens, and the one failure that ends it, go to its owner, which decides
what becomes of the request. The one thing it repairs by itself is a decode worker that fails before it has confirmed:
the same ticket goes to another one, and nothing is computed twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from router.dispatch.booking import SILENT, Wish
from router.dispatch.continuity import Piece
from router.dispatch.legs import DecodeLeg, DepartedLeg, PrefillLeg
from router.dispatch.legs import Owner as LegOwner
from router.dispatch.seats import ENDED, Leg, Owner, Seats, Shared, TokenLogprob, worker_gave_up
from router.policy.pairing import Local
from router.policy.view import NO_FORECAST
from router.pressure import joined
from router.text.progress import GOES_ON
from router.workers.worker import Worker
from runtime.errors import Draining, KvLost, PdserveError, TicketInvalid, WorkerLost, from_detail

MAX_DECODE_ATTEMPTS = 3


class Passage(Seats):
    """avoid: workers that have failed this request already, by leg."""

    def __init__(self, owner: Owner, shared: Shared, piece: Piece, avoid: dict[str, frozenset[str]]) -> None:
        super().__init__(owner, shared, piece)
        self.local = False
        self.moved_at: float | None = None  # the last progress; None until it is sent
        self._sent_at = 0.0
        self._took_s = 0.0  # from there to the first token
        self.begun = False  # the first token is there
        self.over = False
        self._avoid = avoid
        self._source: Worker | None = None  # where the prompt is computed
        self._fetch_from = ""  # the worker whose cache has its beginning
        self._ticket: prefill_pb2.TicketIssued | None = None
        self._first_seen = False  # the first token of every choice is there
        self._handed_over = False
        self._ended: set[int] = set()  # choices, as the decode worker told
        self._leaving: list[decode_pb2.HandedOver] = []  # ahead of P's answer
        self._held: list[decode_pb2.ChoiceTokens] = []  # not yet looked at: ahead of P's answer, or under pressure
        self._refused_decode: set[str] = set(avoid.get("decode", ()))
        self._failed_reader = ""  # the worker that had the ticket first, and failed
        self._replacing: asyncio.Task[None] | None = None

    def _legs_owner(self) -> LegOwner:
        return self

    # reserve

    async def place(self, patience_s: float | None = None) -> None:
        """Book and send. Raises PdserveError. patience_s: of one that goes on: it waits for a worker that is not there
        no longer than this, and in no line."""
        started = self._now()
        before = self.owner.ledger.route_s
        length = len(self.piece.tokens) + self._left()
        wish = Wish(self.owner.work, self.piece.tokens, length, self._attempt, self._avoid, patience_s)
        choice = await self.shared.booking.book(wish)
        ledger = self.owner.ledger
        ledger.queue_s += max(self._now() - started - (ledger.route_s - before), 0.0)  # others may be on their way
        self.local = isinstance(choice, Local)
        if self.over:  # the request ended while it waited
            self.close("settled")
            raise ENDED
        self._submit()

    # prefill, hand off, decode

    def _submit(self) -> None:
        """Both at once: D allocates while P computes. Raises WorkerLost."""
        assert self.decode is not None
        self._source = self.prefill.worker if self.prefill is not None else self.decode.worker
        self.owner.ledger.placed(self._source.id, self.decode.worker.id)
        if isinstance(self.prefill, PrefillLeg):
            self.prefill.submit(self._fill_fetching)
        self.decode.submit(self._fill_fetching if self.local else self._fill, local=self.local)
        self.moved_at = self._sent_at = self._now()
        self.owner.moved(self)

    def _fill(self, request: common_pb2.WorkRequest, ref: common_pb2.AttemptRef) -> None:
        """In its place in a command: a message that is put into another one is copied."""
        work, piece = self.owner.work, self.piece
        request.ref.CopyFrom(ref)
        request.tokens.extend(piece.tokens)
        request.prompt_len = piece.prompt_len
        request.sampling.CopyFrom(work.sampling)
        request.n = len(piece.choices)
        request.choice = piece.choice
        request.salt = work.salt
        request.remaining_ms = self._remaining_ms()
        request.traceparent = work.traceparent
        request.retention.CopyFrom(work.retention)
        request.priority = work.priority
        request.due_ms = round(1000 * (self.shared.booking.due(work) - self._now()))
        if piece.first_sequence:  # the prompt's scores are there: asking again would only keep it from the cache
            request.sampling.prompt_logprobs = False

    def _fill_fetching(self, request: common_pb2.WorkRequest, ref: common_pb2.AttemptRef) -> None:
        """With the place where the prompt's beginning is to be brought from first. Whose scores are wanted is run."""
        self._fill(request, ref)
        source = self._prefix_source(self._source) if self._source is not None else None
        if source is not None and not request.sampling.prompt_logprobs:
            request.prefix_source.CopyFrom(source)
            self._fetch_from = source.worker_id

    def prefill_event(self, leg: PrefillLeg, kind: str, body: Any) -> None:
        if leg is not self.prefill:
            return
        if kind == "ticket":
            self._ticket = body
            if self.decode is not None:
                self.decode.ticket(body)
        elif kind == "prompt_logprobs":
            self.owner.prompt_logprobs(body.offset, body.entries)
        elif kind == "done":
            self._prefilled(leg, body)
        elif kind == "failed":
            leg.over()
            self._source_failed(leg, from_detail(body), lost=False)

    def _prefilled(self, leg: PrefillLeg, done: prefill_pb2.PrefillDone) -> None:
        """P's whole answer: the first token of every choice. From here D's tokens count."""
        if leg.done:
            return
        leg.done = True
        leg.charge.close()
        if leg.booked is not None:
            leg.booked.prefilled()
        self._took_s = self._now() - self._sent_at
        self._learn(leg.worker.id, done.times)
        self._heard(leg, None)
        first = self.piece.first_sequence
        self.owner.ledger.prefilled(done.times)
        for one in done.first:
            logprobs = [one.logprob] if one.HasField("logprob") else []
            if not self._accept(one.choice, first, [one.token], logprobs, one.finish):
                return
        if self.over:
            return
        if any(self.owner.next_sequence(choice) <= first for choice in self.owner.open_choices(self.piece.choices)):
            error = WorkerLost("the prefill worker left out a choice", reason="sequence_gap")
            self._source_failed(leg, error, lost=False)
            return
        self._first_seen = True
        self.flush()
        if self._handed_over and not self.over:
            leg.over()
        self._let_go()

    def decode_event(self, leg: DecodeLeg, kind: str, body: Any) -> None:
        if leg is not self.decode:
            return  # a superseded attempt
        if kind == "tokens":
            self._new_tokens(leg, body)
        elif kind == "prompt_logprobs":
            self.owner.prompt_logprobs(body.offset, body.entries)
        elif kind == "handoff":
            self._confirmed(body)
        elif kind == "handed_over":
            self._leaving.append(body)
            self._let_go()
        elif kind == "failed":
            leg.over()
            error = from_detail(body.error)
            self._decode_failed(leg, KvLost(error.message, reason=error.reason) if body.kv_lost else error, lost=False)

    def _confirmed(self, handoff: decode_pb2.HandoffDone) -> None:
        """D confirmed to P itself: the prefill leg is over as soon as its answer is here."""
        self._handed_over = True
        if self.decode is not None and self._source is not None:
            if self.decode.booked is not None:
                self.decode.booked.landed()
            self.shared.planner.handed_over(self._source.id, self.decode.worker.id, handoff.times)
        self.owner.ledger.handed_over(handoff.times)
        if self.prefill is not None and self.prefill.done:
            self.prefill.over()

    def _new_tokens(self, leg: DecodeLeg, tokens: decode_pb2.ChoiceTokens) -> None:
        finish = tokens.finish
        if self.local and not self._took_s:
            self._took_s = self._now() - self._sent_at
            if leg.booked is not None:
                leg.booked.prefilled()
        if finish != GOES_ON:
            self._choice_ended(leg, tokens)
        if not (self.local or self._first_seen):
            self._held.append(tokens)
            return
        if self.begun and finish == GOES_ON and self.shared.pressure.on:
            self.moved_at = self._now()
            self._held.append(tokens)
            self.shared.pressure.hold(self._beat)
            return
        if self._held:
            self._held.append(tokens)
            self.flush()
            return
        self._accept(tokens.choice, tokens.first_sequence, tokens.tokens, tokens.logprobs, finish)

    def _choice_ended(self, leg: DecodeLeg, tokens: decode_pb2.ChoiceTokens) -> None:
        self._ended.add(tokens.choice)
        if tokens.HasField("times"):
            self.owner.ledger.decoded(tokens.times)
            if self.local and len(self._ended) == 1:
                self._learn(leg.worker.id, tokens.times)
            said = tokens.first_sequence + len(tokens.tokens) - self.piece.first_sequence
            self.shared.planner.decoded(leg.worker.id, len(self.piece.tokens), said, tokens.times)
        self._all_ended(leg)

    def _all_ended(self, leg: DecodeLeg) -> None:
        if len(self._ended) >= len(self.piece.choices):
            self._heard(leg, None)
            leg.over()

    def _let_go(self) -> None:
        """Choices that have left their worker: their owner takes them on, after everything they said here."""
        if not (self.local or self._first_seen) or not self._leaving or not self._caught_up():
            return
        leaving, self._leaving = self._leaving, []
        for body in leaving:
            if self.decode is None or body.choice not in self.choices:
                continue
            left = DepartedLeg(self.decode, body.choice)
            self.left.add(body.choice)
            self._ended.add(body.choice)
            self._all_ended(self.decode)
            try:
                self.owner.departed(self, left, body)
            except PdserveError as error:
                left.close("not usable")
                self.left.discard(body.choice)
                self._fail(self.decode, error, lost=False)
                return

    def _accept(
        self,
        choice: int,
        sequence: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish: int,
    ) -> bool:
        """False: the passage is over now."""
        if self.over:
            return False
        self.moved_at = self._now()
        if not self.begun:
            self.begun = True
            self.owner.moved(self)
        try:
            if choice not in self.choices:
                raise WorkerLost("the worker answered for a choice that does not exist", reason="bad_choice")
            if finish > common_pb2.FINISH_REASON_LENGTH:
                raise worker_gave_up(finish)
            self.owner.accept(choice, sequence, tokens, logprobs, finish)
        except PdserveError as error:
            self._fail(self.decode or self.prefill, error, lost=False)
        return not self.over

    def _learn(self, worker: str, times: common_pb2.StageTimes) -> None:
        """What was predicted of the prompt, and what it took since it was sent."""
        planner = self.shared.planner
        forecast = self.plan.placement.forecast if self.plan is not None else NO_FORECAST
        planner.prefilled(worker, len(self.piece.tokens), times, forecast, self._took_s)
        if self._fetch_from:
            fetch = self.plan.placement.fetch if self.plan is not None else None
            planner.fetched(self._fetch_from, worker, times, fetch.lifted if fetch is not None else 0.0)

    def flush(self) -> None:
        """Everything held back, tokens of a choice that follow each other as one."""
        if not self._held or self.over or not (self.local or self._first_seen):
            return
        held, self._held = self._held, []
        for tokens in joined(held):
            if not self._accept(*tokens):
                return

    def _caught_up(self) -> bool:
        """What has arrived counts. False: with it, the passage is over."""
        self.flush()
        return not self.over

    def _beat(self) -> None:
        self.flush()
        self.owner.step()

    def step(self) -> None:
        if not (self._held and (self.local or self._first_seen)):  # else the beat does it
            self.owner.step()

    def next_sequences(self) -> list[int]:
        return [self.owner.next_sequence(choice) for choice in self.piece.choices]

    def end_choice(self, choice: int) -> None:
        """The router has seen the end of this choice by itself; the others go on."""
        if self.decode is not None and len(self.piece.choices) > 1:
            self.decode.end_choice(choice)

    # failures

    def leg_lost(self, leg: PrefillLeg | DecodeLeg, error: PdserveError) -> None:
        if isinstance(leg, PrefillLeg):
            if leg is self.prefill and not leg.done:
                self._source_failed(leg, error, lost=True)
            # after its answer, D finds out whether the pages are still to be had
        elif leg is self.decode:
            self._decode_failed(leg, error, lost=True)

    def timed_out(self) -> None:
        """Nothing came for as long as the timer allows: whoever owes something has failed."""
        if self.begun or self.local or self.prefill is None or self.prefill.done:
            leg: Leg | None = self.decode
        else:
            leg = self.prefill
        silence = self.silence_s
        if self.begun:
            error = WorkerLost("no token came in time", reason="inter_token_timeout", limit=f"{silence:g} s")
        else:
            error = WorkerLost(
                "the first token did not come in time", reason="first_token_timeout", limit=f"{silence:g} s"
            )
        self._fail(leg, error, lost=False)

    @property
    def silence_s(self) -> float:
        config = self.shared.config
        return config.inter_token_timeout_s if self.begun else config.first_token_timeout_s

    def _source_failed(self, leg: PrefillLeg, error: PdserveError, *, lost: bool) -> None:
        self._fail(leg, error, lost=lost)

    def _decode_failed(self, leg: DecodeLeg, error: PdserveError, *, lost: bool) -> None:
        """Before D has confirmed, the same ticket may go to another D; later the passage is over. Who was asked to give
        it away and had nothing to give has not failed it."""
        lost = lost or bool(self.moves)
        self._stay()
        again = (
            not self.over
            and not self.local
            and not self._handed_over
            and error.row.retryable
            and not isinstance(error, KvLost)
            and self.decode_tries < MAX_DECODE_ATTEMPTS
            and max(self.next_sequences()) <= self.piece.first_sequence + 1
        )
        if not again:
            self._fail(leg, error, lost=lost)
            return
        self._heard(leg, error)
        self._held.clear()
        self._ended.clear()
        self._failed_reader = self._failed_reader or leg.worker.id
        self._refused_decode.add(leg.worker.id)
        self._replacing = asyncio.create_task(self._replace(leg, error, lost))

    async def _replace(self, leg: DecodeLeg | None, cause: PdserveError, lost: bool) -> None:
        """Another decode worker for the pages that P holds. A failure here is the first one's."""
        try:
            placed = await self._place_again()
        except PdserveError:
            placed = False
        if not placed and not self.over:
            self._replacing = None
            self._fail(leg, cause, lost=lost, heard=True)

    async def _place_again(self) -> bool:
        assert self._source is not None
        while self.decode_tries < MAX_DECODE_ATTEMPTS and not self.over:
            worker_id = self.shared.booking.another_decode(
                len(self.piece.tokens) + self._left(), self._source.group, frozenset(self._refused_decode)
            )
            if worker_id is None:
                return False
            self._refused_decode.add(worker_id)
            leg = self._decode_leg(worker_id, local=False)
            self.decode = leg
            await self._ask([leg], local=False)
            if leg.refusal is not None:
                self._heard(leg, leg.refusal)
                continue
            try:
                leg.submit(self._fill, local=False)
            except WorkerLost:
                leg.close("lost")
                continue
            self.owner.ledger.placed("", leg.worker.id)
            if self._ticket is not None:
                leg.ticket(self._ticket)
            return True
        return False

    def _fail(self, leg: Leg | None, error: PdserveError, *, lost: bool, heard: bool = False) -> None:
        if self.over or not self._caught_up():
            return
        if leg is not None:
            if not heard:
                self._heard(leg, error)
            self._blame(leg, error)
        self.close("failed")
        self.owner.failed(self, error, lost)

    def _blame(self, leg: Leg, error: PdserveError) -> None:
        """Who is given this request again only if nobody else is left. Pages that are lost are their source's fault,
        whoever says so; pages that are gone because a worker read them, which has failed since, are not."""
        names, worker_id = ("prefill", "decode") if self.local else (leg.name,), leg.worker.id
        if isinstance(error, Draining) and self.local:  # it gives up decoding, and may be the only one for prompts;
            names = ("decode",)  # one that drains altogether refuses to be booked
        if error.reason == TicketInvalid.reason and self._failed_reader:
            names, worker_id = ("decode",), self._failed_reader
        elif isinstance(error, KvLost) and self.prefill is not None:
            names, worker_id = (self.prefill.name,), self.prefill.worker.id
        if error.reason.endswith("_token_timeout"):
            names = (*names, SILENT)
        for name in names:
            self._avoid = self._avoid | {name: self._avoid.get(name, frozenset()) | {worker_id}}

    @property
    def avoid(self) -> dict[str, frozenset[str]]:
        """Workers that the next passage of this request should be given only if there is nobody else, by leg."""
        return self._avoid

    # the end

    def close(self, reason: str) -> None:
        """Give back everything. Idempotent."""
        self.over = True
        self._held.clear()
        self._stay()
        self.shared.pressure.drop(self._beat)
        if self._replacing is not None:
            self._replacing.cancel()
        for leg in (self.prefill, self.decode):
            if leg is not None:
                if not leg.heard:
                    self._heard(leg, ENDED)
                leg.close(reason)

    def forget(self) -> None:
        """The request is over: passage and legs, which know each other, are freed without the collector's help."""
        self.prefill = self.decode = None
