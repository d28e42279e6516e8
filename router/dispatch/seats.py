"""The places of one passage at the workers chosen for it: both asked for at once, all or nothing, in every book.

A leg is charged to its worker's forecast, sent to its breaker and booked in the router's own ledger before the worker
is asked; whichever refuses, everything is given back and the next choice is tried by the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from protos.v1 import common_pb2, decode_pb2
from router.dispatch import legs
from router.dispatch.bells import Bell
from router.dispatch.booking import Booking
from router.dispatch.continuity import Piece
from router.dispatch.legs import DecodeLeg, DepartedLeg, PrefillLeg
from router.policy import pairing
from router.pressure import Pressure
from router.request import Ledger, Work
from router.workers.breaker import result_of
from router.workers.fleet import Fleet
from router.workers.planner import Plan, Planner
from router.workers.worker import RESERVE_TIMEOUT_S, Worker
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import Cancelled, DeadlineExceeded, PdserveError, WorkerLost

if TYPE_CHECKING:
    from router.dispatch.onward import Onward
    from router.dispatch.passage import Passage

TokenLogprob = common_pb2.TokenLogprob
MAX_BUDGET_S = 3600.0
"""Of a prefix to be fetched, whatever a worker's seconds make computing it look like."""

ENDED = Cancelled("this passage is over")
Leg = PrefillLeg | DecodeLeg | DepartedLeg


class Moving(Protocol):
    """A planned move of one choice, which its worker has been asked for."""

    def departed(self) -> Onward:
        """It has left: the passage to go on with."""
        ...

    def off(self) -> None:
        """It will not come to that."""
        ...


class Shared(Protocol):
    """What all passages use."""

    fleet: Fleet
    booking: Booking
    planner: Planner
    pressure: Pressure
    config: Config
    clock: Clock
    router_id: str

    def spawn(self, job: Coroutine[Any, Any, None]) -> None: ...


class Owner(Protocol):
    """The request. accept() raises PdserveError when the worker's tokens cannot be right."""

    work: Work
    ledger: Ledger

    def accept(
        self,
        choice: int,
        sequence: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish: int,
    ) -> None: ...

    def open_choices(self, choices: Sequence[int]) -> list[int]:
        """Those that have not ended."""
        ...

    def next_sequence(self, choice: int) -> int: ...

    def prompt_logprobs(self, offset: int, entries: Sequence[TokenLogprob]) -> None: ...

    def step(self) -> None: ...

    def failed(self, passage: Passage, error: PdserveError, lost: bool) -> None:
        """The passage is over and holds nothing any more. lost: a stream broke, the worker may be dead."""
        ...

    def moved(self, passage: Passage) -> None:
        """Its timer has changed."""
        ...

    def onward(self, passage: Passage, choice: int) -> Piece:
        """What a choice would go on with at another worker, as things are."""
        ...

    def departed(self, passage: Passage, left: DepartedLeg, body: decode_pb2.HandedOver) -> None:
        """A choice has left the passage and its worker, everything it said has been taken. Raises PdserveError when
        what the worker says of it cannot be right."""
        ...


