"""Numbers on a benchmark's command line: what cannot be measured with is refused before anything is started."""

from __future__ import annotations

import argparse

MOST = 1_000_000.0


def whole(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to {MOST:.0f}")
    return number


def positive(text: str) -> float:
    """Seconds, a rate: more than 0, and finite."""
    number = float(text)
    if not 0 < number <= MOST:
        raise argparse.ArgumentTypeError(f"more than 0 and at most {MOST:.0f}")
    return number
