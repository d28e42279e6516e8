"""What other routers have at the same workers, read from reports."""

from __future__ import annotations

import copy

import pytest

from protos.v1 import common_pb2
from router.policy.ledger import Demand, Ledger
from router.policy.pairing import Role
from router.policy.speeds import Speeds
from router.policy.view import WorkerView
from router.shared.others import Others


def others(*, present: bool = True) -> Others:
    made = Others(Speeds())
    made.present = present
    return made


def view(role: Role = Role.DECODE) -> tuple[Ledger, WorkerView]:
    ledger, made = Ledger(), WorkerView("w", role, kv_tokens=1600, slots=8)
    ledger.add(made)
    return ledger, made


def load(sequence: int, **fields: int) -> common_pb2.Load:
    given = {"pages_total": 100, "pages_free": 100, "slots_total": 8, "slots_free": 8} | fields
    return common_pb2.Load(sequence=sequence, **given)  # type: ignore[arg-type]


def test_a_router_that_is_alone_decides_on_its_own_books() -> None:
    _, mine = view()
    assert others(present=False).corrected(mine, load(1, running=9, pages_free=0), 0.0) is mine


def test_what_is_not_ours_is_theirs() -> None:
    ledger, mine = view()
    ledger.reserve(("r", 1), {"w": Demand(tokens=320, context=320, decode=True, slots=1)}, 0.0)
    seen = others().corrected(mine, load(1, running=4, pages_free=40, slots_free=4), 0.0)
    assert (seen.decoding, seen.held_tokens, seen.kv_tokens, seen.slots) == (4, 320, 1600 - 640, 8 - 3)
    assert seen.room_tokens() == 1600 - 960, "what the worker says it has left"
    assert (mine.decoding, mine.kv_tokens) == (1, 1600), "nothing is booked"


def test_prompts_of_others_stand_before_the_next_one_of_ours() -> None:
    ledger, mine = view(Role.PREFILL)
    ledger.reserve(("r", 1), {"w": Demand(prefill_tokens=100, prefill_s=0.5)}, 0.0)
    both = others()
    seen = both.corrected(mine, load(1, waiting=3, queued_prefill_tokens=900), 1.0)
    assert seen.prefill_tokens == 900
    assert seen.queue_s(0.0) > mine.queue_s(0.0)
    assert seen.decoding == 0
    _, empty = view(Role.PREFILL)
    seen = others().corrected(empty, load(1, waiting=3, queued_prefill_tokens=900), 50.0)
    assert seen.queue_s(50.0) > 0.0, "it has only just been heard of"


def test_what_we_send_after_a_report_is_not_taken_for_theirs_and_what_we_sent_before_is_not_counted_twice() -> None:
    ledger, mine = view()
    made = others()
    report = load(1, running=2)
    assert made.corrected(mine, report, 0.0).decoding == 2
    ledger.reserve(("r", 1), {"w": Demand(tokens=16, decode=True)}, 0.0)
    assert made.corrected(mine, report, 0.0).decoding == 3, "two of theirs as of then, one of ours since"
    assert made.corrected(mine, load(2, running=3), 0.0).decoding == 3


@pytest.mark.parametrize("role", list(Role))
def test_a_report_that_holds_less_than_our_books_changes_nothing(role: Role) -> None:
    ledger, mine = view(role)
    ledger.reserve(("r", 1), {"w": Demand(tokens=320, context=320, decode=True, prefill_tokens=320)}, 0.0)
    before = copy.copy(mine)
    assert others().corrected(mine, load(1), 0.0) is mine
    assert mine.held_tokens == before.held_tokens
