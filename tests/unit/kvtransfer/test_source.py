"""What a hand-off promises, to whom, until when."""

from __future__ import annotations

import pytest

from kvtransfer.layout import fingerprint
from kvtransfer.source import Caller, HandoffStore, State
from kvtransfer.tickets import TicketMint
from kvtransfer.types import Layout
from protos.v1 import kvsource_pb2 as pb
from runtime.errors import DeadlineExceeded, InvalidRequest, KvLost, PdserveError, TicketInvalid, WorkerLost
from tests.unit.kvtransfer.support import (
    KV,
    LAYOUT,
    LEASE_S,
    OTHER,
    PAGES,
    READER,
    TOKENS,
    CountingHold,
    World,
    key,
)


@pytest.fixture
def world() -> World:
    return World()


def refused(world: World, ticket: bytes, **options: object) -> str:
    with pytest.raises(TicketInvalid) as caught:
        world.watch(ticket, **options)  # type: ignore[arg-type]
    return caught.value.message


def test_a_reader_may_watch_before_any_token_is_ready(world: World) -> None:
    watch = world.watch(world.open())
    update = world.store.poll(watch)
    assert (update.start, update.end, update.final, update.error) == (0, 0, None, None)


def test_ranges_are_handed_out_once_in_whole_pages_and_the_last_one_at_the_end(world: World) -> None:
    watch = world.watch(world.open())
    world.store.range_ready(key(), 0, 40)
    first = world.store.poll(watch)
    world.store.range_ready(key(), 32, TOKENS)
    second = world.store.poll(watch)
    third = world.store.poll(watch)
    assert [(u.start, u.end) for u in (first, second, third)] == [(0, 32), (32, TOKENS), (TOKENS, TOKENS)]


def test_tokens_of_a_prefix_hit_are_readable_at_once(world: World) -> None:
    watch = world.watch(world.open(ready=48))
    assert world.store.poll(watch).end == 48


def test_a_reader_that_holds_a_part_is_served_from_the_page_of_its_first_missing_token(world: World) -> None:
    watch = world.watch(world.open(ready=64), first_token=37)
    update = world.store.poll(watch)
    assert (update.start, update.end) == (32, 64)


def test_every_change_wakes_the_watcher(world: World) -> None:
    world.watch(world.open())
    world.store.range_ready(key(), 0, 16)
    world.final()
    world.store.release(key())
    assert world.wakes == 3


def test_the_final_message_is_handed_out_once_with_first_tokens_and_slots(world: World) -> None:
    watch = world.watch(world.open())
    world.final()
    update = world.store.poll(watch)
    assert update.end == TOKENS
    assert update.final is not None
    assert update.final.state_length == TOKENS
    assert update.final.first[0].token == 42
    assert update.final.slots == (1,)
    assert world.store.poll(watch).final is None


def test_pages_are_released_when_the_reader_confirms_and_only_once(world: World) -> None:
    watch = world.watch(world.open())
    world.final()
    assert world.store.release_lease(watch.lease_id)
    assert not world.store.release_lease(watch.lease_id)
    assert not world.store.release(key())
    assert world.releases() == 1
    assert world.store.state(key()) is State.RELEASED


def test_the_router_may_release_at_any_time_and_the_watcher_is_told(world: World) -> None:
    watch = world.watch(world.open())
    assert world.store.release(key())
    assert isinstance(world.store.poll(watch).error, TicketInvalid)
    assert world.releases() == 1


def test_a_failed_prompt_releases_its_pages_and_tells_the_watcher_why(world: World) -> None:
    watch = world.watch(world.open())
    world.store.fail(key(), WorkerLost("the engine stopped"))
    error = world.store.poll(watch).error
    assert isinstance(error, WorkerLost)
    assert world.releases() == 1


def test_what_the_engine_says_after_the_end_changes_nothing(world: World) -> None:
    world.open()
    world.store.release(key())
    assert not world.store.range_ready(key(), 0, 16)
    assert not world.final()
    assert not world.store.fail(key(), KvLost("late"))
    assert world.releases() == 1


# --- leases -------------------------------------------------------------------------------------------------------


def test_no_lease_runs_while_the_prompt_is_computed(world: World) -> None:
    world.open()
    world.clock.advance(100 * LEASE_S)
    assert world.store.expire() == []
    assert world.releases() == 0


def test_a_prompt_that_misses_its_deadline_fails(world: World) -> None:
    watch = world.watch(world.open(deadline=world.clock.monotonic() + 5))
    world.clock.advance(5)
    assert world.store.expire() == [key()]
    assert isinstance(world.store.poll(watch).error, DeadlineExceeded)
    assert world.store.state(key()) is State.FAILED


