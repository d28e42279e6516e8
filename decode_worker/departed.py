"""Choices that have left this worker in mid-answer: their pages and state wait under a ticket for whoever goes on.

The failure it answers: a move that stops half-way. What has left is held by a lease like a prompt computed for another
worker, so the same ticket may go to a second worker when the first one fails; nobody's word is needed to free it, and
the router's word frees it at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from decode_worker.leg import Leg
from engine.api import HandedOver
from engine.face import Worker
from kvtransfer.source import HandoffStore, State
from kvtransfer.types import First, LegKey
from protos.v1 import common_pb2, decode_pb2, prefill_pb2

TICKET_LEG = "continuation"


class Departed:
    """By leg and choice, in the worker's store of hand-offs."""

    def __init__(self, worker: Worker, handoffs: HandoffStore) -> None:
        self._worker = worker
        self._handoffs = handoffs

    def open(self, leg: Leg, event: HandedOver) -> decode_pb2.HandedOver:
        """Promise what a choice has left, final from the start. The store owns the event's hold from here on."""
        key = _key(leg.key, event.choice)
        logprob = leg.newest.get(event.choice)
        signed = self._handoffs.open(
            key,
            pages=event.pages,
            token_count=event.token_count,
            ready=event.token_count,
            hold=event.hold,
            below=event.below,
        )
        first = First(event.choice, event.token, logprob=logprob.SerializeToString() if logprob is not None else b"")
        self._handoffs.final(key, state_length=event.token_count, first=(first,), slots=event.slots)
        return decode_pb2.HandedOver(
            choice=event.choice,
            token_count=event.token_count,
            first=common_pb2.FirstToken(choice=event.choice, token=event.token, logprob=logprob),
            ticket=prefill_pb2.TicketIssued(ticket=signed, source_address=self._worker.address),
        )

    def release(self, leg: Leg, choices: Iterable[int]) -> None:
        """Nobody will read these (any more). Idempotent."""
        for choice in choices:
            if choice in leg.departed:
                self._handoffs.release(_key(leg.key, choice))

    def held(self, leg: Leg) -> bool:
        """Something it has left may still be read, or be called off."""
        return any(self._handoffs.state(_key(leg.key, choice)) is State.FINAL for choice in leg.departed)


def _key(leg: LegKey, choice: int) -> LegKey:
    """Each choice leaves by itself. A request's id has no spaces of ours in it, so no two are the same."""
    return LegKey(f"{leg.request_id} {choice}", TICKET_LEG, leg.attempt)
