"""Two small engines under everything that can happen in any order; each answer is the undisturbed one or none.

Pages run out, requests share prefixes, fork, are preempted, cancelled, expire; hand-offs arrive, arrive late, arrive
never, or are written into after their request is gone. The oracle turns any wrong byte into a wrong token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.api import Admitted, EngineRequest, Failed, Mode, Needs, Reserved, Retention, SourceDone, Tokens
from kvtransfer.types import First, Hold, LegKey
from runtime.errors import DeadlineExceeded
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
class World:
    pairs: list[Pair] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)


lengths = st.sampled_from([1, 15, 16, 17, 33, 48, 70, 96])
outputs = st.sampled_from([1, 2, 9, 30, 60])


class EnginesMachine(RuleBasedStateMachine):
    STATE = False
    HINTS = (Retention(), Retention(b"talk", 3, 3.0), Retention(priority=-2), Retention(b"other", ttl_s=5.0))

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
        right = undisturbed(leg.request.tokens, leg.request.sampling, leg.request.n, self.STATE)
        if leg.done is not None:
            assert [f.token for f in leg.done.first] == [said[0] for said in right]
        for choice, said in enumerate(right):
            got = leg.lab.tokens(leg.key, choice)
            skipped = 1 if leg.first else 0
            assert got == list(said[skipped : skipped + len(got)])
            if complete and any(isinstance(e, Tokens) and e.last for e in leg.lab.of(leg.key)):
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
            for lab, reservation in self.bookings:
                lab.engine.cancel_reservation(reservation)
        for leg in self.world.legs:
            self._check(leg, complete=True)
            ends = leg.lab.ends(leg.key)
            assert ends == 1 or (leg.cancelled and ends == 0)
            failures = [e.error for e in leg.lab.of(leg.key) if isinstance(e, Failed)]
            assert all(isinstance(error, DeadlineExceeded) for error in failures)
        self.p.engine.check_baseline()
        self.d.engine.check_baseline()


class StatefulEnginesMachine(EnginesMachine):
    STATE = True


TestEngines = EnginesMachine.TestCase
TestEngines.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestEnginesWithState = StatefulEnginesMachine.TestCase
TestEnginesWithState.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