def test_the_lease_starts_at_the_final_range_and_ends_on_time_not_earlier(world: World) -> None:
    world.open()
    world.clock.advance(50)
    world.final()
    world.clock.advance(LEASE_S - 0.001)
    assert world.store.expire() == []
    world.clock.advance(0.001)
    assert world.store.expire() == [key()]
    assert world.releases() == 1
    assert world.store.state(key()) is State.EXPIRED


def test_a_deadline_does_not_end_a_computed_prompt(world: World) -> None:
    world.open(deadline=world.clock.monotonic() + 5)
    world.final()
    world.clock.advance(6)
    assert world.store.expire() == []


def test_renewals_and_the_watch_itself_extend_the_lease(world: World) -> None:
    ticket = world.open()
    world.final()
    world.clock.advance(LEASE_S - 1)
    watch = world.watch(ticket)
    world.clock.advance(LEASE_S - 1)
    assert world.store.expire() == []
    assert world.store.renew(READER, [watch.lease_id]) == []
    world.clock.advance(LEASE_S - 1)
    assert world.store.expire() == []
    world.clock.advance(1)
    assert world.store.expire() == [key()]


def test_one_renewal_carries_all_leases_of_a_pair_and_names_the_lost_ones(world: World) -> None:
    first = world.watch(world.open(key("a")))
    second = world.watch(world.open(key("b")))
    world.store.release(key("a"))
    assert world.store.renew(READER, [first.lease_id, second.lease_id, "unknown"]) == [first.lease_id, "unknown"]


def test_a_renewal_after_the_lease_ran_out_is_refused_even_before_the_reaper_came(world: World) -> None:
    watch = world.watch(world.open())
    world.final()
    world.clock.advance(LEASE_S)
    assert world.store.renew(READER, [watch.lease_id]) == [watch.lease_id]


def test_nobody_renews_a_lease_of_another_worker_or_of_its_own_earlier_life(world: World) -> None:
    watch = world.watch(world.open())
    assert world.store.renew(OTHER, [watch.lease_id]) == [watch.lease_id]
    assert world.store.renew(Caller("d", 2), [watch.lease_id]) == [watch.lease_id]


def test_a_step_of_the_wall_clock_ends_no_lease(world: World) -> None:
    """Public report T030 (NVIDIA/TensorRT-LLM#8005; etcd-io/etcd#12291)."""
    world.open()
    world.final()
    world.clock.step_wall(-3600)
    assert world.store.expire() == []
    world.clock.step_wall(7200)
    assert world.store.expire() == []


# --- fences -------------------------------------------------------------------------------------------------------


def test_a_higher_fence_supersedes_and_the_older_watcher_is_told(world: World) -> None:
    ticket = world.open()
    old = world.watch(ticket, READER, fence=1)
    new = world.watch(ticket, OTHER, fence=2)
    assert isinstance(world.store.poll(old).error, TicketInvalid)
    assert not world.store.held(old)
    assert world.store.held(new)
    assert world.wakes == 1


def test_a_lower_fence_is_refused(world: World) -> None:
    ticket = world.open()
    world.watch(ticket, READER, fence=3)
    assert "superseded" in refused(world, ticket, caller=OTHER, fence=2)


def test_the_same_fence_is_refused_to_another_worker_and_granted_to_the_same_again(world: World) -> None:
    ticket = world.open()
    first = world.watch(ticket, READER, fence=1)
    refused(world, ticket, caller=OTHER, fence=1)
    again = world.watch(ticket, READER, fence=1)
    assert not world.store.held(first)
    assert world.store.held(again)


def test_a_late_release_of_a_superseded_reader_frees_nothing(world: World) -> None:
    ticket = world.open()
    old = world.watch(ticket, READER, fence=1)
    world.final()
    world.watch(ticket, OTHER, fence=2)
    assert not world.store.release_lease(old.lease_id)
    assert world.releases() == 0


def test_a_late_release_of_an_earlier_attempt_leaves_the_newer_one_alone(world: World) -> None:
    """Public report T073 (kvcache-ai/Mooncake#3030)."""
    old = world.watch(world.open(key(attempt=1)))
    world.store.release(key(attempt=1))
    world.open(key(attempt=2))
    assert not world.store.release_lease(old.lease_id)
    assert world.releases(key(attempt=2)) == 0


def test_another_decode_worker_may_take_the_same_ticket_after_the_first_is_lost(world: World) -> None:
    ticket = world.open()
    world.watch(ticket, READER, fence=1)
    world.final()
    second = world.watch(ticket, OTHER, fence=2)
    update = world.store.poll(second)
    assert (update.start, update.end) == (0, TOKENS)
    assert update.final is not None


# --- tickets ------------------------------------------------------------------------------------------------------


