"""Every hybrid model through the Triton kernels, in Triton's interpreter, against the torch path's scores.

TRITON_INTERPRET=1 python -m tests.unit.hybrid.interpreted SCORES.json     (made by the test, without that variable)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from tests.unit.hybrid.models import CONFIGS, Walk, runner_of, tokens_of

MODELS = [name for name in CONFIGS if "-" not in name]


def scores(name: str) -> list[list[float]]:
    """A chunk, a chunk that resumes off the grid, and two decode steps."""
    walk = Walk(runner_of(name, pages=8, slots=4), tokens_of(27))
    walk.pages = tuple(range(1, 4))
    walk.run(21, ((16, 3),))
    walk.run(25)
    walk.run(26)
    walk.run(27)
    return [list(map(float, s)) for s in walk.scores]


def main() -> None:
    expected = json.loads(Path(sys.argv[1]).read_text())
    for name, theirs in expected.items():
        gap = np.abs(np.array(scores(name)) - np.array(theirs)).max() / np.abs(np.array(theirs)).max()
        print(f"{name} {gap:.2e}")
        assert gap <= 2e-4, name


if __name__ == "__main__":
    main()
