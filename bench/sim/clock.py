"""A simulated worker's own clock, by which it measures all that it reports."""

from __future__ import annotations

import numpy as np

from bench.sim.noise import seed_of
from bench.sim.profile import Profile
from runtime.clock import Clock


def drift_of(profile: Profile, worker_id: str) -> float:
    """The share by which this worker's clock runs fast (or slow, < 0): a worker's own, for its whole life."""
    drawn = np.random.default_rng([seed_of(worker_id), 0xC10C]).uniform(-1, 1)
    return float(drawn) * profile.noise.clock_drift_ppm * 1e-6


class DriftingClock:
    """Right when it is made, and wrong by `drift` seconds more with every second of `base`."""

    def __init__(self, base: Clock, drift: float) -> None:
        self._base = base
        self._drift = drift
        self._from = base.monotonic()

    def monotonic(self) -> float:
        return self._base.monotonic() + self._gone_wrong()

    def wall(self) -> float:
        return self._base.wall() + self._gone_wrong()

    def _gone_wrong(self) -> float:
        return (self._base.monotonic() - self._from) * self._drift
