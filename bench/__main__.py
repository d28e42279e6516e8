"""`pdserve bench` and `make bench`: run one benchmark by name, or all of them, each in a process of its own.

python -m bench               all, one after the other
python -m bench transfer ...  one, with its own options
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


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
    if arguments and arguments[0] not in known:
        print(f"no such benchmark: {arguments[0]} (there are: {', '.join(known)})", file=sys.stderr)
        return 2
    chosen = arguments[:1] or list(known)
    return next((code for name in chosen if (code := _run(name, arguments[1:], quiet=bool(arguments)))), 0)


def _run(name: str, arguments: list[str], *, quiet: bool) -> int:
    if not quiet:
        print(f"== {name}", file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", f"bench.{name}", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