class Seats:
    """What a passage holds. `plan`: what the policy expected of it, where one decides by seconds."""

    def __init__(self, owner: Owner, shared: Shared, piece: Piece) -> None:
        self.owner = owner
        self.shared = shared
        self._now = shared.clock.monotonic
        self.piece = piece
        self.prefill: PrefillLeg | DepartedLeg | None = None
        self.decode: DecodeLeg | None = None
        self.plan: Plan | None = None
        self.decode_tries = 0
        self.left: set[int] = set()  # choices that went on elsewhere
        self.moves: dict[int, Moving] = {}  # choices that were asked to, and have not yet

    @property
    def choices(self) -> tuple[int, ...]:
        """Those that have not gone on elsewhere."""
        if not self.left:
            return self.piece.choices
        return tuple(choice for choice in self.piece.choices if choice not in self.left)

    def _stay(self) -> None:
        """Nothing of this goes elsewhere by plan any more."""
        moves, self.moves = self.moves, {}
        for move in moves.values():
            move.off()

    def choice_over(self, choice: int) -> None:
        """This choice has ended: whoever has room for it is told now, not when its worker does not answer."""
        if choice in self.moves:
            self.moves[choice].off()

    def _legs_owner(self) -> legs.Owner:
        raise AssertionError("whoever holds seats hears of its legs")

    async def _attempt(self, choice: pairing.Pair | pairing.Local, plan: Plan | None) -> dict[str, PdserveError]:
        """Book at every worker of the choice at once; all or nothing."""
        started = self._now()
        taken: list[PrefillLeg | DecodeLeg] = []
        try:
            if isinstance(choice, pairing.Local):
                self.decode = self._decode_leg(choice.worker, local=True)
                taken.append(self.decode)
            else:
                self.prefill = self._prefill_leg(choice.prefill)
                taken.append(self.prefill)
                self.decode = self._decode_leg(choice.decode, local=False)
                taken.append(self.decode)
        except KeyError:  # it left between choice and attempt
            for leg in taken:
                leg.close("refused")
            return {"decode": WorkerLost("the worker left")}
        if plan is not None:
            self.plan = plan
            booked = self.shared.planner.book(self.piece.request_id, plan)
            for leg in taken:
                leg.booked = booked.get(leg.worker.id)
        await self._ask(taken, local=isinstance(choice, pairing.Local))
        refusals = {leg.name: leg.refusal for leg in taken if leg.refusal is not None}
        if refusals:
            for leg in taken:
                self._heard(leg, refusals.get(leg.name, ENDED))
                leg.close("refused")
            self.prefill = self.decode = None
        self.owner.ledger.route_s += self._now() - started
        return refusals

    async def _ask(self, asked: Sequence[PrefillLeg | DecodeLeg], *, local: bool) -> None:
        """Returns when every leg has its answer."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()
        left = len(asked)

        def one() -> None:
            nonlocal left
            left -= 1
            if not left and not answered.done():
                answered.set_result(None)

        remaining_ms = self._remaining_ms()
        for leg in asked:
            leg.ask(self.shared.router_id, partial(self._needs, leg, local), remaining_ms, one)
        timer = Bell(loop, min(RESERVE_TIMEOUT_S, remaining_ms / 1000), lambda: _no_answer(asked))
        await answered  # cancelled: the timer goes on, so that nothing waits for a worker that never answers
        timer.cancel()

    def _needs(self, leg: PrefillLeg | DecodeLeg, local: bool, needs: common_pb2.Needs) -> None:
        count, choices = len(self.piece.tokens), len(self.piece.choices)
        needs.prompt_tokens, needs.choices = count, choices
        if leg.name == "prefill" or local:
            needs.prefill_tokens = count
        if leg.name == "decode":
            needs.headroom_tokens = min(self.shared.config.headroom_tokens, self._left())
        if leg.worker.has_slots:
            needs.slots = choices

    def _prefill_leg(self, worker_id: str) -> PrefillLeg:
        worker = self._worker(worker_id)
        self.owner.ledger.prefill_attempts += 1
        ref = common_pb2.AttemptRef(request_id=self.piece.request_id, attempt=self.owner.ledger.prefill_attempts)
        charge = worker.charge(prefill_tokens=len(self.piece.tokens), requests=1)
        leg = PrefillLeg(self._legs_owner(), worker, ref, charge, self.shared.spawn)
        self.shared.booking.breakers.of(worker_id, "prefill").send(leg.key, self._now())
        return leg

    def _decode_leg(self, worker_id: str, *, local: bool) -> DecodeLeg:
        worker = self._worker(worker_id)
        self.owner.ledger.decode_attempts += 1
        self.decode_tries += 1
        ref = common_pb2.AttemptRef(request_id=self.piece.request_id, attempt=self.owner.ledger.decode_attempts)
        charge = worker.charge(prefill_tokens=len(self.piece.tokens) if local else 0, requests=1)
        leg = DecodeLeg(self._legs_owner(), worker, ref, charge, self.shared.spawn)
        self.shared.booking.breakers.of(worker_id, "decode").send(leg.key, self._now())
        return leg

    def _worker(self, worker_id: str) -> Worker:
        worker = self.shared.fleet.worker(worker_id)
        if worker is None:
            raise KeyError(worker_id)
        return worker

    def _heard(self, leg: Leg, error: PdserveError | None) -> None:
        """How a leg went, to its breaker."""
        leg.heard = True
        granted = not isinstance(leg, DepartedLeg) and bool(leg.reservation_id)
        result = result_of(error, granted=granted)
        self.shared.booking.breakers.heard(leg.worker.id, leg.name, leg.key, result, self._now())

    def _prefix_source(self, target: Worker) -> common_pb2.PrefixSource | None:
        """Where the worker that prefills is to bring the prompt's beginning from, as planned."""
        fetch = self.plan.placement.fetch if self.plan is not None else None
        source = self.shared.fleet.worker(fetch.source) if fetch is not None else None
        if fetch is None or source is None or not target.can("prefix_source"):
            return None
        return common_pb2.PrefixSource(
            worker_id=source.id,
            epoch=source.record.epoch,
            address=source.record.address,
            tokens=fetch.tokens,
            budget_ms=max(1, round(1000 * min(fetch.budget_s, MAX_BUDGET_S))),
        )

    def _left(self) -> int:
        """Tokens that may still be made, per choice."""
        return self.owner.work.sampling.max_tokens - self.piece.first_sequence

    @property
    def _deadline(self) -> float:
        return self.owner.work.deadline

    def _remaining_ms(self) -> int:
        """Raises DeadlineExceeded."""
        left = int((self._deadline - self._now()) * 1000)
        if left <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        return left


def _no_answer(asked: Sequence[PrefillLeg | DecodeLeg]) -> None:
    for leg in asked:
        leg.no_answer()


def worker_gave_up(finish: int) -> PdserveError:
    """What a finish that a worker gives instead of an answer's end means."""
    if finish == common_pb2.FINISH_REASON_DEADLINE:
        return DeadlineExceeded("the request's deadline passed")
    if finish == common_pb2.FINISH_REASON_CANCELLED:
        return WorkerLost("the worker cancelled the request", reason="worker_cancelled")
    return WorkerLost("the worker failed the request", reason="worker_failed")
