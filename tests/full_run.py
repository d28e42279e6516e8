"""`make test-all`: every test, slow ones included, and one page that says when, of what commit, with what result."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "LAST_FULL_RUN.md"


def main() -> int:
    command = [sys.executable, "-m", "pytest", "tests", "-m", "not gpu", "--durations=15", *sys.argv[1:]]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    PAGE.write_text(page(lines, run.returncode))
    return run.returncode


def page(lines: list[str], status: int) -> str:
    """The text of the page. lines: what pytest printed."""
    summary = next(
        (line.strip("= ") for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "none"
    )
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    slow = [line for line in lines if re.match(r"\s*\d+\.\d+s (call|setup|teardown)", line)]
    commit = _git("rev-parse", "HEAD") + (
        " with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    )
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = (
        f"# Last full run\n\n{when}, commit {commit}, {os.cpu_count()} cores, exit status {status}\n\n    {summary}\n"
    )
    parts = [head]
    if bad:
        parts.append("\nNot passed:\n\n" + "\n".join(f"    {line}" for line in bad) + "\n")
    if slow:
        parts.append("\nSlowest:\n\n" + "\n".join(f"    {line.strip()}" for line in slow) + "\n")
    return "".join(parts)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
