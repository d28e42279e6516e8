"""The engine on its own thread: it sleeps, wakes, survives a bad step, and never leaves a request without an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from engine.api import Admitted, Event, Failed, Mode, Needs, Refused, SourceDone, Tokens
from engine.loop import FAULTS_IN_A_ROW, Engine, EngineSpec
from engine.models.oracle import OracleRunner
from engine.plan import StepPlan, StepResult
from engine.runner_api import RowsFailed
from kvtransfer.types import LegKey
from runtime.clock import SystemClock
from runtime.config import Config
from runtime.errors import InvalidRequest, WorkerLost
from tests.unit.engine_core.lab import VOCAB, Lab, config, prompt, request, undisturbed

WAIT_S = 20.0


class Mailbox:
    """A sink that can be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls = 0
        self._new = threading.Condition()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._new:
            self.events += events
            self.calls += 1
            self._new.notify_all()

    def wait_for(self, kind: type[Event] | None = None, key: LegKey | None = None) -> Event:
        """The first event of a kind, or the last event of all of a request."""

        def found() -> Event | None:
            fits = (e for e in self.events if key is None or e.key == key)
            return next((e for e in fits if (isinstance(e, kind) if kind else _last(e))), None)

        with self._new:
            assert self._new.wait_for(lambda: found() is not None, WAIT_S)
        event = found()
        assert event is not None
        return event


def _last(event: Event) -> bool:
    return isinstance(event, SourceDone | Failed) or (isinstance(event, Tokens) and event.last)


class Poisoned(OracleRunner):
    """Fails rows, or whole steps, that hold a token."""

    def __init__(self, rows: int = -1, step: int = -1) -> None:
        super().__init__(VOCAB, 2048)
        self.rows, self.step = rows, step

    def run(self, plan: StepPlan) -> StepResult:
        if any(self.step in row.tokens for row in plan.rows):
            raise RuntimeError("device lost")
        bad = tuple(row.seq for row in plan.rows if self.rows in row.tokens)
        good = tuple(row for row in plan.rows if row.seq not in bad)
        result = super().run(StepPlan(plan.step, good, plan.copies))
        if bad:
            raise RowsFailed(bad, result)
        return result


def engine_on(runner: OracleRunner, **changes: object) -> Engine:
    return Engine(runner, EngineSpec(65, 0, 2048), config(**changes), SystemClock())


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = engine_on(OracleRunner(VOCAB, 2048))
    made.start_loop()
    yield made
    made.stop()
    made.check_baseline()


def test_a_request_from_another_thread_wakes_a_sleeping_engine(engine: Engine) -> None:
    box = Mailbox()
    engine.submit(request("a", prompt(50), max_tokens=10), box)
    box.wait_for()
    said = [t for e in box.events if isinstance(e, Tokens) for t in e.tokens]
    assert tuple(said) == undisturbed(prompt(50), request("a", prompt(50), max_tokens=10).sampling)[0]


def test_all_events_of_a_step_for_one_sink_come_in_one_call(engine: Engine) -> None:
    box = Mailbox()
    for name in "abc":
        engine.submit(request(name, prompt(10, ord(name)), max_tokens=40), box)
    for name in "abc":
        box.wait_for(key=request(name, prompt(10)).key)
    assert len(box.events) == 120
    assert box.calls < 60


def test_memory_released_on_another_thread_lets_the_next_request_in(engine: Engine) -> None:
    box = Mailbox()
    engine.submit(request("a", prompt(900), Mode.SOURCE), box)
    box.wait_for(SourceDone)
    key = request("b", prompt(500, 1)).key
    engine.submit(request("b", prompt(500, 1), max_tokens=2), box)
    held = box.wait_for(Admitted)
    assert isinstance(held, Admitted)
    before = time.monotonic()
    held.hold.release()
    box.wait_for(key=key)
    assert time.monotonic() - before < WAIT_S


def test_an_idle_engine_shows_that_it_lives_and_uses_next_to_no_cpu(engine: Engine) -> None:
    seen = {engine.load().steps_alive_at}
    cpu = time.process_time()
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        time.sleep(0.05)
        seen.add(engine.load().steps_alive_at)
    assert len(seen) >= 3
    assert time.process_time() - cpu < 0.1


def test_a_cancel_is_silent_and_gives_everything_back(engine: Engine) -> None:
    box = Mailbox()
    key = request("a", prompt(20)).key
    engine.submit(request("a", prompt(20), max_tokens=900), box)
    box.wait_for(Tokens)
    engine.cancel(key)
    engine.submit(request("b", prompt(20), max_tokens=1), box)
    box.wait_for()
    ended = len(box.events)
    assert not any(_last(e) and e.key == key for e in box.events)
    engine.submit(request("c", prompt(20), max_tokens=1), box)
    box.wait_for(key=request("c", prompt(20)).key)
    assert all(e.key != key for e in box.events[ended:])


