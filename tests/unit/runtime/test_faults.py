from __future__ import annotations

import time

import pytest

from runtime import faults
from runtime.errors import InvalidRequest, KvLost, PdserveError, PermissionDenied


def test_nothing_happens_while_nothing_is_armed() -> None:
    assert faults.on("p") is None
    assert not faults.strike("p")
    assert not faults.corrupted("p", bytearray(b"abc"))


def test_a_fault_strikes_only_its_point_and_only_while_armed() -> None:
    with faults.armed("p=drop"):
        assert faults.strike("p")
        assert not faults.strike("q")
    assert not faults.strike("p")


def test_a_fault_may_skip_hits_and_wear_out() -> None:
    with faults.armed("p=drop*2@1"):
        assert [faults.strike("p") for _ in range(5)] == [False, True, True, False, False]
        assert faults.hits("p") == 5


def test_fail_raises_the_error_of_its_reason() -> None:
    with faults.armed("p=fail:kv_lost", "q=fail"):
        with pytest.raises(KvLost):
            faults.strike("p")
        with pytest.raises(PdserveError, match="injected at q"):
            faults.strike("q")


async def test_a_delay_waits_blocking_or_not() -> None:
    with faults.armed("p=delay:0.05"):
        started = time.monotonic()
        assert not faults.strike("p")
        assert not await faults.strike_async("p")
        assert time.monotonic() - started >= 0.1


def test_corrupt_flips_one_byte() -> None:
    data = bytearray(b"abc")
    with faults.armed("p=corrupt:2*1"):
        assert faults.corrupted("p", data)
        assert not faults.corrupted("p", data)
    assert data == b"ab" + bytes([ord("c") ^ 0xFF])


def test_count_only_counts() -> None:
    with faults.armed("p=count"):
        assert not faults.strike("p")
        assert faults.hits("p") == 1


@pytest.mark.parametrize(
    "bad", ["", "p", "p=", "=drop", "p=explode", "p=drop*x", "p=drop@-1", "p=delay", "p=delay:-1", "p=delay:nan",
            "p=fail:nothing", "p=corrupt:x", "p=drop:1"],
)  # fmt: skip
def test_a_malformed_fault_is_refused(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        faults.Fault.parse(bad)


def test_a_process_without_the_variable_cannot_be_armed_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.ENV, raising=False)
    with pytest.raises(PermissionDenied):
        faults.arm("p=drop")
    faults.arm_from_environment()
    assert not faults.strike("p")


def test_a_process_with_the_variable_is_armed_by_it_and_can_be_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.ENV, "p=drop, q=count")
    faults.arm_from_environment()
    assert faults.strike("p")
    faults.arm("q=drop")
    assert not faults.strike("p")
    assert faults.strike("q")
    faults.arm("")
    assert not faults.strike("q")
