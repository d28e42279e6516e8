"""Random histories of hand-offs against a model that is a few lines long."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.source import Caller, State, Watch
from kvtransfer.types import LegKey
from runtime.errors import KvLost, TicketInvalid
from tests.unit.kvtransfer.support import LEASE_S, TOKENS, World, key

KEYS = st.integers(0, 2).map(lambda i: key(f"r{i}"))
CALLERS = st.sampled_from([Caller("d", 1), Caller("d", 2), Caller("e", 1)])


class Model:
    """One hand-off as the design tells it."""

    def __init__(self) -> None:
        self.state = State.COMPUTING
        self.ready = 0
        self.lease: float | None = None
        self.fence = 0
        self.watch: Watch | None = None
        self.caller: Caller | None = None

    @property
    def live(self) -> bool:
        return self.state in (State.COMPUTING, State.FINAL)


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.models: dict[LegKey, Model] = {}
        self.tickets: dict[LegKey, bytes] = {}
        self.old: list[Watch] = []

    def model(self, k: LegKey) -> Model | None:
        model = self.models.get(k)
        return model if model is not None and model.live else None

    @rule(k=KEYS)
    def open(self, k: LegKey) -> None:
        if self.model(k) is None:
            self.tickets[k] = self.world.open(k)
            self.models[k] = Model()

    @rule(k=KEYS, pages=st.integers(1, 3))
    def ready(self, k: LegKey, pages: int) -> None:
        model = self.model(k)
        if model is not None and model.state is State.COMPUTING:
            end = min(model.ready + 16 * pages, TOKENS)
            assert self.world.store.range_ready(k, model.ready, end)
            model.ready = end

    @rule(k=KEYS)
    def final(self, k: LegKey) -> None:
        model = self.model(k)
        if model is not None and model.state is State.COMPUTING:
            assert self.world.final(k)
            model.state, model.ready = State.FINAL, TOKENS
            model.lease = max(model.lease or 0.0, self.world.clock.monotonic() + LEASE_S)

    @rule(k=KEYS, caller=CALLERS, fence=st.integers(1, 4))
    def watch(self, k: LegKey, caller: Caller, fence: int) -> None:
        if k not in self.tickets:
            return
        model = self.model(k)
        again = model is not None and (model.caller is None or (fence == model.fence and caller == model.caller))
        if model is None or not (again or fence > model.fence):
            try:
                self.world.watch(self.tickets[k], caller, fence=fence)
            except TicketInvalid:
                return
            raise AssertionError("it should have been refused")
        if model.watch is not None:
            self.old.append(model.watch)
        model.watch = self.world.watch(self.tickets[k], caller, fence=fence)
        model.fence, model.caller = fence, caller
        if model.lease is not None:
            model.lease = max(model.lease, self.world.clock.monotonic() + LEASE_S)

    @rule(k=KEYS)
    def renew(self, k: LegKey) -> None:
        model = self.model(k)
        if model is None or model.watch is None or model.caller is None:
            return
        now = self.world.clock.monotonic()
        over = model.lease is not None and now >= model.lease
        lost = self.world.store.renew(model.caller, [model.watch.lease_id])
        assert bool(lost) == over
        if not over and model.lease is not None:
            model.lease = max(model.lease, now + LEASE_S)

    @rule(k=KEYS)
    def release(self, k: LegKey) -> None:
        model = self.model(k)
        assert self.world.store.release(k) == (model is not None)
        if model is not None:
            model.state = State.RELEASED

    @rule(k=KEYS)
    def confirm(self, k: LegKey) -> None:
        model = self.model(k)
        if model is not None and model.watch is not None:
            assert self.world.store.release_lease(model.watch.lease_id)
            model.state = State.RELEASED

    @rule(k=KEYS)
    def fail(self, k: LegKey) -> None:
        model = self.model(k)
        assert self.world.store.fail(k, KvLost("failed")) == (model is not None)
        if model is not None:
            model.state = State.FAILED

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE_S - 0.5, LEASE_S]))
    def tick(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        now = self.world.clock.monotonic()
        due = {k for k, m in self.models.items() if m.live and m.lease is not None and now >= m.lease}
        assert set(self.world.store.expire()) == due
        for k in due:
            self.models[k].state = State.EXPIRED

    @precondition(lambda self: bool(self.old))
    @rule()
    def a_superseded_reader_speaks_late(self) -> None:
        watch = self.old[-1]
        assert not self.world.store.release_lease(watch.lease_id)
        assert self.world.store.poll(watch).error is not None

    @invariant()
    def a_hold_is_released_exactly_when_its_hand_off_is_over(self) -> None:
        for k, model in self.models.items():
            assert self.world.releases(k) == (0 if model.live else 1)
            assert self.world.store.state(k) is model.state

    @invariant()
    def only_the_latest_watcher_of_a_live_hand_off_is_served(self) -> None:
        for model in self.models.values():
            if model.watch is not None:
                assert self.world.store.held(model.watch) == model.live


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase
