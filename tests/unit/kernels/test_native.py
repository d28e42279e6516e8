"""Compiled code that cannot be kept, was kept badly, or has a compiler that is none."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from engine import native
from engine.kernels.cpu.build import compiled
from engine.kernels.decode_cpu import _load
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
