"""The index of a disk tier against a model of it: random records, cut at every byte, a disk that is often full."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine.successors import Line
from engine.tiers.journal import Found, Hint, Journal, Keep, Past, Put, StatePut
from kvtransfer.hashing import page_keys
from tests.unit.engine_core.lab import ROOT
from tests.unit.tiers.test_disk import FIRST, lab
from tests.unit.tiers.test_host import cached, said

KEYS = [bytes([number]) * 32 for number in range(8)]
NAMES = [bytes([100 + number]) * 32 for number in range(4)]


def journal(path: Path) -> Journal:
    return Journal(path, "x", 2, 3)


def copied(found: Found) -> Found:
    return Found(dict(found.puts), dict(found.states), dict(found.hints))


class Model:
    """What the index says, after each of its records."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = Found()

    def batch(self) -> tuple[dict[str, Any], list[Found]]:
        """Arguments of append(), and what counts after each of their records."""
        r, after = self.random, [copied(self.now)]
        drops = r.sample([*KEYS, *NAMES], r.randrange(3))
        puts = [
            Put(k, r.choice([None, *KEYS]), r.randrange(99), r.randrange(9), (r.getrandbits(64), 1))
            for k in self.some(KEYS)
        ]
        states = [self.state(name) for name in self.some(NAMES)]
        kept = [(k, Keep(r.randrange(-9, 9), r.random(), r.randbytes(r.randrange(20)))) for k in self.some(KEYS)]
        hints: list[tuple[bytes, Hint]] = [*kept, *((name, Past(self.line())) for name in self.some(NAMES))]
        for name in drops:
            self.now.forget(name)
            after.append(copied(self.now))
        for put in puts:
            self.now.forget(put.key)
            self.now.puts[put.key] = put
            after.append(copied(self.now))
        for state in states:
            self.now.forget(state.name)
            self.now.states[state.name] = state
            after.append(copied(self.now))
        for key, hint in hints:
            self.now.hints[key] = hint
            if isinstance(hint, Past) and not hint.line.spent and key in self.now.states:
                self.now.states[key] = self.now.states.pop(key)
            after.append(copied(self.now))
        return {"puts": puts, "drops": drops, "states": states, "hints": hints}, after

    def some(self, names: list[bytes]) -> list[bytes]:
        return self.random.sample(names, self.random.randrange(3))

    def state(self, name: bytes) -> StatePut:
        r = self.random
        tail = tuple(r.getrandbits(32) for _ in range(r.randrange(16)))
        sums = (r.getrandbits(64), 2) if tail else ()
        return StatePut(name, r.choice(KEYS), r.getrandbits(40), tail, r.randrange(99), r.random(), (1, 2, 3), sums)

    def line(self) -> Line:
        r = self.random
        return Line(r.randbytes(8), r.choice([None, *NAMES]), r.randbytes(8), r.random() < 0.5, r.random() < 0.5)


def counting(found: Found) -> Found:
    """What is said counts beside its page or state only."""
    here = {*found.puts, *found.states}
    return replace(found, hints={name: hint for name, hint in found.hints.items() if name in here})


def same(found: Found, wanted: Found) -> bool:
    """The states in the same order, too."""
    return found == counting(wanted) and list(found.states) == list(wanted.states)


def test_cut_anywhere_an_index_says_what_it_said_then(tmp_path: Path) -> None:
    path, model = tmp_path / "index", Model(0)
    one = journal(path)
    known = [Found()]
    for _ in range(2):
        batch, after = model.batch()
        one.append(**batch)
        known += after[1:]
    one.close()
    whole, at = path.read_bytes(), 0
    for size in range(48, len(whole) + 1):
        path.write_bytes(whole[:size])
        again = journal(path)
        again.close()
        at += at + 1 < len(known) and again.torn == 0 and size > 48
        assert same(again.found, known[at]), size
    assert at == len(known) - 1


class Disk:
    """os.write and Path.replace on a disk that is full now and then."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.full = Random(seed), True
        self.write, self.replace = os.write, Path.replace
        monkeypatch.setattr(os, "write", self.writes)
        monkeypatch.setattr(Path, "replace", lambda path, target: self.replaces(path, target))

    def writes(self, fd: int, data: Any) -> int:
        if self.full and self.random.random() < 0.3:
            part = self.random.randrange(len(data) + 1)
            if not part:
                raise OSError(errno.ENOSPC, "no room")
            return self.write(fd, bytes(data)[:part])
        return self.write(fd, data)

    def replaces(self, path: Path, target: Path) -> Path:
        if self.full and self.random.random() < 0.3:
            raise OSError(errno.ENOSPC, "no room")
        return self.replace(path, target)


@pytest.mark.parametrize("seed", range(20))
def test_on_a_disk_that_fills_a_batch_counts_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Restarts among it, and a log that is written anew every few batches."""
    monkeypatch.setattr("engine.tiers.journal.REWRITE_BYTES", 1500)
    path, model = tmp_path / "index", Model(seed)
    one = journal(path)
    Disk(seed, monkeypatch)
    for turn in range(60):
        before = copied(model.now)
        batch, _ = model.batch()
        try:
            one.append(**batch)
        except OSError:
            model.now = before
        if turn % 7 == 6:
            one.close()
            one = journal(path)
            assert same(one.found, model.now), turn
            model.now = copied(one.found)
    one.close()
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("torn", [b"", b"\0" * 333], ids=["whole", "torn"])
def test_on_a_full_disk_a_worker_starts_with_the_index_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    path, model = tmp_path / "index", Model(4)
    one = journal(path)
    for _ in range(5):
        one.append(**model.batch()[0])
    one.close()
    path.write_bytes(path.read_bytes() + torn)
    disk = Disk(0, monkeypatch)
    monkeypatch.setattr(disk.random, "random", lambda: 0.0)
    monkeypatch.setattr(disk.random, "randrange", lambda _: 0)

    one = journal(path)
    assert same(one.found, model.now)
    assert one.torn == len(torn)
    with pytest.raises(OSError, match="no room"):
        one.append(drops=[KEYS[0]])

    disk.full = False
    one.append(**model.batch()[0])
    one.close()
    again = journal(path)
    assert same(again.found, model.now)
    assert again.torn == 0
    again.close()


def test_on_a_full_disk_a_worker_starts_although_it_cannot_note_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab(tmp_path)
    said(made, "a", FIRST)
    made.settle()
    made.engine.stop()
    index = tmp_path / "0" / "index"
    whole = index.read_bytes()
    first = page_keys(ROOT, FIRST)[0]
    index.write_bytes(whole + journal(index.with_suffix(".other"))._drop_record(first))
    disk = Disk(0, monkeypatch)
    monkeypatch.setattr(disk.random, "random", lambda: 0.0)
    monkeypatch.setattr(disk.random, "randrange", lambda _: 0)

    again = lab(tmp_path)

    assert again.tiers.disk is not None
    assert len(again.tiers.disk.index) == 0, "seven pages under one that has gone"
    said(again, "b", FIRST)
    again.settle()
    assert cached(again, "b") == 0
    assert again.tiers.counts.failed > 0
    again.baseline()
