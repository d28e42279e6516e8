"""A request's ledger before and after it becomes a message."""

from __future__ import annotations

from protos.v1 import common_pb2, inference_pb2
from router.request import Ledger


def test_a_ledger_has_every_field_of_its_message_in_its_order() -> None:
    assert list(Ledger().values()) == [field.name for field in inference_pb2.Ledger.DESCRIPTOR.fields]
    assert Ledger().wire() == inference_pb2.Ledger()


def test_times_are_those_of_the_worker_that_did_it() -> None:
    ledger = Ledger(render_s=0.5)
    ledger.placed("p", "d")
    ledger.prefilled(common_pb2.StageTimes(prefill_s=1.0, pid=1, cached_tokens=7))
    ledger.prefilled(common_pb2.StageTimes(prefill_s=9.0, pid=9))  # of a continuation
    ledger.handed_over(common_pb2.StageTimes(transfer_bytes=64, pid=2))
    ledger.decoded(common_pb2.StageTimes(decode_s=2.0, pid=2))

    wire = ledger.wire()

    assert (wire.render_s, wire.prefill_s, wire.decode_s, wire.transfer_bytes) == (0.5, 1.0, 2.0, 64)
    assert (wire.prefill_pid, wire.decode_pid, ledger.cached_tokens) == (1, 2, 7)
    assert ledger.values()["prefill_worker"] == wire.prefill_worker == "p"
    assert Ledger().prefill == common_pb2.StageTimes(), "what is shared was not written to"
