"""The engine: one thread, one sentence (take commands, schedule, run, apply, emit), one pool set, whatever the role.

Commands come from any thread and never wait for a step. With nothing to do the thread sleeps on a condition; a slow
tick keeps it visibly alive and reaps what has expired. A step that fails takes its own requests with it; several in a
row, or a fault of the engine itself, end the engine: every request gets its error, new ones are refused, and
`steps_alive_at` stands still.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.api import (
    Admitted,
    EngineLoad,
    EngineRequest,
    Event,
    Failed,
    HandedOver,
    Needs,
    Refused,
    Reserved,
    Sink,
    SourceDone,
    Tokens,
)
from engine.check import check_request
from engine.memory import Checkpoints, Memory
from engine.pages import PagePool, SlotPool
from engine.plan import Copy, StepPlan
from engine.prefix_cache import PrefixCache
from engine.prefixes import Prefixes
from engine.reservations import Ledger
from engine.runner_api import ModelSpec, RowsFailed, Runner
from engine.scheduler import Limits, Scheduler
from engine.sequence import Request
from engine.states import StateCache
from engine.tiers.build import Ways, make_tiers
from kvtransfer.types import PAGE_TOKENS, First, LegKey, Region
from runtime.clock import Clock
from runtime.config import Config
from runtime.errors import Draining, InvalidRequest, PdserveError, Saturated, Unsupported, WorkerLost

TICK_S = 0.25
FAULTS_IN_A_ROW = 3

_log = logging.getLogger(__name__)


MIN_SLOTS = 2
"""One that runs and one that is read or cached."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Sizes of one engine: pages and slots include the null ones."""

    pages: int
    slots: int
    max_model_len: int

    @classmethod
    def of(cls, model: ModelSpec, config: Config) -> EngineSpec:
        """From the configuration: slots first, pages in what they leave of kv_pool_bytes. Raises InvalidRequest when
        not even one page fits, Unsupported when the model has no state to replay."""
        if config.replay_ssm and not model.has_state:
            raise Unsupported("this model has no recurrent state to replay", field="replay_ssm")
        slots = _slots(model, config)
        left = config.kv_pool_bytes - slots * model.slot_memory
        given = config.kv_pool_tokens
        pages = given // PAGE_TOKENS if given else max(left, 0) // model.page_bytes
        if pages < 1:
            least = slots * model.slot_memory + model.page_bytes
            key, limit = ("kv_pool_tokens", f"{PAGE_TOKENS} tokens") if given else ("kv_pool_bytes", f"{least} bytes")
            raise InvalidRequest(f"less than one page and the state slots take: {limit}", field=key, limit=limit)
        longest = min(config.max_model_len or model.max_model_len, model.max_model_len)
        return cls(pages + 1, slots, longest)


