from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.demo import Answer, Worker, expected_bytes, faults
from pdserve.results import Ledger, Usage
from protos.v1 import inference_pb2, kvsource_pb2, worker_pb2

PREFILL = Worker("prefill-0", 11, "nixl", 16, 1000, 0)
DECODE = replace(PREFILL, name="decode-0", pid=22)
LEDGER = replace(
    Ledger.of(inference_pb2.Ledger()),
    prefill_pid=11,
    decode_pid=22,
    transport="nixl",
    transfer_bytes=3000,
    transfer_pages=3,
)
GOOD = Answer("Paris", Usage(37, 8, 45, 0), LEDGER)


def test_sizes_come_from_the_workers_own_layout() -> None:
    kv = kvsource_pb2.Component(name="kv", paged=True, units=3, layers=30, rows=2, tokens=16, token_bytes=128)
    state = kvsource_pb2.Component(name="recurrent", units=4, layers=2, rows=1, tokens=1, token_bytes=100)
    layout = kvsource_pb2.Layout(page_tokens=16, components=[kv, state])
    worker = Worker.of(worker_pb2.DescribeReply(worker_id="d", pid=1, transport="nixl", layout=layout))
    assert (worker.page_bytes, worker.slot_bytes) == (3 * 30 * 2 * 16 * 128, 800)
    assert expected_bytes(33, worker) == 3 * worker.page_bytes + 800


def test_a_proven_hand_off_has_no_faults() -> None:
    assert faults(GOOD, PREFILL, DECODE) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"decode_pid": 11}, "one process"),
        ({"prefill_pid": 0}, "one process"),
        ({"decode_pid": 33}, "not those of the workers"),
        ({"transport": "inprocess"}, "not nixl"),
        ({"transport": ""}, "none, not nixl"),
        ({"transfer_bytes": 0}, "0 bytes moved, 3000 expected"),
        ({"transfer_bytes": 2000}, "2000 bytes moved"),
        ({"transfer_pages": 2}, "2 pages moved, 3 expected"),
    ],
)
def test_anything_else_fails_and_says_why(change: dict[str, object], says: str) -> None:
    answer = replace(GOOD, ledger=replace(LEDGER, **change))  # type: ignore[arg-type]
    assert any(says in fault for fault in faults(answer, PREFILL, DECODE))


def test_a_worker_with_the_test_transport_fails_whatever_the_ledger_says() -> None:
    assert faults(GOOD, PREFILL, replace(DECODE, transport="inprocess"))


def test_an_empty_answer_fails() -> None:
    assert faults(replace(GOOD, text=" "), PREFILL, DECODE) == ["the answer is empty"]
