"""The passage of a choice that has left its decode worker by plan: reserved at another one before it leaves, then on
from what it has left, as after a prompt. The worker it left is its source.

The failure it answers: a move that costs what it should save. Nobody is asked to give a choice away before another has
room for it, and when the chosen one fails nevertheless, the same ticket goes to a third; only when the pages themselves
are lost is anything computed again, by the passage after this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protos.v1 import decode_pb2, prefill_pb2
from router.dispatch.continuity import Piece
from router.dispatch.legs import DecodeLeg, DepartedLeg, State
from router.dispatch.passage import Passage
from router.dispatch.seats import ENDED, Owner, Shared
from router.workers.worker import Worker
from runtime.errors import PdserveError, WorkerLost


class Onward(Passage):
    """then: told once how the move ended, "moved" when the target has confirmed, "failed", or "ended" when the request
    was over first."""

    def __init__(
        self,
        owner: Owner,
        shared: Shared,
        piece: Piece,
        avoid: dict[str, frozenset[str]],
        came_from: Worker,
        then: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        super().__init__(owner, shared, piece, avoid)
        self._refused_decode.add(came_from.id)
        self._then: Callable[[str], None] | None = then
        self.arrived_at: float | None = None

    async def reserve(self, worker_id: str) -> bool:
        """Book at a decode worker. False: it refused, and nothing is held there."""
        self._refused_decode.add(worker_id)
        try:
            leg = self._decode_leg(worker_id, local=False)
        except KeyError:  # it left
            return False
        self.decode = leg
        leg.booked = self.shared.planner.moving(
            self.piece.request_id, worker_id, len(self.piece.tokens), self.left_to_make
        )
        await self._ask([leg], local=False)
        if self.decode is not leg:  # it has left already, and does without
            return False
        if leg.refusal is not None:
            self._heard(leg, leg.refusal)
            self.decode = None
        return leg.refusal is None and not self.over

    @property
    def left_to_make(self) -> int:
        """Tokens that may still be made."""
        return self._left()

    @property
    def refused(self) -> frozenset[str]:
        """Workers not to ask (again)."""
        return frozenset(self._refused_decode)

    def go_on(self, piece: Piece, left: DepartedLeg, ticket: prefill_pb2.TicketIssued) -> None:
        """It has left: continue where room is booked, or else wherever there is some."""
        self.piece = piece
        self.prefill, self._source, self._ticket = left, left.worker, ticket
        self.begun = self._first_seen = True
        self.moved_at = self._sent_at = self._now()
        cause = WorkerLost("no other decode worker has room", reason="no_other_worker")
        leg = self.decode
        if leg is not None and leg.state is State.RESERVING:  # it came unasked, or long after it was asked
            self._heard(leg, ENDED)
            leg.close("late")
        if leg is None or leg.state is not State.RESERVED:
            self.decode = None
            self._replacing = asyncio.create_task(self._replace(None, cause, lost=True))
            return
        try:
            self._send(leg)
        except PdserveError as error:
            leg.close("lost")
            self._replacing = asyncio.create_task(self._replace(leg, error, lost=True))

    def _send(self, leg: DecodeLeg) -> None:
        """Raises PdserveError."""
        leg.submit(self._fill, local=False)
        self.owner.ledger.placed("", leg.worker.id)
        assert self._ticket is not None
        leg.ticket(self._ticket)

    def _confirmed(self, handoff: decode_pb2.HandoffDone) -> None:
        """The client is told of the transfer after its prompt, where there was one, not of this one."""
        told = self.owner.ledger.handoff
        super()._confirmed(handoff)
        if told.ByteSize():
            self.owner.ledger.handoff = told
        self.arrived_at = self._now()
        self._ended_as("moved")

    def close(self, reason: str) -> None:
        super().close(reason)
        self._ended_as("failed" if reason == "failed" else "ended")

    def _ended_as(self, outcome: str) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(outcome)
