"""A worker ends itself when its engine stands still, and not when the machine does."""

from __future__ import annotations

import threading

from pdserve._worker_watch import LONGEST_LOOK_S, Sample, Standstill, sample
from runtime.clock import FakeClock


class Thread:
    """What the kernel would say of the engine's thread."""

    def __init__(self) -> None:
        self.now: Sample | None = (False, 0.0)

    def sampled(self) -> Sample | None:
        return self.now


def looks(watch: Standstill, clock: FakeClock, count: int, turned_at: float = 0.0) -> float:
    for _ in range(count):
        clock.advance(0.1)
        watch.look(turned_at, clock.monotonic())
    return watch.seconds


def test_a_thread_that_waits_without_turning_stands_still() -> None:
    watch, clock = Standstill(Thread().sampled), FakeClock()
    watch.look(0.0, clock.monotonic())
    assert 29.0 < looks(watch, clock, 300) <= 30.1


def test_a_turn_begins_the_count_anew() -> None:
    watch, clock = Standstill(Thread().sampled), FakeClock()
    looks(watch, clock, 200)
    assert looks(watch, clock, 1, turned_at=20.0) == 0.0


def test_a_thread_that_wants_a_core_and_gets_a_twentieth_of_one_has_stood_still_a_twentieth_of_the_time() -> None:
    thread, clock = Thread(), FakeClock()
    watch = Standstill(thread.sampled)
    for turn in range(600):
        thread.now = (True, 0.005 * turn)
        looks(watch, clock, 1)
    assert 2.5 < watch.seconds < 3.5


def test_a_thread_that_burns_a_core_without_turning_stands_still() -> None:
    thread, clock = Thread(), FakeClock()
    watch = Standstill(thread.sampled)
    for turn in range(310):
        thread.now = (True, 0.1 * turn)
        looks(watch, clock, 1)
    assert watch.seconds > 30.0


def test_time_in_which_the_whole_process_was_stopped_does_not_count() -> None:
    watch, clock = Standstill(Thread().sampled), FakeClock()
    looks(watch, clock, 10)
    clock.advance(600.0)
    assert watch.look(0.0, clock.monotonic()) < 1.0 + LONGEST_LOOK_S + 0.1


def test_where_the_kernel_does_not_say_all_time_counts() -> None:
    watch, clock = Standstill(lambda: None), FakeClock()
    watch.look(0.0, clock.monotonic())
    assert looks(watch, clock, 300) > 29.0


def test_the_kernel_tells_a_thread_that_waits_from_one_that_computes() -> None:
    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        while (waits := sample(thread.native_id)) is not None and waits[0]:
            pass  # it has not got as far as its wait
        computes = sample(threading.get_native_id())
    finally:
        go.set()
        thread.join()
    assert waits == (False, waits[1] if waits is not None else 0.0)
    assert computes is not None
    assert computes[0]
    assert computes[1] > 0.0
    assert sample(1 << 30) is None
