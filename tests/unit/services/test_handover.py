"""A running choice is given away: the ticket, what is said again, and who lets go of the pages."""

from __future__ import annotations

from engine.api import HandedOver, Mode, Tokens
from engine.plan import Logprob
from kvtransfer.source import Caller, State
from kvtransfer.types import Below, LegKey
from protos.v1 import common_pb2, decode_pb2, kvsource_pb2
from tests.unit.services.decoding import KEY, Setup, admitted, cancel, decoding, opened, submit, submitted
from tests.unit.services.fakes import Hold
from tests.unit.services.streams import Stream, decode_stream, ref, work

GONE = LegKey("r1 0", "continuation", 1)


def handover(stream: Stream, choice: int = 0, attempt: int = 1) -> None:
    stream.send(handover=decode_pb2.Handover(ref=ref("r1", attempt), choice=choice))


def leaves(s: Setup, choice: int = 0, *, last: bool = True, count: int = 22, below: Below | None = None) -> Hold:
    """What the engine says when the choice has left."""
    hold = Hold()
    s.engine.emit(HandedOver(KEY, choice, count, 67, (5, 6), (3,), hold, last, below))
    return hold


async def gone(s: Setup) -> tuple[Stream, decode_pb2.HandedOver, Hold]:
    """A leg whose only choice has left after two tokens of its own."""
    stream = await decoding(s)
    s.tokens(1, 66, 67)
    await stream.next()
    handover(stream)
    await stream.settle()
    assert s.engine.given_away == [(KEY, 0)]
    hold = leaves(s)
    return stream, (await stream.next()).handed_over, hold


async def test_what_has_left_is_told_with_its_newest_token_and_a_ticket_for_the_rest(s: Setup) -> None:
    stream, told, hold = await gone(s)

    assert (told.choice, told.token_count, told.first.token) == (0, 22, 67)
    ticket = kvsource_pb2.Ticket.FromString(kvsource_pb2.SignedTicket.FromString(told.ticket.ticket).ticket)
    assert (ticket.kind, ticket.token_count) == (kvsource_pb2.TICKET_KIND_CONTINUATION, 22)
    assert told.ticket.source_address == "127.0.0.1:9"
    watch = s.handoffs.watch(told.ticket.ticket, Caller("d2", 1), 0, 2, lambda: None)
    update = s.handoffs.poll(watch)
    assert update.final is not None
    assert (update.end, update.final.state_length, update.final.slots) == (22, 22, (3,))
    assert [(f.choice, f.token, f.finish) for f in update.final.first] == [(0, 67, 0)]
    assert (s.service.busy(), hold.released) == (0, 0)

    assert s.handoffs.release_lease(watch.lease_id)
    assert hold.released == 1
    await stream.drop()


async def test_the_newest_tokens_logprob_goes_along(s: Setup) -> None:
    stream = await decoding(s)
    s.engine.emit(Tokens(KEY, 0, 1, (66,), (Logprob(66, -0.5, 2),), 0, last=False))
    await stream.next()
    leaves(s, count=21)
    told = (await stream.next()).handed_over
    assert (told.first.logprob.token, told.first.logprob.logprob, told.first.logprob.rank) == (66, -0.5, 2)
    await stream.drop()


async def test_what_lies_on_the_host_is_read_from_there(s: Setup) -> None:
    stream = await decoding(s)
    below = Below(0, ((1,), (2,)), ((3,),))
    leaves(s, below=below)
    told = (await stream.next()).handed_over
    assert s.handoffs.watch(told.ticket.ticket, Caller("d2", 1), 0, 2, lambda: None).below == below
    await stream.drop()


async def test_asked_again_it_says_the_same_and_opens_nothing_twice(s: Setup) -> None:
    stream, told, _ = await gone(s)
    handover(stream)
    again = (await stream.next()).handed_over
    assert again == told
    assert s.engine.given_away == [(KEY, 0)]
    assert s.handoffs.counts().leased == 1
    await stream.drop()


async def test_a_router_that_comes_back_hears_of_it(s: Setup) -> None:
    stream, told, _ = await gone(s)
    await stream.drop()
    s.tick(1.0)

    back = decode_stream(s.service)
    await back.open(common_pb2.Resume(ref=ref("r1", 1), next_sequence=[3]))

    kinds = {}
    for _ in range(2):
        event = await back.next()
        kinds[event.WhichOneof("event")] = event
    assert kinds["handed_over"].handed_over == told
    await back.drop()


async def test_the_routers_word_frees_it_at_once(s: Setup) -> None:
    stream, _, hold = await gone(s)
    stream.send(cancel=common_pb2.Cancel(ref=ref("r1", 1), reason="the client left"))
    await stream.settle()
    assert hold.released == 1
    assert s.handoffs.state(GONE) is State.RELEASED
    assert s.service.remembered() == 0
    await stream.drop()


