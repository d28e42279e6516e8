"""States of hybrids on disk: down with their pages, up again before who waits for them is admitted, through a restart,
and whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from engine.tiers.build import disk_items
from engine.tiers.disk import HostItem
from engine.tiers.journal import Journal, Put, StatePut
from kvtransfer.files import PlainFile, Ranges
from kvtransfer.hashing import page_keys, root
from kvtransfer.types import Region
from runtime import faults
from tests.unit.engine_core.lab import ROOT, config, prompt, request
from tests.unit.tiers.lab import Manual
from tests.unit.tiers.test_disk import PAGE, DiskLab
from tests.unit.tiers.test_states import ask

FIRST = prompt(128)
KEYS = page_keys(ROOT, FIRST)


def lab(folder: Path, changes: dict[str, object] | None = None, **more: object) -> DiskLab:
    changes = {"host_state_slots": 2, **(changes or {})}
    return DiskLab(pages=12, host_pages=20, folder=folder, state=True, changes=changes, **more)  # type: ignore[arg-type]


def pushed_down(made: DiskLab, tokens: tuple[int, ...] = FIRST, count: int = 4) -> list[int]:
    """Ask, then for so much else that nothing of it is left on device and host. The answer."""
    _, said = ask(made, "first", tokens, count)
    made.settle()
    for seed in (1, 2, 3, 4):
        ask(made, f"push{seed}", prompt(176, seed=seed))
        made.settle()
    keys = page_keys(ROOT, tokens)
    assert made.engine.cache.match(keys) == []
    assert not any(key in made.tiers.host for key in keys)
    assert made.tiers.states.match(keys, tokens, 0) == []
    return said


def on_disk(made: DiskLab, tokens: tuple[int, ...] = FIRST) -> list[int]:
    """Lengths of the states on the disk that this prompt can resume."""
    assert made.tiers.disk is not None
    return [s.length for s in made.tiers.disk.states.match(page_keys(ROOT, tokens), tokens, 0)]


def again(made: DiskLab, folder: Path) -> DiskLab:
    """The worker ends and starts again."""
    made.engine.stop()
    return lab(folder)


def test_a_state_that_left_the_host_comes_back_from_disk_with_its_pages(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    assert on_disk(made) == [112]

    cached, _ = ask(made, "again", FIRST)

    assert cached == 112
    assert made.tiers.counts.disk_states == 1
    assert made.tiers.counts.disk_pages == 7
    assert made.tiers.counts.hit_states == 1
    made.baseline()


def test_the_end_of_a_turn_comes_back_with_its_partial_page(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said = pushed_down(made, count=6)
    cached, _ = ask(made, "turn", (*FIRST, *said, 9, 8, 7))
    assert cached == 133
    made.baseline()


def test_a_restarted_worker_resumes_from_the_state_it_had(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said = pushed_down(made, count=6)
    turn = (*FIRST, *said, 9, 8, 7)

    fresh = again(made, tmp_path)

    states = {tier: {length for _, length in found} for tier, found in fresh.engine.cache.snapshot().lower_states}
    assert {112, 133} <= states["disk"], "a router that asks hears of them"
    assert ask(fresh, "turn", turn)[0] == 133
    fresh.baseline()


def test_a_worker_that_stops_while_pages_come_up_begins_no_read_of_their_state(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    assert made.tiers.disk is not None
    made.tiers.disk.lane = slow = Manual()
    made.submit(request("again", FIRST, max_tokens=4))
    made.engine.turn()
    assert len(slow.waiting) == 1, "the pages"
    made.engine.stop()
    assert made.tiers.counts.disk_pages == 7
    assert made.tiers.counts.disk_states == 0
    made.tiers.check_empty()


def test_a_state_with_its_pages_on_device_and_host_needs_only_itself(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    ask(made, "again", FIRST)
    made.settle()
    before = made.tiers.counts.disk_pages
    for state in made.tiers.states.match(KEYS, FIRST, 0):
        made.tiers.states.drop(state)
    assert made.engine.states is not None
    for found in list(made.engine.states._by_key.values()):
        for device in list(found):
            made.engine.states._drop(device)

    assert ask(made, "third", FIRST)[0] == 112

    assert made.tiers.counts.disk_pages == before
    assert made.tiers.counts.disk_states == 2
    made.baseline()


def test_pages_under_no_state_are_not_brought_up(tmp_path: Path) -> None:
    """They would be run again."""
    made = lab(tmp_path)
    pushed_down(made)
    assert made.tiers.disk is not None
    for state in made.tiers.disk.states.match(KEYS, FIRST, 0):
        made.tiers.disk.states.drop(state)
    assert ask(made, "again", FIRST)[0] == 0
    assert made.tiers.counts.disk_pages == 0
    made.baseline()


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_a_damaged_state_is_a_miss_and_is_forgotten(tmp_path: Path, damage: str) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    made.engine.stop()
    states = tmp_path / "0" / "states"
    if damage == "missing":
        states.unlink()
    elif damage == "truncated":
        os.truncate(states, 0)
    else:
        states.write_bytes(bytes(byte ^ 1 for byte in states.read_bytes()))

    fresh = lab(tmp_path)
    assert on_disk(fresh) == [112]
    assert ask(fresh, "again", FIRST)[0] == 0

    assert fresh.tiers.counts.corrupt == 1
    assert fresh.tiers.counts.disk_states == 0
    fresh.baseline()


def test_a_damaged_partial_page_spoils_its_state(tmp_path: Path) -> None:
    made = lab(tmp_path)
    said = pushed_down(made, count=6)
    assert made.tiers.disk is not None
    turn = (*FIRST, *said, 9, 8, 7)
    deep = made.tiers.disk.states.match(page_keys(ROOT, turn), turn, 0)[0]
    assert deep.length == 133
    deep.page_sums = tuple(s ^ 1 for s in deep.page_sums)

    assert ask(made, "turn", turn)[0] == 0

    assert made.tiers.counts.corrupt == 1
    assert made.tiers.disk.states.get(deep.key, deep.tail) is not deep
    assert on_disk(made) == [112]
    made.baseline()


def test_a_damaged_page_below_a_state_takes_it_along(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    assert made.tiers.disk is not None
    made.tiers.disk.index.match(KEYS, 0)[3].sums = (1, 2)
    assert ask(made, "again", FIRST)[0] == 0
    assert made.tiers.counts.corrupt == 1
    assert made.tiers.counts.disk_states == 0
    made.baseline()


@pytest.mark.parametrize("point", ["disk.write", "disk.publish", "disk.read"])
def test_a_disk_that_fails_is_a_miss(tmp_path: Path, point: str) -> None:
    made = lab(tmp_path)
    with faults.armed(f"{point}=fail"):
        pushed_down(made)
        assert ask(made, "again", FIRST)[0] == 0
    assert made.tiers.counts.failed > 0
    assert (on_disk(made) == []) is (point != "disk.read")
    made.baseline()


class Full(PlainFile):
    """No room for any state."""

    def __init__(self, path: Path, size: int, memory: Sequence[Region]) -> None:
        super().__init__(path, size, memory)
        self.full = path.name == "states"

    def write(self, ranges: Ranges) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no space left")
        super().write(ranges)


def test_a_full_disk_degrades_to_misses(tmp_path: Path) -> None:
    made = lab(tmp_path, open_file=Full)
    pushed_down(made)
    assert on_disk(made) == []
    assert ask(made, "again", FIRST)[0] == 0
    made.baseline()


def test_states_that_find_the_queue_full_wait_on_the_host(tmp_path: Path) -> None:
    disk = Manual()
    made = lab(tmp_path, lane_of_disk=disk, changes={"disk_queue_pages": 1, "host_state_slots": 4})
    for seed in range(4):
        ask(made, f"r{seed}", prompt(40, seed=seed))
        made.settle()
    assert made.tiers.disk is not None
    spill = made.tiers.disk._spill
    assert len(spill._writing_states) == 1
    assert len(spill._states_later) > 1

    disk.open()
    made.tiers.poll()

    assert len(made.tiers.disk.states) > 2
    assert not spill._states_later
    made.baseline()


def test_pages_that_find_the_queue_full_wait_on_the_host(tmp_path: Path) -> None:
    disk = Manual()
    made = lab(tmp_path, lane_of_disk=disk, changes={"disk_queue_pages": 2})
    ask(made, "a", FIRST)
    made.settle()
    assert made.tiers.disk is not None
    assert len(made.tiers.disk._spill._writing) == 2
    disk.open()
    made.tiers.poll()
    assert len(made.tiers.disk.index) == len(made.tiers.host)
    made.baseline()


def test_another_tenants_equal_prompt_does_not_resume_there(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    for other in (root(b"other", "oracle", "1"), root(b"tenant", "oracle", "2")):
        key = made.submit(request(f"theirs{other[:4].hex()}", FIRST, root=other, max_tokens=4))
        made.run()
        made.settle()
        assert made.ends(key)
    assert made.tiers.counts.disk_states == 0


def test_a_small_disk_keeps_states_with_their_pages(tmp_path: Path) -> None:
    """Whatever goes first, a state that can be found can be used."""
    made = lab(tmp_path, changes={"disk_pool_bytes": 30 * PAGE})
    for turn in range(3):
        for seed in range(5):
            ask(made, f"{turn}-{seed}", prompt(100, seed=seed))
            made.settle()
            made.check()
    made.baseline()
    fresh = again(made, tmp_path)
    assert fresh.tiers.disk is not None
    keys = fresh.tiers.disk.index.keys()
    assert all(state.key in keys for state in fresh.tiers.disk.states._all())
    fresh.check()


def test_pages_that_only_served_an_evicted_state_go_next(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    assert made.tiers.disk is not None
    disk = made.tiers.disk
    disk.index.used_again(KEYS[::-1])
    (state,) = disk.states.match(KEYS, FIRST, 0)
    ends = disk.states._by_key[KEYS[7]]
    for end in list(ends):
        disk.states.drop(end)

    disk.states._evict(state)

    assert [entry.key for entry in disk.index.oldest(8)] == KEYS[7::-1]


def test_pages_that_serve_another_state_stay_where_they_were(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    assert made.tiers.disk is not None
    disk = made.tiers.disk
    before = [entry.key for entry in disk.index.oldest(99)]
    (state,) = disk.states.match(KEYS, FIRST, 0)
    disk.states._evict(state)
    assert [entry.key for entry in disk.index.oldest(99)] == before, "the end of the turn stands on all of them"


def test_half_of_the_disk_is_for_states_but_not_more_of_them_than_pages() -> None:
    model = lab(Path("/nonexistent"), changes={"disk_pool_bytes": 0}).engine.model
    for nbytes in (10, 3000, 10_000, 1 << 20):
        pages, states = disk_items(config(disk_pool_bytes=nbytes), model)
        used = pages * model.page_bytes + states * (model.slot_bytes + model.page_bytes)
        assert used <= max(nbytes, model.page_bytes)
        assert states <= pages
        assert states or nbytes < 2 * (model.slot_bytes + model.page_bytes)


def test_nothing_of_another_shape_of_state_is_taken_for_ours(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    made.engine.stop()
    journal = Journal(tmp_path / "0" / "index", "another layout", 2, 1)
    assert not journal.found.puts
    assert not journal.found.states
    journal.close()


def test_the_index_keeps_states_through_a_tear_and_a_rewriting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    monkeypatch.setattr("engine.tiers.journal.REWRITE_BYTES", 2000)
    journal = Journal(path, "x", 2, 1)
    names = [bytes([i]) * 32 for i in range(1, 4)]
    puts = [
        StatePut(name, b"k" * 32, 16 + i, tuple(range(i)), i + 1, 0.5, (i,), (8, 9) if i else ())
        for i, name in enumerate(names)
    ]
    journal.append([Put(b"k" * 32, None, 1, 0, (1, 2))], states=puts[:2])
    for _ in range(40):
        journal.append(states=puts[2:], drops=[names[2]])
    journal.append(drops=[names[0]])
    journal.close()
    with path.open("ab") as file:
        file.write(path.read_bytes()[-20:])

    found = Journal(path, "x", 2, 1).found

    assert list(found.states.values()) == puts[1:]
    assert list(found.puts) == [b"k" * 32]
    assert path.stat().st_size < 2000


WRITER = """
import sys
from pathlib import Path
from tests.unit.tiers.test_disk_states import ask, lab, prompt
made = lab(Path(sys.argv[1]), changes={"disk_pool_bytes": 4 << 20})
print("ready", flush=True)
for seed in range(10**6):
    ask(made, f"r{seed}", prompt(128, seed=seed))
    made.settle()
    print(seed, flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_only_what_is_intact(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    lines = 5
    for _ in range(lines):
        assert writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()

    fresh = lab(tmp_path, changes={"disk_pool_bytes": 4 << 20, "host_state_slots": 6})
    assert fresh.tiers.disk is not None
    fresh.check()
    hits = 0
    for seed in range(lines - 1):
        tokens = prompt(128, seed=seed)
        whole = bool(on_disk(fresh, tokens))
        cached, _ = ask(fresh, f"r{seed}", tokens)
        assert (cached == 112) is whole
        hits += whole
        fresh.settle()
    assert hits >= lines - 3
    assert fresh.tiers.counts.corrupt == 0
    fresh.baseline()


def test_reports_count_states_by_tier(tmp_path: Path) -> None:
    made = lab(tmp_path)
    pushed_down(made)
    ask(made, "again", FIRST)
    host, disk = made.tiers.reports()
    assert (host.hit_states, disk.hit_states) == (1, 1)
    assert disk.states_published == len(made.tiers.disk.states)  # type: ignore[union-attr]
    assert disk.states_total >= disk.states_published > 0
    assert disk.bytes_up > disk.hit_pages * PAGE


def test_whenever_it_is_killed_no_state_is_there_without_the_pages_that_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One page is on its way at a time, and all of a prompt's come to the host before its states do."""
    lane = Manual()
    made = lab(tmp_path, {"disk_queue_pages": 1, "host_state_slots": 4}, lane_of_disk=lane)
    assert made.tiers.disk is not None
    assert made.tiers.state_stores is not None
    written: list[bytes] = []
    disk = made.tiers.disk._disk
    write, write_state = disk.write, disk.write_state
    states: list[StatePut] = []

    def page(pairs: Sequence[tuple[int, int]], puts: Sequence[Put], *more: object) -> None:
        write(pairs, puts, *more)  # type: ignore[arg-type]
        written.extend(put.key for put in puts)

    def state(source: HostItem, put: StatePut, drops: Iterable[bytes]) -> None:
        write_state(source, put, drops)
        assert set(KEYS[: put.length // 16]) <= set(written)
        states.append(put)

    monkeypatch.setattr(disk, "write", page)
    monkeypatch.setattr(disk, "write_state", state)
    ask(made, "first", FIRST)
    made.tiers._stores.make_room(made.engine.pages.cached, [])
    made.tiers.poll()
    made.tiers.state_stores.make_room(made.engine.slots.cached, [], None)
    made.tiers.poll()
    assert len(made.tiers.states) == 2

    while lane.waiting:
        assert len(lane.waiting) <= 2
        lane.step()
        made.tiers.poll()

    assert len(states) == 2
    made.baseline()
