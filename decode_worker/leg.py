"""One decode attempt as the service sees it, and what its router may have to be told again after a lost stream."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import DecodeError

from engine.api import Admitted, Tokens
from engine.meter import Meter
from engine.service import ServiceLeg
from kvtransfer.types import Destination, Hold, LegKey, Pulled
from protos.v1 import common_pb2, decode_pb2, prefill_pb2
from runtime.errors import KvLost
from runtime.streamhub import Session

FIRST_FINISHES = (0, common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)

KEPT_TOKENS = 8192
"""Unacknowledged tokens kept per leg, all choices together. A leg that loses older ones cannot be resumed from them."""


class Puller(Protocol):
    """The one thing of kvtransfer.puller that the service needs."""

    async def pull(
        self, signed_ticket: bytes, source_address: str, dest: Destination, deadline: float, fence: int
    ) -> Pulled:
        """Read a hand-off into `dest`, verify, confirm. Owns dest.hold from the call on, also when it is
        cancelled. Raises TicketInvalid, KvLost, ChecksumMismatch, TransferFailed, LayoutMismatch, DeadlineExceeded."""
        ...


@dataclass(slots=True, eq=False)
class Leg(ServiceLeg[decode_pb2.DecodeEvents]):
    """landing: the hold on the pages a pull will write, until the puller takes it over. over_at: when the last token
    or the failure was said; None while it runs."""

    local: bool
    fence: int
    first_choice: int
    open: set[int] = field(default_factory=set)  # choices that may still say something
    ticket: prefill_pb2.TicketIssued | None = None
    admitted: Admitted | None = None
    admitted_at: float = 0.0
    waited_s: float = 0.0
    landing: Hold | None = None
    pull: asyncio.Task[None] | None = None
    pulled: Pulled | None = None
    recomputing: bool = False
    begun: bool = False  # it has said a token
    newest: dict[int, common_pb2.TokenLogprob] = field(default_factory=dict)  # by choice, where they are asked for
    departed: dict[int, decode_pb2.DecodeEvent] = field(default_factory=dict)  # choices given away: what was said
    over_at: float | None = None
    _kept: deque[decode_pb2.DecodeEvent] = field(default_factory=deque)
    _kept_tokens: int = 0
    _forgotten: dict[int, int] = field(default_factory=dict)  # choice -> first sequence number still kept

    @property
    def ended(self) -> bool:
        return self.over_at is not None

    @classmethod
    def of(
        cls,
        submit: decode_pb2.DecodeSubmit,
        key: LegKey,
        session: Session[decode_pb2.DecodeEvents],
        now: float,
        max_n: int,
    ) -> Leg:
        """A leg as submitted. n is checked when the request is complete; until then it is no size to allocate."""
        request = submit.request
        choices = range(min(request.n, max_n)) if request.n > 1 else (request.choice,)
        deadline = now + request.remaining_ms / 1000
        return cls(key, session, deadline, submit.local, submit.fence, request.choice, open=set(choices))

    def take(self, pulled: Pulled, vocab_size: int) -> None:
        """Accept what arrived, or raise KvLost. What another process sampled is an input like any other: one wrong
        token id would fail the step of everybody."""
        if pulled.state_length != self.token_count:
            raise KvLost("the hand-off has another length than the request", reason="length_mismatch")
        if any(first.token >= vocab_size or first.finish not in FIRST_FINISHES for first in pulled.first):
            raise KvLost("the hand-off has no usable first token", reason="first_mismatch")
        try:
            newest = {f.choice: common_pb2.TokenLogprob.FromString(f.logprob) for f in pulled.first if f.logprob}
        except DecodeError as exc:
            raise KvLost("the hand-off has no usable log-probability", reason="first_mismatch") from exc
        self.pulled, self.newest = pulled, newest

    def times(self, pid: int, transport: str) -> common_pb2.StageTimes:
        """How the prompt's KV came here. A local leg has no transport."""
        times = common_pb2.StageTimes(pid=pid, transport="" if self.local else transport, handoff_wait_s=self.waited_s)
        if self.admitted is not None and not self.local:
            times.cached_tokens = self.admitted.ready
        if self.pulled is not None:
            times.handoff_wait_s += self.pulled.wait_s
            times.transfer_s = self.pulled.read_s
            times.checksum_s = self.pulled.checksum_s
            times.transfer_bytes = self.pulled.bytes_read
            times.transfer_pages = self.pulled.pages_read
        return times

    def final_times(self, last: Tokens, pid: int, transport: str) -> common_pb2.StageTimes:
        """The whole leg, with its last token."""
        times = self.times(pid, transport)
        times.queue_s = last.queue_s
        times.decode_s = last.decode_s
        times.recomputed_tokens = last.recomputed_tokens
        if self.local or last.recomputed_tokens:  # else what the engine counts here is the wait for the hand-off
            times.prefill_s = last.prefill_s
        if self.local:
            times.cached_tokens = last.cached_tokens
            if self.fetched is not None:
                self.fetched.put_into(times)
        return times

    def meter(self, meter: Meter, said: decode_pb2.ChoiceTokens, cached_tokens: int) -> None:
        """Count what it is about to say. A local leg's prompt counts with its first tokens, another's when it came."""
        if self.local and not self.begun:
            meter.prompt(self.key.leg, self.token_count, common_pb2.StageTimes(cached_tokens=cached_tokens))
        self.begun = True
        meter.generated(self.key.leg, len(said.tokens))
        if said.HasField("times"):
            meter.finished(self.key.leg, said.times)

    def keep(self, event: decode_pb2.DecodeEvent) -> None:
        """Remember an event until it is acknowledged or too much is kept."""
        self._kept.append(event)
        self._kept_tokens += len(event.tokens.tokens)
        while self._kept_tokens > KEPT_TOKENS:
            self._drop(self._kept.popleft())

    def acknowledge(self, next_sequence: list[int]) -> None:
        """The router has everything of choice i before next_sequence[i]."""
        self._kept = deque(e for e in self._kept if not self._taken(e, next_sequence))
        self._kept_tokens = sum(len(e.tokens.tokens) for e in self._kept)

    def missed(self, next_sequence: list[int]) -> list[decode_pb2.DecodeEvent] | None:
        """What to say again to a router that has everything before next_sequence; None when it is not all kept.

        Events that carry no tokens are always said again: the router knows them by what they are.
        """
        for choice, first_kept in self._forgotten.items():
            if self._next(choice, next_sequence) < first_kept:
                return None
        return [e for e in self._kept if not self._taken(e, next_sequence)]

    def _drop(self, event: decode_pb2.DecodeEvent) -> None:
        count = len(event.tokens.tokens)
        self._kept_tokens -= count
        if count:
            self._forgotten[event.tokens.choice] = event.tokens.first_sequence + count

    def _taken(self, event: decode_pb2.DecodeEvent, next_sequence: list[int]) -> bool:
        tokens = event.tokens
        if event.WhichOneof("event") != "tokens" or not tokens.tokens:
            return False
        return tokens.first_sequence + len(tokens.tokens) <= self._next(tokens.choice, next_sequence)

    def _next(self, choice: int, next_sequence: list[int]) -> int:
        index = choice - self.first_choice
        return next_sequence[index] if 0 <= index < len(next_sequence) else 0
