"""Bring a prompt's cached prefix from another worker before the prompt is run here, if that can be done in time.

Whatever goes wrong is a miss: the request is run as if nobody had offered anything, at the latest after the budget that
its router gave it. Nothing is published before every byte of it is verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from engine.api import EngineRequest
from engine.meter import Meter
from engine.prefixes import Prefixes, Staged
from kvtransfer.hashing import page_keys
from kvtransfer.prefix import check_offer
from kvtransfer.types import PAGE_TOKENS, Destination, Pulled, Wanted
from protos.v1 import common_pb2
from protos.v1 import kvsource_pb2 as pb
from runtime.clock import Clock
from runtime.errors import PdserveError

DECLINE_S = 1.0
"""How long it may take to tell a source that its offer is not wanted; its lease ends anyway."""

_log = structlog.get_logger("pdserve.fetch")

T = TypeVar("T")


class Asker(Protocol):
    """What is needed of kvtransfer.puller.Puller."""

    async def ask(
        self, address: str, source_epoch: int, ref: common_pb2.AttemptRef, wanted: Wanted, timeout: float
    ) -> pb.OfferPrefixReply: ...

    async def decline(self, offer: pb.SignedTicket, address: str, timeout: float) -> None: ...

    async def pull(
        self, signed_ticket: bytes, source_address: str, dest: Destination, deadline: float, fence: int, *, sole: bool
    ) -> Pulled: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """outcome: "fetched", or why not. tokens: of the prompt, that are here now and were not before. pulled: what
    moved."""

    outcome: str
    seconds: float
    tokens: int = 0
    pulled: Pulled | None = None

    def put_into(self, times: common_pb2.StageTimes) -> None:
        times.fetch_s = self.seconds
        times.fetched_tokens = self.tokens
        if self.pulled is not None:
            times.transfer_s += self.pulled.read_s
            times.checksum_s += self.pulled.checksum_s
            times.transfer_bytes += self.pulled.bytes_read
            times.transfer_pages += self.pulled.pages_read


class _Missed(Exception):
    """There is nothing to fetch, or nowhere to put it."""


class Fetcher:
    """One worker's. most: fetches at a time, 0 = none. longest_s: of one, whatever its budget: the room booked for the
    request must outlive it."""

    def __init__(
        self, prefixes: Prefixes, puller: Asker, clock: Clock, meter: Meter, most: int, longest_s: float
    ) -> None:
        self._prefixes = prefixes
        self._puller = puller
        self._clock = clock
        self._meter = meter
        self._most = most
        self._longest_s = longest_s
        self._flying = 0
        self._total = common_pb2.TierLoad(tier="peers")
        self._background: set[asyncio.Task[None]] = set()

    async def fetch(self, work: EngineRequest, source: common_pb2.PrefixSource) -> Fetched:
        """Never raises anything but the caller's cancellation."""
        began = self._clock.monotonic()
        self._flying += 1
        try:
            found = await self._bounded(work, source, began)
        finally:
            self._flying -= 1
        moved = found.pulled.bytes_read if found.pulled is not None else 0
        if found.pulled is not None:
            self._total.hit_pages += found.pulled.pages_read
            self._total.bytes_up += moved
            self._total.seconds_up += found.pulled.read_s
        self._meter.fetched(found.outcome, found.seconds, found.tokens, moved)
        if found.pulled is None:
            _log.debug("no_prefix", request_id=work.key.request_id, source=source.worker_id, why=found.outcome)
        return found

    def report(self) -> common_pb2.TierLoad:
        """What has come from other workers' caches so far, as if they were one more tier."""
        return self._total

    async def close(self) -> None:
        """Wait for what is still being said to sources."""
        if self._background:
            await asyncio.wait(self._background, timeout=DECLINE_S)

    async def _bounded(self, work: EngineRequest, source: common_pb2.PrefixSource, began: float) -> Fetched:
        until = min(began + min(source.budget_ms / 1000, self._longest_s), work.deadline)
        outcome = "internal_error"
        try:
            if self._flying > self._most:
                raise _Missed("busy")
            async with asyncio.timeout(until - began):
                tokens, pulled = await self._fetch(work, source, until)
            return Fetched("fetched", self._clock.monotonic() - began, tokens, pulled)
        except _Missed as miss:
            outcome = str(miss)
        except TimeoutError:
            outcome = "late"
        except PdserveError as error:
            outcome = error.reason
        except Exception as error:  # noqa: BLE001  supervises the fetch: a bug in it costs time, never the request
            _log.error("fetch_failed", request_id=work.key.request_id, exc_info=error)
        return Fetched(outcome, self._clock.monotonic() - began)

    async def _fetch(self, work: EngineRequest, source: common_pb2.PrefixSource, until: float) -> tuple[int, Pulled]:
        prefixes, state = self._prefixes, self._prefixes.has_state
        keys = await asyncio.to_thread(page_keys, work.root, work.tokens, work.unit_extras)
        wanted = Wanted(tuple(keys), work.tokens, 0, state)
        held = prefixes.held(wanted)
        most = min(source.tokens, len(work.tokens) - 1)
        if held >= (most if state else most - most % PAGE_TOKENS):
            raise _Missed("here")
        wanted = Wanted(wanted.page_keys, wanted.tokens, held, state)
        ref = common_pb2.AttemptRef(request_id=work.key.request_id, attempt=work.key.attempt)
        offer = await self._puller.ask(source.address, source.epoch, ref, wanted, until - self._clock.monotonic())
        if not offer.HasField("ticket"):
            raise _Missed("absent")
        staged = await self._room(work, wanted, offer, source.address, until)
        try:
            pulled = await self._puller.pull(
                offer.ticket.SerializeToString(), source.address, staged.destination, until, 1, sole=True
            )
        except BaseException:
            prefixes.drop(staged)
            raise
        prefixes.publish(staged)
        return offer.token_count - held, pulled

    async def _room(
        self, work: EngineRequest, wanted: Wanted, offer: pb.OfferPrefixReply, address: str, until: float
    ) -> Staged:
        try:
            if not check_offer(wanted, offer.token_count, wanted.state):
                raise _Missed("bad_offer")
            asked = self._prefixes.stage(wanted, offer.token_count, work.key, until)
            staged = await answered(asked, self._give_back)
            if staged is None:
                raise _Missed("no_room")
        except BaseException:
            self._decline(offer, address)
            raise
        return staged

    def _give_back(self, staged: Staged) -> None:
        staged.destination.hold.release()
        self._prefixes.drop(staged)

    def _decline(self, offer: pb.OfferPrefixReply, address: str) -> None:
        task = asyncio.ensure_future(self._puller.decline(offer.ticket, address, DECLINE_S))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def answered(asked: Future[T | None], give_back: Callable[[T], None]) -> T | None:
    """What the engine thread answers. Whoever stops waiting holds nothing: what is answered all the same is given
    back."""
    waiting = asyncio.wrap_future(asked)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:

        def return_it(done: Future[T | None]) -> None:
            if not done.cancelled() and done.exception() is None and (value := done.result()) is not None:
                give_back(value)

        if not asked.cancel():
            asked.add_done_callback(return_it)
        raise