def test_an_unknown_a_released_and_an_expired_ticket_are_refused_by_name(world: World) -> None:
    ticket = world.open()
    world.store.release(key())
    assert "released" in refused(world, ticket)
    expired = world.open(key("b"))
    world.final(key("b"))
    world.clock.advance(LEASE_S)
    world.store.expire()
    assert "expired" in refused(world, expired)
    unknown, _ = world.mint.mint(key("never"), TOKENS)
    assert "unknown" in refused(world, unknown)


def test_a_ticket_of_another_epoch_is_refused(world: World) -> None:
    world.open()
    ticket, _ = TicketMint("p", 6, fingerprint(LAYOUT)).mint(key(), TOKENS)
    refused(world, ticket)


def test_a_ticket_of_an_earlier_hand_off_under_the_same_key_is_refused(world: World) -> None:
    old = world.open()
    world.store.release(key())
    world.open()
    assert "earlier" in refused(world, old)


@pytest.mark.parametrize("part", ["ticket", "mac"])
def test_a_ticket_changed_in_one_bit_is_refused(world: World, part: str) -> None:
    signed = pb.SignedTicket.FromString(world.open())
    value = bytearray(getattr(signed, part))
    value[len(value) // 2] ^= 1
    setattr(signed, part, bytes(value))
    refused(world, signed.SerializeToString())


def test_a_ticket_that_says_more_tokens_than_were_promised_is_refused_even_with_a_good_signature(world: World) -> None:
    world.open()
    forged, _ = world.mint.mint(key(), TOKENS * 2)
    refused(world, forged)


@pytest.mark.parametrize("kind", [pb.TICKET_KIND_UNSPECIFIED, pb.TICKET_KIND_CONTINUATION])
def test_kinds_that_are_not_served_are_refused(world: World, kind: pb.TicketKind.ValueType) -> None:
    signed = pb.SignedTicket.FromString(world.open())
    ticket = pb.Ticket.FromString(signed.ticket)
    ticket.kind = kind
    signed.ticket = ticket.SerializeToString()
    signed.mac = world.mint._mac(signed.ticket)
    refused(world, signed.SerializeToString())


@pytest.mark.parametrize("garbage", [b"", b"x", b"\xff" * 100, b"\0" * 5000])
def test_garbage_is_refused(world: World, garbage: bytes) -> None:
    refused(world, garbage)


@pytest.mark.parametrize("first_token", [TOKENS, TOKENS + 1, 2**31])
def test_a_first_token_outside_the_prompt_is_refused(world: World, first_token: int) -> None:
    refused(world, world.open(), first_token=first_token)


def test_a_ticket_of_another_layout_is_refused(world: World) -> None:
    mint = TicketMint("p", 7, fingerprint(LAYOUT))
    other = TicketMint("p", 7, fingerprint(Layout((KV,), "model-a", 512)))
    other._key = mint._key
    store = HandoffStore(mint, world.clock, LEASE_S)
    ticket, _ = other.mint(key(), TOKENS)
    with pytest.raises(TicketInvalid, match="layout"):
        store.watch(ticket, READER, 0, 1, lambda: None)


def test_a_ticket_bound_to_an_identity_is_refused_to_others(world: World) -> None:
    ticket = world.open(peer_identity="spiffe://d")
    refused(world, ticket, caller=Caller("d", 1, "spiffe://e"))
    refused(world, ticket, caller=Caller("d", 1))
    world.watch(ticket, caller=Caller("d", 1, "spiffe://d"))


def test_a_key_that_is_live_is_not_opened_twice_and_the_caller_keeps_its_hold(world: World) -> None:
    world.open()
    hold = CountingHold()
    with pytest.raises(InvalidRequest):
        world.store.open(key(), pages=PAGES, token_count=TOKENS, ready=0, hold=hold)
    assert hold.releases == 0


@pytest.mark.parametrize(("pages", "tokens", "ready"), [(PAGES, 113, 0), (PAGES, 96, 0), ((), 0, 0), (PAGES, 100, 101)])
def test_pages_that_do_not_fit_the_tokens_are_refused(
    world: World, pages: tuple[int, ...], tokens: int, ready: int
) -> None:
    with pytest.raises(InvalidRequest):
        world.store.open(key(), pages=pages, token_count=tokens, ready=ready, hold=CountingHold())


def test_counts_say_what_is_computing_leased_and_how_many_pages_are_promised(world: World) -> None:
    world.open(key("a"))
    world.open(key("b"))
    world.final(key("b"))
    counts = world.store.counts()
    assert (counts.computing, counts.leased, counts.pages) == (1, 1, 2 * len(PAGES))


def test_closing_ends_every_hand_off(world: World) -> None:
    watch = world.watch(world.open())
    world.store.close()
    error = world.store.poll(watch).error
    assert isinstance(error, PdserveError)
    assert world.releases() == 1
