"""Noise of a worker's steps, drawn once and walked through, so that a long run of steps costs one subtraction."""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from bench.sim.profile import NoiseTerms

LENGTH = 1 << 16
PARTS = ("steps", "transfers", "host", "disk")
"""Of one live worker: each goes its own way through the noise, on its own thread."""


class Tape:
    """Factors of consecutive steps and their running sums. One per simulation, shared by its workers, each of which
    reads from places of its own.

    factors[i]; plain[i] = sum of factors[:i]; ramp[i] = sum of j * factors[j] for j < i.
    """

    def __init__(self, terms: NoiseTerms, seed: int) -> None:
        rng = np.random.default_rng([seed, 0x7A9E])
        drawn = np.exp(rng.normal(0.0, terms.lognormal_sigma, LENGTH))
        drawn[rng.random(LENGTH) < terms.stall_probability] *= terms.stall_factor
        self.factors: list[float] = drawn.tolist()
        self.plain: list[float] = [0.0, *np.cumsum(drawn).tolist()]
        self.ramp: list[float] = [0.0, *np.cumsum(drawn * np.arange(LENGTH)).tolist()]


class Reader:
    """One worker's place on the tape."""

    def __init__(self, tape: Tape, seed: int) -> None:
        self._tape = tape
        self._rng = np.random.default_rng([seed, 0x5EED])
        self._at = int(self._rng.integers(LENGTH))

    def next(self) -> float:
        """The factor of one step."""
        self._at = (self._at + 1) % LENGTH
        return self._tape.factors[self._at]

    def run(self, steps: int) -> int:
        """A place from which `steps` consecutive factors can be read; they are used up. steps <= LENGTH / 2."""
        if self._at + steps > LENGTH:
            self._at = int(self._rng.integers(LENGTH // 4))
        return self._at

    def used(self, steps: int) -> None:
        self._at += steps

    def seconds(self, start: int, steps: int, base: float, slope: float) -> float:
        """Sum over i < steps of (base + slope * i) * factor[start + i]."""
        plain = self._tape.plain[start + steps] - self._tape.plain[start]
        ramp = self._tape.ramp[start + steps] - self._tape.ramp[start] - start * plain
        return base * plain + slope * ramp


def seed_of(worker_id: str) -> int:
    """A live worker's own noise, speed and clock come from its name."""
    return int.from_bytes(hashlib.sha256(worker_id.encode()).digest()[:4], "little")


def reader_of(terms: NoiseTerms, worker_id: str, part: str) -> Reader:
    """The noise of one of PARTS of a live worker."""
    return Reader(_tape(terms), seed_of(worker_id) + PARTS.index(part))


@functools.lru_cache(maxsize=4)
def _tape(terms: NoiseTerms) -> Tape:
    """Shared by the workers of a process: it takes some megabytes."""
    return Tape(terms, 0)
