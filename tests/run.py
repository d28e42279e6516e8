"""`make test` and `make test-all`: the tests in two lanes side by side.

Unit tests want one core; the others mostly wait for processes of theirs. One after the other they leave half of a small
machine idle. The lanes are made to take about as long as each other. Each is a pytest of its own, so each proves for
itself that it leaves nothing behind; whatever shares a cluster is in one.

    python tests/run.py            what has to be green before a change lands
    python tests/run.py --all      the slow ones too, and one page that says when, of what commit, with what result
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "LAST_FULL_RUN.md"
LANES = {
    "unit, router, transfer": ["tests/unit", "tests/integration/router", "tests/integration/transfer"],
    "cluster, pairs, tiers": [
        "tests/integration/cluster",
        "tests/integration/hybrid",
        "tests/integration/pd",
        "tests/integration/sim",
        "tests/integration/tiers",
        "tests/faults",
        "tests/perf",
    ],
}
SHOWN = tuple(LANES)[-1]
"""The lane whose lines are printed as they come."""


@dataclass
class Lane:
    """One pytest. lines: all it printed; status: its exit status."""

    name: str
    command: list[str]
    live: bool
    lines: list[str] = field(default_factory=list)
    status: int = 1

    def run(self) -> None:
        with subprocess.Popen(
            self.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pytest:
            assert pytest.stdout is not None
            for line in pytest.stdout:
                self.lines.append(line.rstrip())
                if self.live:
                    print(line, end="", flush=True)
        self.status = pytest.returncode


def main(arguments: Sequence[str]) -> int:
    everything = "--all" in arguments
    marks = "not gpu" if everything else "not slow and not gpu"
    options = ["-m", marks, "--durations=15", *(word for word in arguments if word != "--all")]
    lanes = [
        Lane(name, [sys.executable, "-m", "pytest", *folders, *options], live=name == SHOWN)
        for name, folders in LANES.items()
    ]
    quiet = lanes[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the lanes get it too, and say how they ended
    other = threading.Thread(target=quiet.run)
    other.start()
    lanes[1].run()
    other.join()
    print(f"\n== {quiet.name}", *quiet.lines, sep="\n", flush=True)
    for lane in lanes:
        print(f"{lane.name}: {summary(lane.lines)}")
    if everything:
        PAGE.write_text(page({lane.name: lane.lines for lane in lanes}, max(lane.status for lane in lanes)))
    return next((lane.status for lane in lanes if lane.status), 0)


def summary(lines: Sequence[str]) -> str:
    """The line in which pytest counts."""
    return next((line.strip("= ") for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "none")


def page(printed: dict[str, list[str]], status: int) -> str:
    """The text of the page. printed: what each lane's pytest printed; status: the worst exit status."""
    commit = _git("rev-parse", "HEAD") + (
        " with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
    )
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    parts = [f"# Last full run\n\n{when}, commit {commit}, {os.cpu_count()} cores, exit status {status}\n"]
    for name, lines in printed.items():
        parts.append(f"\n## {name}\n\n    {summary(lines)}\n")
        bad = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
        slow = [line for line in lines if re.match(r"\s*\d+\.\d+s (call|setup|teardown)", line)]
        if bad:
            parts.append("\nNot passed:\n\n" + "\n".join(f"    {line}" for line in bad) + "\n")
        if slow:
            parts.append("\nSlowest:\n\n" + "\n".join(f"    {line.strip()}" for line in slow) + "\n")
    return "".join(parts)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