def _slots(model: ModelSpec, config: Config) -> int:
    """State slots, the null one included. As many states again as can run: sources hold theirs until they are read,
    and the cache lives in what is idle. By default not more than half of kv_pool_bytes, where that sizes the pool."""
    if not model.has_state:
        return 0
    wanted = config.state_slots or 2 * config.max_batch
    if not config.state_slots and not config.kv_pool_tokens:
        wanted = min(wanted, max(config.kv_pool_bytes // 2 // model.slot_memory - 1, MIN_SLOTS))
    return wanted + 1


def _settle(runner: Runner, copy: Copy) -> None:
    runner.run(StepPlan(0, (), (copy,)))


class Engine:
    """Implements engine.api.EnginePort over a runner, whose pools it allocates. Made stopped; start() runs it."""

    def __init__(
        self,
        runner: Runner,
        spec: EngineSpec,
        config: Config,
        clock: Clock,
        ways: Ways = Ways(),
    ) -> None:
        self.spec = spec
        self.model = runner.spec()
        self._runner = runner
        self._clock = clock
        runner.allocate(spec.pages, spec.slots)
        self.pages = PagePool(spec.pages)
        self.slots = SlotPool(spec.slots, self.pages.lock)
        self.cache = PrefixCache(self.pages, enabled=config.prefix_cache)
        self._ledger = Ledger(self.pages, self.slots, config.max_batch, config.reservation_s)
        limits = Limits(config.max_batch, config.max_batched_tokens, config.chunk_tokens, spec.max_model_len)
        states = None
        if self.model.has_state:
            states = StateCache(self.cache, self.pages, self.slots, self.model)
        kept = Checkpoints(config.state_interval_tokens, config.state_junctions, config.state_ends)
        memory = Memory(self.pages, self.slots, self.cache, self._ledger, config.headroom_tokens, states, kept)
        below = make_tiers(
            config,
            self.model,
            runner.regions(),
            self.pages,
            self.slots,
            self.cache,
            states,
            memory.retained,
            news=self._poke,
            now=clock.monotonic,
            ways=ways,
            wall=clock.wall,
            busy=lambda: self._stepping,
        )
        if self.model.record_bytes:
            memory.settle = lambda copy: _settle(runner, copy)
        self.tiers = memory.tiers = below[0] if below is not None else None
        if self.tiers is not None and self.tiers.state_stores is not None:
            self.tiers.state_stores.settle = memory.settle
        self._host = below[1] if below is not None else None
        self.states = states
        self.prefixes = Prefixes(memory, self._between_steps, clock.monotonic)
        self._scheduler = Scheduler(limits, memory)
        self._max_queued = config.max_queued_requests
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._live: dict[LegKey, Request] = {}
        self._poked = False
        self._draining = False
        self._stopping = False
        self._dead = False
        self._faults = 0
        self._stepping = False
        self._alive_at = clock.monotonic()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.pages.set_free_listener(self._poke)
        self.slots.set_free_listener(self._poke)

    # --- life -----------------------------------------------------------------------------------------------------

    @property
    def thread_id(self) -> int:
        """The kernel's name for the thread; 0 before it runs."""
        return self._thread.native_id or 0

    def start_loop(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    def stop(self) -> None:
        """End every request with an error, end the thread, return when it is over. Idempotent; not for a sink."""
        assert threading.current_thread() is not self._thread, "the engine cannot wait for itself"
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._end_all(WorkerLost("the worker is stopping"))
        else:
            self._thread.join()
        if self.tiers is not None:
            self.tiers.close()

    @property
    def dead(self) -> bool:
        """The engine has ended by a fault of its own."""
        return self._dead

    def regions(self) -> tuple[Region, ...]:
        """The pools, as the transport registers them."""
        return self._runner.regions()

    def host_regions(self) -> tuple[Region, ...]:
        """The host tier's pools, if there is one: registered as well, so that peers may be let in."""
        return self._host.regions if self._host is not None else ()

    # --- EnginePort -------------------------------------------------------------------------------------------------

    def reserve(self, key: LegKey, needs: Needs) -> Reserved | Refused:
        with self._wake:
            closed = self._closed()
            if closed is None and key in self._live:
                closed = InvalidRequest("the request is here already", reason="duplicate")
            if closed is None and self._ledger.waiting >= self._max_queued:
                closed = Saturated("too many requests wait on this worker")
            if closed is not None:
                return Refused(closed, self._ledger.free())
            return self._ledger.reserve(key, needs, self._clock.monotonic())

    def cancel_reservation(self, reservation_id: str) -> bool:
        return self._ledger.cancel(reservation_id)

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        check_request(request, self.model, self.spec.max_model_len)
        with self._wake:
            closed = self._closed()
            if closed is not None:
                raise closed
            if request.key in self._live:
                raise InvalidRequest("the request is here already", reason="duplicate")
            promised = self._ledger.claim(request.reservation_id, request.key)
            if not promised and self._ledger.waiting >= self._max_queued:
                raise Saturated("too many requests wait on this worker")
            prepared = self._scheduler.prepare(request, sink, self._clock.monotonic())
            self._live[request.key] = prepared
            self._post(lambda: self._scheduler.add(prepared))

    def start(self, key: LegKey, first: Sequence[First]) -> None:
        with self._wake:
            firsts = tuple(first)
            self._post(lambda: self._scheduler.start(key, firsts, self._clock.monotonic()))

    def recompute(self, key: LegKey) -> None:
        with self._wake:
            self._post(lambda: self._scheduler.recompute(key))

    def cancel(self, key: LegKey) -> None:
        with self._wake:
            request = self._live.pop(key, None)
            if request is None:
                self._ledger.forget(key)
                return
            request.silenced = True
            self._post(lambda: self._scheduler.cancel(key))

    def end_choices(self, key: LegKey, choices: Sequence[int]) -> None:
        with self._wake:
            if key in self._live:
                unwanted = frozenset(choices)
                self._post(lambda: self._scheduler.end_choices(key, unwanted))

    def handover(self, key: LegKey, choice: int) -> None:
        with self._wake:
            if key in self._live:
                self._post(lambda: self._scheduler.handover(key, choice))

    def load(self) -> EngineLoad:
        free = self._ledger.free()
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._ledger.waiting,
            queued_prefill_tokens=free.queued_prefill_tokens,
            pages_total=self.pages.total,
            pages_free=self.pages.available,
            pages_cached=self.pages.cached,
            pages_reserved=self._ledger.booked.pages,
            slots_total=self.slots.total,
            slots_free=self.slots.available,
            slots_cached=self.slots.cached,
            swapped=self.tiers.swapped_now if self.tiers is not None else 0,
            step=self._scheduler.step,
            steps_alive_at=self._alive_at,
        )

    def drain(self, on: bool) -> None:
        with self._wake:
            self._draining = on

    # --- the loop ---------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One turn, without waiting; whether a step was run. (The loop's body; tests call it with a fake clock.)"""
        self._alive_at = self._clock.monotonic()
        for command in self._take_commands():
            command()
        self.prefixes.turn()
        plan = self._scheduler.schedule(self._clock.monotonic())
        self._emit()
        if plan is None:
            return False
        self._run(plan)
        self._emit()
        return True

    def _loop(self) -> None:
        try:
            while not self._stopping:
                if not self.turn():
                    self._sleep()
            self._end_all(WorkerLost("the worker is stopping"))
        except Exception:  # noqa: BLE001 - the supervisor: whatever it was, every request gets its end
            _log.exception("the engine has ended")
            self._die()

    def _sleep(self) -> None:
        with self._wake:
            if not self._commands and not self._poked and not self._stopping:
                self._wake.wait(TICK_S)
            self._poked = False

    def _run(self, plan: StepPlan) -> None:
        started = self._clock.monotonic()
        self._stepping = True
        try:
            result = self._runner.run(plan)
        except RowsFailed as failure:
            self._scheduler.apply(failure.result, self._clock.monotonic(), failure.seqs)
        except Exception:  # the supervisor: a fault ends the requests of its step
            _log.exception("step %d has failed", plan.step)
            self._scheduler.abort_step()
            self._faults += 1
            if self._faults >= FAULTS_IN_A_ROW:
                raise
        else:
            self._faults = 0
            now = self._clock.monotonic()
            self._measure(plan, now - started)
            self._scheduler.apply(result, now)
        finally:
            self._stepping = False

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        """What a prefill costs here, for the choice between fetching and computing."""
        tokens = sum(len(row.tokens) for row in plan.rows if not row.is_decode)
        if self.tiers is not None and tokens >= PAGE_TOKENS:
            self.tiers.costs.prefill.saw(tokens, seconds)

    def _end_all(self, error: PdserveError) -> None:
        with self._wake:
            self._stopping = True
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        self.prefixes.close()
        self._scheduler.abort_step()
        self._scheduler.fail_all(error)
        self._emit()

    def _die(self) -> None:
        """After a fault of the engine itself: its state is not to be trusted, so only the ends are delivered."""
        with self._wake:
            self._dead = self._stopping = True
            lost, self._live = list(self._live.values()), {}
        error = WorkerLost("the engine of this worker has failed")
        self._deliver([(request, Failed(request.spec.key, error)) for request in lost])

    # --- threads ------------------------------------------------------------------------------------------------------

    def _closed(self) -> PdserveError | None:
        if self._dead or self._stopping:
            return WorkerLost("the engine of this worker does not run")
        if self._draining:
            return Draining("this worker is draining")
        return None

    def _post(self, command: Callable[[], None]) -> bool:
        """Queue a command; the caller holds the condition. An engine that has ended owns nothing it could act on."""
        if not self._stopping:
            self._commands.append(command)
            self._wake.notify()
        return not self._stopping

    def _between_steps(self, command: Callable[[], None]) -> bool:
        with self._wake:
            return self._post(command)

    def _poke(self) -> None:
        """Memory came free: on another thread, that may let a waiting request in."""
        if threading.current_thread() is not self._thread:
            with self._wake:
                self._poked = True
                self._wake.notify()

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._wake:
            commands, self._commands = self._commands, []
        return commands

    def _emit(self) -> None:
        """Deliver what happened: one call per sink, each request's events in order, none after its cancel."""
        wanted = []
        with self._wake:
            for request, event in self._scheduler.take_events():
                if request.silenced:
                    _discard(event)
                    continue
                if _terminal(event):
                    self._live.pop(request.spec.key, None)
                wanted.append((request, event))
        self._deliver(wanted)

    def _deliver(self, pairs: Iterable[tuple[Request, Event]]) -> None:
        batches: dict[Sink, list[tuple[Request, Event]]] = {}
        for request, event in pairs:
            batches.setdefault(request.sink, []).append((request, event))
        for sink, batch in batches.items():
            try:
                sink([event for _, event in batch])
            except Exception:  # noqa: BLE001 - the supervisor: a receiver that fails loses its own requests only
                _log.exception("a receiver of events has failed")
                for _, event in batch:
                    _discard(event)
                self._give_up({id(request): request for request, _ in batch}.values())

    def _give_up(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.silenced = True
            if not request.over:
                self._scheduler.cancel(request.spec.key)
            with self._wake:
                self._live.pop(request.spec.key, None)

    # --- for tests and shutdown -------------------------------------------------------------------------------------

    def check_baseline(self) -> None:
        """Assert that nothing is left of any request: no page or slot held, nothing promised, every page free or
        cached. Call it when the loop is stopped or idle. Raises AssertionError."""
        self._scheduler.check_empty()
        self._ledger.check_empty()
        assert not self._live, "requests are live"
        for pool in (self.pages, self.slots):
            pool.check()
            assert pool.referenced == 0, f"{pool.referenced} pages or slots are still held"
        self.cache.check()
        self._scheduler.check_states()
        if self.tiers is not None:
            self.tiers.check_empty()


def _terminal(event: Event) -> bool:
    return isinstance(event, SourceDone | Failed) or (isinstance(event, Tokens | HandedOver) and event.last)


def _discard(event: Event) -> None:
    """An event nobody gets must not take its hold along."""
    if isinstance(event, Admitted | HandedOver):
        event.hold.release()
