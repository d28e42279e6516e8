"""Prefixes that lie on the disk, offered to another worker: read up first, if that fits into the asker's time."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from engine.promotions import DISK_SHARE
from kvtransfer.types import Prefix
from runtime import faults
from tests.unit.engine_core.lab import Lab, prompt
from tests.unit.engine_core.test_prefixes import staged, wanted
from tests.unit.tiers.lab import Manual, TierLab
from tests.unit.tiers.test_disk import DiskLab
from tests.unit.tiers.test_prefixes import ask, copy

FIRST = prompt(140)


@pytest.fixture(params=[False, True], ids=["dense", "hybrid"])
def state(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def pushed_down(folder: Path, state: bool, disk: Manual | None = None, **changes: object) -> DiskLab:
    """A worker that has the first prompt on its disk and nowhere else."""
    lanes = {} if disk is None else {"lane_of_disk": disk}
    changes = {"host_state_slots": 4, **changes}
    made = DiskLab(pages=12, host_pages=20, folder=folder, state=state, changes=changes, **lanes)  # type: ignore[arg-type]
    ask(made, "first", FIRST, 4)
    for seed in (1, 2, 3, 4):
        ask(made, f"push{seed}", prompt(176, seed=seed), 4)
    assert made.engine.prefixes.held(wanted(FIRST, state=state)) == 0
    return made


def turned(made: TierLab, answer: Future[Prefix | None]) -> Prefix | None:
    for _ in range(4):
        made.engine.turn()
    return answer.result(timeout=0)


def test_what_is_on_disk_is_read_up_and_offered_from_the_host(tmp_path: Path, state: bool) -> None:
    source, target = pushed_down(tmp_path, state), Lab(state=state)
    want = wanted(FIRST, state=state)

    prefix = turned(source, source.engine.prefixes.offer(want, within_s=5.0))

    assert prefix is not None
    assert (prefix.token_count, prefix.tier) == (128, "host")
    assert source.tiers.counts.disk_pages == 8
    assert source.tiers.counts.disk_states == int(state)
    room = staged(target, want, prefix.token_count)
    assert room is not None
    copy(source, target, prefix, room)
    target.engine.prefixes.publish(room)
    target.run()
    assert target.engine.prefixes.held(want) == 128
    source.baseline()


def test_without_time_nothing_is_read(tmp_path: Path, state: bool) -> None:
    source = pushed_down(tmp_path, state)
    assert turned(source, source.engine.prefixes.offer(wanted(FIRST, state=state))) is None
    assert source.tiers.counts.disk_pages == 0
    source.baseline()


def test_what_would_come_too_late_is_not_read(tmp_path: Path, state: bool) -> None:
    source = pushed_down(tmp_path, state)
    source.tiers.costs.copied("disk", "up", 1 << 20, seconds=1e4)
    assert turned(source, source.engine.prefixes.offer(wanted(FIRST, state=state), 5.0)) is None
    assert source.tiers.counts.disk_pages == 0
    source.baseline()


def test_who_cannot_wait_any_longer_is_told_so(tmp_path: Path, state: bool) -> None:
    disk = Manual()
    disk.open()
    source = pushed_down(tmp_path, state, disk)
    assert source.tiers.disk is not None
    source.tiers.disk.lane = slow = Manual()
    answer = source.engine.prefixes.offer(wanted(FIRST, state=state), 4.0)
    source.turns(3)
    assert not answer.done()
    assert slow.waiting

    source.clock.advance(4.0 * DISK_SHARE)
    assert turned(source, answer) is None

    slow.open()
    source.run()
    source.tiers.poll()
    source.baseline()
    assert turned(source, source.engine.prefixes.offer(wanted(FIRST, state=state), 4.0)) is not None


def test_an_asker_that_has_gone_holds_nothing(tmp_path: Path, state: bool) -> None:
    disk = Manual()
    disk.open()
    source = pushed_down(tmp_path, state, disk)
    assert source.tiers.disk is not None
    source.tiers.disk.lane = slow = Manual()
    given: list[Prefix | None] = []
    answer = source.engine.prefixes.offer(wanted(FIRST, state=state), 4.0)
    answer.add_done_callback(lambda done: given.append(done.result()))
    source.turns(1)
    slow.open()
    source.run()
    (prefix,) = given
    assert prefix is not None
    prefix.hold.release()  # as engine.fetch.answered() does for who has gone
    source.baseline()


def test_a_disk_that_fails_leaves_what_is_above_it(tmp_path: Path, state: bool) -> None:
    source = pushed_down(tmp_path, state)
    with faults.armed("disk.read=fail"):
        assert turned(source, source.engine.prefixes.offer(wanted(FIRST, state=state), 5.0)) is None
    assert source.tiers.counts.failed == 1
    source.baseline()


def test_what_is_above_the_disk_already_is_offered_at_once(tmp_path: Path, state: bool) -> None:
    source = pushed_down(tmp_path, state)
    ask(source, "again", FIRST, 4)
    answer = source.engine.prefixes.offer(wanted(FIRST, state=state), 5.0)
    assert answer.done() is True
    prefix = answer.result()
    assert prefix is not None
    prefix.hold.release()
    source.baseline()


def test_an_engine_that_ends_answers(tmp_path: Path) -> None:
    disk = Manual()
    disk.open()
    source = pushed_down(tmp_path, False, disk)
    assert source.tiers.disk is not None
    source.tiers.disk.lane = Manual()
    answer = source.engine.prefixes.offer(wanted(FIRST), 5.0)
    source.turns(1)
    source.engine._end_all(RuntimeError())  # type: ignore[arg-type]
    assert answer.result(timeout=0) is None
