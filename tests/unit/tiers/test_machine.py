"""Two small engines with host tiers under everything that can happen in any order, copies finishing when they like.

All of tests/unit/engine_core/test_machine.py, and: copies end late and in any order, fail, find damaged bytes; running
requests are swapped at any step. Device pages that have gone down are poisoned, and the oracle turns a wrong byte into
a wrong token.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.sequence import Phase, Sequence
from runtime import faults
from tests.unit.engine_core import test_machine as base
from tests.unit.tiers.lab import Manual, TierLab


class TiersMachine(base.EnginesMachine):
    HOST = 24

    def __init__(self) -> None:
        super().__init__()
        self.lanes = (Manual(), Manual())
        changes = {"max_batch": 4, "host_queue_pages": 6}
        made = [
            TierLab(pages=14, state=self.STATE, host_pages=self.HOST, lane=lane, changes=dict(changes))
            for lane in self.lanes
        ]
        self.p, self.d = made
        self.labs = made

    @precondition(lambda self: any(lane.waiting for lane in self.lanes))
    @rule(
        data=st.data(), fault=st.sampled_from(["", "", "", "tier.store=fail", "tier.load=fail", "tier.corrupt=count"])
    )
    def copy(self, data: st.DataObject, fault: str) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.lanes if lane.waiting]))
        index = data.draw(st.integers(0, len(lane.waiting) - 1))
        if not fault:
            lane.step(index)
            return
        with faults.armed(fault):
            lane.step(index)

    @rule()
    def copies(self) -> None:
        for lane in self.lanes:
            lane.run_all()

    @precondition(lambda self: any(self._swappable()))
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        lab, seq = data.draw(st.sampled_from(self._swappable()))
        lab.engine._scheduler._preempt(seq)

    def _swappable(self) -> list[tuple[TierLab, Sequence]]:
        return [
            (lab, seq)
            for lab in self.labs
            for seq in lab.engine._scheduler._running
            if seq.phase is Phase.RUNNING and seq.request.decodes
        ]

    @invariant()
    def what_is_published_is_there(self) -> None:
        """Nothing on the host has a name whose bytes are not what they were when it got it (damage apart, which is
        found when it is read)."""
        for lab in self.labs:
            for entry in lab.tiers.host.oldest(100):
                assert entry.sums, "published before it was written"
            for loading in lab.tiers._loads.under_way.values():
                assert all(lab.engine.pages.refs(device) > 0 for device, _ in loading.pages)
                assert all(lab.tiers.host.pool.refs(host) > 0 for _, host in loading.pages)
                assert all(lab.engine.slots.refs(device) > 0 for device, _ in loading.slots)
                assert all(lab.tiers.host_slots.refs(host) > 0 for _, host in loading.slots)

    def teardown(self) -> None:
        for lane in self.lanes:
            lane.open()
        for lab in self.labs:
            lab.settle()
        super().teardown()


class SmallHostMachine(TiersMachine):
    HOST = 5


class StatefulTiersMachine(TiersMachine):
    STATE = True


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestSmallHost = SmallHostMachine.TestCase
TestSmallHost.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestTiersWithState = StatefulTiersMachine.TestCase
TestTiersWithState.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
