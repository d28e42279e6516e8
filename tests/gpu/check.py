"""Everything a GPU must show, in one command and under eight minutes:

    python -m tests.gpu.check [--device cuda|cpu] [--seconds 460] [--only NAME,NAME] [--out FOLDER]

Needs: an NVIDIA GPU, and in this Python torch with CUDA, its triton, numpy, safetensors, tokenizers, and beside them
pydantic, pydantic-settings, structlog, gguf and NIXL (nixl-cu13 or nixl-cu12, as torch's CUDA is). No network, no
transformers, no server. A machine that has torch only takes the rest from a folder:

    python -m tests.gpu.carry .gpu/carry.tar.xz          where there is a network; for Python 3.12 and CUDA 13
    mkdir /tmp/carry && tar xf .gpu/carry.tar.xz -C /tmp/carry && PYTHONPATH=/tmp/carry python3 -m tests.gpu.check

Parts run in processes of their own, the most telling first, each with its own time: one that fails, hangs or takes the
device's context with it does not stop the others. Those that compare run side by side (most of their time kernels are
compiled), those that measure one by one. What they found is written after each of them to gpu.json in
--out, else in the folder that the environment's OUT names, else in a new one. Exit status 0: every part has passed.
With --device cpu sizes are small and few kernels run, in Triton's interpreter: it shows that the check itself works.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PARTS: dict[str, tuple[str, float]] = {
    "limits": ("parts", 60),
    "kernels": ("parts", 200),
    "scores": ("parts", 200),
    "tokens": ("parts", 200),
    "sampling": ("parts", 200),
    "handoff": ("handoff", 90),
    "attention": ("attention", 90),
    "decode": ("speed", 90),
    "replay": ("speed", 90),
    "tiers": ("speed", 60),
    "resume": ("speed", 60),
    "prefill": ("speed", 60),
}
"""Name -> its module, and the seconds it may take. In order of what is learnt from them."""

TOGETHER = ("kernels", "scores", "tokens", "sampling")

SECONDS = 460.0
LEAST = 15.0
"""A part with less time left than this is not begun."""


def run_part(name: str, device: str) -> int:
    """In a process of its own: the last line it prints is its figures, or what went wrong."""
    try:
        module = importlib.import_module(f"tests.gpu.{PARTS[name][0]}")
        line: dict[str, Any] = {"ok": True, "figures": getattr(module, name)(device)}
    except Exception:
        line = {"ok": False, "error": traceback.format_exc()[-6000:]}
    print("\n" + json.dumps(line), flush=True)
    return 0 if line["ok"] else 1


def child(name: str, device: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.check", "--part", name, "--device", device]
    return ran(command, environment(name, device), seconds)


def ran(command: Sequence[str], env: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """What a part's process had to say, or why it had nothing to say."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        found = result(output, process.returncode)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its own children, too: a source waits for its reader
        output, _ = process.communicate()
        found = {"ok": False, "error": f"not over after {seconds:.0f} s", "output": output[-3000:]}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def environment(name: str, device: str) -> Mapping[str, str]:
    extra = {"PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        extra |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if name in ("kernels", "attention") else "0"}
    return {**os.environ, **extra}


def result(output: str, status: int) -> dict[str, Any]:
    """The part's own line; without one (it crashed) the end of what it printed."""
    last = output.strip().rpartition("\n")[2]
    try:
        found: dict[str, Any] = json.loads(last)
    except ValueError:
        return {"ok": False, "error": f"ended with status {status}", "output": output[-3000:]}
    if not found["ok"]:
        found["output"] = output.strip().rpartition("\n")[0][-2000:]
    return found


def rounds(names: Sequence[str]) -> list[list[str]]:
    """What runs at once, one after the other."""
    alone = [[name] for name in names if name not in TOGETHER]
    together = [name for name in names if name in TOGETHER]
    if not together:
        return alone
    at = names.index(together[0])
    return [*alone[:at], together, *alone[at:]]


def check(device: str, names: Sequence[str], seconds: float, out: Path) -> dict[str, Any]:
    until = time.monotonic() + seconds
    report: dict[str, Any] = {"device": device, "passed": False, "parts": {}}

    def one(name: str) -> dict[str, Any]:
        left = min(PARTS[name][1], until - time.monotonic())
        return child(name, device, left) if left >= LEAST else {"ok": False, "error": "no time was left"}

    for some in rounds(names):
        with ThreadPoolExecutor(len(some)) as pool:
            for name, found in zip(some, pool.map(one, some), strict=True):
                report["parts"][name] = found
                report["passed"] = report["parts"].keys() == set(names) and all(
                    part["ok"] for part in report["parts"].values()
                )
                (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
                print(f"{name}: {'passed' if found['ok'] else 'FAILED'} in {found.get('seconds', 0)} s", flush=True)
                print(found.get("error") or json.dumps(found["figures"]), flush=True)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="what a GPU must show")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part:
        return run_part(given.part, given.device)
    names = [name for name in given.only.split(",") if name]
    unknown = set(names) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    out = Path(given.out or tempfile.mkdtemp(prefix="pdserve-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    report = check(given.device, names, given.seconds, out)
    print(f"{'passed' if report['passed'] else 'FAILED'}, see {out / 'gpu.json'}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
