"""Two small engines under everything that can happen in any order; each answer is the undisturbed one or none.

Pages run out, requests share prefixes, fork, are preempted, cancelled, expire; hand-offs arrive, arrive late, arrive
never, or are written into after their request is gone; running choices leave and go on at the other engine. The oracle
turns any wrong byte into a wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import Admitted, EngineRequest, Failed, HandedOver, Mode, Needs, Reserved, Retention, SourceDone, Tokens
from kvtransfer.types import First, Hold, LegKey
from runtime.errors import DeadlineExceeded, Draining
from tests.unit.engine_core.lab import VOCAB, Lab, move, prompt, request, undisturbed

JUNK = 0xEE


@dataclass
class Leg:
    """A leg of a request at one engine."""

    lab: Lab
    request: EngineRequest
    cancelled: bool = False
    settled: bool = False  # REMOTE: started or recomputing
    hold: Hold | None = None
    first: tuple[First, ...] = ()
    asked: bool = False  # to give a choice away
    origin: EngineRequest | None = None  # it is one choice of this, which has left elsewhere

    @property
    def left(self) -> list[HandedOver]:
        return [e for e in self.lab.of(self.key) if isinstance(e, HandedOver)]

    @property
    def right(self) -> list[tuple[int, ...]]:
        """What each of its choices says."""
        whole = self.origin or self.request
        said = undisturbed(whole.tokens, whole.sampling, whole.n, self.lab.state)
        if self.origin is None:
            return list(said)
        return [said[self.request.choice][len(self.request.tokens) - self.request.prompt_len :]]

    def choices(self) -> list[int]:
        return [self.request.choice] if self.origin is not None else list(range(self.request.n))

    @property
    def key(self) -> LegKey:
        return self.request.key

    @property
    def admitted(self) -> Admitted | None:
        return next((e for e in self.lab.of(self.key) if isinstance(e, Admitted)), None)

    @property
    def done(self) -> SourceDone | None:
        return next((e for e in self.lab.of(self.key) if isinstance(e, SourceDone)), None)

    @property
    def failed(self) -> bool:
        return any(isinstance(e, Failed) for e in self.lab.of(self.key))

    def take_hold(self) -> None:
        if self.hold is None and self.admitted is not None:
            self.hold = self.admitted.hold


@dataclass
class Pair:
    p: Leg
    d: Leg
    landing: bool = True  # somebody may still write into D's pages
    read: bool = True  # P's pages may still be read


@dataclass
class Departure:
    """What a choice has left at d, and the leg at p that goes on with it."""

    event: HandedOver
    onward: Leg | None = None
    over: bool = False


@dataclass
class World:
    pairs: list[Pair] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    departures: dict[tuple[LegKey, int], Departure] = field(default_factory=dict)


lengths = st.sampled_from([1, 15, 16, 17, 33, 48, 70, 96])
outputs = st.sampled_from([1, 2, 9, 30, 60])


class EnginesMachine(RuleBasedStateMachine):
    STATE = False
    HINTS = (Retention(), Retention(b"talk", 3, 3.0), Retention(priority=-2), Retention(b"other", ttl_s=5.0))
    DUES = (None, 1e4, 0.0, None, 1002.0, -5.0)

    def __init__(self) -> None:
        super().__init__()
        self.p = Lab(pages=14, state=self.STATE)
        self.d = Lab(pages=14, state=self.STATE)
        self.world = World()
        self.names = iter(range(10**6))
        self.bookings: list[tuple[Lab, str]] = []

    def _made(self, mode: Mode, name: str, length: int, output: int, shape: tuple[int, int, int], wait: float) -> Leg:
        n, seed, priority = shape
        lab = self.p if mode is Mode.SOURCE else self.d
        made = request(
            name,
            prompt(length, seed),
            mode,
            n=n,
            deadline=lab.clock.monotonic() + wait,
            priority=priority,
            due=self.DUES[(length + output + seed) % len(self.DUES)],
            max_tokens=output,
            temperature=0.8 if n > 1 else 0.0,
            seed=seed,
            stop_token_ids=(seed, VOCAB - 1),
            retention=self.HINTS[(seed + priority + length) % len(self.HINTS)],
        )
        leg = Leg(lab, made)
        lab.submit(made)
        self.world.legs.append(leg)
        return leg

    shapes = st.tuples(st.sampled_from([1, 1, 2, 3]), st.integers(0, 2), st.integers(-1, 1))
    waits = st.sampled_from([5.0, 1e9, 1e9, 1e9])

    @rule(length=lengths, output=outputs, shape=shapes, wait=waits)
    def submit_local(self, length: int, output: int, shape: tuple[int, int, int], wait: float) -> None:
        self._made(Mode.LOCAL, f"local{next(self.names)}", length, output, shape, wait)

    @rule(length=lengths, output=outputs, shape=shapes, wait=waits)
    def submit_pair(self, length: int, output: int, shape: tuple[int, int, int], wait: float) -> None:
        name = f"pair{next(self.names)}"
        p = self._made(Mode.SOURCE, name, length, output, shape, wait)
        d = self._made(Mode.REMOTE, name, length, output, shape, wait)
        self.world.pairs.append(Pair(p, d))

    @rule(turns=st.integers(1, 12))
    def turn(self, turns: int) -> None:
        self.p.turns(turns)
        self.d.turns(turns)

    @rule()
    def pass_time(self) -> None:
        self.p.clock.advance(2)
        self.d.clock.advance(2)

    @rule(tokens=st.integers(1, 100), at_p=st.booleans())
    def book(self, tokens: int, at_p: bool) -> None:
        lab = self.p if at_p else self.d
        answer = lab.engine.reserve(LegKey(f"booked{next(self.names)}", "decode", 1), Needs(tokens, 16))
        if isinstance(answer, Reserved):
            self.bookings.append((lab, answer.reservation_id))

    @precondition(lambda self: self.bookings)
    @rule()
    def unbook(self) -> None:
        lab, reservation = self.bookings.pop(0)
        lab.engine.cancel_reservation(reservation)

    @precondition(lambda self: self.world.legs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        leg = data.draw(st.sampled_from(self.world.legs))
        leg.lab.engine.cancel(leg.key)
        leg.cancelled = True

    def _arrived(self) -> list[Pair]:
        """Pairs whose pages can land (once: a landing that was started from writes no more)."""
        open_ = (pair for pair in self.world.pairs if pair.read and pair.landing and not pair.d.first)
        return [pair for pair in open_ if pair.p.done and pair.d.admitted]

    @precondition(lambda self: self._arrived())
    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        """The pull is complete, whatever became of the request meanwhile."""
        pair = data.draw(st.sampled_from(self._arrived()))
        assert pair.p.done is not None
        assert pair.p.admitted is not None
        assert pair.d.admitted is not None
        move(self.p, self.d, pair.p.admitted, pair.d.admitted)
        if not pair.d.settled:
            self.d.engine.start(pair.d.key, pair.p.done.first)
            pair.d.first = pair.p.done.first
            pair.d.settled = True
        if not keep:
            self._over(pair)

    @precondition(lambda self: any(not pair.d.settled for pair in self.world.pairs))
    @rule(data=st.data())
    def give_up_the_load(self, data: st.DataObject) -> None:
        """The landing goes on, into pages that are nobody else's yet."""
        pair = data.draw(st.sampled_from([pair for pair in self.world.pairs if not pair.d.settled]))
        self.d.engine.recompute(pair.d.key)
        pair.d.settled = True

    @precondition(lambda self: any(self._wild(pair) for pair in self.world.pairs))
    @rule(data=st.data())
    def write_late(self, data: st.DataObject) -> None:
        """Junk lands in what is (or was) this landing's; then it is over."""
        pair = data.draw(st.sampled_from([pair for pair in self.world.pairs if self._wild(pair)]))
        self.d.turns(1)  # the command that took the pages from the request has been heard
        assert pair.d.admitted is not None
        pages = pair.d.admitted.pages[pair.d.admitted.ready // 16 :]
        self.d.memory()[0][list(pages)] = JUNK
        if self.STATE:
            self.d.memory()[1][list(pair.d.admitted.slots)] = JUNK
        self._over(pair)

    @staticmethod
    def _wild(pair: Pair) -> bool:
        """Landing into pages whose request never started from them."""
        gone = pair.d.cancelled or pair.d.settled
        return pair.landing and pair.d.admitted is not None and gone and not pair.d.first

    def _over(self, pair: Pair) -> None:
        pair.landing = pair.read = False
        for leg in (pair.p, pair.d):
            leg.take_hold()
            if leg.hold is not None:
                leg.hold.release()

    # --- running choices that leave d for p

    def _decoding(self) -> list[Leg]:
        """Legs at d that have begun to answer and go on; failing those, whatever is there."""
        there = [leg for leg in self.world.legs if leg.lab is self.d and not leg.cancelled and leg.origin is None]
        going = [leg for leg in there if self.d.of(leg.key) and not self.d.ends(leg.key)]
        return [leg for leg in going if isinstance(self.d.of(leg.key)[-1], Tokens)] or there

    @precondition(lambda self: self._decoding())
    @rule(data=st.data(), choice=st.integers(0, 2), turns=st.integers(0, 2))
    def give_away(self, data: st.DataObject, choice: int, turns: int) -> None:
        self._give_away(data.draw(st.sampled_from(self._decoding())), choice, turns)

    def _give_away(self, leg: Leg, choice: int, turns: int) -> None:
        self.d.engine.handover(leg.key, choice % leg.request.n)
        leg.asked = True
        self.d.turns(turns)

    def _departed(self) -> list[tuple[Leg, Departure]]:
        """What has left, as far as nobody has gone on with it."""
        found = []
        for leg in self.world.legs:
            for event in leg.left:
                known = self.world.departures.setdefault((leg.key, event.choice), Departure(event))
                if known.onward is None and not known.over:
                    found.append((leg, known))
        return found

    @precondition(lambda self: self._departed())
    @rule(data=st.data(), wanted=st.sampled_from([True, True, False]), turns=st.integers(0, 2))
    def go_on(self, data: st.DataObject, wanted: bool, turns: int) -> None:
        """The router submits it at p, or does not want it any more."""
        leg, departure = data.draw(st.sampled_from(self._departed()))
        if wanted:
            self._go_on(leg, departure, turns)
        else:
            departure.event.hold.release()
            departure.over = True

    def _go_on(self, leg: Leg, departure: Departure, turns: int) -> None:
        event, origin = departure.event, leg.request
        said = undisturbed(origin.tokens, origin.sampling, origin.n, self.STATE)[event.choice]
        tokens = origin.tokens + said[: event.token_count - origin.prompt_len]
        key = LegKey(f"{leg.key.request_id}.{event.choice}", "decode", 2)
        made = replace(origin, key=key, mode=Mode.REMOTE, tokens=tokens, n=1, choice=event.choice, deadline=1e9)
        departure.onward = Leg(self.p, made, origin=origin)
        self.p.submit(made)
        self.world.legs.append(departure.onward)
        self.p.turns(turns)

    @precondition(lambda self: self._decoding())
    @rule(data=st.data(), choice=st.integers(0, 2), good=st.booleans())
    def move_at_once(self, data: st.DataObject, choice: int, good: bool) -> None:
        """All of it, where nothing is in the way."""
        self._give_away(data.draw(st.sampled_from(self._decoding())), choice, 2)
        for leg, departure in self._departed():
            self._go_on(leg, departure, 2)
        for departure in self._landing():
            self._land(departure, good)

    def _landing(self) -> list[Departure]:
        going = [d for d in self.world.departures.values() if d.onward is not None and not d.over]
        return [d for d in going if d.onward is not None and d.onward.admitted is not None]

    @precondition(lambda self: self._landing())
    @rule(data=st.data(), good=st.booleans())
    def land(self, data: st.DataObject, good: bool) -> None:
        """Everything has been read, or does not agree with its checksums."""
        departure = data.draw(st.sampled_from(self._landing()))
        self._land(departure, good)

    def _land(self, departure: Departure, good: bool) -> None:
        event, onward = departure.event, departure.onward
        assert onward is not None
        assert event.token == onward.right[0][0]
        admitted = onward.admitted
        if admitted is not None and good and not onward.cancelled:
            self._read(event, admitted)
            onward.first = (First(event.choice, event.token),)
            self.p.engine.start(onward.key, onward.first)
        else:
            self.p.engine.recompute(onward.key)
        if admitted is not None:
            admitted.hold.release()
        event.hold.release()
        departure.over = True

    def _read(self, event: HandedOver, admitted: Admitted) -> None:
        source = Admitted(event.key, event.pages, event.slots, event.token_count, event.hold)
        move(self.d, self.p, source, admitted)

    @invariant()
    def pools_are_sound(self) -> None:
        self.p.check()
        self.d.check()

    @invariant()
    def nothing_wrong_is_said(self) -> None:
        for leg in self.world.legs:
            self._check(leg, complete=False)

    def _check(self, leg: Leg, complete: bool) -> None:
        assert leg.lab.ends(leg.key) <= 1
        right, left = leg.right, {event.choice: event for event in leg.left}
        if leg.done is not None:
            assert [f.token for f in leg.done.first] == [said[0] for said in right]
        for choice, said in zip(leg.choices(), right, strict=True):
            got = leg.lab.tokens(leg.key, choice)
            skipped = 1 if leg.first else 0
            assert got == list(said[skipped : skipped + len(got)])
            if choice in left:
                known = len(leg.request.tokens) + skipped + len(got)
                assert left[choice].token_count == known - 1, "it leaves with everything it has said"
                assert left[choice].token == said[skipped + len(got) - 1]
            elif complete and any(isinstance(e, Tokens) and e.last for e in leg.lab.of(leg.key)):
                assert len(got) + skipped == len(said)

    def teardown(self) -> None:
        """Everything that is under way comes to its end, and nothing is left."""
        for pair in self.world.pairs:
            if not pair.d.settled:
                self.d.engine.recompute(pair.d.key)
                pair.d.settled = True
        for _ in range(20):
            self.p.run()
            self.d.run()
            for pair in self.world.pairs:
                self._over(pair)
            for _, departure in self._departed():
                departure.event.hold.release()
                departure.over = True
            for departure in self.world.departures.values():
                if not departure.over:
                    self._land(departure, good=True)
            for lab, reservation in self.bookings:
                lab.engine.cancel_reservation(reservation)
        for leg in self.world.legs:
            self._check(leg, complete=True)
            ends = leg.lab.ends(leg.key) + any(event.last for event in leg.left)
            assert ends == 1 or (leg.cancelled and ends == 0)
            failures = [e.error for e in leg.lab.of(leg.key) if isinstance(e, Failed)]
            allowed = (DeadlineExceeded, Draining) if leg.asked else (DeadlineExceeded,)
            assert all(isinstance(error, allowed) for error in failures)
        self.p.engine.check_baseline()
        self.d.engine.check_baseline()


class StatefulEnginesMachine(EnginesMachine):
    STATE = True


TestEngines = EnginesMachine.TestCase
TestEngines.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEnginesWithState = StatefulEnginesMachine.TestCase
TestEnginesWithState.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
