"""`pdserve bench` and `make bench`: run one benchmark by name, or all of them, each in a process of its own.

python -m bench               all but `serve`, one after the other; one that fails or takes too long does not stop the
                              others
python -m bench --short       the same with few rounds
python -m bench transfer ...  one, with its own options
"""

from __future__ import annotations

import ast
import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LIMIT_S = 900.0
"""Of one benchmark when all are run."""
END_S = 20.0
"""One that took too long has so long to end what it started."""
NEEDS_FLEET = ("serve",)
"""It measures one that runs already."""

SHORT: dict[str, list[str]] = {
    "engine": ["--rounds", "2", "--no-inductor"],
    "transfer": ["--rounds", "5"],
    "handoff": ["--rounds", "4", "--idle-seconds", "2"],
    "router": ["--seconds", "1"],
    "turns": ["--talks", "5", "--turns", "2", "--policies", "2"],
    "study": ["--seeds", "1", "--requests", "300", "--loads", "0.8"],
}


def benchmarks() -> dict[str, str]:
    """Name -> first line of its documentation. A benchmark is a module here that can be run (`if __name__ ...`)."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules([str(FOLDER)]):
        source = (FOLDER / f"{module.name}.py").read_text(encoding="utf-8") if not module.ispkg else ""
        if not module.name.startswith("_") and '__name__ == "__main__"' in source:
            found[module.name] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Exit status of the benchmark, or of the first one that failed."""
    known = benchmarks()
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        for name, about in known.items():
            print(f"  {name:<12} {about}")
        return 0
    if not arguments or arguments == ["--short"]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        chosen = [name for name in known if name not in NEEDS_FLEET]
        codes = [_run(name, SHORT.get(name, []) if arguments else [], LIMIT_S) for name in chosen]
        return next((code for code in codes if code), 0)
    if arguments[0] not in known:
        print(f"no such benchmark: {arguments[0]} (there are: {', '.join(known)})", file=sys.stderr)
        return 2
    sys.stdout.flush()
    # in place of this process: whoever ends it must not leave the benchmark running
    return os.execv(sys.executable, _command(arguments[0], arguments[1:]))


def _run(name: str, arguments: list[str], limit_s: float) -> int:
    print(f"== {name}", file=sys.stderr, flush=True)
    process = subprocess.Popen(_command(name, arguments))
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{name} took more than {limit_s:g} s", file=sys.stderr)
        return 124
    finally:
        _end(process)


def _command(name: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", f"bench.{name}", *arguments]


def _end(process: subprocess.Popen[bytes]) -> None:
    """One that is asked to end takes the workers it started with it."""
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
