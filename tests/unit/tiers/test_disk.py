"""Pages on disk: found again after they left the host and after a restart, and never believed without a checksum."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.tiers.build import Ways
from engine.tiers.disk import OpenFile
from engine.tiers.journal import Journal, Put, StatePut
from engine.tiers.work import Thread, Urgency
from kvtransfer.files import PlainFile, Ranges
from kvtransfer.hashing import page_keys
from kvtransfer.types import Region
from runtime import faults
from runtime.errors import InvalidRequest
from tests.unit.engine_core.lab import ROOT, prompt, request
from tests.unit.tiers.lab import Manual, TierLab, carry
from tests.unit.tiers.test_host import cached, said

PAGE = 2048
FIRST = prompt(128)


@dataclass
class DiskLab(TierLab):
    """A small host over a large disk."""

    folder: Path = Path()
    open_file: OpenFile = PlainFile

    def __post_init__(self) -> None:
        disk: dict[str, object] = {"disk_pool_bytes": 256 * PAGE, "disk_pool_dir": str(self.folder)}
        self.changes = {**disk, **self.changes}
        super().__post_init__()

    def ways(self) -> Ways:
        return Ways(carry, lane=self.lane, disk_lane=self.lane_of_disk, layout="oracle", open_file=self.open_file)

    def cool(self) -> None:
        """What is idle goes down, as far as there is room, and leaves device and host."""
        tiers, engine = self.tiers, self.engine
        tiers._stores.make_room(engine.pages.cached, [])
        if tiers.state_stores is not None:
            tiers.state_stores.make_room(engine.slots.cached, [], None)
        for _ in range(4):
            for lane in (self.lane, self.lane_of_disk):
                if isinstance(lane, Manual):
                    lane.run_all()
            tiers.poll()
        tiers._waited(pending=False)
        for pool in (engine.pages, engine.slots, tiers.host.pool, tiers.host_slots):
            pool.release(pool.allocate(pool.available) or [])


def lab(folder: Path, **more: object) -> DiskLab:
    return DiskLab(pages=12, host_pages=16, folder=folder, **more)  # type: ignore[arg-type]


def push_out(made: DiskLab) -> None:
    """Fill device and host with other prompts."""
    for seed in (1, 2, 3):
        said(made, f"push{seed}", prompt(176, seed=seed))
        made.settle()


def test_a_prefix_that_left_the_host_comes_back_from_disk(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    push_out(made)
    assert not [key for key in page_keys(ROOT, FIRST) if key in made.tiers.host]

    said(made, "b", FIRST)

    assert cached(made, "b") == 112
    assert made.tiers.counts.disk_pages == 7
    made.baseline()


def test_a_restarted_worker_finds_what_it_had_on_disk(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    made.engine.stop()

    again = lab(tmp_path)
    assert {tier: len(keys) for tier, keys in again.engine.cache.snapshot().lower} == {"disk": 8}
    said(again, "b", FIRST)

    assert cached(again, "b") == 112
    again.baseline()


def test_a_worker_that_ends_with_more_on_its_way_down_than_the_queue_takes_ends(tmp_path: Path) -> None:
    made = lab(tmp_path, lane_of_disk=Thread("disk", lambda: None), changes={"disk_queue_pages": 1})
    busy = threading.Event()
    assert made.tiers.disk is not None
    made.tiers.disk._submit(Urgency.LOAD, busy.wait, lambda *_: None)
    said(made, "a", FIRST)
    made.settle()

    busy.set()
    made.engine.stop()

    again = lab(tmp_path)
    assert said(again, "b", FIRST) == said(lab(tmp_path / "other"), "b", FIRST)
    again.baseline()


def test_a_worker_of_another_model_finds_nothing(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    made.engine.stop()

    other = DiskLab(pages=12, host_pages=16, folder=tmp_path, state=True, changes={})
    assert other.tiers.disk is not None
    assert len(other.tiers.disk.index) == 0
    other.engine.stop()


def test_two_workers_of_one_machine_use_folders_of_their_own(tmp_path: Path) -> None:
    one, other = lab(tmp_path), lab(tmp_path)
    said(one, "a", FIRST)
    one.settle()
    assert other.tiers.disk is not None
    assert len(other.tiers.disk.index) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]
    one.engine.stop()
    assert len(lab(tmp_path).engine.cache.snapshot().lower) == 1, "the first folder is free again"


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_page_file_is_a_miss_and_the_engine_lives(tmp_path: Path, damage: str) -> None:
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    made.engine.stop()
    pages = tmp_path / "0" / "pages"
    if damage == "missing":
        pages.unlink()
    elif damage == "truncated":
        os.truncate(pages, 4 * PAGE)
    else:
        data = bytearray(pages.read_bytes())
        for slot in range(len(data) // PAGE):
            data[slot * PAGE + 700] ^= 1
        pages.write_bytes(data)

    again = lab(tmp_path)
    said(again, "b", FIRST)
    again.settle()

    assert again.tiers.counts.corrupt == 1
    push_out(again)
    said(again, "c", FIRST)  # written anew, and found
    assert cached(again, "c") == 112
    again.baseline()


def test_a_file_cut_short_while_it_is_in_use_is_a_miss(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    push_out(made)
    os.truncate(tmp_path / "0" / "pages", 0)

    said(made, "b", FIRST)

    assert made.tiers.counts.failed == 1
    assert cached(made, "b") == 0
    made.baseline()


@pytest.mark.parametrize("tail", [b"", b"\0" * 40, os.urandom(333)])
def test_a_torn_index_is_read_up_to_its_last_whole_record(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "index"
    journal = Journal(path, "x", 2)
    keys = [bytes([i]) * 32 for i in range(3)]
    for depth, key in enumerate(keys):
        journal.append([Put(key, keys[depth - 1] if depth else None, depth + 1, depth, (7, 8))])
    journal.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - (0 if tail else 1))
        file.seek(0, os.SEEK_END)
        file.write(tail)

    again = Journal(path, "x", 2)

    assert list(again.puts) == (keys if tail else keys[:2])
    assert bool(again.torn)
    again.append([Put(keys[2], keys[1], 9, 2, (1, 2))], [keys[0]])
    again.close()
    assert list(Journal(path, "x", 2).puts) == [keys[1], keys[2]]


def test_no_changed_byte_of_an_index_makes_a_page_another_one(tmp_path: Path) -> None:
    """Whatever byte is changed: what is read is what was written, up to the record that was hit."""
    path = tmp_path / "index"
    journal = Journal(path, "x", 2, 1)
    keys = [bytes([i]) * 32 for i in range(3)]
    written = [Put(key, keys[at - 1] if at else None, at + 1, at, (7, 8)) for at, key in enumerate(keys)]
    state = StatePut(b"n" * 32, keys[1], 35, (1, 2, 3), 1, 0.5, (9,), (7, 8))
    journal.append(written, states=[state])
    journal.close()
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        again = Journal(path, "x", 2, 1)
        again.close()
        found = list(again.puts.values())
        assert found == written[: len(found)], at
        assert list(again.found.states.values()) in ([], [state]), at
        assert len(found) < 3 or not again.found.states, at


@pytest.mark.parametrize("room", [True, False])
def test_an_index_does_not_grow_with_what_has_come_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    monkeypatch.setattr("engine.tiers.journal.REWRITE_BYTES", 4096)
    path = tmp_path / "index"
    journal = Journal(path, "x", 2)
    if not room:
        monkeypatch.setattr(Path, "replace", full)
    stays = [bytes([255, number]) * 16 for number in range(5)]
    journal.append([Put(key, None, number + 1, 0, (7, 8)) for number, key in enumerate(stays)])
    last = stays[0]
    for number in range(2_000):
        key = number.to_bytes(32, "little")
        journal.append([Put(key, None, 10 + number % 7, 0, (1, 2))], [last] if number else [])
        last = key

    assert (path.stat().st_size < 10_000) is room
    monkeypatch.undo()
    journal.close()
    again = Journal(path, "x", 2)
    assert list(again.puts) == [*stays, last], "the drops of what was here before count"
    again.close()


def full(path: Path, target: Path) -> Path:
    raise OSError(errno.ENOSPC, "no room")


def test_nothing_is_read_from_disk_before_it_is_published(tmp_path: Path) -> None:
    """T113: the second of two equal prompts comes while the first is still being written."""
    disk = Manual()
    made = lab(tmp_path, lane_of_disk=disk)
    said(made, "a", FIRST)
    made.settle()
    assert disk.waiting
    for seed in (1, 2, 3):
        said(made, f"push{seed}", prompt(176, seed=seed))

    said(made, "b", FIRST)

    assert made.tiers.counts.disk_pages == 0
    disk.open()
    made.settle()
    made.baseline()


def test_who_waits_for_the_disk_does_not_hold_up_who_comes_after(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    push_out(made)
    assert made.tiers.disk is not None
    disk = made.tiers.disk.lane = Manual()

    slow = made.submit(request("slow", FIRST, max_tokens=3))
    quick = made.submit(request("quick", prompt(20, seed=9), max_tokens=3))
    made.run()

    assert made.finish(quick)
    assert made.tokens(slow) == []
    disk.open()
    made.run()
    made.run()
    assert made.finish(slow)
    assert cached(made, "slow") == 112
    made.baseline()


@pytest.mark.parametrize("point", ["disk.write", "disk.publish", "disk.read"])
def test_a_disk_that_fails_is_a_miss(tmp_path: Path, point: str) -> None:
    made = lab(tmp_path)
    with faults.armed(f"{point}=fail"):
        said(made, "a", FIRST)
        made.settle()
        push_out(made)
        said(made, "b", FIRST)
    assert made.tiers.counts.failed > 0
    assert cached(made, "b") == 0
    made.baseline()


class Full(PlainFile):
    """A disk without room beyond the first pages."""

    def __init__(self, path: Path, size: int, memory: Sequence[Region]) -> None:
        super().__init__(path, size, memory)
        self.left = 3 * PAGE

    def write(self, ranges: Ranges) -> None:
        self.left -= sum(size for _, size, _ in ranges)
        if self.left < 0:
            raise OSError(errno.ENOSPC, "no space left")
        super().write(ranges)


def test_a_full_disk_degrades_to_misses(tmp_path: Path) -> None:
    made = lab(tmp_path, open_file=Full)
    said(made, "a", FIRST)
    made.settle()
    push_out(made)
    said(made, "b", FIRST)
    assert made.tiers.counts.failed > 0
    made.baseline()


def test_a_small_disk_keeps_whole_prefixes(tmp_path: Path) -> None:
    made = lab(tmp_path, changes={"disk_pool_bytes": 10 * PAGE})
    for round_ in range(3):
        for seed in range(5):
            said(made, f"{round_}-{seed}", prompt(128, seed=seed))
            made.settle()
            made.check()
    assert made.tiers.disk is not None
    made.tiers.disk.index.check()
    made.baseline()


def test_a_disk_without_a_host_pool_is_refused() -> None:
    from runtime.config import Config

    with pytest.raises(InvalidRequest, match="disk_pool_dir"):
        Config.load({"disk_pool_bytes": 1 << 20})


WRITER = """
import sys
from pathlib import Path
from tests.unit.tiers.test_disk import lab, said, prompt
made = lab(Path(sys.argv[1]))
print("ready", flush=True)
for seed in range(10**6):
    said(made, f"r{seed}", prompt(128, seed=seed))
    made.settle()
    print(seed, made.tiers.counts.spilled, flush=True)
"""


@pytest.mark.parametrize("lines", [3])
def test_a_process_killed_while_it_writes_leaves_only_what_is_intact(tmp_path: Path, lines: int) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(lines):
        assert writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()

    made = lab(tmp_path)
    assert made.tiers.disk is not None
    assert len(made.tiers.disk.index) >= 8 * (lines - 1)
    for seed in range(lines - 1):
        said(made, f"r{seed}", prompt(128, seed=seed))
        assert cached(made, f"r{seed}") == 112
    assert made.tiers.counts.corrupt == 0
    made.baseline()


def test_a_worker_that_is_stopped_twice_closes_nobody_elses_files(tmp_path: Path) -> None:
    """The second time, the numbers of its files are others'."""
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    made.engine.stop()
    others = [os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) for _ in range(8)]
    made.engine.stop()
    for fd in others:
        os.close(fd)
