"""One ledger of what this router has promised its workers: reserve, don't observe.

The failure that shapes it: two requests chosen in the same instant from the same reported load, both "fitting". What is
chosen is booked before anything is sent, on every worker or on none, and the next decision sees it. Bookings are
released by (request, attempt, worker), once, on whatever path ends the leg; releasing again is nothing.

A reservation takes workers in the order of their ids and never waits holding one, so it cannot deadlock. The worker's
own answer is authoritative; this is the forecast, and a worker that goes takes its bookings with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from router.policy.view import Key, Work, WorkerView


class Short(Enum):
    """Why a reservation was refused."""

    GONE = "worker_gone"
    KV = "no_pages"
    SLOTS = "no_slots"
    BATCH = "no_batch"
    TWICE = "duplicate"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one leg needs of one worker. prefill_s > 0 or prefill_tokens > 0: a prompt to run, predicted to take that
    long; due: as the worker is told. tokens: pages for the prompt, headroom and staging, in tokens. context: tokens its
    decode steps will read. decode: it will generate here. landing: its pages arrive from elsewhere first. fetch_from:
    the worker from which it reads a prefix before its prompt is run, "" = none."""

    tokens: int = 0
    slots: int = 0
    context: int = 0
    decode: bool = False
    landing: bool = False
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    due: float = 0.0
    fetch_from: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    worker: str
    short: Short


@dataclass(slots=True)
class _Booking:
    view: WorkerView
    demand: Demand
    tokens: int
    context: int
    prefilling: bool
    landing: bool
    source: WorkerView | None = None  # which serves it a prefix


class Ledger:
    """Writes the accounts of the views it was given. Pure: no clock of its own."""

    def __init__(self) -> None:
        self._views: dict[str, WorkerView] = {}
        self._bookings: dict[Key, dict[str, _Booking]] = {}
        self._order = 0

    # --- workers ------------------------------------------------------------------------------------------------

    def add(self, view: WorkerView) -> None:
        """A worker (or its next life) with an empty account."""
        self.remove(view.worker_id)
        self._views[view.worker_id] = view

    def remove(self, worker: str) -> list[Key]:
        """The worker is gone, with everything booked there. Returns the legs that had a booking."""
        self._views.pop(worker, None)
        lost = [key for key, legs in self._bookings.items() if worker in legs]
        for key in lost:
            self.release(key, worker, 0.0)
        return lost

    def views(self) -> list[WorkerView]:
        return list(self._views.values())

    def view(self, worker: str) -> WorkerView | None:
        return self._views.get(worker)

    # --- bookings -----------------------------------------------------------------------------------------------

    def reserve(self, key: Key, demands: Mapping[str, Demand], now: float) -> Refusal | None:
        """Book all of it, or none of it and say what was short. None: booked."""
        held = self._bookings.get(key, {})
        for worker in sorted(demands):
            short = Short.TWICE if worker in held else self._short(worker, demands[worker])
            if short is not None:
                return Refusal(worker, short)
        for worker in sorted(demands):
            self._book(key, self._views[worker], demands[worker], now)
        return None

    def charge(self, key: Key, demands: Mapping[str, Demand], now: float) -> None:
        """Book what was sent without asking for room: policies that only observe. Legs booked already are left."""
        for worker in sorted(demands):
            if worker in self._views and worker not in self._bookings.get(key, {}):
                self._book(key, self._views[worker], demands[worker], now)

    def prefilled(self, key: Key, worker: str, now: float) -> None:
        """The prompt is done there: its work is over, what it holds stays until release."""
        booking = self._booking(key, worker)
        if booking is not None:
            self._work_over(key, booking, now)

    def landed(self, key: Key, worker: str) -> None:
        """The hand-off has arrived: the leg decodes."""
        booking = self._booking(key, worker)
        if booking is not None and booking.landing:
            booking.landing = False
            booking.view.landing -= 1

    def grown(self, key: Key, worker: str, tokens: int) -> None:
        """The leg has generated `tokens` more; they use up its headroom before they count as held."""
        booking = self._booking(key, worker)
        if booking is None or not booking.demand.decode:
            return
        booking.context += tokens
        booking.view.context_tokens += tokens
        over = booking.context - booking.tokens
        if over > 0:
            booking.tokens += over
            booking.view.held_tokens += over

    def release(self, key: Key, worker: str, now: float) -> bool:
        """The leg is over, for whatever reason. False: it was released before, or never booked."""
        booking = self._booking(key, worker)
        if booking is None:
            return False
        self._work_over(key, booking, now)
        self.landed(key, worker)
        view = booking.view
        view.held_tokens -= booking.tokens
        view.held_slots -= booking.demand.slots
        if booking.demand.decode:
            view.decoding -= 1
            view.context_tokens -= booking.context
        legs = self._bookings[key]
        del legs[worker]
        if not legs:
            del self._bookings[key]
        return True

    def release_all(self, request_id: str, attempts: Iterable[int], now: float) -> None:
        """Every leg of these attempts, wherever it is."""
        for attempt in attempts:
            for worker in list(self._bookings.get((request_id, attempt), {})):
                self.release((request_id, attempt), worker, now)

    def holds(self, key: Key) -> tuple[str, ...]:
        """Workers at which this attempt has something booked."""
        return tuple(self._bookings.get(key, ()))

    def __len__(self) -> int:
        return sum(len(legs) for legs in self._bookings.values())

    # --- inside -------------------------------------------------------------------------------------------------

    def _booking(self, key: Key, worker: str) -> _Booking | None:
        return self._bookings.get(key, {}).get(worker)

    def _short(self, worker: str, demand: Demand) -> Short | None:
        view = self._views.get(worker)
        if view is None:
            return Short.GONE
        if view.kv_tokens and view.held_tokens + demand.tokens > view.kv_tokens:
            return Short.KV
        if view.slots and view.held_slots + demand.slots > view.slots:
            return Short.SLOTS
        if demand.decode and view.max_batch and view.decoding + 1 > view.max_batch:
            return Short.BATCH
        return None

    def _book(self, key: Key, view: WorkerView, demand: Demand, now: float) -> None:
        prefilling = demand.prefill_tokens > 0 or demand.prefill_s > 0
        booking = _Booking(view, demand, demand.tokens, demand.context, prefilling, demand.landing)
        self._bookings.setdefault(key, {})[view.worker_id] = booking
        view.held_tokens += demand.tokens
        view.held_slots += demand.slots
        view.served += 1
        if demand.decode:
            view.decoding += 1
            view.context_tokens += demand.context
        if demand.landing:
            view.landing += 1
        if prefilling:
            if demand.decode:
                view.mix(demand.prefill_s, now)
            self._order += 1
            view.begin(key, Work(demand.prefill_s, demand.prefill_tokens, (demand.due, self._order)), now)
            view.prefill_tokens += demand.prefill_tokens
            source = self._views.get(demand.fetch_from)
            if source is not None:
                booking.source = source
                source.serving += 1
                view.fetching += 1

    def _work_over(self, key: Key, booking: _Booking, now: float) -> None:
        if booking.prefilling:
            booking.prefilling = False
            booking.view.prefill_tokens -= booking.view.end(key, now).tokens
            if booking.source is not None:
                booking.source.serving -= 1
                booking.view.fetching -= 1
                booking.source = None

    def check(self) -> None:
        """Assert that every account is the sum of its bookings. Raises AssertionError."""
        for view in self._views.values():
            mine = [legs[view.worker_id] for legs in self._bookings.values() if view.worker_id in legs]
            assert view.held_tokens == sum(b.tokens for b in mine)
            assert view.held_slots == sum(b.demand.slots for b in mine)
            assert view.decoding == sum(b.demand.decode for b in mine)
            assert view.landing == sum(b.landing for b in mine)
            assert view.context_tokens == sum(b.context for b in mine if b.demand.decode)
            assert view.prefill_tokens == sum(work.tokens for work in view.work.values())
            assert len(view.work) == sum(b.prefilling for b in mine)
            assert view.fetching == sum(b.source is not None for b in mine)
        sources = [b.source for legs in self._bookings.values() for b in legs.values() if b.source is not None]
        assert all(view.serving == sum(s is view for s in sources) for view in self._views.values())
        assert all(legs for legs in self._bookings.values()), "an attempt without bookings is kept"
