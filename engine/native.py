"""Functions in C++, compiled for this CPU: built once, kept on disk under a name made of all they depend on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC")


class NotBuilt(Exception):
    """There is no compiler, or it cannot build this for this CPU."""


def default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "pdserve" / "compiled"


def library(source: Path, cache: Path, flags: Sequence[str] = (), link: Sequence[str] = ()) -> ctypes.CDLL:
    """Build `source`, which may include headers beside it, unless that was done. Concurrent builders do not meet: each
    renames a finished file into place. Raises NotBuilt, OSError."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise NotBuilt("there is no g++")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    options = [*FLAGS, *flags]
    text = [source, *sorted(source.parent.glob("*.h"))]
    parts = (*(p.read_bytes() for p in text), " ".join(options).encode(), version, str(list(link)).encode(), _cpu())
    built = cache / f"{source.stem}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:24]}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            part = Path(folder) / "part"
            _run([compiler, *options, "-c", str(source), "-o", f"{part}.o"])
            _run([compiler, "-shared", f"{part}.o", *link, "-o", f"{part}.so"])
            os.replace(f"{part}.so", built)
    return ctypes.CDLL(str(built))


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
