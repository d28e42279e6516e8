"""Two small engines with host tiers that give each other prefixes, in any order of offers, evictions, reads that land
late and copies between tiers: each answer is the undisturbed one. The oracle turns any wrong byte into a wrong token.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.prefixes import Staged
from kvtransfer.types import LegKey, Prefix, Wanted
from tests.unit.engine_core.lab import Lab, prompt, request, undisturbed
from tests.unit.engine_core.test_prefixes import wanted
from tests.unit.tiers.lab import TierLab
from tests.unit.tiers.test_disk import DiskLab
from tests.unit.tiers.test_prefixes import copy

JUNK = 0xEE
WHICH, SEED = st.integers(0, 1), st.integers(0, 2)
LENGTH, FOLLOW = st.sampled_from([40, 64, 90]), st.sampled_from([0, 0, 7])


@dataclass
class Fetch:
    """One that has been promised and given room."""

    source: TierLab
    target: TierLab
    prefix: Prefix
    room: Staged


class PrefixMachine(RuleBasedStateMachine):
    state = False

    def __init__(self) -> None:
        super().__init__()
        self.labs = [self.lab() for _ in "ab"]
        self.fetches: list[Fetch] = []
        self.late: list[Staged] = []  # given up, and a read may still land
        self.asked: list[tuple[TierLab, LegKey, tuple[int, ...]]] = []
        self.names = 0

    def lab(self) -> TierLab:
        return TierLab(pages=18, state=self.state, host_pages=20, changes={"host_evict": "lru"})

    def _turn(self, which: int, seed: int, length: int, follow: int) -> tuple[TierLab, tuple[int, ...]]:
        """A prompt, or with `follow` the next turn of its conversation."""
        tokens = prompt(length, seed)
        if follow:
            said = undisturbed(tokens, request("r", tokens, max_tokens=5).sampling, state=self.state)[0]
            tokens = (*tokens, *said, *prompt(follow, seed + 50))
        return self.labs[which], tokens

    @rule(which=WHICH, seed=SEED, length=LENGTH, follow=FOLLOW)
    def ask(self, which: int, seed: int, length: int, follow: int) -> None:
        lab, tokens = self._turn(which, seed, length, follow)
        self.names += 1
        self.asked.append((lab, lab.submit(request(f"q{self.names}", tokens, max_tokens=5)), tokens))

    @rule(which=st.integers(0, 1), count=st.integers(1, 30))
    def run(self, which: int, count: int) -> None:
        self.labs[which].turns(count)

    @rule(which=WHICH, seed=SEED, length=LENGTH, follow=FOLLOW)
    def fetch(self, which: int, seed: int, length: int, follow: int) -> None:
        """What a worker does that is told where a prefix is: ask, take room."""
        target, tokens = self._turn(which, seed, length, follow)
        source = self.labs[1 - which]
        want = wanted(tokens, target.engine.prefixes.held(wanted(tokens)), state=self.state)
        offer = source.engine.prefixes.offer(want, within_s=1.0)
        source.turns(1)
        prefix = offer.result(timeout=0)
        if prefix is not None:
            self._room(source, target, want, prefix)

    def _room(self, source: TierLab, target: TierLab, want: Wanted, prefix: Prefix) -> None:
        self.names += 1
        key = LegKey(f"f{self.names}", "prefill", 1)
        asked = target.engine.prefixes.stage(want, prefix.token_count, key, target.clock.monotonic() + 1)
        target.turns(1)
        if not asked.done():
            target.clock.advance(2)
            target.turns(1)
        room = asked.result(timeout=0)
        if room is None:
            prefix.hold.release()
        else:
            self.fetches.append(Fetch(source, target, prefix, room))

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def lands(self, data: st.DataObject) -> None:
        one = self.fetches.pop(data.draw(st.integers(0, len(self.fetches) - 1)))
        copy(one.source, one.target, one.prefix, one.room)
        one.target.engine.prefixes.publish(one.room)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def is_given_up(self, data: st.DataObject) -> None:
        one = self.fetches.pop(data.draw(st.integers(0, len(self.fetches) - 1)))
        one.prefix.hold.release()
        one.target.engine.prefixes.drop(one.room)
        self.late.append(one.room)
        self._junk(one.target, one.room)

    @precondition(lambda self: self.late)
    @rule()
    def a_late_read_is_quiet_at_last(self) -> None:
        self.late.pop().destination.hold.release()

    def _junk(self, target: Lab, room: Staged) -> None:
        """A read that was given up writes what it likes into what was its destination, and nowhere else."""
        landed = room.destination
        paged = {c.name: c.paged for c in target.engine.model.components}
        for number, region in enumerate(target.engine.regions()):
            into = landed.pages[landed.held // 16 :] if paged[region.component] else landed.slots
            target.memory()[number][list(into)] = JUNK

    @invariant()
    def pools_add_up(self) -> None:
        for lab in self.labs:
            lab.check()

    @invariant()
    def what_was_said_is_right(self) -> None:
        for lab, key, tokens in self.asked:
            right = undisturbed(tokens, request("r", tokens, max_tokens=5).sampling, state=self.state)[0]
            said = lab.tokens(key)
            assert tuple(said) == right[: len(said)]

    def teardown(self) -> None:
        for one in self.fetches:
            one.prefix.hold.release()
            one.target.engine.prefixes.drop(one.room)
            one.room.destination.hold.release()
        for room in self.late:
            room.destination.hold.release()
        for lab in self.labs:
            lab.clock.advance(1)
            for _ in range(50):
                lab.settle()
                lab.run()
        for lab, key, tokens in self.asked:
            right = undisturbed(tokens, request("r", tokens, max_tokens=5).sampling, state=self.state)[0]
            assert tuple(lab.tokens(key)) == right
        for lab in self.labs:
            lab.baseline()


class HybridMachine(PrefixMachine):
    state = True


class DiskPrefixMachine(PrefixMachine):
    """Little on the host, so that most of what is wanted lies on the disk."""

    def lab(self) -> TierLab:
        folder = Path(tempfile.mkdtemp(prefix="pdserve-prefixes-"))
        return DiskLab(pages=18, state=self.state, host_pages=14, folder=folder, changes={"host_state_slots": 2})

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            for lab in self.labs:
                lab.tiers.close()
                shutil.rmtree(lab.folder)  # type: ignore[attr-defined]

    @rule(which=WHICH)
    def cool(self, which: int) -> None:
        """Whatever nobody uses is on the disk, and nowhere else."""
        lab = self.labs[which]
        assert isinstance(lab, DiskLab)
        lab.cool()


class DiskHybridMachine(DiskPrefixMachine):
    state = True


SHORT = settings(max_examples=6, stateful_step_count=20, deadline=None)
TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = SHORT
TestHybrids = HybridMachine.TestCase
TestHybrids.settings = SHORT
TestDiskPrefixes = DiskPrefixMachine.TestCase
TestDiskPrefixes.settings = SHORT
TestDiskHybrids = DiskHybridMachine.TestCase
TestDiskHybrids.settings = SHORT
