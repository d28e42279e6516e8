"""`pip install .` installs all that the code reads. Other tests would not see it: they run from the checkout."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
INCLUDED = SETUPTOOLS["packages"]["find"]["include"]
PACKAGES = [ROOT / pattern.removesuffix("*") for pattern in INCLUDED]

READ_BY_PEOPLE = ("deploy/Dockerfile.*", "deploy/*.yaml", "bench/results/*", "bench/out/**/*")
PYTHON = (".py", ".pyi", ".pyc")


def data() -> Iterator[Path]:
    """What is beside the code and is not Python."""
    people = {path for pattern in READ_BY_PEOPLE for path in ROOT.glob(pattern)}
    for package in PACKAGES:
        yield from (p for p in package.rglob("*") if p.is_file() and p.suffix not in PYTHON and p not in people)


def test_every_package_of_the_checkout_is_installed() -> None:
    assert all(pattern.endswith("*") for pattern in INCLUDED)
    assert set(PACKAGES) == {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
    for package in PACKAGES:
        assert {path.parent for path in package.rglob("*.py")} == {path.parent for path in package.rglob("__init__.py")}


def test_every_file_that_the_code_reads_is_installed_with_it() -> None:
    patterns = [(ROOT / package, pattern) for package, own in SETUPTOOLS["package-data"].items() for pattern in own]
    installed = {path for package, pattern in patterns for path in package.glob(pattern)}
    assert sorted(set(data()) - installed) == []
    for package, pattern in patterns:
        assert any(path.is_file() for path in package.glob(pattern)), f"{pattern} of {package.name} is nothing any more"
