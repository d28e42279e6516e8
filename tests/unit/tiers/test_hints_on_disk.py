"""What requests said of how long to keep things is known to a worker that starts again with its disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.api import Retention
from engine.retention import EXPIRED, Retained
from engine.tiers.journal import Journal, Keep, Put
from engine.tiers.notes import LONGEST_S, Hints
from kvtransfer.hashing import page_keys
from runtime.clock import FakeClock
from tests.unit.engine_core.lab import ROOT, prompt, request
from tests.unit.tiers.test_disk import PAGE, DiskLab

KEYS = page_keys(ROOT, prompt(64, seed=1))


def lab(folder: Path, pages: int = 12) -> DiskLab:
    return DiskLab(pages=pages, host_pages=16, folder=folder, changes={"disk_pool_bytes": 64 * PAGE})


def ask(made: DiskLab, name: str, seed: int, hint: Retention = Retention(), length: int = 64) -> None:
    key = made.submit(request(name, prompt(length, seed=seed), max_tokens=2, retention=hint))
    for _ in range(100):
        made.run()
        if made.ends(key):
            made.settle()
            return
        made.settle()
    raise AssertionError("it runs for ever")


def stored(folder: Path, hint: Retention) -> DiskLab:
    """A worker that has a prompt of `hint` on its disk."""
    made = lab(folder)
    ask(made, "hinted", 1, hint)
    ask(made, "more", 2, length=112)
    assert made.tiers.disk is not None
    assert all(key in made.tiers.disk.index for key in KEYS)
    return made


def again(made: DiskLab, folder: Path) -> DiskLab:
    """The worker ends and starts again."""
    made.engine.stop()
    return lab(folder)


def retained(made: DiskLab) -> Retained:
    return made.engine._scheduler.memory.retained


def test_a_priority_survives_a_restart(tmp_path: Path) -> None:
    fresh = again(stored(tmp_path, Retention(priority=5)), tmp_path)
    assert [retained(fresh).rank(key) for key in KEYS] == [5] * 4
    assert fresh.tiers.disk is not None
    assert fresh.tiers.disk.index.oldest(99)[-4:] == [fresh.tiers.disk.index.get(k) for k in KEYS[::-1]], "they go last"
    fresh.tiers.check()


def test_a_session_survives_a_restart_and_is_used_as_one(tmp_path: Path) -> None:
    fresh = again(stored(tmp_path, Retention(session=b"s")), tmp_path)
    assert fresh.tiers.disk is not None
    index = fresh.tiers.disk.index
    index.leave_first(KEYS[::-1])
    retained(fresh).used(b"s")
    assert [entry.key for entry in index.oldest(99)][-4:] == KEYS[::-1]


@pytest.mark.parametrize(("down_s", "rank"), [(30.0, 0), (70.0, EXPIRED)])
def test_time_goes_on_while_a_worker_is_down(tmp_path: Path, down_s: float, rank: int) -> None:
    made = stored(tmp_path, Retention(ttl_s=60.0))
    made.engine.stop()
    fresh = DiskLab(pages=12, host_pages=16, folder=tmp_path, clock=FakeClock(5.0, made.clock.wall() + down_s))
    fresh.engine.turn()
    assert [retained(fresh).rank(key) for key in KEYS] == [rank] * 4
    fresh.clock.advance(31)
    fresh.engine.turn()
    assert retained(fresh).rank(KEYS[0]) == EXPIRED


def test_what_is_said_later_is_known_too(tmp_path: Path) -> None:
    """The pages were written before anybody said anything; the write of the hint waits for none of them."""
    made = stored(tmp_path, Retention())
    ask(made, "again", 1, Retention(priority=3))
    made.clock.advance(2.0)
    made.engine.turn()
    made.tiers.disk._disk._folder.close()  # type: ignore[union-attr]  # as the kernel does when a process is killed

    fresh = lab(tmp_path)

    assert [retained(fresh).rank(key) for key in KEYS[:3]] == [3] * 3


def test_a_hint_goes_with_its_page(tmp_path: Path) -> None:
    path = tmp_path / "index"
    journal = Journal(path, "x", 1)
    put = Put(b"k" * 32, None, 1, 0, (7,))
    journal.append([put], hints=[(put.key, Keep(4, math.inf, b"session")), (b"o" * 32, Keep(1, 2.0, b""))])
    assert Journal(path, "x", 1).found.hints == {put.key: Keep(4, math.inf, b"session")}
    again_ = Journal(path, "x", 1)
    again_.append(drops=[put.key])
    again_.append([put])
    assert Journal(path, "x", 1).found.hints == {}


@pytest.mark.parametrize("ends", [1e12, 2e9])
def test_a_clock_that_was_set_back_keeps_nothing_for_longer_than_a_day(ends: float) -> None:
    clock, kept = FakeClock(), Retained()
    hints = Hints(kept, lambda _: True, clock.monotonic, clock.wall)
    hints.restore({b"k": Keep(1, ends, b"")})
    assert kept.kept(b"k") == (1, clock.monotonic() + LONGEST_S, b"")


def test_an_end_is_not_written_down_at_every_use() -> None:
    clock, kept = FakeClock(), Retained()
    kept.tick(clock.monotonic())
    hints = Hints(kept, lambda _: True, clock.monotonic, clock.wall)
    kept.serve(lambda key, _rank: hints.changed(key), lambda _: None)
    hint = Retention(ttl_s=100.0)
    written = 0
    for _ in range(50):
        clock.advance(1.0)
        kept.tick(clock.monotonic())
        kept.touch([b"k"], hint, 0, kept.until(hint))
        written += len(hints.take())
    assert 3 <= written <= 6
    assert hints.take() == []


def test_what_could_not_be_written_down_is_tried_again() -> None:
    clock, kept = FakeClock(), Retained()
    hints = Hints(kept, lambda _: True, clock.monotonic, clock.wall)
    kept.serve(lambda key, _rank: hints.changed(key), lambda _: None)
    kept.touch([b"k"], Retention(priority=2), 0, math.inf)
    taken = hints.take()
    assert taken == [(b"k", Keep(2, math.inf, b""))]
    hints.failed(key for key, _ in taken)
    assert hints.waiting
    hints.forget([b"k"])
    assert not hints.waiting
