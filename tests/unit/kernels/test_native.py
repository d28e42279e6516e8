"""Compiled code that cannot be kept, was kept badly, or has a compiler that is none."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import native
from engine.kernels.cpu.build import compiled
from engine.kernels.cpu.decode import _load
from engine.tiers.carriers import fused
from runtime.errors import Unsupported


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "some.cpp"
    path.write_text('extern "C" int value() { return 3; }\n')
    return path


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A g++ that only fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "g++").write_text("#!/bin/sh\nexit 1\n")
    (folder / "g++").chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_header_that_has_changed_makes_another_library(source: Path, tmp_path: Path) -> None:
    source.write_text('#include "some.h"\nextern "C" int value() { return VALUE; }\n')
    for value in (3, 4):
        source.with_name("some.h").write_text(f"#define VALUE {value}\n")
        assert native.library(source, tmp_path / "cache").value() == value


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, b"\x7fELF"], ids=["empty", "zeros", "cut"])
def test_a_kept_library_that_cannot_be_loaded_is_built_anew(source: Path, tmp_path: Path, damage: bytes) -> None:
    reference, cache = tmp_path / "reference", tmp_path / "cache"
    native.library(source, reference)
    (built,) = reference.iterdir()
    cache.mkdir()
    (cache / built.name).write_bytes(damage)

    assert native.library(source, cache).value() == 3

    assert [p.name for p in cache.iterdir()] == [built.name]
    assert (cache / built.name).read_bytes()[:4] == b"\x7fELF"
    assert (cache / built.name).stat().st_size > 4096


@pytest.mark.parametrize("place", [None, "some.cpp/below"])
def test_where_nothing_can_be_kept_it_is_built_all_the_same(source: Path, tmp_path: Path, place: str | None) -> None:
    before = sorted(tmp_path.iterdir())
    assert native.library(source, None if place is None else tmp_path / place).value() == 3
    assert sorted(tmp_path.iterdir()) == before


def aged(folder: Path) -> Path:
    """As if nothing had happened in it for some time."""
    long_ago = time.time() - 10 * native.UNLOCKED_S
    os.utime(folder, (long_ago, long_ago))
    return folder


def killed_builder(cache: Path) -> Path:
    """What one leaves: its folder with a part in it."""
    code = (
        "import sys; from pathlib import Path; from engine import native\n"
        "with native._room(Path(sys.argv[1])) as (folder, _):\n"
        "    (folder / 'part.o').touch(); print(folder, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(cache)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout is not None
        folder = Path(builder.stdout.readline().strip())
        builder.kill()
    assert (folder / "part.o").exists()
    return folder


def test_what_a_killed_builder_left_is_removed_by_the_next_one(source: Path, tmp_path: Path) -> None:
    left = aged(killed_builder(tmp_path / "cache"))
    native.library(source, tmp_path / "cache")
    assert not left.exists()
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".so"]


def test_the_folder_of_a_builder_that_lives_or_has_only_begun_stays(source: Path, tmp_path: Path) -> None:
    """Given one that takes long, and one that nobody has locked yet, then neither is touched."""
    cache = tmp_path / "cache"
    young = killed_builder(cache)
    with native._room(cache) as (mine, _):
        aged(mine)
        native.library(source, cache)
        assert mine.exists()
    assert young.exists()
    assert not mine.exists()


@pytest.mark.usefixtures("broken")
def test_a_compiler_that_fails_is_none(tmp_path: Path) -> None:
    assert compiled(tmp_path, products=True) is None
    assert fused(tmp_path) is None
    with pytest.raises(Unsupported):
        _load(tmp_path)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert native.default_cache() is None
