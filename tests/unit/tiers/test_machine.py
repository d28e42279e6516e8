"""Two small engines with host tiers under everything that can happen in any order, copies finishing when they like.

All of tests/unit/engine_core/test_machine.py, and: copies end late and in any order, fail, find damaged bytes; running
requests are swapped at any step. Device pages that have gone down are poisoned, and the oracle turns a wrong byte into
a wrong token.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engine.api import Admitted, HandedOver
from engine.sequence import Phase, Sequence
from engine.tiers.disk import HostItem
from engine.tiers.pool import view
from runtime import faults
from tests.unit.engine_core import test_machine as base
from tests.unit.tiers.lab import Manual, TierLab
from tests.unit.tiers.test_disk import PAGE, DiskLab


class TiersMachine(base.EnginesMachine):
    HOST = 24

    def __init__(self) -> None:
        super().__init__()
        self.damaged = False
        self.lanes = [Manual(), Manual()]
        self.labs = [self.lab(lane) for lane in tuple(self.lanes)]
        self.p, self.d = self.labs

    def lab(self, lane: Manual) -> TierLab:
        changes: dict[str, object] = {"max_batch": 4, "host_queue_pages": 6}
        return TierLab(pages=14, state=self.STATE, host_pages=self.HOST, lane=lane, changes=changes)

    @precondition(lambda self: any(lane.waiting for lane in self.lanes))
    @rule(
        data=st.data(),
        fault=st.sampled_from(
            [
                "",
                "",
                "",
                "tier.store=fail",
                "tier.load=fail",
                "tier.corrupt=count*1",
                "disk.write=fail",
                "disk.read=fail",
            ]
        ),
    )
    def copy(self, data: st.DataObject, fault: str) -> None:
        lane = data.draw(st.sampled_from([lane for lane in self.lanes if lane.waiting]))
        index = data.draw(st.integers(0, len(lane.waiting) - 1))
        if not fault:
            lane.step(index)
            return
        self.damaged |= fault.startswith("tier.corrupt")
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

    def _read(self, event: HandedOver, admitted: Admitted) -> None:
        """What was swapped out lies on the host."""
        if event.below is None:
            super()._read(event, admitted)
            return
        assert self.d.engine._host is not None
        low = {region.component.removesuffix("@host"): view(region) for region in self.d.engine._host.regions}
        paged = {c.name: c.paged for c in self.d.engine.model.components}
        held = admitted.ready // 16
        for region, mine in zip(self.p.engine.regions(), self.p.memory(), strict=True):
            into, out_of = (
                (admitted.pages[held:], event.pages[held:])
                if paged[region.component]
                else (admitted.slots, event.slots)
            )
            mine[list(into)] = low[region.component][list(out_of)]

    @invariant()
    def what_is_published_is_there(self) -> None:
        """Nothing on the host has a name whose bytes are not what they were when it got it (damage apart, which is
        found when it is read)."""
        for lab in self.labs:
            tiers, mover = lab.tiers, lab.tiers._mover
            entries = tiers.host.oldest(100)
            assert mover.sums(True, [entry.page for entry in entries]) == [entry.sums for entry in entries]
            states = [s for found in tiers.states._by_key.values() for s in found if not tiers.host_slots.refs(s.slot)]
            assert mover.sums(False, [s.slot for s in states]) == [s.slot_sums for s in states]
            partial = [s for s in states if s.page]
            assert mover.sums(True, [s.page for s in partial]) == [s.page_sums for s in partial]
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


class DiskMachine(TiersMachine):
    """A host of eight pages over a disk of sixty-four, whose lane is another one."""

    HOST = 8

    def lab(self, lane: Manual) -> TierLab:
        below = Manual()
        self.lanes.append(below)
        self.folder = Path(tempfile.mkdtemp(prefix="pdserve-machine-"))
        changes: dict[str, object] = {"max_batch": 4, "host_queue_pages": 6, "disk_pool_bytes": 64 * PAGE}
        return DiskLab(
            pages=14,
            state=self.STATE,
            host_pages=self.HOST,
            lane=lane,
            lane_of_disk=below,
            folder=self.folder,
            changes=changes,
        )

    def teardown(self) -> None:
        folders = [lab.folder for lab in self.labs]  # type: ignore[attr-defined]
        try:
            super().teardown()
        finally:
            for lab in self.labs:
                lab.tiers.close()
        try:
            for folder in folders:
                self.restarted(folder)
        finally:
            for folder in folders:
                shutil.rmtree(folder)

    @rule(which=st.integers(0, 1))
    def cool(self, which: int) -> None:
        """Whatever nobody uses is on the disk, and nowhere else."""
        lab = self.labs[which]
        assert isinstance(lab, DiskLab)
        lab.cool()

    def restarted(self, folder: Path) -> None:
        """What the index says is there, unless bytes were damaged before they were written."""
        changes: dict[str, object] = {"max_batch": 4, "disk_pool_bytes": 64 * PAGE}
        fresh = DiskLab(pages=14, state=self.STATE, host_pages=self.HOST, folder=folder, changes=changes)
        fresh.check()
        tiers, tier = fresh.tiers, fresh.tiers.disk
        assert tier is not None
        for entry in tier.index.oldest(99):
            assert tier._disk.read([(entry.page, 1)], [entry.sums]) == 1 or self.damaged
        for state in tier.states._all():
            item = HostItem(1, int(bool(state.tail)))
            assert tier._disk.read_state(state.slot, item, state.slot_sums, state.page_sums) or self.damaged
        tiers.close()


class StatefulDiskMachine(DiskMachine):
    STATE = True
    HOST = 14


class SmallHostMachine(TiersMachine):
    HOST = 5


class StatefulTiersMachine(TiersMachine):
    STATE = True


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestSmallHost = SmallHostMachine.TestCase
TestSmallHost.settings = settings(max_examples=10, stateful_step_count=40, deadline=None)
TestDisk = DiskMachine.TestCase
TestDisk.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)
TestDiskWithState = StatefulDiskMachine.TestCase
TestDiskWithState.settings = settings(max_examples=8, stateful_step_count=40, deadline=None)
TestTiersWithState = StatefulTiersMachine.TestCase
TestTiersWithState.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
