"""Decides what runs next. Synchronous and pure: plain state, the clock is passed in, no tensor in sight.

    schedule(now) -> StepPlan      expire, grow, admit, then decode rows and whole prefill chunks
    apply(result, now)             confirm, publish, sample, finish; events are collected for take_events()

Running requests come first: a decode that needs a page takes it from the pool, then from the latest running request
(preempted by recompute). The earliest one can always take from all others, so it always gets on; one that cannot get a
page waits for it holding what it has. Prompts are admitted and computed, chunk by chunk, in the order of engine.order;
admission is all or nothing, decode headroom included; a request whose KV is being loaded owns its memory already, so
nobody in front can hold it up once it has arrived.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.api import Admitted, EngineRequest, Event, Failed, Mode, Sink
from engine.departure import Departures
from engine.exports import Exports
from engine.memory import Memory
from engine.order import chosen, due_at
from engine.outcome import Outcome, charge
from engine.pages import PagePool, pages_for
from engine.plan import Copy, Row, StepPlan, StepResult
from engine.reservations import Amount
from engine.sequence import Phase, Request, Sequence, samples_of, targets_of
from kvtransfer.hashing import PageHasher
from kvtransfer.types import PAGE_TOKENS, First, LegKey
from runtime.errors import DeadlineExceeded, PdserveError, TransferFailed


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch: int
    max_batched_tokens: int
    chunk_tokens: int
    max_model_len: int


class Scheduler:
    """All per-request state of one engine. One thread calls it."""

    def __init__(self, limits: Limits, memory: Memory) -> None:
        self.limits = limits
        self.memory = memory
        self.step = 0
        self._requests: dict[LegKey, Request] = {}
        self._waiting: list[Sequence] = []  # by order
        self._running: list[Sequence] = []  # by admission; loading ones too
        self._arrivals = itertools.count()
        self._ids = itertools.count(1)
        self._in_flight: dict[int, tuple[Sequence, Row]] = {}
        self._began = 0.0  # the step in flight
        self._copying: list[tuple[Sequence, PagePool, Copy]] = []
        self._doomed: list[Sequence] = []  # ended while in flight: their memory is given back when the step lands
        self._outcome = Outcome(memory, self._ids)
        self._departures = Departures(memory, self._outcome)
        self._exports = Exports(memory, limits.chunk_tokens)

    # --- commands -------------------------------------------------------------------------------------------------

    def prepare(self, spec: EngineRequest, sink: Sink, now: float) -> Request:
        """A checked request, counted as waiting from here on. The one method for other threads (behind one lock)."""
        limit = min(self.limits.max_model_len, self.memory.pages.total * PAGE_TOKENS)
        due = due_at(spec.due, spec.priority, now)
        request = Request(spec, sink, next(self._arrivals), now, due, limit, remote=spec.mode is Mode.REMOTE)
        hasher = PageHasher(spec.root, spec.unit_extras)
        if request.remote:
            request.scored = spec.prompt_len  # log-probabilities of the prompt come from the leg that runs it
        lead = Sequence(next(self._ids), request, request.choices()[0], spec.n, list(spec.tokens), hasher)
        request.sequences.append(lead)
        never = self.memory.ledger.never(self._need(lead))
        if never is not None:
            raise never
        self._count_waiting(lead)
        return request

    def add(self, request: Request) -> None:
        """Queue a prepared request. Its key must not live."""
        assert request.spec.key not in self._requests
        self._requests[request.spec.key] = request
        bisect.insort(self._waiting, request.sequences[0], key=lambda s: s.order)

    def start(self, key: LegKey, first: Seq[First], now: float) -> None:
        """The pages of a loading request are there and verified. Ignored when it is not loading (any more)."""
        request = self._requests.get(key)
        if request is None or request.sequences[0].phase is not Phase.LOADING or request.admitted < 0:
            return
        firsts = sorted(first, key=lambda f: f.choice)
        if tuple(f.choice for f in firsts) != request.choices():
            self.fail(request, TransferFailed("the first tokens do not match the choices asked for"))
            return
        lead = request.sequences[0]
        lead.phase = Phase.RUNNING
        lead.computed = lead.whole = len(lead.tokens)
        request.remote = False
        request.prefilled = now
        self.memory.publish(lead)
        self._outcome.started(lead, firsts, now)
        self._sweep()

    def recompute(self, key: LegKey) -> None:
        """The pages of a remote request will not come: compute them here, in fresh ones. Ignored once it runs."""
        request = self._requests.get(key)
        if request is None or not request.remote:
            return
        request.remote = False
        lead = request.sequences[0]
        if lead.phase is Phase.LOADING:
            lead.lost = len(lead.tokens)
            self.memory.release(lead)
        else:
            self._unqueue(lead)
        self._enqueue(lead)
        self._sweep()

    def cancel(self, key: LegKey) -> None:
        """Forget a request at any stage, silently. What a step in flight uses is given back when it lands."""
        if (request := self._requests.get(key)) is not None:
            self._end(request)

    def end_choices(self, key: LegKey, choices: frozenset[int]) -> None:
        """Nobody wants more of these choices. Before the first token there is one run for all of them: it goes on."""
        request = self._requests.get(key)
        if request is None:
            return
        request.unwanted |= choices
        for seq in request.sequences:
            begun = seq.fanout == 1 and len(seq.tokens) > len(request.spec.tokens)
            if begun and seq.choice in choices:
                self._drop(seq)
        self._sweep()

    def handover(self, key: LegKey, choice: int) -> None:
        """This choice goes on elsewhere: it leaves as soon as it can, see engine.departure."""
        request = self._requests.get(key)
        if request is not None:
            self._departures.ask(request, choice)

    def fail(self, request: Request, error: PdserveError) -> None:
        """End a request with its one terminal event."""
        if not request.over:
            self._outcome.emit(request, Failed(request.spec.key, error))
            self._end(request)

    def fail_all(self, error: PdserveError) -> None:
        for request in list(self._requests.values()):
            self.fail(request, error)

    def take_events(self) -> list[tuple[Request, Event]]:
        """What happened since the last call, in order."""
        return self._outcome.take()

    @property
    def running(self) -> int:
        """Choices in the batch, loading ones included."""
        return len(self._running)

    @property
    def requests(self) -> int:
        """Requests alive."""
        return len(self._requests)

    # --- the step ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        assert not self._in_flight, "the last step has not landed"
        self._expire(now)
        self._take_loaded(now)
        if self._departures:
            self._depart()
        stalled = self._grow()
        self._admit(now)
        self._take_loaded(now)
        if self.memory.tiers is not None:
            self.memory.tiers.store()
        decoding = [seq for seq in self._running if seq.phase is Phase.RUNNING and seq.decoding]
        rows = [self._row(seq, len(seq.tokens)) for seq in decoding if seq.id not in stalled]
        rows += self._chunks(len(rows), now)
        copies = self._take_copies()
        if not rows and not copies:
            return None
        self.step, self._began = self.step + 1, now
        return StepPlan(self.step, tuple(rows), copies)

    def apply(self, result: StepResult, now: float, failed: Seq[int] = ()) -> None:
        """Take a step's result. failed: Row.seq of rows that have none; their requests end."""
        assert result.step == self.step, "another step's result"
        flight = self._land()
        charge(flight.values(), now - self._began)
        for row_result in result.rows:
            seq, row = flight.pop(row_result.seq)
            if seq.phase is Phase.DONE:  # ended meanwhile
                self._exports.drop([row])
            else:
                self._outcome.ran(seq, row, row_result, now)
        assert set(flight) == set(failed), "rows without a result"
        self._exports.drop(row for _, row in flight.values())
        self._fault([seq for seq, _ in flight.values()])
        self._sweep()

    def abort_step(self) -> None:
        """The step in flight has no result: every request in it, or waiting for a copy of it, ends."""
        copying = [seq for seq, _, _ in self._copying]
        flight = self._land()
        self._exports.drop(row for _, row in flight.values())
        self._fault([*copying, *(seq for seq, _ in flight.values())])
        self._sweep()

    def _fault(self, sequences: Seq[Sequence]) -> None:
        for seq in sequences:
            self.fail(seq.request, PdserveError("the step of this request failed", reason="engine_fault"))

    def _land(self) -> dict[int, tuple[Sequence, Row]]:
        """The step is over: what only it still used is given back."""
        for _, pool, copy in self._copying:
            pool.release([copy.source])
        for seq in self._doomed:
            self.memory.release(seq)
        flight = self._in_flight
        self._in_flight, self._copying, self._doomed = {}, [], []
        return flight

    # --- who may run --------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        self.memory.ledger.reap(now)
        self.memory.retained.tick(now)
        for request in [r for r in self._requests.values() if now >= r.spec.deadline]:
            self.fail(request, DeadlineExceeded("the request's time was over before it was complete"))

    def _grow(self) -> set[int]:
        """Make room for every decode's token; ids of those that must wait for it."""
        wanting = [seq for seq in self._running if seq.phase is Phase.RUNNING and seq.decoding]
        wanting.sort(key=_rank)
        return {seq.id for seq in wanting if seq.phase is Phase.RUNNING and not self._room(seq)}

    def _room(self, seq: Sequence) -> bool:
        """A page for the next token, from the pool or from whoever came last. That one waits for a page instead of
        giving itself up: everybody before it can still take its pages."""
        while not self.memory.grow(seq):
            victim = max(filter(_preemptable, self._running), key=_rank)
            if victim is seq or (self.memory.tiers is not None and self.memory.tiers.holds_pages):
                return False
            self._preempt(victim)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.memory.preempt(seq)
        if self.memory.tiers is not None:
            self.memory.tiers.poll()
        self._enqueue(seq)
        self._sweep()

    def _enqueue(self, seq: Sequence) -> None:
        self._count_waiting(seq)
        bisect.insort(self._waiting, seq, key=lambda s: s.order)

    def _unqueue(self, seq: Sequence) -> None:
        self._waiting.remove(seq)
        self.memory.ledger.unwait(seq.request.spec.key, seq.booked)

    def _need(self, seq: Sequence) -> Amount:
        return seq.need(self.memory.headroom_tokens, self.memory.has_state)

    def _count_waiting(self, seq: Sequence) -> None:
        seq.phase = Phase.WAITING
        seq.booked = self._need(seq)
        self.memory.ledger.wait(seq.request.spec.key, seq.booked)

    def _admit(self, now: float) -> None:
        """In order, until one finds no room. Who waits for pages from the disk owns nothing and is passed by."""
        at = 0
        while at < len(self._waiting):
            seq = self._waiting[at]
            if self.memory.staging(seq, self._may_use_cache(seq.request)):
                at += 1
                continue
            if not self._try_admit(seq, now):
                return
            del self._waiting[at]
            self.memory.ledger.unwait(seq.request.spec.key, seq.booked)
            self._running.append(seq)
            self._sweep()

    def _try_admit(self, seq: Sequence, now: float) -> bool:
        ledger = self.memory.ledger
        if ledger.active_batch + seq.rows + ledger.booked.batch > self.limits.max_batch:
            return False
        cached = self.memory.admit(seq, self._may_use_cache(seq.request))
        if cached is None:
            return False
        if self.memory.loading(seq):
            seq.phase = Phase.LOADING
        else:
            self._admitted(seq, cached, now)
        return True

    def _take_loaded(self, now: float) -> None:
        """Requests whose pages have come up from a lower tier run from here on, whoever waits in front of the queue."""
        if self.memory.tiers is None:
            return
        self.memory.tiers.poll()
        while arrived := self.memory.tiers.take_loaded():
            for loaded in arrived:
                seq = next(s for s in self._running if s.id == loaded.seq)
                if loaded.computed is None:
                    self._preempt(seq)
                else:
                    self.memory.loaded(seq, loaded)
                    self._admitted(seq, loaded.computed, now)

    def _may_use_cache(self, request: Request) -> bool:
        """Positions whose log-probabilities are wanted must be run."""
        spec = request.spec
        return request.remote or not spec.sampling.prompt_logprobs or request.scored >= spec.prompt_len - 1

    def _admitted(self, seq: Sequence, cached: int, now: float) -> None:
        request = seq.request
        seq.phase = Phase.LOADING if request.remote else Phase.RUNNING
        request.recomputed_tokens += max(seq.lost - cached, 0)
        seq.lost = 0
        if request.admitted < 0:
            request.admitted = now
            request.cached_tokens = cached
            if request.remote or request.spec.mode is Mode.SOURCE:
                pages, slots = self.memory.known_pages(seq), self.memory.known_slots(seq)
                hold = self.memory.hold(seq)
                ready = cached // PAGE_TOKENS * PAGE_TOKENS
                self._outcome.emit(request, Admitted(request.spec.key, pages, slots, ready, hold))

    # --- rows -------------------------------------------------------------------------------------------------------

    def _chunks(self, decode_rows: int, now: float) -> list[Row]:
        """Whole chunks, one per request, of those due first, within the step's tokens; the first one always fits."""
        prompts = [seq for seq in self._running if seq.phase is Phase.RUNNING and not seq.decoding]
        budget = max(self.limits.max_batched_tokens - decode_rows, self.limits.chunk_tokens)
        sizes = [(seq.order, seq.chunk_end(self.limits.chunk_tokens) - seq.computed) for seq in prompts]
        rows: dict[int, Row] = {}

        def takes(at: int) -> bool:
            seq, end = prompts[at], prompts[at].computed + sizes[at][1]
            if ready := self._exports.ready(seq, end, now):
                rows[at] = self._row(seq, end)
            return ready

        return [rows[at] for at in chosen(sizes, budget, takes)]

    def _row(self, seq: Sequence, end: int) -> Row:
        start = seq.computed
        points = self._exports.slots(seq, end)
        recorded = seq.records and self.memory.has_state and not points
        assert recorded or seq.whole == start, "a row that needs a whole state"
        row = Row(
            seq=seq.id,
            tokens=tuple(seq.tokens[start:end]),
            start=start,
            pages=tuple(seq.pages[: pages_for(end)]),
            slot=seq.slot,
            samples=samples_of(seq) if end == len(seq.tokens) else (),
            prompt_targets=targets_of(seq, start, end),
            prompt_top=seq.request.spec.sampling.prompt_top_logprobs,
            checkpoints=points,
            whole=seq.whole if recorded else -1,
        )
        self._in_flight[seq.id] = (seq, row)
        return row

    def _take_copies(self) -> tuple[Copy, ...]:
        for seq in self._running:
            self._copying += [(seq, pool, copy) for pool, copy in seq.pending]
            seq.pending = []
        return tuple(copy for _, _, copy in self._copying)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _depart(self) -> None:
        for request, error in self._departures.hopeless():
            self.fail(request, error)
        for seq in self._departures.due(busy=set(self._in_flight)):
            if seq.phase is Phase.WAITING:
                self._unqueue(seq)
            if self._departures.leave(seq):
                seq.request.over = True
                del self._requests[seq.request.spec.key]
        self._sweep()

    def _end(self, request: Request) -> None:
        """Take a request out, whatever its sequences are doing."""
        request.over = True
        del self._requests[request.spec.key]
        for seq in request.sequences:
            self._drop(seq)
        self._sweep()

    def _drop(self, seq: Sequence) -> None:
        """Take one choice out. What a step in flight uses of it is given back when the step lands."""
        if seq.phase is Phase.WAITING:
            self._unqueue(seq)
        if seq.id in self._in_flight or any(other is seq for other, _, _ in self._copying):
            self._doomed.append(seq)
        elif seq.phase is not Phase.DONE:
            self.memory.release(seq)
        seq.phase = Phase.DONE

    def _sweep(self) -> None:
        """After any change: the running list is what runs, over is what has no open choice, the ledger knows both."""
        arrived, self._outcome.forked = self._outcome.forked, []
        for seq in self._running:
            request = seq.request
            if not request.over and all(s.phase is Phase.DONE for s in request.sequences):
                request.over = True
                del self._requests[request.spec.key]
        live = (Phase.RUNNING, Phase.LOADING)
        self._running = [seq for seq in [*self._running, *arrived] if seq.phase in live]
        ledger = self.memory.ledger
        ledger.active_batch = sum(seq.rows for seq in self._running)
        ledger.active_prefill_tokens = sum(
            len(seq.tokens) - seq.computed for seq in self._running if not seq.decoding and not seq.request.remote
        )

    def check_empty(self) -> None:
        """Assert that no request is left. Raises AssertionError."""
        assert not self._requests, "requests are left"
        assert not self._waiting
        assert not self._running
        assert not self._in_flight
        assert not self._copying
        assert not self._doomed

    def check_states(self) -> None:
        """Assert that no slot is both a running sequence's own and an immutable state. Raises AssertionError."""
        if self.memory.states is not None:
            self.memory.states.check()
            owned = {seq.slot for seq in self._running} | {s for seq in self._running for s in seq.spare_slots}
            assert not owned & self.memory.states.slots(), "a mutable slot in the cache"


def _rank(seq: Sequence) -> tuple[int, int, int, tuple[float, int, int]]:
    """Who gives way: the last in this order. Earlier deadlines go first (to the second), then who would lose more."""
    return (seq.request.spec.priority, int(seq.request.spec.deadline), -seq.computed, seq.order)


def _preemptable(seq: Sequence) -> bool:
    """A source's pages are announced and held by its lease; a loading one's are being written."""
    return seq.phase is Phase.RUNNING and seq.request.decodes
