"""Tickets: what a worker shows to read a hand-off, a request in mid-decode or a cached prefix. Minted and verified by
the same worker, opaque to all others.

The key is random per worker epoch and never leaves the process: a restarted worker refuses every older ticket, and a
forged one costs its forger nothing but a FAILED_PRECONDITION. It guards against mistakes; the fabric is isolated.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvtransfer.types import LegKey
from protos.v1 import common_pb2
from protos.v1 import kvsource_pb2 as pb
from runtime.errors import TicketInvalid

MAX_TICKET_BYTES = 4096

KINDS = {
    "prefill": pb.TICKET_KIND_HANDOFF,
    "continuation": pb.TICKET_KIND_CONTINUATION,
    "prefix": pb.TICKET_KIND_PREFIX,
}
"""What a ticket is for, by the leg it is issued under."""
LEGS = {kind: leg for leg, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Claims:
    """What a verified ticket says."""

    key: LegKey
    token_count: int
    peer_identity: str
    nonce: bytes


class TicketMint:
    """Signs and checks the tickets of one worker epoch."""

    def __init__(self, worker_id: str, epoch: int, layout_fingerprint: bytes) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._fingerprint = layout_fingerprint
        self._key = secrets.token_bytes(32)

    def mint(self, key: LegKey, token_count: int, peer_identity: str = "") -> tuple[bytes, bytes]:
        """(serialised SignedTicket, nonce). The nonce tells two hand-offs of one key apart."""
        nonce = secrets.token_bytes(16)
        ticket = pb.Ticket(
            kind=KINDS[key.leg],
            worker_id=self._worker_id,
            epoch=self._epoch,
            ref=common_pb2.AttemptRef(request_id=key.request_id, attempt=key.attempt),
            layout_fingerprint=self._fingerprint,
            token_count=token_count,
            peer_identity=peer_identity,
            nonce=nonce,
        ).SerializeToString(deterministic=True)
        return pb.SignedTicket(ticket=ticket, mac=self._mac(ticket)).SerializeToString(), nonce

    def verify(self, signed: pb.SignedTicket) -> Claims:
        """Raises TicketInvalid. The signature is checked first, so nothing of a forged ticket is looked at."""
        if not hmac.compare_digest(self._mac(signed.ticket), signed.mac):
            raise TicketInvalid("the ticket was not signed by this worker's present epoch")
        try:
            ticket = pb.Ticket.FromString(signed.ticket)
        except DecodeError as exc:
            raise TicketInvalid("the ticket cannot be read") from exc
        if ticket.kind not in LEGS:
            raise TicketInvalid(f"tickets of kind {ticket.kind} are not served here")
        if ticket.worker_id != self._worker_id or ticket.epoch != self._epoch:
            raise TicketInvalid("the ticket is of another worker or epoch")
        if ticket.layout_fingerprint != self._fingerprint:
            raise TicketInvalid("the ticket is of another layout")
        key = LegKey(ticket.ref.request_id, LEGS[ticket.kind], ticket.ref.attempt)
        return Claims(key, ticket.token_count, ticket.peer_identity, ticket.nonce)

    def _mac(self, ticket: bytes) -> bytes:
        return hmac.digest(self._key, ticket, hashlib.sha256)


def parse(signed: bytes) -> pb.SignedTicket:
    """The outer message of a ticket as it travels. Raises TicketInvalid."""
    if not signed or len(signed) > MAX_TICKET_BYTES:
        raise TicketInvalid("the ticket has no valid size")
    try:
        return pb.SignedTicket.FromString(signed)
    except DecodeError as exc:
        raise TicketInvalid("the ticket cannot be read") from exc
