"""What a machine with a GPU and torch, but without a network, still lacks for the GPU check, in one archive of 25 MiB:

    python -m tests.gpu.carry FILE.tar.xz [--python 3.12] [--nixl nixl-cu13]

Wheels for x86-64 Linux are fetched with pip, at this environment's versions, and packed anew; of NIXL's parts that the
check does not use are left out (they are two thirds of it).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

PACKAGES = (
    "annotated-types",
    "gguf",
    "grpcio",
    "grpcio-health-checking",
    "protobuf",
    "pydantic",
    "pydantic-core",
    "pydantic-settings",
    "python-dotenv",
    "typing-inspection",
)
"""torch, triton, numpy, safetensors, tokenizers, jinja2, pyyaml and tqdm are taken to be there."""

PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
UNUSED = ("nixl_ep_*", "*.scripts", "*.libs/ucx/libucx_perftest*", "*.libs/nixl/libplugin_[!UP]*")


def fetch(target: Path, python: str, nixl: str) -> None:
    wanted = [f"{name}=={version(name)}" for name in PACKAGES] + [f"{nixl}=={version('nixl-cu12')}"]
    platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, *platforms, "-d", str(target), *wanted]
    subprocess.run(command, check=True)


def unpack(wheels: Path, folder: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    for pattern in UNUSED:
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what a machine without a network lacks for the GPU check")
    parser.add_argument("archive", type=Path, help="ending in .tar.xz")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--nixl", choices=("nixl-cu12", "nixl-cu13"), default="nixl-cu13")
    given = parser.parse_args(arguments)
    given.archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels, unpacked = Path(folder) / "wheels", Path(folder) / "unpacked"
        fetch(wheels, given.python, given.nixl)
        unpack(wheels, unpacked)
        with tarfile.open(given.archive, "w:xz") as archive:
            archive.add(unpacked, ".")
    print(f"{given.archive.stat().st_size / 2**20:.0f} MiB in {given.archive}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
