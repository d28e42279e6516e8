"""Cached prefixes between workers: the question, the answer, and the promise that an answer is.

A worker that is short of a prefix asks another for it by page key and tokens. What is offered is held and promised
under a lease like a hand-off that is final from the start, so watching, renewing and releasing it are the same. Not to
have it is an answer, not an error; another epoch or layout is one.

Offers pin cached pages, so there are `most` of them at a time: whoever asks beyond that computes. Asking again ends
the offer before, so an offer is known by the connection it was asked on: a name is only said, and another worker that
says the same one must not end it. Asked again on a new connection, the earlier offer is left to its lease.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable

from kvtransfer.source import HandoffStore
from kvtransfer.tickets import KINDS
from kvtransfer.types import PAGE_TOKENS, LegKey, Prefix, Wanted
from protos.v1 import common_pb2
from protos.v1 import kvsource_pb2 as pb
from runtime.errors import EpochMismatch, InvalidRequest, LayoutMismatch, PdserveError

LEG = "prefix"
assert LEG in KINDS

KEY_BYTES = 32
MAX_TOKENS = 10_000 * PAGE_TOKENS
"""Asked for at most: the question, keys and tokens, stays below the size of a message."""

MAX_NAME_CHARS = 256

Holder = Callable[[Wanted, float], Awaitable[Prefix | None]]
"""Finds and holds the longest run of pages here; None: nothing beyond what is wanted. Told how many seconds the asker
can wait for all of it."""


class Offers:
    """The source's side, for one worker epoch. fingerprint: of its layout. most: offers alive at a time."""

    def __init__(self, epoch: int, fingerprint: bytes, store: HandoffStore, holder: Holder, most: int) -> None:
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._store = store
        self._holder = holder
        self._most = most
        self._asked = 0

    async def answer(
        self, request: pb.OfferPrefixRequest, identity: str, connection: str, within_s: float = 0.0
    ) -> pb.OfferPrefixReply:
        """identity: the caller's, as mutual TLS verified it. connection: its address and port, as the transport has
        them. within_s: until the caller's time is over; 0 = nothing is read up for it. Raises EpochMismatch,
        LayoutMismatch, InvalidRequest."""
        if request.source_epoch != self._epoch:
            raise EpochMismatch("the prefix was sought in another epoch of this worker")
        if request.layout_fingerprint != self._fingerprint:
            raise LayoutMismatch("the layout of the pages differs between the two workers")
        wanted, key = wanted_of(request), _key(request, connection)
        if self._asked + self._store.live(LEG) >= self._most:
            return pb.OfferPrefixReply()
        self._asked += 1
        try:
            prefix = await self._holder(wanted, within_s)
        finally:
            self._asked -= 1
        if prefix is None:
            return pb.OfferPrefixReply()
        return _reply(promise(self._store, key, prefix, identity), prefix)


def promise(store: HandoffStore, key: LegKey, prefix: Prefix, peer_identity: str = "") -> bytes:
    """A ticket for a prefix that is held, under a lease from now on. The store owns its hold; an earlier offer under
    this key is over. Raises InvalidRequest, and then the hold is released."""
    store.release(key)
    count = prefix.token_count
    try:
        ticket = store.open(
            key,
            pages=prefix.pages,
            token_count=count,
            ready=count,
            hold=prefix.hold,
            peer_identity=peer_identity,
            below=prefix.below,
        )
    except PdserveError:
        prefix.hold.release()
        raise
    store.final(key, state_length=count, first=(), slots=prefix.slots)
    return ticket


def question(
    worker_id: str, epoch: int, source_epoch: int, fingerprint: bytes, ref: common_pb2.AttemptRef, wanted: Wanted
) -> pb.OfferPrefixRequest:
    """The request of worker (worker_id, epoch) for `wanted`; what is beyond MAX_TOKENS is left out."""
    return pb.OfferPrefixRequest(
        worker_id=worker_id,
        epoch=epoch,
        source_epoch=source_epoch,
        layout_fingerprint=fingerprint,
        ref=ref,
        page_keys=wanted.page_keys[: MAX_TOKENS // PAGE_TOKENS],
        tokens=wanted.tokens[:MAX_TOKENS],
        first_token=wanted.first_token,
        state=wanted.state,
    )


def wanted_of(request: pb.OfferPrefixRequest) -> Wanted:
    """Raises InvalidRequest."""
    keys, tokens = tuple(request.page_keys), tuple(request.tokens)
    if len(keys) != len(tokens) // PAGE_TOKENS or any(len(key) != KEY_BYTES for key in keys):
        raise InvalidRequest(
            f"{len(keys)} page keys of {KEY_BYTES} bytes do not fit {len(tokens)} tokens", field="page_keys"
        )
    if len(tokens) > MAX_TOKENS:
        raise InvalidRequest("the prompt is longer than can be asked for", field="tokens", limit=str(MAX_TOKENS))
    return Wanted(keys, tokens, request.first_token, request.state)


def check_offer(wanted: Wanted, token_count: int, state: bool) -> bool:
    """Whether an offer is one that can be used: more than is there, less than the prompt, and on the page grid unless
    a state comes with it."""
    longest = len(wanted.tokens) - 1
    return wanted.first_token < token_count <= longest and (state or token_count % PAGE_TOKENS == 0)


def _key(request: pb.OfferPrefixRequest, connection: str) -> LegKey:
    """Offers of one request to two workers are two, and so are those to two connections."""
    names = (request.worker_id, request.ref.request_id)
    if not all(0 < len(name) <= MAX_NAME_CHARS for name in names) or not request.ref.attempt:
        raise InvalidRequest("worker_id and ref name the caller", field="ref", limit=str(MAX_NAME_CHARS))
    caller = hashlib.sha256(repr((connection, request.worker_id)).encode()).hexdigest()[:32]
    return LegKey(f"{request.ref.request_id} {caller}", LEG, request.ref.attempt)


def _reply(ticket: bytes, prefix: Prefix) -> pb.OfferPrefixReply:
    reply = pb.OfferPrefixReply(token_count=prefix.token_count, tier=prefix.tier)
    reply.ticket.ParseFromString(ticket)
    return reply
