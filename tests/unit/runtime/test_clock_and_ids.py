from __future__ import annotations

import pytest

from runtime import ids
from runtime.clock import FakeClock, SystemClock


def test_a_fake_clock_moves_only_when_told() -> None:
    clock = FakeClock(monotonic=10.0)
    assert clock.monotonic() == 10.0
    clock.advance(2.5)
    assert clock.monotonic() == 12.5


def test_a_step_of_the_wall_clock_does_not_touch_durations() -> None:
    """Public report T030 (NVIDIA/TensorRT-LLM#8005; etcd-io/etcd#12291)."""
    clock = FakeClock(monotonic=10.0, wall=1000.0)
    clock.step_wall(-3600)
    assert (clock.monotonic(), clock.wall()) == (10.0, -2600.0)


def test_a_monotonic_clock_cannot_go_back() -> None:
    with pytest.raises(ValueError, match="back"):
        FakeClock().advance(-0.1)


def test_the_system_clock_grows() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()


def test_epochs_grow_even_when_asked_within_a_microsecond() -> None:
    epochs = [ids.new_epoch() for _ in range(1000)]
    assert epochs == sorted(set(epochs))
    assert 0 < epochs[0] < 2**64


def test_ids_do_not_repeat_and_name_the_role() -> None:
    assert len({ids.new_request_id() for _ in range(1000)}) == 1000
    assert ids.new_worker_id("prefill").startswith("prefill-")


def test_a_child_span_stays_in_its_trace() -> None:
    parent = ids.new_traceparent()
    child = ids.child_traceparent(parent)
    assert ids.is_traceparent(child)
    assert ids.trace_id(child) == ids.trace_id(parent)
    assert child != parent


@pytest.mark.parametrize("bad", ["", "00-1-2-01", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "ff" * 30])
def test_a_malformed_trace_context_starts_a_new_trace(bad: str) -> None:
    assert not ids.is_traceparent(bad)
    assert ids.trace_id(bad) == ""
    assert ids.is_traceparent(ids.child_traceparent(bad))