async def test_without_the_routers_word_the_lease_ends_and_then_it_is_forgotten(s: Setup) -> None:
    stream, _, hold = await gone(s)
    s.tick(8.0)
    assert s.service.remembered() == 1, "a word to free it may still come"
    s.clock.advance(2.5)
    s.handoffs.expire()
    assert hold.released == 1
    s.tick(0.1)
    assert s.service.remembered() == 0
    await stream.drop()


async def test_a_lost_router_frees_nothing_that_may_still_be_read(s: Setup) -> None:
    stream, told, hold = await gone(s)
    await stream.drop()
    s.tick(2.5)
    assert s.service.remembered() == 0
    assert hold.released == 0
    s.handoffs.watch(told.ticket.ticket, Caller("d2", 1), 0, 2, lambda: None)


async def test_one_choice_leaves_and_the_others_go_on(s: Setup) -> None:
    stream = await admitted(s, local=True, n=2)
    hold = leaves(s, 1, last=False)
    assert (await stream.next()).handed_over.choice == 1
    assert s.service.busy() == 1

    await cancel(stream, 1)
    assert hold.released == 1
    assert s.engine.cancelled == []

    s.tokens(0, 65, choice=0, finish=int(common_pb2.FINISH_REASON_STOP))
    assert (await stream.next()).tokens.finish == common_pb2.FINISH_REASON_STOP
    assert s.service.busy() == 0
    await stream.drop()


async def test_giving_up_one_of_two_that_left_keeps_the_other(s: Setup) -> None:
    stream = await admitted(s, local=True, n=2)
    holds = [leaves(s, 0, last=False), leaves(s, 1)]
    await cancel(stream, 0)
    assert [hold.released for hold in holds] == [1, 0]
    await cancel(stream, 1)
    assert [hold.released for hold in holds] == [1, 1]
    assert s.service.remembered() == 0
    await stream.drop()


async def test_the_last_choice_that_runs_stops_on_the_routers_word_beside_one_that_left(s: Setup) -> None:
    stream = await admitted(s, local=True, n=2)
    hold = leaves(s, 0, last=False)
    await stream.next()

    await cancel(stream, 1)  # a stop string

    assert s.engine.cancelled == [KEY], "it would go on to its last token for nobody"
    assert (s.service.busy(), s.service.remembered(), hold.released) == (0, 1, 0)
    await cancel(stream, 0)
    assert (s.service.remembered(), hold.released) == (0, 1)
    await stream.drop()


async def test_a_choice_whose_end_the_router_has_seen_leaves_nothing(s: Setup) -> None:
    stream = await admitted(s, local=True, n=2)
    await cancel(stream, 1)  # a stop string
    hold = leaves(s, 1, last=False)  # it had left before the engine heard of that
    await stream.settle()
    assert hold.released == 1
    assert s.handoffs.counts().leased == 0
    assert s.service.busy() == 1
    await stream.drop()


async def test_what_cannot_be_promised_ends_its_own_request_and_no_other(s: Setup) -> None:
    stream = await decoding(s)
    submit(stream, work("r2", tokens=range(20)), local=True)
    await stream.settle()
    other = LegKey("r2", "decode", 1)
    hold = Hold()
    s.engine.emit(
        HandedOver(KEY, 0, 99, 67, (5, 6), (3,), hold, last=True),  # two pages cannot hold so much: a fault of ours
        Tokens(other, 0, 0, (70,), (None,), 0, last=False),
    )
    said = [await stream.next(), await stream.next()]
    assert [(event.ref.request_id, event.WhichOneof("event")) for event in said] == [("r1", "failed"), ("r2", "tokens")]
    assert (said[0].failed.error.reason, hold.released) == ("internal", 1)
    assert s.engine.cancelled == [KEY, KEY]
    assert s.service.busy() == 1
    await stream.drop()


async def test_what_left_when_its_leg_is_gone_is_let_go(s: Setup) -> None:
    stream = await decoding(s)
    await cancel(stream)
    assert leaves(s).released == 0
    hold = leaves(s)
    await stream.settle()
    assert hold.released == 1
    await stream.drop()


async def test_a_request_that_is_not_complete_fails_so_that_another_worker_gets_it(s: Setup) -> None:
    stream = await submitted(s, more_tokens=True)
    handover(stream)
    failed = (await stream.next()).failed
    assert (failed.error.reason, failed.error.retryable, failed.kv_lost) == ("draining", True, False)
    assert s.engine.given_away == []
    await stream.drop()


async def test_nobodys_choice_is_nobodys_business(s: Setup) -> None:
    stream = await opened(s)
    handover(stream, attempt=9)
    await stream.settle()
    assert s.engine.given_away == []
    await stream.drop()


async def test_one_choice_alone_may_be_named_right_after_the_prompt(s: Setup) -> None:
    stream = await submitted(s, choice=3)
    leg = s.engine.submitted[KEY]
    assert (leg.mode, leg.n, leg.choice) == (Mode.REMOTE, 1, 3)
    submit(stream, work("r2", tokens=range(20), n=2, choice=1))
    assert (await stream.next()).failed.error.field == "choice"
    await stream.drop()
