"""Make the stubs and the descriptor set from protos/v1/*.proto, or check that the committed ones are right.

python -m protos.generate                    rewrite them; refuses a change that breaks peers
python -m protos.generate --accept-breaking  rewrite them all the same
python -m protos.generate --check            exit 1 when something would change, or breaks peers (used by lint)
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from protos.compat import problems, unspecified_problems

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTORS = Path("protos") / "v1" / "descriptors.bin"
_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(root: Path, out: Path) -> None:
    """Run protoc over root/protos/v1/*.proto into `out`. Raises RuntimeError with protoc's status.

    protoc is a process of its own: its extension module and NIXL's libraries end a process that loads both.
    """
    sources = sorted(str(path.relative_to(root)) for path in (root / "protos" / "v1").glob("*.proto"))
    (out / DESCRIPTORS).parent.mkdir(parents=True, exist_ok=True)
    # The mypy plugins are scripts beside the interpreter, which need not be on PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    outputs = [
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", *outputs]
    command += [f"--descriptor_set_out={out / DESCRIPTORS}", *sources]
    status = subprocess.run(command, cwd=root, env=os.environ | {"PATH": path}, check=False).returncode
    if status:
        raise RuntimeError(f"protoc failed with status {status}")


def drift(root: Path, fresh: Path) -> list[str]:
    """Generated files that differ from, are missing in, or are left over in `root`."""
    made = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    there = {p.relative_to(root) for p in (root / "protos" / "v1").iterdir() if p.name.endswith(_SUFFIXES)}
    stale = [f"{path} is left over: its .proto is gone" for path in sorted(there - made)]
    changed = [
        f"{path} is not what its .proto gives; run: python -m protos.generate"
        for path in sorted(made)
        if not (root / path).is_file() or (root / path).read_bytes() != (fresh / path).read_bytes()
    ]
    return stale + changed


def breaks(root: Path, fresh: Path) -> list[str]:
    """What in the fresh descriptor set breaks peers built from the committed one."""
    new = FileDescriptorSet.FromString((fresh / DESCRIPTORS).read_bytes())
    committed = root / DESCRIPTORS
    if not committed.is_file():
        return unspecified_problems(new)
    return problems(FileDescriptorSet.FromString(committed.read_bytes()), new)


def install(root: Path, fresh: Path) -> None:
    """Put the fresh files in place; touch only what changed."""
    for path in (p.relative_to(fresh) for p in fresh.rglob("*") if p.is_file()):
        data = (fresh / path).read_bytes()
        if not (root / path).is_file() or (root / path).read_bytes() != data:
            (root / path).write_bytes(data)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when something is wrong")
    parser.add_argument("--accept-breaking", action="store_true", help="rewrite although peers break")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(options.root, fresh)
        breaking = breaks(options.root, fresh)
        wrong = breaking + (drift(options.root, fresh) if options.check else [])
        for line in wrong:
            print(line, file=sys.stderr)
        if options.check or (breaking and not options.accept_breaking):
            return 1 if wrong else 0
        install(options.root, fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