def test_stop_ends_every_request_and_refuses_new_ones() -> None:
    engine = engine_on(OracleRunner(VOCAB, 2048))
    engine.start_loop()
    box = Mailbox()
    for name in "ab":
        engine.submit(request(name, prompt(20), Mode.REMOTE, max_tokens=900), box)
    box.wait_for(Admitted)
    engine.stop()
    engine.stop()
    ends = [e for e in box.events if isinstance(e, Failed)]
    assert len(ends) == 2
    assert all(isinstance(e.error, WorkerLost) for e in ends)
    for event in box.events:
        if isinstance(event, Admitted):
            event.hold.release()
    with pytest.raises(WorkerLost):
        engine.submit(request("c", prompt(20)), box)
    assert isinstance(engine.reserve(request("c", prompt(20)).key, Needs(20)), Refused)
    engine.check_baseline()


def test_an_engine_that_never_ran_can_be_stopped() -> None:
    engine = engine_on(OracleRunner(VOCAB, 2048))
    box = Mailbox()
    engine.submit(request("a", prompt(20)), box)
    engine.stop()
    assert [type(e) for e in box.events] == [Failed]
    engine.check_baseline()


def test_rows_that_fail_end_their_own_requests_only() -> None:
    lab = Lab(runner=Poisoned(rows=96))
    clean = tuple(t % 90 for t in prompt(40))
    good = lab.submit(request("good", clean, max_tokens=20, logit_bias=((96, -100.0),)))
    bad = lab.submit(request("bad", (*clean[:20], 96), max_tokens=20))
    lab.run()
    assert lab.failed(bad).error.reason == "engine_fault"
    assert "device" not in lab.failed(bad).error.message
    assert len(lab.tokens(good)) == 20
    lab.engine.check_baseline()


def test_a_step_that_fails_ends_its_requests_and_the_next_ones_run() -> None:
    lab = Lab(runner=Poisoned(step=96))
    clean = tuple(t % 90 for t in prompt(40))
    for turn in range(2 * FAULTS_IN_A_ROW):
        bad = lab.submit(request(f"bad{turn}", (*clean, 96), n=2, max_tokens=20))
        lab.run()
        assert lab.ends(bad) == 1
        good = lab.submit(request(f"good{turn}", clean, max_tokens=3, logit_bias=((96, -100.0),)))
        lab.run()
        assert len(lab.tokens(good)) == 3
    lab.engine.check_baseline()


def test_an_engine_whose_steps_all_fail_is_dead_and_says_so_to_everybody() -> None:
    engine = engine_on(Poisoned(step=1), max_batch=1)
    engine.start_loop()
    box = Mailbox()
    keys = []
    for i in range(FAULTS_IN_A_ROW + 2):
        made = request(f"{i}", (1, 2, 3))
        keys.append(made.key)
        engine.submit(made, box)
    for key in keys:
        box.wait_for(key=key)
    assert [sum(e.key == key for e in box.events) for key in keys] == [1] * len(keys)
    assert isinstance(box.events[-1], Failed)
    assert isinstance(box.events[-1].error, WorkerLost)
    assert engine.dead
    with pytest.raises(WorkerLost):
        engine.submit(request("late", (1, 2, 3)), box)
    engine.stop()


@pytest.mark.parametrize("mode", [Mode.SOURCE, Mode.REMOTE])
def test_a_receiver_that_fails_over_an_admission_does_not_keep_its_pages(mode: Mode) -> None:
    lab = Lab()

    def fail(events: Sequence[Event]) -> None:
        raise RuntimeError("the event loop is closed")

    lab.engine.submit(request("x", prompt(40), mode), fail)
    lab.turns(4)
    lab.engine.check_baseline()


def test_a_receiver_that_fails_loses_its_own_requests_only() -> None:
    lab = Lab()

    def broken(events: Sequence[Event]) -> None:
        raise RuntimeError("closed")

    lab.engine.submit(request("a", prompt(20), max_tokens=9), broken)
    good = lab.submit(request("b", prompt(20, 1), max_tokens=9))
    lab.run()
    assert len(lab.tokens(good)) == 9
    lab.engine.check_baseline()


def test_sizes_follow_from_the_configuration_and_the_model() -> None:
    model = OracleRunner(VOCAB, 2048).spec()
    assert EngineSpec.of(model, Config(kv_pool_tokens=1000, max_model_len=512)) == EngineSpec(63, 0, 512)
    by_bytes = EngineSpec.of(model, Config(kv_pool_bytes=10 * model.page_bytes + 5, max_model_len=9999))
    assert by_bytes == EngineSpec(11, 0, 2048)
    state = OracleRunner(VOCAB, 2048, state=True).spec()
    assert EngineSpec.of(state, Config(kv_pool_tokens=1000, max_batch=8)).slots == 17
    with pytest.raises(InvalidRequest):
        EngineSpec.of(model, Config(kv_pool_bytes=10))


def test_a_slow_step_does_not_make_a_command_wait() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(_: float) -> None:
        entered.set()
        assert leave.wait(WAIT_S)

    engine = engine_on(OracleRunner(VOCAB, 2048, step_s=1.0, sleep=slow))
    engine.start_loop()
    box = Mailbox()
    engine.submit(request("a", prompt(20), max_tokens=1), box)
    assert entered.wait(WAIT_S)
    engine.submit(request("b", prompt(20), max_tokens=1), box)
    engine.reserve(request("c", prompt(20)).key, Needs(20))
    engine.cancel(request("a", prompt(20)).key)
    assert engine.load().waiting == 1
    leave.set()
    box.wait_for(key=request("b", prompt(20)).key)
    assert all(e.key.request_id == "b" for e in box.events)
    engine.stop()
