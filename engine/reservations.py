"""Who has been promised what. The worker's answer to Reserve is authoritative; this is where it comes from.

Three stages, one owner each: a *booking* (made by reserve(), it expires), a *waiting* request (submitted, counted until
it is admitted), and pages that are really allocated (counted by the pool). A new booking is given only what all three
leave over. Admission of a waiting request respects bookings (they expire within seconds, so it cannot be held up for
ever) but not the other waiting ones: those are served in order.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass

from engine.api import Free, Needs, Refused, Reserved
from engine.pages import PagePool, pages_for
from kvtransfer.types import PAGE_TOKENS, LegKey
from runtime.errors import InvalidRequest, Saturated


@dataclass(frozen=True, slots=True)
class Amount:
    """batch: rows of the running batch."""

    pages: int = 0
    slots: int = 0
    batch: int = 0
    prefill_tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.pages + other.pages,
            self.slots + other.slots,
            self.batch + other.batch,
            self.prefill_tokens + other.prefill_tokens,
        )

    def __sub__(self, other: Amount) -> Amount:
        return self + Amount(-other.pages, -other.slots, -other.batch, -other.prefill_tokens)


def needed_pages(tokens: int, headroom: int, choices: int) -> int:
    """Pages of `choices` continuations of `tokens` known tokens: full pages are shared, the rest is each one's own."""
    own = pages_for(tokens + headroom)
    return own + (choices - 1) * (own - tokens // PAGE_TOKENS)


def amount_of(needs: Needs) -> Amount:
    """headroom_tokens 0 = the request does not decode here: one prefill, whatever the number of choices."""
    choices = max(needs.choices, 1) if needs.headroom_tokens else 1
    pages = needed_pages(needs.prompt_tokens, needs.headroom_tokens, choices)
    return Amount(pages, needs.slots, choices, needs.prefill_tokens)


@dataclass(frozen=True, slots=True)
class _Booking:
    reservation_id: str
    key: LegKey
    amount: Amount
    expires: float


class Ledger:
    """All methods may be called from any thread; they hold the pool's lock for microseconds."""

    def __init__(self, pages: PagePool, slots: PagePool, max_batch: int, reservation_s: float) -> None:
        self._pages = pages
        self._slots = slots
        self._lock = pages.lock
        self._max_batch = max_batch
        self._reservation_s = reservation_s
        self._bookings: dict[str, _Booking] = {}
        self._by_key: dict[LegKey, _Booking] = {}
        self._booked = Amount()
        self._waiting: dict[LegKey, Amount] = {}
        self._waited = Amount()
        self._name = secrets.token_hex(4)  # a late cancel meant for this worker's earlier life must find nothing here
        self._numbers = itertools.count(1)
        self.active_batch = 0  # rows in use, kept by the scheduler
        self.active_prefill_tokens = 0  # tokens admitted requests still have to prefill, kept by the scheduler

    # --- bookings -------------------------------------------------------------------------------------------------

    def reserve(self, key: LegKey, needs: Needs, now: float) -> Reserved | Refused:
        """Book what is needed, or say what is free. Asking again for a living booking gives the same answer."""
        amount = amount_of(needs)
        with self._lock:
            self.reap(now)
            known = self._by_key.get(key)
            if known is not None:
                return Reserved(known.reservation_id, known.expires - now, self.free())
            never = self.never(amount)
            if never is not None:
                return Refused(never, self.free())
            if not self._fits(amount):
                return Refused(Saturated("this worker has no room for the request now"), self.free())
            booking = _Booking(f"{self._name}.{next(self._numbers)}", key, amount, now + self._reservation_s)
            self._bookings[booking.reservation_id] = self._by_key[key] = booking
            self._booked += amount
            return Reserved(booking.reservation_id, self._reservation_s, self.free())

    def never(self, amount: Amount) -> InvalidRequest | None:
        """The refusal of what could not be had with everything free."""
        if amount.pages > self._pages.total:
            limit = f"{self._pages.total * PAGE_TOKENS} tokens"
            text = f"the request needs {amount.pages} KV pages and this worker has {self._pages.total}"
            return InvalidRequest(text, reason="exceeds_capacity", field="prompt", limit=limit)
        if amount.batch > self._max_batch:
            text = f"{amount.batch} choices exceed this worker's batch"
            return InvalidRequest(text, reason="exceeds_capacity", field="n", limit=str(self._max_batch))
        if amount.slots > self._slots.total:
            text = f"the request needs {amount.slots} state slots and this worker has {self._slots.total}"
            return InvalidRequest(text, reason="exceeds_capacity", field="n", limit=str(self._slots.total))
        return None

    def cancel(self, reservation_id: str) -> bool:
        """False: unknown, expired, or consumed by a submit. Idempotent."""
        with self._lock:
            return self._remove(reservation_id) is not None

    def claim(self, reservation_id: str, key: LegKey) -> bool:
        """A submit consumes its booking. False: it is gone (expired), the request waits like any other.

        Raises InvalidRequest when it is another request's booking.
        """
        with self._lock:
            booking = self._bookings.get(reservation_id)
            if booking is None:
                return False
            if booking.key != key:
                raise InvalidRequest("the reservation belongs to another request", field="reservation_id")
            self._remove(reservation_id)
            return True

    def forget(self, key: LegKey) -> None:
        """The request will not come. Idempotent."""
        with self._lock:
            booking = self._by_key.get(key)
            if booking is not None:
                self._remove(booking.reservation_id)

    def promised(self, key: LegKey) -> Amount:
        """What is booked for a request that is not here yet."""
        booking = self._by_key.get(key)
        return booking.amount if booking is not None else Amount()

    def reap(self, now: float) -> int:
        """Drop expired bookings; how many."""
        with self._lock:
            late = [b.reservation_id for b in self._bookings.values() if b.expires <= now]
            for reservation_id in late:
                self._remove(reservation_id)
            return len(late)

    def _remove(self, reservation_id: str) -> _Booking | None:
        booking = self._bookings.pop(reservation_id, None)
        if booking is not None:
            del self._by_key[booking.key]
            self._booked -= booking.amount
        return booking

    # --- waiting requests -------------------------------------------------------------------------------------------

    def wait(self, key: LegKey, amount: Amount) -> None:
        """Count a request (or a preempted part of one: amounts of a key add up) until settle()."""
        with self._lock:
            self._waiting[key] = self._waiting.get(key, Amount()) + amount
            self._waited += amount

    def settle(self, key: LegKey) -> None:
        """Nothing of this request waits any more."""
        with self._lock:
            self._waited -= self._waiting.pop(key, Amount())

    def unwait(self, key: LegKey, amount: Amount) -> None:
        """This part of a request waits no more."""
        with self._lock:
            left = self._waiting[key] - amount
            if left == Amount():
                del self._waiting[key]
            else:
                self._waiting[key] = left
            self._waited -= amount

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def booked(self) -> Amount:
        return self._booked

    # --- what is left -------------------------------------------------------------------------------------------------

    def free(self) -> Free:
        """What a new booking could get."""
        with self._lock:
            taken = self._booked + self._waited
            return Free(
                pages=max(self._pages.available - taken.pages, 0),
                slots=max(self._slots.available - taken.slots, 0),
                batch=max(self._max_batch - self.active_batch - taken.batch, 0),
                queued_prefill_tokens=self.active_prefill_tokens + taken.prefill_tokens,
            )

    def _fits(self, amount: Amount) -> bool:
        free = self.free()
        return amount.pages <= free.pages and amount.slots <= free.slots and amount.batch <= free.batch

    def check_empty(self) -> None:
        """Assert that nothing is promised. Raises AssertionError."""
        with self._lock:
            assert not self._bookings, "reservations are left"
            assert not self._by_key
            assert self._booked == Amount()
            assert not self._waiting, "waiting requests are left"
            assert self._waited == Amount()
            assert self.active_batch == 0
            assert self.active_prefill_tokens == 0
