"""Functions in C++, compiled for this CPU: built once, kept on disk under a name made of all they depend on."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC")

BUILDING = "building-"
"""How folders that are built in begin. Their builder holds a lock on them, which ends with it."""

UNLOCKED_S = 60.0
"""A folder that nobody holds may be one that its builder is about to lock, unless it is older than this."""


class NotBuilt(Exception):
    """There is no compiler, or it cannot build this for this CPU, or what it built cannot be loaded."""


def default_cache() -> Path | None:
    """None for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "pdserve" / "compiled"
    except RuntimeError:
        return None


def library(source: Path, cache: Path | None, flags: Sequence[str] = (), link: Sequence[str] = ()) -> ctypes.CDLL:
    """Build `source`, which may include headers beside it, unless that was done. Concurrent builders do not meet: each
    renames a finished file into place. Where nothing can be kept, it is built for this process. Raises NotBuilt."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NotBuilt("there is no g++")
    try:
        return _library(compiler, source, cache, [*FLAGS, *flags], link)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotBuilt(f"it could not be built: {type(error).__name__}") from error


def _library(
    compiler: str, source: Path, cache: Path | None, options: Sequence[str], link: Sequence[str]
) -> ctypes.CDLL:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    text = [source, *sorted(source.parent.glob("*.h"))]
    parts = (*(p.read_bytes() for p in text), " ".join(options).encode(), version, str(list(link)).encode(), _cpu())
    name = f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"
    if cache is not None and (cache / name).exists():
        with contextlib.suppress(OSError):  # one that cannot be loaded is built anew
            return ctypes.CDLL(str(cache / name))
    with _room(cache) as (folder, keeps):
        part = folder / "part"
        _run([compiler, *options, "-c", str(source), "-o", f"{part}.o"])
        _run([compiler, "-shared", f"{part}.o", *link, "-o", f"{part}.so"])
        built = Path(f"{part}.so")
        if cache is not None and keeps:
            _settle(built)  # a machine that goes down must not leave half of it under that name
            built = built.replace(cache / name)
        return ctypes.CDLL(str(built))


@contextlib.contextmanager
def _room(cache: Path | None) -> Iterator[tuple[Path, bool]]:
    """A folder to build in, and whether it lies in the cache."""
    with contextlib.ExitStack() as stack:
        folder = None
        if cache is not None:
            with contextlib.suppress(OSError):
                cache.mkdir(parents=True, exist_ok=True, mode=0o700)
                _sweep(cache)
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=cache, prefix=BUILDING))
                stack.enter_context(_locked(Path(folder)))
        yield Path(folder or stack.enter_context(tempfile.TemporaryDirectory())), folder is not None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Raises OSError where somebody else holds it, or where nothing can be locked."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _sweep(cache: Path) -> None:
    """Remove what killed builders have left."""
    for folder in cache.glob(f"{BUILDING}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > UNLOCKED_S:
                with _locked(folder):
                    shutil.rmtree(folder)


def _settle(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuilt("g++ could not compile it for this CPU")


def _cpu() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith(b"flags")), b"")
