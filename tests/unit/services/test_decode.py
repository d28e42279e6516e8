"""Decode legs from their submission to the first tokens: tickets, pulls, and what arrives."""

from __future__ import annotations

import resource

import pytest

from engine.api import Admitted, Mode, Tokens
from kvtransfer.types import First, LegKey, Pulled
from protos.v1 import common_pb2
from runtime.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    KvLost,
    LayoutMismatch,
    PdserveError,
    TicketInvalid,
    TransferFailed,
)
from tests.unit.services.decoding import KEY, PULLED, STOP, Setup, opened, pulling, submit, ticket
from tests.unit.services.streams import ref, work


async def test_a_verified_hand_off_starts_decoding_from_the_first_token(s: Setup) -> None:
    stream = await pulling(s)
    signed, address, destination, _, fence = s.puller.calls[0]
    assert (signed, address, fence) == (b"signed", "127.0.0.1:1", 7)
    assert (destination.pages, destination.token_count, destination.held) == ((5, 6), 20, 0)
    assert s.engine.started == {}
    s.puller.answers[0].set_result(PULLED)
    times = (await stream.next()).handoff.times
    assert (times.transfer_bytes, times.transfer_pages, times.transfer_s) == (4096, 1, 0.5)
    assert (times.pid, times.transport) == (4711, "inprocess")
    assert s.engine.started == {KEY: (First(0, 65),)}
    s.tokens(1, 66, 67)
    s.tokens(3, 68, finish=STOP)
    assert list((await stream.next()).tokens.tokens) == [66, 67]
    last = (await stream.next()).tokens
    assert (last.first_sequence, last.finish, last.times.decode_s) == (3, STOP, 2.0)
    assert last.times.transfer_bytes == 4096
    await stream.drop()


@pytest.mark.parametrize("order", ["ticket first", "admission first", "ticket before submit"])
async def test_ticket_and_admission_may_come_in_any_order(s: Setup, order: str) -> None:
    stream = await opened(s)
    if order == "ticket before submit":
        ticket(stream)
    submit(stream, work(tokens=range(20)))
    await stream.settle()
    if order == "ticket first":
        ticket(stream)
        await stream.settle()
    assert s.puller.calls == []
    s.admit(ready=16)
    if order == "admission first":
        ticket(stream)
    await stream.settle()
    assert [c[2].held for c in s.puller.calls] == [16]
    await stream.drop()


async def test_all_tokens_of_a_step_travel_in_one_message(s: Setup) -> None:
    stream = await opened(s)
    for name in ("a", "b", "c"):
        submit(stream, work(name), local=True)
    await stream.settle()
    before = len(stream.messages)
    keys = [LegKey(name, "decode", 1) for name in ("a", "b", "c")]
    s.engine.emit(*(Tokens(k, 0, 0, (65,), (None,), 0, last=False) for k in keys))
    await stream.settle()
    assert [len(m.events) for m in stream.messages[before:]] == [3]
    assert stream.messages[-1].step == 3
    assert stream.messages[-1].load.pages_total == 9
    await stream.drop()


async def test_a_local_leg_needs_no_ticket_and_no_pull(s: Setup) -> None:
    stream = await opened(s)
    submit(stream, work(), local=True)
    await stream.settle()
    assert s.engine.submitted[KEY].mode is Mode.LOCAL
    s.engine.emit(Admitted(KEY, (5,), (), 0, s.hold))
    ticket(stream)
    s.engine.emit(Tokens(KEY, 0, 0, (65,), (None,), STOP, last=True, cached_tokens=2, prefill_s=1.0))
    last = (await stream.next()).tokens
    assert (last.times.cached_tokens, last.times.prefill_s, last.times.transport) == (2, 1.0, "")
    assert s.puller.calls == []
    assert s.hold.released == 1
    await stream.drop()


async def test_a_checksum_mismatch_is_recomputed_and_never_started(s: Setup) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_exception(ChecksumMismatch("page 3"))
    await stream.settle()
    assert s.engine.recomputed == [KEY]
    assert s.engine.started == {}
    s.engine.emit(Tokens(KEY, 0, 0, (65,), (None,), 0, last=False, recomputed_tokens=20))
    assert (await stream.next()).handoff.times.recomputed_tokens == 20
    assert (await stream.next()).tokens.first_sequence == 0
    await stream.drop()


@pytest.mark.parametrize(
    ("error", "kv_lost"),
    [
        (TicketInvalid("expired"), True),
        (KvLost("gone"), True),
        (TransferFailed("reset"), True),
        (LayoutMismatch("page_tokens differs"), False),
        (DeadlineExceeded("too late"), False),
    ],
)
async def test_a_failed_pull_ends_the_leg_and_says_whether_the_prompt_is_needed_again(
    s: Setup, error: PdserveError, kv_lost: bool
) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_exception(error)
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.kv_lost) == (error.reason, kv_lost)
    assert s.engine.cancelled == [KEY]
    assert s.hold.released == 1
    await stream.drop()


async def test_a_bug_in_a_pull_costs_one_request_and_shows_no_text(s: Setup) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_exception(ValueError("/secret/path"))
    failed = (await stream.next()).failed
    assert failed.error.reason == "internal"
    assert "secret" not in failed.error.message
    await stream.drop()


async def test_a_hand_off_of_another_length_is_not_started(s: Setup) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_result(Pulled(19, (First(0, 65),), 1, 1, 0, 0, 0))
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.kv_lost) == ("length_mismatch", True)
    assert s.engine.started == {}
    await stream.drop()


@pytest.mark.parametrize(
    "first",
    [
        First(0, 256),
        First(0, 2**32 - 1),
        First(0, 65, finish=77),
        First(0, 65, finish=5),
        First(0, 65, logprob=b"\xff"),
    ],
)
async def test_a_first_token_that_no_model_of_ours_samples_is_not_started(s: Setup, first: First) -> None:
    stream = await pulling(s)
    s.puller.answers[0].set_result(Pulled(20, (first,), 1, 1, 0, 0, 0))
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.kv_lost) == ("first_mismatch", True)
    assert s.engine.started == {}
    assert s.engine.cancelled == [KEY]
    await stream.drop()


@pytest.mark.parametrize("more", [False, True])
async def test_a_number_of_choices_is_no_size_before_it_is_checked(s: Setup, *, more: bool) -> None:
    stream = await opened(s)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    submit(stream, work(n=20_000_000, more_tokens=more), local=True)
    if more:
        stream.send(tokens=common_pb2.TokenChunk(ref=ref(), offset=3, tokens=[4]))
    failed = (await stream.next()).failed
    assert failed.error.field == "n"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 100_000  # KiB; a set of them takes 1.5 GB
    await stream.drop()


async def test_the_time_the_rest_of_a_prompt_takes_is_the_requests_own(s: Setup) -> None:
    stream = await opened(s)
    arrived = s.clock.monotonic()
    submit(stream, work(more_tokens=True), local=True)
    await stream.settle()
    s.clock.advance(50.0)
    stream.send(tokens=common_pb2.TokenChunk(ref=ref(), offset=3, tokens=[4]))
    await stream.settle()
    assert s.engine.submitted[KEY].deadline == arrived + 60.0
    await stream.drop()
